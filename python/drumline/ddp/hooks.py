"""Communication hooks: shorter types for travelling gradients, and functions of the user."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from drumline import _core
from drumline.ddp.buckets import Places, tensor_at
from drumline.ddp.groups import gathered
from drumline.torch import on_device

if TYPE_CHECKING:
    from drumline.ddp.reducer import Buckets, Reducer


@dataclass(frozen=True)
class Compress:
    """Gradients travel as another type. Sums are formed in float32 and rounded once."""

    dtype: Any
    name: str


fp16_compress = Compress(torch.float16, "fp16_compress")
bf16_compress = Compress(torch.bfloat16, "bf16_compress")

# Buckets for functions of the user have torch's lengths.
_BUCKET_BYTES = 25 << 20
_FIRST_BUCKET_BYTES = 1 << 20


def buckets_for(
    reducer: Reducer, state: object, hook: Any
) -> Callable[[], Buckets] | None:
    """A function that makes the buckets for a hook. None: the present buckets serve."""
    hook = _OF_TORCH.get(_name_in_torch(hook), hook)
    if hook is None:
        return None
    if isinstance(hook, Compress):
        wire = hook.dtype
        return lambda: reducer.own_buckets(wire)
    if not callable(hook):
        raise TypeError("a communication hook must be callable")
    return lambda: HookBuckets(reducer, state, hook)


# Hooks of torch that the core carries out itself.
_OF_TORCH: dict[str | None, Compress | None] = {
    "allreduce_hook": None,
    "fp16_compress_hook": fp16_compress,
    "bf16_compress_hook": bf16_compress,
}


def _name_in_torch(hook: Any) -> str | None:
    theirs = sys.modules.get("torch.distributed.algorithms.ddp_comm_hooks.default_hooks")
    name = getattr(hook, "__name__", None)
    return name if theirs is not None and name and getattr(theirs, name, None) is hook else None


class GradBucket:
    """Gradients side by side, with the methods of torch's class of this name."""

    def __init__(self, index: int, flat: Any, places: list[Any], parameters: list[Any]) -> None:
        self._index, self._flat, self._buffer = index, flat, flat
        self._places, self._parameters = places, parameters
        self.is_last_one = False

    def index(self) -> int:
        """The number of the bucket. Buckets are reduced in this order."""
        return self._index

    def buffer(self) -> Any:
        """All gradients as one tensor of one dimension."""
        return self._buffer

    def set_buffer(self, tensor: Any) -> None:
        """Replaces the tensor that `buffer` returns."""
        self._buffer = tensor

    def gradients(self) -> list[Any]:
        """Each gradient, in the shape of its parameter: views of the buffer."""
        return self._places

    def parameters(self) -> list[Any]:
        """The parameters, in the order of `gradients`."""
        return self._parameters

    def is_last(self) -> bool:
        """Whether this is the last bucket of a backward."""
        return self.is_last_one


class HookBuckets:
    """Buckets that a function of the user reduces, one after another."""

    averages = False

    def __init__(
        self,
        reducer: Reducer,
        state: object,
        hook: Callable[..., Any],
        bucket_bytes: int | None = None,
    ) -> None:
        self._group, self._names, self._parameters = reducer.group, reducer.names, reducer.parameters
        self._has_marks = reducer.has_marks
        self._hook, self._state = hook, state
        tensors: list[Any] = [None] * len(self._names)
        # A storage of their own would need no copy either, but torch has none for GPUs.
        view = (lambda index: tensors[index].detach()) if reducer.views else None
        self.places = Places(self._names, self._parameters, tensors, view)
        self._buckets: list[GradBucket] = []
        self._bucket_of = [0] * len(self._names)
        for members in plan(self._parameters, bucket_bytes or _BUCKET_BYTES):
            self._add(members)
        self._buckets[-1].is_last_one = True
        self._next_step()

    def _add(self, members: list[int]) -> None:
        parameters = [self._parameters[index] for index in members]
        first = parameters[0]
        flat = torch.zeros(
            sum(it.numel() for it in parameters), dtype=first.dtype, device=first.device
        )
        at = 0
        for index, parameter in zip(members, parameters, strict=True):
            self._bucket_of[index] = len(self._buckets)
            storage, offset = flat.untyped_storage(), at * flat.element_size()
            self.places.tensors[index] = tensor_at(storage, offset, flat.dtype, parameter)
            at += parameter.numel()
        places = [self.places.tensors[index] for index in members]
        self._buckets.append(GradBucket(len(self._buckets), flat, places, parameters))

    def _next_step(self) -> None:
        self._pending = [len(bucket.parameters()) for bucket in self._buckets]
        self._futures: list[Any] = []
        self._is_brought = [False] * len(self._names)
        # By bucket: what streams were doing when they had made a gradient of it.
        self._marks: list[dict[int, Any]] = [{} for _ in self._buckets]

    def bring(self, index: int) -> None:
        self._put(index)
        self._bring(index)

    def _put(self, index: int) -> None:
        self.places.put(index)

    def bring_zeros(self, index: int) -> None:
        self.places.tensors[index].zero_()
        self._bring(index)

    def _bring(self, index: int) -> None:
        self._is_brought[index] = True
        device = self.places.tensors[index].device
        if device.type == on_device.GPUS.kind:
            marks = self._marks[self._bucket_of[index]]
            marks[on_device.GPUS.stream(device)] = on_device.GPUS.mark(device)
        self._pending[self._bucket_of[index]] -= 1
        # In the same order on all ranks, because functions call collectives.
        while len(self._futures) < len(self._buckets) and not self._pending[len(self._futures)]:
            self._launch()

    def _launch(self) -> None:
        bucket = self._buckets[len(self._futures)]
        bucket.set_buffer(bucket._flat)
        for stream, mark in self._marks[bucket.index()].items():
            # Autograd makes a gradient on the stream of its forward, which may be another one.
            if stream != on_device.GPUS.stream(bucket._flat.device):
                on_device.GPUS.follow(bucket._flat.device, mark)
        future = self._hook(self._state, bucket)
        if not hasattr(future, "wait"):
            raise TypeError(
                f"a communication hook returns a Future with the reduced buffer, and this one has "
                f"returned a {type(future).__name__}"
            )
        self._futures.append(future)

    def synchronize(self, used: Sequence[bool]) -> list[bool]:
        # Other ranks wait for all buckets, also for those in which a gradient is missing on this rank.
        while len(self._futures) < len(self._buckets):
            self._launch()
        for bucket, future in zip(self._buckets, self._futures, strict=True):
            result = future.wait()
            result = result[0] if isinstance(result, list | tuple) else result
            if result.data_ptr() != bucket._flat.data_ptr():
                bucket._flat.copy_(result)
        brought, used_by = self._tell(self._is_brought), used
        self._next_step()
        missing = [
            f"rank {rank} has not brought {', '.join(names)}"
            for rank, row in enumerate(brought)
            if (names := [name for name, came in zip(self._names, row, strict=True) if not came])
        ]
        if missing:
            raise _core.NotBroughtError("; ".join(missing))
        if not self._has_marks:
            return list(used_by)
        return [any(column) for column in zip(*self._tell(used), strict=True)]

    def _tell(self, own: Sequence[bool]) -> list[list[bool]]:
        """Gathers one flag per parameter from all ranks; one row per rank."""
        return [[bool(it) for it in row] for row in gathered(self._group, own)]

    def abort(self) -> None:
        self._group.abort()

    def leave(self, patience_s: float) -> None:
        """Does nothing: these buckets have no connections of their own."""

    def drop(self) -> None:
        """Does nothing: these buckets have no connections of their own."""


def plan(parameters: Sequence[Any], bucket_bytes: int = _BUCKET_BYTES) -> list[list[int]]:
    """Indices of parameters, in buckets of one type and device, from the last parameter to the first. The
    first bucket is small."""
    buckets: list[list[int]] = []
    open_buckets: dict[Any, list[int]] = {}
    for index in reversed(range(len(parameters))):
        kind = parameters[index].dtype, parameters[index].device
        members = open_buckets.setdefault(kind, [])
        members.append(index)
        limit = bucket_bytes if buckets else min(bucket_bytes, _FIRST_BUCKET_BYTES)
        held = sum(parameters[it].numel() * parameters[it].element_size() for it in members)
        if held >= limit:
            buckets.append(open_buckets.pop(kind))
    return buckets + list(open_buckets.values())
