"""Arrays as memory: address, length, type, and the object that keeps the memory alive.

Takes numpy arrays, torch tensors, and objects with ``__dlpack__`` or the buffer protocol.
"""

from __future__ import annotations

import sys
from typing import Any, Protocol

import numpy as np

from drumline import _core

CODES: dict[str, int] = dict(_core.DTYPES)

_NAMES = {
    "uint8": "u8", "int8": "i8", "uint16": "u16", "int16": "i16", "uint32": "u32", "int32": "i32",
    "uint64": "u64", "int64": "i64", "float16": "f16", "float32": "f32", "float64": "f64",
    "bool": "bool", "complex64": "complex64", "complex128": "complex128",
    # Of the package ml_dtypes.
    "bfloat16": "bf16", "float8_e4m3fn": "f8e4m3", "float8_e5m2": "f8e5m2",
}  # fmt: skip

Memory = tuple[int, int, int, Any]


class Staging(Protocol):
    """Turns arrays into memory. Copies arrays whose elements do not lie side by side."""

    def read(self, array: Any, /) -> Memory: ...
    def write(self, array: Any, /) -> Memory: ...
    def finish(self) -> None: ...


def staging_for(array: Any) -> Staging:
    """The staging for arrays of this kind."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        from drumline.torch.tensors import Staging as OfTensors

        return OfTensors()
    return OfArrays()


class OfArrays:
    """The staging for numpy, DLPack and the buffer protocol."""

    def __init__(self) -> None:
        self._back: list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]] = []

    def read(self, array: Any) -> Memory:
        """The elements of an array that the call only reads."""
        found = as_numpy(array)
        return _memory(found if _is_plain(found) else np.array(found, order="C"))

    def write(self, array: Any) -> Memory:
        """The elements of an array that the call changes."""
        found = as_numpy(array)
        if not found.flags.writeable:
            raise ValueError(
                f"this {type(array).__name__} is read-only, and the call writes to it: pass a "
                "copy"
            )
        if _is_plain(found):
            return _memory(found)
        copy = np.array(found, order="C")
        self._back.append((found, copy))
        return _memory(copy)

    def finish(self) -> None:
        """Copies results back to the arrays."""
        for array, copy in self._back:
            array[...] = copy
        self._back = []  # afterwards: a handler of a signal may wait for the same call meanwhile


def as_numpy(array: Any) -> np.ndarray[Any, Any]:
    """A numpy array on the same memory."""
    if isinstance(array, np.ndarray):
        return array
    if hasattr(array, "__dlpack__"):
        return np.from_dlpack(array)
    try:
        return np.asarray(memoryview(array))
    except TypeError:
        raise TypeError(
            f"a {type(array).__name__} is no array: pass a numpy array, a torch tensor, or what has "
            "__dlpack__ or the buffer protocol"
        ) from None


def _is_plain(array: np.ndarray[Any, Any]) -> bool:
    return bool(array.flags.c_contiguous and array.flags.aligned)


def _memory(array: np.ndarray[Any, Any]) -> Memory:
    name = _NAMES.get(array.dtype.name)
    if name is None or not array.dtype.isnative:
        raise TypeError(
            f"drumline has no element type for numpy's {array.dtype!r}; it has {', '.join(_NAMES)}"
        )
    return array.__array_interface__["data"][0], array.size, CODES[name], array
