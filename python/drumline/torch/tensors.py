"""Tensors as memory: address, length, type, and the object that keeps the memory alive."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from drumline import _core
from drumline.torch.device import SideStream, side_stream

_CODES = dict(_core.DTYPES)
_BYTES = _CODES["u8"]

_NAMES = {
    "uint8": "u8", "int8": "i8", "uint16": "u16", "int16": "i16", "uint32": "u32", "int32": "i32",
    "uint64": "u64", "int64": "i64", "float16": "f16", "bfloat16": "bf16", "float32": "f32",
    "float64": "f64", "float8_e4m3fn": "f8e4m3", "float8_e5m2": "f8e5m2", "bool": "bool",
    "complex64": "complex64", "complex128": "complex128",
}  # fmt: skip

CODE = {
    getattr(torch, theirs): _CODES[ours]
    for theirs, ours in _NAMES.items()
    if hasattr(torch, theirs)
}
"""The element types that ranks can reduce, with their codes."""

Memory = tuple[int, int, int, Any]


class Staging:
    """Copies of tensors whose elements do not lie side by side in the memory of the CPU.

    ``finish`` copies results back to the tensors. The thread that uses the tensors calls it.
    """

    __slots__ = ("_back", "_sides")

    def __init__(self) -> None:
        self._back: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._sides: dict[torch.device, SideStream] = {}

    @property
    def devices(self) -> list[torch.device]:
        """The devices to which streams copy results back."""
        return list(self._sides)

    @property
    def is_idle(self) -> bool:
        """Whether `finish` has nothing to do."""
        return not self._back and not self._sides

    def read(self, tensor: torch.Tensor, reduce: bool = False) -> Memory:
        """The elements of a tensor that the call only reads."""
        return _usual(tensor) or memory_of(tensor if _is_on_host(tensor) else self._copied(tensor), reduce)

    def read_all(self, tensors: Sequence[torch.Tensor], reduce: bool = False) -> list[Memory]:
        """`read` for each."""
        return [self.read(tensor, reduce) for tensor in tensors]

    def write(self, tensor: torch.Tensor, reduce: bool = False) -> Memory:
        """The elements of a tensor that the call changes."""
        return _usual(tensor) or self._back_to(tensor, self._copied, reduce)

    def fill(self, tensor: torch.Tensor, reduce: bool = False) -> Memory:
        """The place of a tensor all of whose elements the operation sets."""
        return _usual(tensor) or self._back_to(tensor, self._room_for, reduce)

    def fill_all(self, tensors: Sequence[torch.Tensor], reduce: bool = False) -> list[Memory]:
        """`fill` for each."""
        return [self.fill(tensor, reduce) for tensor in tensors]

    def finish(self) -> None:
        """Brings results to where they belong; the caller's streams wait for it."""
        for tensor, copy in self._back:
            if tensor.device.type == "cpu":
                with torch.no_grad():
                    tensor.copy_(copy)
            else:
                self._side(tensor).bring_back(tensor, copy)
        self._back = []  # afterwards: a handler of a signal may wait for the same call meanwhile
        for side in self._sides.values():
            side.join()

    def _back_to(self, tensor: torch.Tensor, make: Callable[..., torch.Tensor], reduce: bool) -> Memory:
        if _is_on_host(tensor):
            return memory_of(tensor, reduce)
        copy = make(tensor)
        self._back.append((tensor, copy))
        return memory_of(copy, reduce)

    def _copied(self, tensor: torch.Tensor) -> torch.Tensor:
        check_layout(tensor)
        if tensor.device.type != "cpu":
            return self._side(tensor).fetch(tensor)
        with torch.no_grad():
            return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)

    def _room_for(self, tensor: torch.Tensor) -> torch.Tensor:
        check_layout(tensor)
        if tensor.device.type != "cpu":
            return self._side(tensor).room_for(tensor)
        return torch.empty(tensor.shape, dtype=tensor.dtype)

    def _side(self, tensor: torch.Tensor) -> SideStream:
        device = tensor.device
        if device not in self._sides:
            self._sides[device] = side_stream(device)
        return self._sides[device]


def _usual(tensor: torch.Tensor) -> Memory | None:
    """The elements of most tensors, with the fewest questions. None: `memory_of` knows, or they must be copied."""
    if not (tensor.is_cpu and tensor.is_contiguous()) or tensor.is_neg():
        return None
    code, address = _USUAL.get(tensor.dtype), tensor.data_ptr()
    return None if code is None or address % 16 else (address, tensor.numel(), code, tensor)


# Complex elements may be conjugated.
_USUAL = {dtype: code for dtype, code in CODE.items() if not dtype.is_complex}


def _is_on_host(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu and is_plain(tensor)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the elements lie side by side, as they are, and aligned."""
    return (
        tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
        and tensor.data_ptr() % max(tensor.element_size(), 1) == 0
    )


def check_layout(tensor: torch.Tensor) -> None:
    """Refuses sparse tensors."""
    if tensor.layout is not torch.strided:
        raise ValueError(
            f"drumline takes tensors of layout {tensor.layout} in all_reduce only: "
            "use to_dense() for others"
        )


def memory_of(tensor: torch.Tensor, reduce: bool) -> Memory:
    """The elements of a tensor that lie side by side. Of a type that ranks cannot reduce: its bytes."""
    code = CODE.get(tensor.dtype)
    if code is not None:
        return tensor.data_ptr(), tensor.numel(), code, tensor
    if reduce:
        raise TypeError(f"drumline cannot reduce elements of type {tensor.dtype}")
    return tensor.data_ptr(), tensor.numel() * tensor.element_size(), _BYTES, tensor


def width(tensor: torch.Tensor) -> int:
    """Elements of the memory for one element of the tensor."""
    return 1 if tensor.dtype in CODE else tensor.element_size()
