"""The backend: one process group of torch's on one of drumline's."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend

from drumline import _core, _exit
from drumline.torch import profile
from drumline.torch.barrier import MonitoredBarrier
from drumline.torch.sparse import all_reduce_sparse
from drumline.torch.tensors import Memory, Staging, width
from drumline.torch.work import DrumlineWork, as_dist_error, patch_holder

_log = logging.getLogger(__name__)

# torch may wrap a backend and drop the half of it that is in Python.
_LIVING: set[DrumlineBackend] = set()

# How long destroy_process_group waits for ranks that have not called it.
_PATIENCE_S = 5.0

_OPERATORS = {
    getattr(dist.ReduceOp.RedOpType, name): name.lower()
    for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
}

_PER_GROUP = timedelta(milliseconds=-1)


def create(options: Any, backend_options: Any) -> Backend:
    """What torch calls for every group of this rank."""
    patch_holder()
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    is_world = not options.global_ranks_in_group
    name = "world" if is_world else str(options.group_id)
    return connect(options.store, options.group_rank, ranks, name, options.timeout)


def connect(
    store: dist.Store, rank: int, ranks: list[int], name: str, timeout: timedelta
) -> DrumlineBackend:
    settings: dict[str, Any] = {"timeout": timeout.total_seconds()}
    try:
        group = _core.Group.connect(name, store, rank, ranks, _master(store), settings)
    except _core.DrumlineError as error:
        raise as_dist_error(error) from None
    return DrumlineBackend(group, store, timeout, ranks)


def _master(store: dist.Store) -> tuple[str, int] | None:
    """Where the store is, if it is on a host: the way there leads to the other hosts."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if isinstance(store, dist.TCPStore):
        return store.host, store.port
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    return (address, int(port)) if address and port.isdigit() else None


class DrumlineBackend(Backend):
    """Collectives of one group. torch checks arguments, turns global ranks into those of the group,
    and passes lists of tensors with an object of options."""

    def __init__(
        self, group: _core.Group, store: dist.Store, timeout: timedelta, ranks: list[int]
    ) -> None:
        super().__init__(group.rank, group.world_size)
        self._group = group
        self._ranks = ranks
        self._timeout = timeout
        self._sequence = 0
        self._options = Backend.Options("drumline", timeout)
        self._options.global_ranks_in_group = ranks
        self._monitored_barrier = MonitoredBarrier(store, group.rank, group.world_size)
        _LIVING.add(self)
        _exit.watch(group)

    # What torch asks.

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        return "drumline"

    @property
    def options(self) -> Backend.Options:
        return self._options

    # Each must be answered here: torch's own answer asks this class again.
    supports_splitting = property(lambda self: True)
    supports_coalescing = property(lambda self: False)
    supports_shrinking = property(lambda self: False)
    supports_reconfigure = property(lambda self: False)
    supports_window = property(lambda self: False)
    supports_abort_hooks = property(lambda self: False)
    supports_completion_hooks = property(lambda self: False)
    _supports_time_estimate = property(lambda self: False)

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return False

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    def _set_sequence_number_for_group(self) -> None:
        """Counts from 0 on all ranks already."""

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self._options._timeout = timeout
        self._group.set_timeout(timeout.total_seconds())

    _set_default_timeout = set_timeout

    def split(self, store: dist.Store, ranks: list[int], opts: Any) -> DrumlineBackend | None:
        if self.rank() not in ranks:
            return None
        name = getattr(opts, "group_name", "") or f"{self._group.name}/{ranks}"
        timeout = getattr(opts, "_timeout", self._timeout)
        return connect(
            store, ranks.index(self.rank()), [self._ranks[rank] for rank in ranks], name, timeout
        )

    def shutdown(self) -> None:
        _LIVING.discard(self)
        try:
            self._group.leave(_PATIENCE_S)
        except _core.DrumlineError as error:
            # A call that needed nobody's answer is not known to have failed until now. Of all else
            # whoever used the group has heard, and it is to go.
            is_news = not str(error).startswith("destroy did not happen")
            if is_news and "ranks disagree" in str(error):
                raise as_dist_error(error) from None
            _log.warning("left a group that had failed: %s", error)

    def abort(self) -> None:
        _LIVING.discard(self)
        self._group.abort()

    # Operations on one tensor.

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> DrumlineWork:
        staging = Staging()
        data = staging.write(_one(tensors, "broadcast"))
        return self._run(
            "broadcast", opts, tensors, tensors, staging,
            lambda group, background: group.broadcast(data, opts.rootRank, background),
        )  # fmt: skip

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> DrumlineWork:
        if len(tensors) > 1:
            return self.allreduce_coalesced(tensors, opts)
        tensor = _one(tensors, "all_reduce")
        if tensor.layout is not torch.strided:
            return self.allreduce_sparse(tensors, opts)
        staging, (op, factor) = Staging(), _operator(opts)
        data = staging.write(tensor, reduce=True)
        return self._run(
            "all_reduce", opts, tensors, tensors, staging,
            lambda group, background: group.all_reduce(data, op, factor, background),
        )  # fmt: skip

    def allreduce_sparse(self, tensors: list[torch.Tensor], opts: Any) -> DrumlineWork:
        """On the calling thread, also where torch does not wait."""
        op, _ = _operator(opts)
        self._sequence += 1
        event = profile.begin("drumline:sparse_all_reduce", tensors)
        try:
            all_reduce_sparse(self._group, _one(tensors, "all_reduce"), op)
        except _core.DrumlineError as error:
            raise as_dist_error(error) from None
        finally:
            profile.end(event, [])
        return DrumlineWork("all_reduce", [], Staging(), tensors)

    def reduce(self, tensors: list[torch.Tensor], opts: Any) -> DrumlineWork:
        tensor = _one(tensors, "reduce")
        staging, (op, factor), root = Staging(), _operator(opts), opts.rootRank
        # Other ranks' tensors stay as they are.
        take = staging.write if self.rank() == root else staging.read
        data = take(tensor, reduce=True)
        return self._run(
            "reduce", opts, tensors, tensors, staging,
            lambda group, background: group.reduce(data, op, factor, root, background),
        )  # fmt: skip

    # Operations on lists.

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any) -> DrumlineWork:
        staging, (op, factor) = Staging(), _operator(opts)
        parts = [
            [staging.write(tensor, reduce=True) for tensor in kind] for kind in _by_type(tensors)
        ]
        return self._run(
            "all_reduce", opts, tensors, tensors, staging,
            *(
                lambda group, background, part=part: group.all_reduce_coalesced(
                    part, op, factor, background
                )
                for part in parts
            ),
        )  # fmt: skip

    def allgather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any
    ) -> DrumlineWork:
        own, lists = _one(inputs, "all_gather"), _one(outputs, "all_gather")
        self._check_list(lists, "output")
        staging = Staging()
        data, filled = staging.read(own), [staging.write(tensor) for tensor in lists]
        return self._run(
            "all_gather", opts, inputs, lists, staging,
            lambda group, background: group.all_gather(data, filled, background),
        )  # fmt: skip

    def allgather_coalesced(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any
    ) -> DrumlineWork:
        """``outputs[r][i]`` is ``inputs[i]`` of rank ``r``."""
        self._check_list(outputs, "output")
        for row in outputs:
            if [(t.shape, t.dtype) for t in row] != [(t.shape, t.dtype) for t in inputs]:
                raise ValueError("all_gather_coalesced: outputs must be like the inputs")
        staging = Staging()
        calls = []
        for index, tensor in enumerate(inputs):
            data, filled = staging.read(tensor), [staging.write(row[index]) for row in outputs]
            calls.append(
                lambda group, background, data=data, filled=filled: group.all_gather(
                    data, filled, background
                )
            )
        flat = [tensor for row in outputs for tensor in row]
        return self._run("all_gather", opts, inputs, flat, staging, *calls)

    def gather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any
    ) -> DrumlineWork:
        lists = self._list_at_root(outputs, opts.rootRank, "output")
        staging, root = Staging(), opts.rootRank
        data = staging.read(_one(inputs, "gather"))
        filled = [staging.write(tensor) for tensor in lists]
        return self._run(
            "gather", opts, inputs, lists, staging,
            lambda group, background: group.gather(data, filled, root, None, background),
        )  # fmt: skip

    def scatter(
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any
    ) -> DrumlineWork:
        lists = self._list_at_root(inputs, opts.rootRank, "input")
        staging, root = Staging(), opts.rootRank
        data = staging.write(_one(outputs, "scatter"))
        read = [staging.read(tensor) for tensor in lists]
        return self._run(
            "scatter", opts, lists or outputs, outputs, staging,
            lambda group, background: group.scatter(read, data, root, None, background),
        )  # fmt: skip

    def reduce_scatter(
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any
    ) -> DrumlineWork:
        lists = _one(inputs, "reduce_scatter")
        self._check_list(lists, "input")
        staging, (op, factor) = Staging(), _operator(opts)
        data = staging.write(_one(outputs, "reduce_scatter"), reduce=True)
        read = [staging.read(tensor, reduce=True) for tensor in lists]
        return self._run(
            "reduce_scatter", opts, lists, outputs, staging,
            lambda group, background: group.reduce_scatter(read, data, op, factor, background),
        )  # fmt: skip

    def alltoall(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any
    ) -> DrumlineWork:
        self._check_list(outputs, "output")
        self._check_list(inputs, "input")
        staging = Staging()
        read = [staging.read(tensor) for tensor in inputs]
        filled = [staging.write(tensor) for tensor in outputs]
        return self._run(
            "all_to_all", opts, inputs, outputs, staging,
            lambda group, background: group.all_to_all(
                read, _counts(read), filled, _counts(filled), background
            ),
        )  # fmt: skip

    # Operations on tensors with a block for every rank.

    def all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any
    ) -> DrumlineWork:
        staging = Staging()
        data, filled = staging.read(input), staging.write(output)
        return self._run(
            "_all_gather_base", opts, [input], [output], staging,
            lambda group, background: group.all_gather(data, [filled], background),
        )  # fmt: skip

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any
    ) -> DrumlineWork:
        staging = Staging()
        calls = []
        for pairs in _by_type(list(zip(inputs, outputs, strict=True)), lambda pair: pair[0].dtype):
            read = [staging.read(input) for input, _ in pairs]
            filled = [staging.write(output) for _, output in pairs]
            calls.append(
                lambda group, background, read=read, filled=filled: group.all_gather_coalesced(
                    read, filled, background
                )
            )
        return self._run("all_gather", opts, inputs, outputs, staging, *calls)

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any
    ) -> DrumlineWork:
        staging, (op, factor) = Staging(), _operator(opts)
        data, read = staging.write(output, reduce=True), staging.read(input, reduce=True)
        return self._run(
            "_reduce_scatter_base", opts, [input], [output], staging,
            lambda group, background: group.reduce_scatter([read], data, op, factor, background),
        )  # fmt: skip

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any
    ) -> DrumlineWork:
        staging, (op, factor) = Staging(), _operator(opts)
        calls = []
        for pairs in _by_type(list(zip(inputs, outputs, strict=True)), lambda pair: pair[0].dtype):
            read = [staging.read(input, reduce=True) for input, _ in pairs]
            filled = [staging.write(output, reduce=True) for _, output in pairs]
            calls.append(
                lambda group, background, read=read, filled=filled: group.reduce_scatter_coalesced(
                    read, filled, op, factor, background
                )
            )
        return self._run("reduce_scatter", opts, inputs, outputs, staging, *calls)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        opts: Any,
    ) -> DrumlineWork:
        staging = Staging()
        send = self._split_counts(input, input_split_sizes)
        receive = self._split_counts(output, output_split_sizes)
        read, filled = staging.read(input), staging.write(output)
        return self._run(
            "all_to_all", opts, [input], [output], staging,
            lambda group, background: group.all_to_all([read], send, [filled], receive, background),
        )  # fmt: skip

    # Barriers and messages.

    def barrier(self, opts: Any) -> DrumlineWork:
        return self._run(
            "barrier", opts, [], [], Staging(), lambda group, background: group.barrier(background)
        )

    def monitored_barrier(self, opts: Any, wait_all_ranks: bool = False) -> None:
        timeout = opts.timeout if opts.timeout != _PER_GROUP else self._timeout
        self._monitored_barrier.wait(timeout, wait_all_ranks)

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> DrumlineWork:
        staging = Staging()
        data = staging.read(_one(tensors, "send"))
        return self._post("send", tensors, staging, lambda: self._group.send(data, to, _tag(tag)))

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> DrumlineWork:
        staging = Staging()
        data = staging.write(_one(tensors, "recv"))
        return self._post(
            "recv", tensors, staging, lambda: self._group.recv(data, source, _tag(tag))
        )

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> DrumlineWork:
        staging = Staging()
        data = staging.write(_one(tensors, "recv"))
        return self._post(
            "recvAnySource", tensors, staging, lambda: self._group.recv(data, None, _tag(tag))
        )

    # How they run.

    def _run(
        self,
        title: str,
        opts: Any,
        tensors: list[torch.Tensor],
        result: list[torch.Tensor],
        staging: Staging,
        *calls: Callable[[_core.Group, bool], _core.Work | None],
    ) -> DrumlineWork:
        """A call that torch waits for runs on this thread; others in the background."""
        self._sequence += 1
        group = self._group
        if opts.timeout != _PER_GROUP and opts.timeout != self._timeout:
            group = group.within(opts.timeout.total_seconds())
        event = profile.begin(f"drumline:{title}", tensors)
        handles: list[_core.Work] = []
        try:
            for call in calls:
                handle = call(group, opts.asyncOp)
                if handle is not None:
                    handles.append(handle)
        except _core.DrumlineError as error:
            raise as_dist_error(error) from None
        finally:
            profile.end(event, handles)
        if not handles:
            staging.finish()
        return DrumlineWork(title, handles, staging, result)

    def _post(
        self,
        title: str,
        tensors: list[torch.Tensor],
        staging: Staging,
        call: Callable[[], _core.Work],
    ) -> DrumlineWork:
        event = profile.begin(f"drumline:{title}", tensors)
        handles: list[_core.Work] = []
        try:
            handles.append(call())
        except _core.DrumlineError as error:
            raise as_dist_error(error) from None
        finally:
            profile.end(event, handles)
        return DrumlineWork(title, handles, staging, tensors)

    # What arguments must be like.

    def _check_list(self, tensors: Sequence[Any], what: str) -> None:
        if len(tensors) != self.size():
            raise ValueError(
                f"invalid {what} tensor list at index 0 (expected length {self.size()}, got "
                f"{len(tensors)})"
            )

    def _list_at_root(
        self, lists: list[list[torch.Tensor]], root: int, what: str
    ) -> list[torch.Tensor]:
        if self.rank() != root:
            if lists and lists[0]:
                raise ValueError(f"requires an empty {what} list on ranks other than the root")
            return []
        tensors = lists[0] if len(lists) == 1 else []
        self._check_list(tensors, what)
        return tensors

    def _split_counts(self, tensor: torch.Tensor, sizes: list[int]) -> list[int]:
        """Elements for each rank, of rows for each rank."""
        rows = tensor.size(0) if tensor.dim() else 1
        row = tensor.numel() // rows * width(tensor) if rows else 0
        if not sizes:
            if rows % self.size():
                raise ValueError("Tensor's dim 0 does not divide equally across group size")
            return [rows // self.size() * row] * self.size()
        if len(sizes) != self.size():
            raise ValueError("Number of tensor splits not equal to group size")
        if sum(sizes) != rows:
            raise ValueError("Split sizes doesn't match total dim 0 size")
        return [size * row for size in sizes]


def _one(things: list[Any], operation: str) -> Any:
    if len(things) != 1:
        raise ValueError(f"{operation} takes one tensor per rank, and got {len(things)}")
    return things[0]


def _tag(tag: int) -> int:
    if tag < 0:
        raise ValueError("Tag must be nonnegative")
    return tag


def _operator(opts: Any) -> tuple[str, Any]:
    op = opts.reduceOp
    kind = getattr(op, "op", op)
    name = _OPERATORS.get(kind)
    if name is None:
        raise ValueError(f"drumline has no reduce operator {kind}")
    if name != "premul_sum":
        return name, None
    factor = op.__getstate__()[1]
    return name, factor.item() if isinstance(factor, torch.Tensor) else factor


def _counts(memories: list[Memory]) -> list[int]:
    return [count for _, count, _, _ in memories]


def _by_type(things: list[Any], type_of: Callable[[Any], Any] = lambda it: it.dtype) -> list[Any]:
    """The things in lists of one type each, in an order that is the same on all ranks."""
    kinds: dict[Any, list[Any]] = {}
    for thing in things:
        kinds.setdefault(type_of(thing), []).append(thing)
    return list(kinds.values())
