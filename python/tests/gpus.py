"""A GPU without hardware: a shared library with the functions of CUDA's driver stands in for one.

Its memory cannot be touched by the CPU, and what was not waited for is not there yet.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import numpy as np

TARGET = Path(os.environ.get("CARGO_TARGET_DIR") or Path(__file__).parents[2] / "target")


def standin():
    names = [TARGET / "debug" / where / "libdrumline_standin.so" for where in ("", "deps")]
    found = next((str(name) for name in names if name.exists()), None)
    assert found, f"{names[0]} is not there: cargo build -p drumline-standin"
    return found


class Driver:
    """As CuPy uses the driver: in the primary context."""

    def __init__(self):
        self.library = ctypes.CDLL(standin())
        self.call("cuInit", 0)
        context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self.call("cuCtxSetCurrent", context)
        self.aside = ctypes.c_void_p()
        non_blocking = 1
        self.call("cuStreamCreate", ctypes.byref(self.aside), non_blocking)

    def call(self, name, *arguments):
        code = getattr(self.library, name)(*arguments)
        assert code == 0, f"{name}: {code}"

    def array(self, values):
        return Array(self, np.ascontiguousarray(values))


class Array:
    """Numbers in the memory of the device."""

    def __init__(self, driver, values):
        self.driver, self.values = driver, values
        address = ctypes.c_uint64()
        driver.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(max(values.nbytes, 1)))
        self.address = address.value
        self.put(values)

    def put(self, values):
        """Without a wait for what the default stream does."""
        source = np.ascontiguousarray(values)
        self.driver.call(
            "cuMemcpyHtoDAsync_v2",
            ctypes.c_uint64(self.address),
            ctypes.c_void_p(source.ctypes.data),
            ctypes.c_size_t(source.nbytes),
            self.driver.aside,
        )
        self.driver.call("cuStreamSynchronize", self.driver.aside)

    @property
    def __cuda_array_interface__(self):
        return {
            "shape": self.values.shape,
            "typestr": self.values.dtype.str,
            "data": (self.address, False),
            "version": 3,
            "strides": None,
        }

    def get(self):
        found = np.empty(self.values.shape, self.values.dtype)
        self.driver.call(
            "cuMemcpyDtoH_v2",
            ctypes.c_void_p(found.ctypes.data),
            ctypes.c_uint64(self.address),
            ctypes.c_size_t(found.nbytes),
        )
        return found


class Gpus:
    """Tensors of torch's device ``meta``, which have no memory, stand for a GPU's. Their elements are the driver's.

    What torch would do in the caller's stream, the CPU does at once: the driver runs its default stream so.
    """

    kind = "meta"

    def __init__(self):
        self.driver, self.library, self.arrays = Driver(), standin(), {}
        self.copies = self.followed = 0

    def tensor(self, values, dtype=None):
        import torch

        values = np.asarray(values, np.float32 if dtype is None else dtype)
        of_torch = torch.from_numpy(values.copy()).dtype
        tensor = torch.empty(values.shape, dtype=of_torch, device="meta")
        self.arrays[_key(tensor)] = (tensor.untyped_storage(), self.driver.array(values))
        return tensor

    def get(self, tensor):
        """The elements, also those of a view."""
        whole, index = self._find(tensor)
        return whole.get().reshape(-1)[index]

    def set(self, tensor, values):
        whole, index = self._find(tensor)
        is_all = index.size == whole.values.size
        elements = np.empty_like(whole.values) if is_all else whole.get()
        elements.reshape(-1)[index] = values
        whole.put(elements)

    def _find(self, tensor):
        """The array of a tensor, and where in the array its elements are. What torch has made has zeros."""
        if _key(tensor) not in self.arrays:
            import torch

            one = torch.empty(0, dtype=tensor.dtype).numpy().dtype
            zeros = np.zeros(tensor.untyped_storage().nbytes() // one.itemsize, one)
            self.arrays[_key(tensor)] = (tensor.untyped_storage(), self.driver.array(zeros))
        whole = self.arrays[_key(tensor)][1]
        index = np.arange(whole.values.size)
        index = np.lib.stride_tricks.as_strided(
            index[tensor.storage_offset() :],
            tuple(tensor.shape),
            tuple(stride * index.itemsize for stride in tensor.stride()),
        )
        return whole, index

    def memory(self, tensor, reduce):
        from drumline.torch.tensors import memory_of

        whole, _ = self._find(tensor)
        _, count, code, _ = memory_of(tensor, reduce)
        address = whole.address + tensor.storage_offset() * tensor.element_size()
        return address, count, code, whole

    def numbered(self, device):
        return device

    def stream(self, _):
        return 0

    def of_futures(self, _):
        return []  # torch gives callbacks streams of hardware only

    def room_for(self, shape, dtype, _):
        import torch

        return self.tensor(np.full(tuple(shape), 99), torch.empty(0, dtype=dtype).numpy().dtype)

    def copy(self, to, source):
        self.copies += 1
        for one, other in zip(to, source, strict=True):
            self.set(one, self.get(other))

    def fetch(self, tensor):
        import torch

        return torch.from_numpy(self.get(tensor))

    def mark(self, device):
        return device

    def follow(self, *_):
        self.followed += 1


def _key(tensor):
    """The memory of a tensor, which its views have, too."""
    return tensor.untyped_storage()._cdata
