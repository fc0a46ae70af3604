"""A step as shards: the average over all of them has the same bits on any number of ranks."""

from __future__ import annotations

import dataclasses
import hashlib
import random
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import torch

from drumline import _core
from drumline.ddp.groups import gathered
from drumline.ddp.sync_batch_norm import is_synchronised
from drumline.torch.tensors import Staging

_UNUSED, _USED, _MISSING = 0, 1, 2


@dataclasses.dataclass
class Start:
    """What a step changes, as it was before: the values of buffers, and the gradients of parameters."""

    buffers: Sequence[Any]
    values: list[Any]
    parameters: list[Any]
    grads: list[Any]

    def restore(self) -> None:
        """Makes everything as it was."""
        _set(self.buffers, self.values)
        for parameter, grad in zip(self.parameters, self.grads, strict=True):
            parameter.grad = grad


class Shards:
    """This rank's shards of a step. ``parameters`` are those that are trained, by name."""

    def __init__(
        self,
        group: _core.Group,
        count: int,
        seed: int,
        module: torch.nn.Module,
        parameters: dict[str, Any],
        finds_unused: bool,
    ) -> None:
        for name, it in parameters.items():
            if it.dtype not in (torch.float32, torch.float64):
                raise ValueError(
                    f"shards={count}: gradients of parameter {name}, {it.dtype}, would be rounded on the way from shard "
                    "to shard. Keep parameters in float32 or float64"
                )
        if any(map(is_synchronised, module.modules())):
            raise ValueError(
                f"shards={count}: a shard is computed alone, and SyncBatchNorm waits for all ranks. Use BatchNorm"
            )
        self._group, self._count, self._seed = group, count, seed
        self._finds_unused = finds_unused
        # The gradients of a type lie in one tensor.
        named = sorted(parameters.items(), key=lambda it: str(it[1].dtype))
        self._names, self._parameters = [name for name, _ in named], [it for _, it in named]
        self._dealt = _core.deal(group, count)
        first = sum(self._dealt.lengths[: group.rank])
        self._run = range(first, first + self._dealt.lengths[group.rank])

    def start(self, buffers: Sequence[Any]) -> Start:
        """Notes what a step changes."""
        values = [it.detach().clone() for it in buffers]
        return Start(buffers, values, self._parameters, [it.grad for it in self._parameters])

    def step(self, number: int, loss: Callable[[int], Any], start: Start) -> float:
        """Leaves the averages in ``grad`` of the parameters, and returns that of the losses. Buffers become those that
        shard 0 leaves, on the rank that has it; all shards begin from those of ``start``."""
        states, nodes, losses = [_UNUSED] * len(self._names), _Stack(), list[float]()
        after = start.values
        failure: Exception | None = None
        try:
            with _generators():
                for shard, merges in zip(self._run, self._dealt.merges_of_run, strict=True):
                    _set(start.buffers, start.values)
                    self._begin(number, shard)
                    of_shard = loss(shard)
                    of_shard.backward()
                    losses.append(float(of_shard.detach()))
                    nodes.push(self._leaf(states), merges)
                    if shard == 0:
                        after = [it.detach().clone() for it in start.buffers]
        except Exception as error:
            failure = error
        try:
            average, is_used = self._agree(number, states, losses, failure)
        except _core.DrumlineError:
            if failure is None:
                raise
            raise failure from None
        averages = [self._sum(list(of_type)).div_(self._count) for of_type in zip(*nodes.sums, strict=True)]
        _set(start.buffers, after)
        views = (it for flat, of_type in zip(averages, self._by_type(), strict=True) for it in _views(flat, of_type))
        for parameter, view, used in zip(self._parameters, views, is_used, strict=True):
            parameter.grad = view if used else None
        return average

    def _begin(self, number: int, shard: int) -> None:
        for parameter in self._parameters:
            parameter.grad = None
        text = repr((self._seed, number, shard)).encode()
        seed = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
        torch.manual_seed(seed)
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed % (1 << 32))

    def _by_type(self) -> Iterator[list[Any]]:
        return (list(of_type) for _, of_type in groupby(self._parameters, key=lambda it: it.dtype))

    def _leaf(self, states: list[int]) -> list[Any]:
        """The gradients of a shard, one tensor for each type, and none is left in the parameters."""
        for index, parameter in enumerate(self._parameters):
            if parameter.grad is not None:
                states[index] = states[index] or _USED
                continue
            if not self._finds_unused:
                states[index] = _MISSING
            parameter.grad = torch.zeros_like(parameter)
        return [torch.cat([it.grad.reshape(-1) for it in of_type]).cpu() for of_type in self._by_type()]

    def _agree(
        self, number: int, states: list[int], losses: list[float], failure: Exception | None
    ) -> tuple[float, list[bool]]:
        """Tells the other ranks what this one has. Raises if a rank has not all gradients. Returns the average of all
        losses, and which parameters some shard has used."""
        most = max(self._dealt.lengths)
        numbers = [_as_integer(it) for it in losses] + [0] * (most - len(losses))
        told = gathered(self._group, [number, failure is not None, *states, *numbers])
        of_ranks, rows = [row[0] for row in told], [row[1:] for row in told]
        if other := [rank for rank, it in enumerate(of_ranks) if it != of_ranks[0]]:
            raise _core.DrumlineError(
                f"step {number}: rank 0 runs step {of_ranks[0]}, and rank {other[0]} step {of_ranks[other[0]]}. All ranks "
                "must pass the same number"
            )
        failed = [rank for rank, row in enumerate(rows) if row[0]]
        if failed:
            raise _core.DrumlineError(
                f"step {number}: the step failed in the program on {_ranks(failed)}; that rank's own error says why"
            )
        columns = list(zip(*(row[1 : 1 + len(states)] for row in rows), strict=True))
        missing = [
            f"parameter {name} got no gradient on {_ranks([rank for rank, it in enumerate(column) if it == _MISSING])}"
            for name, column in zip(self._names, columns, strict=True)
            if _MISSING in column
        ]
        if missing:
            raise _core.NotBroughtError(
                f"step {number}: {'; '.join(missing)}. Every shard must use every parameter: pass find_unused_parameters=True "
                "if one need not"
            )
        total = _Stack()
        with_lengths = zip(rows, self._dealt.lengths, strict=True)
        all_losses = (_as_float(it) for row, length in with_lengths for it in row[1 + len(states) :][:length])
        for it, merges in zip(all_losses, self._dealt.merges_of_all, strict=True):
            total.push([torch.tensor(it, dtype=torch.float64)], merges)
        return float(total.sums[0][0]) / self._count, [_USED in column for column in columns]

    def _sum(self, nodes: list[Any]) -> Any:
        """The sum of what all ranks bring: ``nodes`` of this one."""
        dealt, group = self._dealt, self._group
        if group.world_size == 1:
            return nodes[0]
        staging = Staging()
        if dealt.is_all_reduce:
            group.all_reduce(staging.write(nodes[0], reduce=True), "sum")
            return nodes[0]
        length = nodes[0].numel()
        share = -(-length // group.world_size)
        # Each rank gets one share of all nodes, and adds these.
        padded = [torch.nn.functional.pad(it, (0, share * group.world_size - length)) for it in nodes]
        sent = torch.stack([it.view(group.world_size, share) for it in padded], dim=1).contiguous()
        received = sent.new_empty(sum(dealt.nodes), share)
        group.all_to_all(
            [staging.read(sent)],
            [len(nodes) * share] * group.world_size,
            [staging.fill(received)],
            [count * share for count in dealt.nodes],
        )
        total = _Stack()
        for node, merges in zip(received, dealt.merges_of_nodes, strict=True):
            total.push([node], merges)
        whole = sent.new_empty(share * group.world_size)
        group.all_gather(staging.read(total.sums[0][0]), [staging.fill(whole)])
        return whole[:length]


class _Stack:
    """Sums of neighbours, lower ones first."""

    def __init__(self) -> None:
        self.sums: list[list[Any]] = []

    def push(self, tensors: list[Any], merges: int) -> None:
        """Adds the two topmost so often afterwards."""
        self.sums.append(tensors)
        for _ in range(merges):
            right = self.sums.pop()
            for left, it in zip(self.sums[-1], right, strict=True):
                left.add_(it)


@contextmanager
def _generators() -> Iterator[None]:
    """The generators of the program are afterwards as they were before."""
    numpy = sys.modules.get("numpy")
    of_numpy = None if numpy is None else numpy.random.get_state()
    of_python = random.getstate()
    devices = range(torch.cuda.device_count())
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(of_python)
        if numpy is not None:
            numpy.random.set_state(of_numpy)


def _set(tensors: Sequence[Any], values: Sequence[Any]) -> None:
    with torch.no_grad():
        for tensor, value in zip(tensors, values, strict=True):
            tensor.copy_(value)


def _views(flat: Any, parameters: Iterable[Any]) -> Iterator[Any]:
    """The parts of a tensor that have the shapes of parameters, where these are."""
    parameters = list(parameters)
    parts = flat.split([it.numel() for it in parameters])
    return (part.view(it.shape).to(it.device) for part, it in zip(parts, parameters, strict=True))


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _as_integer(number: float) -> int:
    [bits] = struct.unpack("<q", struct.pack("<d", number))
    return int(bits)


def _as_float(bits: int) -> float:
    [number] = struct.unpack("<d", struct.pack("<q", bits))
    return float(number)
