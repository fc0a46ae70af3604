"""Gradients on GPUs: flat buckets on each GPU, averaged from where they are while backward runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from drumline import _core
from drumline.ddp.buckets import copy, wire_type
from drumline.ddp.groups import gathered, number_of
from drumline.ddp.hooks import GradBucket, HookBuckets
from drumline.torch import on_device
from drumline.torch.on_device import OnDevice, Placing
from drumline.torch.tensors import Staging

if TYPE_CHECKING:
    from drumline.ddp.reducer import Reducer

_TOGETHER_BYTES = 32 << 20


class Devices:
    """Where the ranks keep a model. All of them make this together.

    Their GPUs are used if the tensors of every rank are spread over GPUs in the same way. If not, each rank copies what
    it has on GPUs to the memory of its CPU, and some ranks may have nothing there.
    """

    def __init__(self, group: _core.Group, tensors: Iterable[Any]) -> None:
        self._group = group
        devices = [tensor.device for tensor in tensors]
        own = _spread(devices)
        is_same = all(it == [own] for it in gathered(group, [own]))
        self._on: OnDevice | None = None
        if own != 0 and is_same:
            self._on = OnDevice(group)
            for device in dict.fromkeys(devices):
                self._on.staging_on(device)

    @property
    def are_used(self) -> bool:
        """Whether calls take memory of GPUs."""
        return self._on is not None

    def staging_of(self, tensor: Any) -> Staging:
        """How a tensor reaches the core."""
        return Staging() if self._on is None else self._on.staging_on(tensor.device)

    def abort(self) -> None:
        """Fails all calls on GPUs."""
        if self._on is not None:
            self._on.abort()

    def leave(self, patience_s: float) -> None:
        """Leaves the other ranks."""
        if self._on is not None:
            self._on.leave(patience_s)


def _spread(devices: list[Any]) -> int:
    """How tensors are spread over GPUs, as a number that is the same for ranks with GPUs of other numbers. 0: there is
    none on a GPU, or one that the core cannot use."""
    known: dict[Any, int] = {}
    order = [known.setdefault(device, len(known)) if device.type != "cpu" else -1 for device in devices]
    if not known or not all(on_device.can_be_used(device) for device in known):
        return 0
    return number_of(order)


class DeviceBuckets(HookBuckets):
    """Flat buckets, each on one GPU or on the CPU. A bucket is averaged as one call, when it is full and those before
    it are under way. Nobody waits for that: the caller's stream does, at the end of backward."""

    averages = True

    def __init__(self, reducer: Reducer, devices: Devices, wire: Any = None) -> None:
        self._devices, self._wire = devices, wire
        super().__init__(reducer, None, self._average, reducer.bucket_bytes)

    def abort(self) -> None:
        self._devices.abort()
        super().abort()

    def _put(self, index: int) -> None:
        place = self.places.tensors[index]
        if place.device.type == "cpu":
            super()._put(index)
        elif (gradient := self.places.to_copy(index)) is not None:
            self._apart[self._bucket_of[index]].append((place, gradient))

    def _next_step(self) -> None:
        super()._next_step()
        # By bucket: places, and the gradients that are copied there together.
        self._apart: list[list[tuple[Any, Any]]] = [[] for _ in self._buckets]

    def _average(self, _: object, bucket: GradBucket) -> _Average:
        apart = self._apart[bucket.index()]
        if apart:
            copy([place for place, _ in apart], [gradient for _, gradient in apart])
            apart.clear()
        return _Average(self._group, self._devices, bucket.buffer(), self._wire)


class _Average:
    """The average of a bucket, as the future of a hook."""

    def __init__(self, group: _core.Group, devices: Devices, buffer: Any, wire: Any) -> None:
        self._buffer, self._sent = buffer, buffer
        self._staging = staging = devices.staging_of(buffer)
        is_there = isinstance(staging, Placing)
        dtype = wire_type(buffer.dtype, wire)
        if dtype != buffer.dtype:
            self._sent = _room(buffer, dtype, is_there)
            copy([self._sent], [buffer])
        memory = staging.write(self._sent, reduce=True)
        self._handle: Any = (
            staging.queue("all_reduce", memory, "avg", None)
            if isinstance(staging, Placing)
            else group.all_reduce(memory, "avg", None, True)
        )

    def wait(self) -> Any:
        """The host waits for a bucket on the CPU, and the caller's stream for one on a GPU."""
        self._handle.wait()
        self._staging.finish()
        if self._sent is not self._buffer:
            copy([self._buffer], [self._sent])
        return self._buffer


def _room(like: Any, dtype: Any, is_there: bool) -> Any:
    if is_there:
        return on_device.GPUS.room_for(like.shape, dtype, like.device)
    return torch.empty(like.shape, dtype=dtype, device=like.device)


def broadcast(devices: Devices, tensors: Sequence[Any], root: int) -> list[Any]:
    """Queues copies of rank ``root``'s values to tensors on GPUs, small ones of a type together. Returns the tensors
    that are not there."""
    kinds: dict[Any, list[Any]] = {}
    others: list[Any] = []
    for tensor in tensors:
        is_there = devices.are_used and tensor.device.type != "cpu"
        (kinds.setdefault((tensor.device, tensor.dtype), []) if is_there else others).append(tensor)
    for alike in kinds.values():
        for some in _in_parts(alike):
            staging = devices.staging_of(some[0])
            if isinstance(staging, Placing):
                memory = staging.write_together(some) if len(some) > 1 else staging.write(some[0])
                staging.queue("broadcast", memory, root)
                staging.finish()
    return others


def _in_parts(tensors: list[Any]) -> list[list[Any]]:
    """Lists of so many tensors that their copy on the GPU stays small."""
    parts: list[list[Any]] = []
    room = 0
    for tensor in tensors:
        if tensor.nbytes > room:
            parts.append([])
            room = _TOGETHER_BYTES
        parts[-1].append(tensor)
        room -= tensor.nbytes
    return parts
