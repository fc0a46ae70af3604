"""Tensors of GPUs: the core takes them from where they are, in the order of the caller's stream.

The host waits for nothing. A call is queued behind what the stream does, and ``wait()`` has the stream wait for it,
as with NCCL. Tensors whose elements do not lie side by side, lists of them and messages are staged instead
(`drumline.torch.device`), and so is everything where a rank has no driver that the core can use.
"""

from __future__ import annotations

import functools
import os
import warnings
from typing import Any, Protocol

import torch

from drumline import _core
from drumline.torch.tensors import CODE, Memory, Staging


class Gpus(Protocol):
    """What this needs to know of GPUs."""

    library: str | None
    """The file of the driver."""

    def memory(self, tensor: torch.Tensor) -> Memory | None:
        """The elements of a tensor on a GPU, if they lie side by side and ranks can reduce them."""
        ...

    def stream(self, device: torch.device) -> int:
        """The caller's stream."""
        ...


class OfTorch:
    """The GPUs of this torch."""

    library = os.environ.get("DRUMLINE_CUDA_LIBRARY") or None

    def memory(self, tensor: torch.Tensor) -> Memory | None:
        is_plain = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
        code = CODE.get(tensor.dtype)
        if tensor.device.type != "cuda" or not is_plain or code is None:
            return None
        return tensor.data_ptr(), tensor.numel(), code, tensor

    def stream(self, device: torch.device) -> int:
        return int(torch.cuda.current_stream(device).cuda_stream)


GPUS: Gpus = OfTorch()


class OnDevice:
    """The ends of a group on this rank's GPUs. All ranks make one together, at the first call on such a tensor."""

    def __init__(self, group: _core.Group) -> None:
        self._group = group
        self._made: dict[torch.device, _core.DeviceGroup | None] = {}

    def of(self, device: torch.device) -> _core.DeviceGroup | None:
        """The end on a GPU. None: some rank cannot have one."""
        if device not in self._made:
            self._made[device] = self._make(device)
        return self._made[device]

    def _make(self, device: torch.device) -> _core.DeviceGroup | None:
        able = torch.tensor([_can_be_used(device.index or 0)], dtype=torch.uint8)
        self._group.all_reduce((able.data_ptr(), 1, CODE[torch.uint8], able), "min", None)
        if not able.item():
            return None
        return _core.DeviceGroup(self._group, device.index or 0, GPUS.library)

    def leave(self, patience: float) -> None:
        """Leaves the other ranks."""
        made, self._made = self._made, {}
        for end in made.values():
            if end is not None:
                end.leave(patience)

    def abort(self) -> None:
        """Fails all calls that are under way."""
        for end in self._made.values():
            if end is not None:
                end.abort()


@functools.cache
def _can_be_used(ordinal: int) -> bool:
    """Whether the core can use a GPU. Says once that it was not tried."""
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


class Queued:
    """A call on a GPU, as a handle of a Work. To wait for it is the stream's business."""

    def __init__(self, work: _core.DeviceWork) -> None:
        self._work = work

    def wait(self, timeout: float | None = None) -> bool:
        """The host waits only if there is a limit, as with NCCL."""
        return True if timeout is None else self._work.wait(timeout)

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def error(self) -> BaseException | None:
        return self._work.error()

    def source(self) -> int | None:
        return None

    def then(self, tell: Any) -> None:
        """At once: what uses the value of a future has a stream, which waits."""
        tell(None)


class Joining(Staging):
    """Has the caller's stream wait for a call when its results are wanted."""

    def __init__(self, work: _core.DeviceWork, device: torch.device) -> None:
        super().__init__()
        self._work, self._device = work, device

    @property
    def devices(self) -> list[torch.device]:
        return [self._device]

    def finish(self) -> None:
        self._work.join(GPUS.stream(self._device))
