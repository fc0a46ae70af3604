"""numpy arrays and torch tensors on memory of the core."""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from drumline import _core

Shape = int | Sequence[int]


def zeros(group: _core.Group, shape: Shape, dtype: Any) -> Any:
    """Zeros that collectives of the group reach without a copy: a torch tensor if ``dtype`` is torch's, or
    else a numpy array. The result keeps its memory alive."""
    sizes = (shape,) if isinstance(shape, int) else tuple(int(size) for size in shape)
    if any(size < 0 for size in sizes):
        raise ValueError(f"a shape has no negative sizes, and this is {sizes}")
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(dtype, torch.dtype):
        empty = torch.empty(0, dtype=dtype)
        if math.prod(sizes) == 0:
            return empty.reshape(sizes)
        memory = _core.Registered(group, math.prod(sizes) * empty.element_size())
        return empty.set_(storage_of(memory), 0, sizes)
    kind = np.dtype(dtype)
    if kind.hasobject:
        raise TypeError(f"elements of numpy's {kind!r} cannot lie in memory that ranks share")
    if math.prod(sizes) * kind.itemsize == 0:
        return np.zeros(sizes, kind)
    memory = _core.Registered(group, math.prod(sizes) * kind.itemsize)
    return np.frombuffer(_as_buffer(memory), kind).reshape(sizes)


def storage_of(
    owner: _core.Registered | _core.AsyncReduce, offset: int = 0, length: int = -1
) -> Any:
    """A torch storage on the memory of the owner, or on ``length`` bytes of it. The storage keeps the owner alive."""
    import torch

    memory = _as_buffer(owner)
    return torch.frombuffer(memory, dtype=torch.uint8, offset=offset, count=length).untyped_storage()


def _as_buffer(owner: _core.Registered | _core.AsyncReduce) -> Any:
    """An object with the buffer protocol, which keeps the owner alive."""
    address, length = owner.memory

    class Memory(ctypes.c_char * length):  # type: ignore[misc]
        owner: Any = None

    memory = Memory.from_address(address)
    memory.owner = owner
    return memory
