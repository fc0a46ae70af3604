"""The collectives of c10d, on tensors on any device."""

from __future__ import annotations

from typing import Any

import torch

from drumline import _core
from drumline.torch import profile
from drumline.torch.arguments import by_type, check_list, list_at_root, only, operator, split_counts
from drumline.torch.calls import Calls
from drumline.torch.sparse import all_reduce_sparse
from drumline.torch.tensors import Memory, Staging
from drumline.torch.work import DrumlineWork, as_dist_error

Tensors = list[torch.Tensor]

_STRIDED = torch.strided


class Collectives(Calls):
    """torch passes lists of tensors and an object of options. Ranks are numbers in the group."""

    # One tensor per rank.

    def broadcast(self, tensors: Tensors, opts: Any) -> DrumlineWork | None:
        tensor = only(tensors, "broadcast")
        staging = self._staging(tensor)
        data = staging.write(tensor)
        call = ("broadcast", data, opts.rootRank)
        return self._run("broadcast", opts, tensors, tensors, staging, call)

    def allreduce(self, tensors: Tensors, opts: Any) -> DrumlineWork | None:
        if len(tensors) > 1:
            return self.allreduce_coalesced(tensors, opts)
        tensor = only(tensors, "all_reduce")
        if tensor.layout is not _STRIDED:
            return self.allreduce_sparse(tensors, opts)
        staging = self._staging(tensor)
        call = ("all_reduce", staging.write(tensor, reduce=True), *operator(opts))
        return self._run("all_reduce", opts, tensors, tensors, staging, call)

    def allreduce_sparse(self, tensors: Tensors, opts: Any) -> DrumlineWork | None:
        """Runs on the calling thread, even if torch does not wait."""
        op, _ = operator(opts)
        self._sequence += 1
        event = profile.begin("sparse_all_reduce", tensors)
        try:
            all_reduce_sparse(self._within(opts.timeout), only(tensors, "all_reduce"), op)
        except _core.DrumlineError as error:
            raise as_dist_error(error) from None
        finally:
            profile.end(event, [])
        return DrumlineWork("all_reduce", [], Staging(), tensors)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any) -> DrumlineWork | None:
        staging = self._staging(*tensors)
        calls = [
            (
                "all_reduce_coalesced",
                [staging.write(tensor, reduce=True) for tensor in kind],
                *operator(opts),
            )
            for kind in by_type(tensors, _dtype)
        ]
        return self._run("all_reduce", opts, tensors, tensors, staging, *calls)

    def reduce(self, tensors: Tensors, opts: Any) -> DrumlineWork | None:
        tensor, root = only(tensors, "reduce"), opts.rootRank
        staging = self._staging(tensor)
        # Other ranks' tensors stay as they are.
        take = staging.write if self._group.rank == root else staging.read
        data = take(tensor, reduce=True)
        call = ("reduce", data, *operator(opts), root)
        return self._run("reduce", opts, tensors, tensors, staging, call)

    # A list with a tensor for every rank.

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> DrumlineWork | None:
        filled, own = only(outputs, "all_gather"), only(inputs, "all_gather")
        check_list(filled, self._group.world_size, "output")
        staging = self._staging(own)
        call = ("all_gather", staging.read(own), staging.fill_all(filled))
        return self._run("all_gather", opts, inputs, filled, staging, call)

    def allgather_coalesced(
        self, outputs: list[Tensors], inputs: Tensors, opts: Any
    ) -> DrumlineWork | None:
        """``outputs[r][i]`` is ``inputs[i]`` of rank ``r``."""
        check_list(outputs, self._group.world_size, "output")
        for row in outputs:
            if [(t.shape, t.dtype) for t in row] != [(t.shape, t.dtype) for t in inputs]:
                raise ValueError("all_gather_coalesced: outputs must be like the inputs")
        staging = self._staging(*inputs)
        calls = [
            ("all_gather", staging.read(own), staging.fill_all([row[i] for row in outputs]))
            for i, own in enumerate(inputs)
        ]
        filled = [tensor for row in outputs for tensor in row]
        return self._run("all_gather", opts, inputs, filled, staging, *calls)

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> DrumlineWork | None:
        own, root = only(inputs, "gather"), opts.rootRank
        filled = list_at_root(outputs, self._group.rank == root, self._group.world_size, "output")
        staging = self._staging(own)
        data = staging.read(own)
        call = ("gather", data, staging.fill_all(filled), root, None)
        return self._run("gather", opts, inputs, filled, staging, call)

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> DrumlineWork | None:
        own, root = only(outputs, "scatter"), opts.rootRank
        dealt = list_at_root(inputs, self._group.rank == root, self._group.world_size, "input")
        staging = self._staging(own)
        data = staging.fill(own)
        call = ("scatter", staging.read_all(dealt), data, root, None)
        return self._run("scatter", opts, dealt or outputs, outputs, staging, call)

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> DrumlineWork | None:
        dealt, own = only(inputs, "reduce_scatter"), only(outputs, "reduce_scatter")
        check_list(dealt, self._group.world_size, "input")
        staging = self._staging(own)
        data = staging.fill(own, reduce=True)
        call = ("reduce_scatter", staging.read_all(dealt, True), data, *operator(opts))
        return self._run("reduce_scatter", opts, dealt, outputs, staging, call)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any) -> DrumlineWork | None:
        check_list(outputs, self._group.world_size, "output")
        check_list(inputs, self._group.world_size, "input")
        staging = self._staging(*inputs)
        read, filled = staging.read_all(inputs), staging.fill_all(outputs)
        call = ("all_to_all", read, _counts(read), filled, _counts(filled))
        return self._run("all_to_all", opts, inputs, outputs, staging, call)

    # One tensor with a block for every rank.

    def all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any
    ) -> DrumlineWork | None:
        staging = self._staging(input)
        call = ("all_gather", staging.read(input), [staging.fill(output)])
        return self._run("_all_gather_base", opts, [input], [output], staging, call)

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any
    ) -> DrumlineWork | None:
        staging = self._staging(*inputs)
        calls = [
            ("all_gather_coalesced", staging.read_all(read), staging.fill_all(filled))
            for read, filled in _pairs_by_type(inputs, outputs)
        ]
        return self._run("all_gather", opts, inputs, outputs, staging, *calls)

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any
    ) -> DrumlineWork | None:
        staging = self._staging(input)
        data, read = staging.fill(output, reduce=True), staging.read(input, reduce=True)
        call = ("reduce_scatter", [read], data, *operator(opts))
        return self._run("_reduce_scatter_base", opts, [input], [output], staging, call)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any
    ) -> DrumlineWork | None:
        staging = self._staging(*inputs)
        calls = [
            (
                "reduce_scatter_coalesced",
                staging.read_all(read, True),
                staging.fill_all(filled, True),
                *operator(opts),
            )
            for read, filled in _pairs_by_type(inputs, outputs)
        ]
        return self._run("reduce_scatter", opts, inputs, outputs, staging, *calls)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        opts: Any,
    ) -> DrumlineWork | None:
        staging = self._staging(input)
        send = split_counts(input, input_split_sizes, self._group.world_size)
        receive = split_counts(output, output_split_sizes, self._group.world_size)
        call = ("all_to_all", [staging.read(input)], send, [staging.fill(output)], receive)
        return self._run("all_to_all", opts, [input], [output], staging, call)

    def barrier(self, opts: Any) -> DrumlineWork | None:
        staging = self._staging_on(getattr(opts, "device", None))
        return self._run("barrier", opts, [], [], staging, ("barrier",))


def _dtype(tensor: torch.Tensor) -> torch.dtype:
    return tensor.dtype


def _counts(memories: list[Memory]) -> list[int]:
    return [count for _, count, _, _ in memories]


def _pairs_by_type(inputs: Tensors, outputs: Tensors) -> list[tuple[Tensors, Tensors]]:
    pairs = by_type(list(zip(inputs, outputs, strict=True)), lambda pair: pair[0].dtype)
    return [([own for own, _ in kind], [filled for _, filled in kind]) for kind in pairs]
