"""Tensors of GPUs: the core takes them from where they are, in the order of the caller's stream.

The host waits for nothing. A call is queued behind what the stream does, and ``wait()`` has the stream wait for it,
as with NCCL. Where a rank has no driver that the core can use, all ranks stage tensors instead
(`drumline.torch.device`).
"""

from __future__ import annotations

import functools
import os
import threading
import time
import warnings
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Protocol

import torch

from drumline import _core
from drumline.torch.tensors import CODE, Memory, Staging, check_layout, is_plain, memory_of


class Gpus(Protocol):
    """What this needs to know of GPUs."""

    library: str | None
    """The file of the driver."""

    kind: str
    """What torch calls these devices."""

    def numbered(self, device: torch.device) -> torch.device:
        """The current device, for one without a number."""
        ...

    def memory(self, tensor: torch.Tensor, reduce: bool) -> Memory:
        """The elements of a tensor, which lie side by side."""
        ...

    def stream(self, device: torch.device) -> int:
        """The caller's stream."""
        ...

    def of_futures(self, device: torch.device) -> list[torch.device]:
        """The devices of a future whose value is on this one: its callbacks get streams there."""
        ...

    def room_for(
        self, shape: Iterable[int], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """A new tensor, whose elements lie side by side."""
        ...

    def copy(self, to: list[torch.Tensor], source: list[torch.Tensor]) -> None:
        """Queues copies of tensors on one GPU in the caller's stream."""
        ...

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in the memory of the host, which waits for it."""
        ...

    def mark(self, device: torch.device) -> Any:
        """What the caller's stream does now, for `follow`."""
        ...

    def follow(self, device: torch.device, mark: Any) -> None:
        """Has the caller's stream wait for what was marked."""
        ...


class OfTorch:
    """The GPUs of this torch."""

    library = os.environ.get("DRUMLINE_CUDA_LIBRARY") or None
    kind = "cuda"

    def numbered(self, device: torch.device) -> torch.device:
        if device.type != "cuda" or device.index is not None:
            return device
        return torch.device("cuda", torch.cuda.current_device())

    def memory(self, tensor: torch.Tensor, reduce: bool) -> Memory:
        return memory_of(tensor, reduce)

    def stream(self, device: torch.device) -> int:
        return int(torch.cuda.current_stream(device).cuda_stream)

    def of_futures(self, device: torch.device) -> list[torch.device]:
        return [device]

    def room_for(
        self, shape: Iterable[int], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=device)

    def copy(self, to: list[torch.Tensor], source: list[torch.Tensor]) -> None:
        with torch.no_grad():
            torch._foreach_copy_(to, source, non_blocking=True)
        # The stream may be another one than that of the call, for which torch keeps them.
        for tensor in (*to, *source):
            tensor.record_stream(torch.cuda.current_stream(tensor.device))

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.cpu()

    def mark(self, device: torch.device) -> Any:
        return torch.cuda.current_stream(device).record_event()

    def follow(self, device: torch.device, mark: Any) -> None:
        torch.cuda.current_stream(device).wait_event(mark)


GPUS: Gpus = OfTorch()


class OnDevice:
    """The ends of a group on this rank's GPUs. All ranks make one together, at the first call on such a tensor."""

    def __init__(self, group: _core.Group) -> None:
        self._group = group
        # By the driver's numbers.
        self._made: dict[int, _core.DeviceGroup | None] = {}
        self._making = threading.RLock()  # a handler of a signal may interrupt its thread
        self._messages: dict[int, _core.DeviceMessages | None] = {}
        self._sent: list[Queued] = []

    def staging_on(self, device: torch.device | None) -> Staging:
        """How the tensors of a call on this device reach the core."""
        if device is None:
            return Staging()
        device = GPUS.numbered(device)
        end = self._of(device)
        return Staging() if end is None else Placing(end, device)

    def staging_of_message(self, tensor: torch.Tensor) -> Staging:
        """How a message reaches the core. Only two ranks know of it, and one of them may have no GPU."""
        device = tensor.device
        if device.type != GPUS.kind:
            return Staging()
        ordinal = _ordinal(device)
        if ordinal not in self._messages:
            able = can_be_used(device)
            self._messages[ordinal] = (
                _core.DeviceMessages(self._group, ordinal, GPUS.library) if able else None
            )
        end = self._messages[ordinal]
        return Staging() if end is None else Placing(end, device)

    def has_sent(self, message: Queued) -> None:
        """Remembers a message: it must be on its way before this rank leaves."""
        self._sent = [it for it in self._sent if not it.is_completed()]
        self._sent.append(message)

    def _of(self, device: torch.device) -> _core.DeviceGroup | None:
        """The end on a GPU. None: some rank cannot have one."""
        if device.type != GPUS.kind:
            return None
        ordinal = _ordinal(device)
        # Autograd has threads of its own, which may be the first to have a call.
        with self._making:
            if ordinal not in self._made:
                self._made[ordinal] = self._make(device)
            return self._made[ordinal]

    def _make(self, device: torch.device) -> _core.DeviceGroup | None:
        able = torch.tensor([can_be_used(device)], dtype=torch.uint8)
        self._group.all_reduce((able.data_ptr(), 1, CODE[torch.uint8], able), "min", None)
        if not able.item():
            return None
        return _core.DeviceGroup(self._group, _ordinal(device), GPUS.library)

    def leave(self, patience: float) -> None:
        """Leaves the other ranks."""
        until = time.monotonic() + patience
        for message in self._sent:
            with suppress(_core.DrumlineError):
                message.wait(max(until - time.monotonic(), 0.001))
        self._sent.clear()
        self._messages.clear()
        made, self._made = self._made, {}
        for end in made.values():
            if end is not None:
                end.leave(patience)

    def abort(self) -> None:
        """Fails all calls that are under way."""
        for end in self._made.values():
            if end is not None:
                end.abort()


def can_be_used(device: torch.device) -> bool:
    """Whether the core can use this device. Says once that it was not tried."""
    return device.type == GPUS.kind and _can_be_used(_ordinal(device))


def _ordinal(device: torch.device) -> int:
    """The driver's number of a device."""
    return device.index or 0


@functools.cache
def _can_be_used(ordinal: int) -> bool:
    try:
        _core.DeviceGroup(_core.Group.alone(), ordinal, GPUS.library, 4096).leave(1.0)
    except (RuntimeError, ValueError) as error:
        warnings.warn(f"drumline stages tensors of GPU {ordinal}: {error}", stacklevel=4)
        return False
    warnings.warn(
        f"drumline adds tensors of GPU {ordinal} in the memory of the host, which has not been verified on this "
        "kind of hardware: compare a first result with another backend's",
        stacklevel=4,
    )
    return True


class Placing(Staging):
    """The tensors of a call as memory of their GPU. Those whose elements do not lie side by side are copied there.

    ``finish`` has the caller's stream wait for the call, and copies back.
    """

    __slots__ = ("_device", "_end", "_mark", "_works")

    def __init__(
        self, end: _core.DeviceGroup | _core.DeviceMessages, device: torch.device
    ) -> None:
        super().__init__()
        self._end, self._device = end, device
        self._works: list[_core.DeviceWork] = []
        self._mark: Any = None

    def queue(self, method: str, *arguments: Any) -> Queued:
        """Queues a call of the core's, behind what the caller's stream does."""
        work = getattr(self._end, method)(GPUS.stream(self._device), *arguments)
        self._works.append(work)
        return Queued(work, is_barrier=method == "barrier")

    @property
    def is_idle(self) -> bool:
        return not self._works

    @property
    def devices(self) -> list[torch.device]:
        return GPUS.of_futures(self._device)

    def read(self, tensor: torch.Tensor, reduce: bool = False) -> Memory:
        return GPUS.memory(tensor if self._takes(tensor) else self._copied(tensor), reduce)

    def write(self, tensor: torch.Tensor, reduce: bool = False) -> Memory:
        return self._back_to(tensor, self._copied, reduce)

    def fill(self, tensor: torch.Tensor, reduce: bool = False) -> Memory:
        return self._back_to(tensor, _room_for, reduce)

    def write_together(self, tensors: list[torch.Tensor]) -> Memory:
        """The elements of tensors of one type, one tensor behind the other, which the call changes."""
        first, total = tensors[0], sum(tensor.numel() for tensor in tensors)
        flat = GPUS.room_for([total], first.dtype, first.device)
        at = 0
        for tensor in tensors:
            place = flat[at : at + tensor.numel()].view(tensor.shape)
            at += tensor.numel()
            self._back.append((tensor, place))
        GPUS.copy([place for _, place in self._back], tensors)
        return GPUS.memory(flat, reduce=False)

    def finish(self) -> None:
        for work in self._works:
            work.join(GPUS.stream(self._device))
        back, self._back = self._back, []
        if back:
            GPUS.copy([tensor for tensor, _ in back], [copy for _, copy in back])
            self._mark = GPUS.mark(self._device)
        elif self._mark is not None:
            # Another stream has copied back.
            GPUS.follow(self._device, self._mark)

    def _back_to(self, tensor: torch.Tensor, make: Any, reduce: bool) -> Memory:
        if self._takes(tensor):
            return GPUS.memory(tensor, reduce)
        place = make(tensor)
        self._back.append((tensor, place))
        return GPUS.memory(place, reduce)

    def _copied(self, tensor: torch.Tensor) -> torch.Tensor:
        copy = _room_for(tensor)
        GPUS.copy([copy], [tensor])
        return copy

    def _takes(self, tensor: torch.Tensor) -> bool:
        """Whether the core can have the tensor itself."""
        if tensor.device != self._device:
            raise ValueError(
                f"the tensors of a call must be on one device, and these are on {self._device} and {tensor.device}"
            )
        check_layout(tensor)
        return is_plain(tensor)


def _room_for(tensor: torch.Tensor) -> torch.Tensor:
    return GPUS.room_for(tensor.shape, tensor.dtype, tensor.device)


class Queued:
    """A call on a GPU, as a handle of a Work. To wait for it is the stream's business."""

    def __init__(self, work: _core.DeviceWork, is_barrier: bool = False) -> None:
        self._work, self._is_barrier = work, is_barrier

    def wait(self, timeout: float | None = None) -> bool:
        """The host waits for a barrier, and if there is a limit, as with NCCL."""
        return True if timeout is None and not self._is_barrier else self._work.wait(timeout)

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def error(self) -> BaseException | None:
        return self._work.error()

    def source(self) -> int | None:
        self._work.wait()
        return self._work.source()

    def then(self, tell: Any) -> None:
        """At once: what uses the value of a future has a stream, which waits."""
        tell(None)
