"""Collectives on arrays of a GPU.

There is no GPU here: a shared library with the functions of CUDA's driver stands in for one. Its memory cannot be
touched by the CPU, and what was not waited for is not there yet.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import numpy as np
import pytest
from ranks import run
from torch_versions import needs_backends

import drumline
from drumline.device import DeviceGroup, memory

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

    def call(self, name, *arguments):
        code = getattr(self.library, name)(*arguments)
        assert code == 0, f"{name}: {code}"

    def array(self, values):
        return Array(self, np.asarray(values))


class Array:
    """Numbers in the memory of the device."""

    def __init__(self, driver, values):
        self.driver, self.values = driver, values
        address = ctypes.c_uint64()
        driver.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(max(values.nbytes, 1)))
        self.address = address.value
        source = np.ascontiguousarray(values)
        driver.call(
            "cuMemcpyHtoD_v2",
            ctypes.c_uint64(self.address),
            ctypes.c_void_p(source.ctypes.data),
            ctypes.c_size_t(values.nbytes),
        )

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


def connect(rank, world_size, directory):
    return drumline.init_process_group(
        f"file://{directory}/store", rank=rank, world_size=world_size
    )


def everything(rank, world_size, directory):
    with connect(rank, world_size, directory) as group:
        driver = Driver()
        on = DeviceGroup(group, 0, library=standin(), window_bytes=4096)
        assert on.device.startswith("cuda:0 (Stand-in 0"), on.device
        seen = {}
        for dtype in ("float32", "float16", "int32"):
            values = (np.arange(5000) % 17 + rank).astype(dtype)
            array = driver.array(values)
            work = on.all_reduce(array)
            work.join()
            assert work.wait(20)
            expected = values.copy()
            group.all_reduce(expected)
            np.testing.assert_array_equal(array.get(), expected)
        blocks = driver.array(np.zeros(world_size * 10, np.float32))
        on.all_gather(blocks, driver.array(np.full(10, rank, np.float32))).wait()
        seen["all_gather"] = blocks.get()[::10].tolist()
        own = driver.array(np.zeros(10, np.float32))
        on.reduce_scatter(own, blocks, ("premul_sum", 0.5)).wait()
        seen["reduce_scatter"] = own.get()[0]
        data = driver.array(np.full(3, rank, np.float64))
        on.broadcast(data, world_size - 1).wait()
        seen["broadcast"] = data.get()[0]
        on.reduce(data, 0, "max").wait()
        every = driver.array(np.zeros(world_size * 3)) if rank == 0 else None
        on.gather(driver.array(np.full(3, rank, np.float64)), every, 0).wait()
        on.scatter(data, every, 0).wait()
        seen["scatter"] = data.get()[0]
        swapped = driver.array(np.zeros(world_size * 10, np.float32))
        on.all_to_all(swapped, blocks).wait()
        seen["all_to_all"] = swapped.get()[::10].tolist()
        on.barrier().wait()
        if world_size > 1:
            sent = on.send(driver.array(np.full(4, rank)), (rank + 1) % world_size, 7)
            got = driver.array(np.zeros(4, int))
            on.recv(got, (rank - 1) % world_size, 7).wait()
            sent.wait()
            seen["recv"] = got.get()[0]
        on.leave()
        return seen


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_arrays_of_a_gpu_are_reduced_where_they_are(world_size):
    for rank, seen in enumerate(run(world_size, everything)):
        assert seen["all_gather"] == list(range(world_size))
        assert seen["reduce_scatter"] == 0.5 * rank * world_size
        assert seen["broadcast"] == world_size - 1
        assert seen["scatter"] == rank
        assert seen["all_to_all"] == [rank] * world_size
        assert seen.get("recv", (rank - 1) % world_size) == (rank - 1) % world_size


def mistakes(rank, world_size, directory):
    with connect(rank, world_size, directory) as group:
        driver = Driver()
        with pytest.raises(RuntimeError, match="/no/libcuda.so"):
            DeviceGroup(group, 0, library="/no/libcuda.so")
        with DeviceGroup(group, 0, library=standin()) as on:
            host = np.zeros(4, np.float32)
            with pytest.raises(TypeError, match="no array on a GPU"):
                on.all_reduce(host)
            array = driver.array(host)
            array.__class__ = type("Lying", (Array,), {"address": host.ctypes.data})
            array.__dict__.pop("address")
            with pytest.raises(drumline.DrumlineError, match="memory of the host"):
                on.all_reduce(array)
            with pytest.raises(ValueError, match="there is no rank 7"):
                on.broadcast(driver.array(host), 7)
            good = driver.array(np.ones(4, np.float32))
            on.all_reduce(good).wait()
            return good.get().tolist()


def test_bad_arguments_are_refused_and_the_group_goes_on():
    assert run(2, mistakes) == [[2.0] * 4] * 2


def test_elements_must_lie_side_by_side():
    class Strided:
        __cuda_array_interface__ = {
            "shape": (2, 3), "typestr": "<f4", "data": (64, False), "version": 3, "strides": (24, 8),
        }  # fmt: skip

    with pytest.raises(ValueError, match="side by side"):
        memory(Strided())


class Gpus:
    """Tensors of torch's device ``meta``, which have no memory, stand for a GPU's. Their elements are the driver's."""

    def __init__(self):
        self.driver, self.library, self.arrays = Driver(), standin(), {}

    def tensor(self, values):
        torch = pytest.importorskip("torch")
        values = np.asarray(values, np.float32)
        tensor = torch.empty(values.shape, dtype=torch.float32, device="meta")
        self.arrays[id(tensor)] = (tensor, self.driver.array(values))
        return tensor

    def get(self, tensor):
        return self.arrays[id(tensor)][1].get()

    def memory(self, tensor):
        known = self.arrays.get(id(tensor))
        return None if known is None else memory(known[1])

    def stream(self, _):
        return 0


def with_torch(rank, world_size, directory):
    import torch
    import torch._C._distributed_c10d as c10d
    import torch.distributed as dist

    from drumline.torch import on_device

    gpus = on_device.GPUS = Gpus()
    store = dist.FileStore(f"{directory}/store", world_size)
    dist.init_process_group("drumline", store=store, rank=rank, world_size=world_size)
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    seen = []
    with pytest.warns(UserWarning, match="not been verified"):
        data = gpus.tensor(np.full(3000, rank + 1))
        backend.allreduce([data], c10d.AllreduceOptions()).wait()
    seen.append(gpus.get(data)[0])
    options = c10d.AllreduceOptions()
    options.reduceOp, options.asyncOp = dist.ReduceOp.AVG, True
    work = backend.allreduce([data], options)
    work.wait()
    assert work.exception() is None
    seen.append(gpus.get(data)[0])
    options = c10d.BroadcastOptions()
    options.rootRank = world_size - 1
    own = gpus.tensor([rank, rank])
    backend.broadcast([own], options).wait()
    seen.append(gpus.get(own)[0])
    every = gpus.tensor(np.zeros(2 * world_size))
    own = gpus.tensor([rank, rank])
    backend.all_gather_single(every, own, c10d.AllgatherOptions()).wait()
    seen.append(gpus.get(every)[::2].tolist())
    backend.reduce_scatter_single(own, every, c10d.ReduceScatterOptions()).wait()
    seen.append(gpus.get(own)[0])
    dist.destroy_process_group()
    return seen


@needs_backends
@pytest.mark.parametrize("world_size", [1, 2])
def test_tensors_of_torch_are_taken_from_where_they_are(world_size):
    for rank, seen in enumerate(run(world_size, with_torch)):
        total = sum(range(1, world_size + 1))
        every = list(range(world_size))
        assert seen == [total, total, world_size - 1, every, rank * world_size]
