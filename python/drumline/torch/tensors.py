"""Tensors as memory: address, length, type, and whoever keeps it alive."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch

from drumline import _core

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

    Results go back to the tensors by ``finish``, in the thread that wants to see them.
    """

    __slots__ = ("_back",)

    def __init__(self) -> None:
        self._back: list[tuple[torch.Tensor, torch.Tensor]] = []

    def read(self, tensor: torch.Tensor, reduce: bool = False) -> Memory:
        """The elements of a tensor that the operation only reads."""
        return _memory(tensor if _is_plain(tensor) else _dense(tensor), reduce)

    def write(self, tensor: torch.Tensor, reduce: bool = False) -> Memory:
        """The elements of a tensor that the operation changes."""
        if _is_plain(tensor):
            return _memory(tensor, reduce)
        copy = _dense(tensor)
        self._back.append((tensor, copy))
        return _memory(copy, reduce)

    def finish(self) -> None:
        """Brings results to where they belong."""
        back, self._back = self._back, []
        if back:
            with torch.no_grad():
                for tensor, copy in back:
                    tensor.copy_(copy)


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.is_contiguous()
        and tensor.device.type == "cpu"
        and not tensor.is_conj()
        and not tensor.is_neg()
        and tensor.data_ptr() % max(tensor.element_size(), 1) == 0
    )


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type != "cpu":
        _warn_once(tensor.device.type)
    if tensor.layout is not torch.strided:
        raise ValueError(
            f"drumline takes tensors of layout {tensor.layout} in all_reduce only: "
            "use to_dense() for others"
        )
    with torch.no_grad():
        return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)


@functools.cache
def _warn_once(device: str) -> None:
    warnings.warn(
        f"drumline stages tensors on {device} through the memory of the CPU, which has not been "
        "verified on hardware",
        stacklevel=2,
    )


def _memory(tensor: torch.Tensor, reduce: bool) -> Memory:
    code = CODE.get(tensor.dtype)
    if code is not None:
        return tensor.data_ptr(), tensor.numel(), code, tensor
    if reduce:
        raise TypeError(f"drumline cannot reduce elements of type {tensor.dtype}")
    return tensor.data_ptr(), tensor.numel() * tensor.element_size(), _BYTES, tensor


def width(tensor: torch.Tensor) -> int:
    """Elements of the memory for one element of the tensor."""
    return 1 if tensor.dtype in CODE else tensor.element_size()
