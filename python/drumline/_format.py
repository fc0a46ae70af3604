"""Objects as bytes, and back without executing anything.

```
 8 bytes, little-endian   length of the description
 description              JSON: [tag, ...] for every value
 contents                 of arrays, tensors and bytes, one after another
```

Plain data (None, bool, int, float, complex, str, bytes, list, tuple, set, frozenset, dict), numpy
arrays and torch tensors travel in this way. All other objects need ``allow_pickle=True`` on both sides.
"""

from __future__ import annotations

import json
import math
import pickle
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

DEPTH_MAX = 200


class FormatError(ValueError):
    """An object cannot be described, or bytes are not a description."""


def encode(value: object, allow_pickle: bool = False) -> bytes:
    """The bytes of an object."""
    contents: list[bytes] = []
    tree = _describe(value, contents, allow_pickle, 0)
    description = json.dumps(tree, separators=(",", ":")).encode()
    return b"".join([len(description).to_bytes(8, "little"), description, *contents])


def decode(data: bytes, allow_pickle: bool = False) -> Any:
    """The object of these bytes."""
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 + length:
        raise FormatError("the description of the object is cut short")
    try:
        tree = json.loads(data[8 : 8 + length])
        return _restore(tree, _Contents(data, 8 + length), allow_pickle)
    except FormatError:
        raise
    except _NO_OBJECT as error:
        raise FormatError(f"these bytes describe no object: {error!r:.200}") from None


# What the parsers of JSON, numbers, numpy and torch raise: RecursionError is a RuntimeError.
_NO_OBJECT = (ArithmeticError, LookupError, RuntimeError, SyntaxError, TypeError, ValueError)


class _Contents:
    """The bytes after the description, taken piece by piece."""

    def __init__(self, data: bytes, place: int) -> None:
        self._data, self._place = data, place

    def take(self, length: int) -> bytes:
        end = self._place + length
        if length < 0 or end > len(self._data):
            raise FormatError("the contents of the object are cut short")
        piece = self._data[self._place : end]
        self._place = end
        return piece


_SEQUENCES: dict[type, str] = {list: "list", tuple: "tuple", set: "set", frozenset: "frozenset"}


def _describe(value: object, contents: list[bytes], allow_pickle: bool, depth: int) -> Any:
    if depth > DEPTH_MAX:
        raise FormatError(f"the object is nested more than {DEPTH_MAX} times, or contains itself")

    def inside(item: object) -> Any:
        return _describe(item, contents, allow_pickle, depth + 1)

    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return ["int", str(value)]
    if kind is float:
        return ["float", float.hex(value)]  # type: ignore[arg-type]
    if kind is complex:
        return ["complex", float.hex(value.real), float.hex(value.imag)]  # type: ignore[attr-defined]
    if kind in (bytes, bytearray):
        contents.append(bytes(value))  # type: ignore[call-overload]
        return [kind.__name__, len(contents[-1])]
    if kind in _SEQUENCES:
        return [_SEQUENCES[kind], [inside(item) for item in value]]  # type: ignore[attr-defined]
    if kind is dict:
        return ["dict", [[inside(key), inside(item)] for key, item in value.items()]]  # type: ignore[attr-defined]
    if isinstance(value, np.ndarray | np.generic) and _is_numeric(value.dtype):
        array = np.ascontiguousarray(value)
        contents.append(array.tobytes())
        tag = "array" if isinstance(value, np.ndarray) else "scalar"
        return [tag, value.dtype.str, list(value.shape), len(contents[-1])]
    torch = sys.modules.get("torch")
    if torch is not None and kind in (torch.Tensor, torch.nn.Parameter):
        return _describe_tensor(torch, value, contents)
    if allow_pickle:
        contents.append(pickle.dumps(value))
        return ["pickle", len(contents[-1])]
    raise FormatError(
        f"a {kind.__module__}.{kind.__qualname__} is no plain data: pass what it is made of, or "
        "allow_pickle=True on all ranks, if you trust all of them"
    )


def _is_numeric(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in "biufcSU"


def _describe_tensor(torch: Any, tensor: Any, contents: list[bytes]) -> Any:
    if tensor.layout is not torch.strided:
        raise FormatError(f"tensors of layout {tensor.layout} do not travel: use to_dense()")
    flat = tensor.detach().cpu().contiguous().resolve_conj().resolve_neg().reshape(-1)
    contents.append(flat.view(torch.uint8).numpy().tobytes())
    name = str(tensor.dtype).removeprefix("torch.")
    return ["tensor", name, list(tensor.shape), len(contents[-1])]


def _restore(tree: Any, contents: _Contents, allow_pickle: bool) -> Any:
    if tree is None or isinstance(tree, bool | str):
        return tree

    def inside(item: Any) -> Any:
        return _restore(item, contents, allow_pickle)

    if not isinstance(tree, list) or not tree:
        raise FormatError(f"{tree!r:.80} describes no value")
    tag, *rest = tree
    simple: dict[str, Callable[..., Any]] = {
        "int": lambda text: int(text, 10),
        "float": float.fromhex,
        "complex": lambda real, imag: complex(float.fromhex(real), float.fromhex(imag)),
        "bytes": contents.take,
        "bytearray": lambda length: bytearray(contents.take(length)),
        "list": lambda items: [inside(item) for item in items],
        "tuple": lambda items: tuple(inside(item) for item in items),
        "set": lambda items: {inside(item) for item in items},
        "frozenset": lambda items: frozenset(inside(item) for item in items),
        "dict": lambda items: {inside(key): inside(item) for key, item in items},
        "array": lambda *it: _array(contents, *it),
        "scalar": lambda *it: _array(contents, *it)[()],
        "tensor": lambda *it: _tensor(contents, *it),
    }
    if tag == "pickle":
        if not allow_pickle:
            raise FormatError("it is pickled, and this rank does not pass allow_pickle=True")
        return pickle.loads(contents.take(*rest))
    if tag not in simple:
        raise FormatError(f"{tag!r:.80} is no kind of value")
    return simple[tag](*rest)


def _array(contents: _Contents, name: str, shape: list[int], length: int) -> Any:
    dtype = np.dtype(name)
    if not _is_numeric(dtype):
        raise FormatError(f"arrays of {dtype} do not travel")
    return np.frombuffer(contents.take(length), dtype=dtype).reshape(shape).copy()


def _tensor(contents: _Contents, name: str, shape: list[int], length: int) -> Any:
    try:
        import torch
    except ImportError:
        raise FormatError(
            "a torch tensor has come, and torch is not installed here: install it, or send numpy arrays"
        ) from None
    # Not by getattr, which imports modules of torch by their names.
    dtype = vars(torch).get(name)
    if not isinstance(dtype, torch.dtype):
        raise FormatError(f"torch has no element type {name!r:.80}")
    data = bytearray(contents.take(length))
    if not all(type(extent) is int and extent >= 0 for extent in shape):
        raise FormatError(f"{shape!r:.80} is no shape of a tensor")
    # A tensor without bytes has no elements: torch would make those that its shape asks for.
    if math.prod(shape) * dtype.itemsize != length:
        raise FormatError(f"a tensor of shape {shape!r:.80} does not take {length} bytes")
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(shape)
