"""Tensors of a GPU: to the memory of the CPU and back, in the order of the caller's stream.

```
 caller's stream   … kernels that make the tensor │            │ kernels that use the result …
 side stream                                      └ copy out ┐ ┌ copy back ┘
 CPU                                                         └─┘ the operation, on pinned memory
```

The host waits for the copy out, because ranks must begin their operations in one order. For the copy
back it does not wait: the caller's stream does.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any, Protocol

import torch


class Accelerator(Protocol):
    """The functions that staging needs of a kind of device."""

    def current_stream(self, device: torch.device) -> Any: ...
    def new_stream(self, device: torch.device) -> Any: ...
    def pinned_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Memory of the CPU with room for the tensor's elements, side by side."""
        ...

    def copy(self, to: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        """Queues a copy on the stream. The memory of both tensors is kept until its end."""
        ...


class SideStream:
    """The stream of a device on which drumline copies."""

    def __init__(self, device: torch.device, accelerator: Accelerator) -> None:
        self._device, self._accelerator = device, accelerator
        self._stream = accelerator.new_stream(device)

    def room_for(self, tensor: torch.Tensor) -> torch.Tensor:
        """Uninitialised memory of the CPU for the tensor's elements."""
        return self._accelerator.pinned_like(tensor)

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copies the elements to the CPU, after all work that the caller's stream has queued."""
        copy = self.room_for(tensor)
        self._stream.wait_stream(self._accelerator.current_stream(self._device))
        self._accelerator.copy(copy, tensor, self._stream)
        self._stream.synchronize()
        return copy

    def bring_back(self, tensor: torch.Tensor, copy: torch.Tensor) -> None:
        """Queues a copy of the elements into the tensor. Call `join` before using the tensor."""
        self._stream.wait_stream(self._accelerator.current_stream(self._device))
        self._accelerator.copy(tensor, copy, self._stream)

    def join(self) -> None:
        """Makes the caller's stream wait for the queued copies."""
        self._accelerator.current_stream(self._device).wait_stream(self._stream)


class OfTorch:
    """The accelerator of this torch: CUDA, ROCm, XPU."""

    def current_stream(self, device: torch.device) -> Any:
        return torch.accelerator.current_stream(device)

    def new_stream(self, device: torch.device) -> Any:
        return torch.Stream(device)

    def pinned_like(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)

    def copy(self, to: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        with stream, torch.no_grad():
            to.copy_(source, non_blocking=True)
        for tensor in (to, source):
            if tensor.device.type != "cpu":
                tensor.record_stream(stream)


@functools.cache
def side_stream(device: torch.device) -> SideStream:
    """The side stream of a device (with an index). Warns once for each device."""
    warnings.warn(
        f"drumline stages tensors on {device} through pinned memory of the CPU, which has not been "
        "verified on this kind of hardware: compare a first result with another backend's",
        stacklevel=2,
    )
    return SideStream(device, OfTorch())
