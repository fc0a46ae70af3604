"""Collectives on arrays of a GPU, on a stand-in for its driver."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from gpus import Array, Driver, standin
from ranks import run

import drumline
from drumline.device import DeviceGroup, memory


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
        several = [driver.array(np.full(n, rank + n, np.float64)) for n in (1, 700, 3)]
        on.all_reduce_coalesced(several, "avg").wait()
        for array in several:
            mean = (world_size - 1) / 2 + array.values.size
            np.testing.assert_array_equal(array.get(), np.full(array.values.shape, mean))
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
            with pytest.raises(ValueError, match="at least one array"):
                on.all_reduce_coalesced([])
            with pytest.raises(ValueError, match="there is no rank 7"):
                on.broadcast(driver.array(host), 7)
            good = driver.array(np.ones(4, np.float32))
            on.all_reduce(good).wait()
            return good.get().tolist()


def test_bad_arguments_are_refused_and_the_group_goes_on():
    assert run(2, mistakes) == [[2.0] * 4] * 2


def ways(rank, world_size, directory):
    with connect(rank, world_size, directory) as group:
        with pytest.raises(ValueError, match="write auto, host or nccl"):
            DeviceGroup(group, 0, library=standin(), way="mpi")
        with pytest.raises(ValueError, match="ranks 0 and 1 are on one GPU|has no NCCL"):
            DeviceGroup(group, 0, library=standin(), way="nccl")
        with DeviceGroup(group, 0, library=standin()) as on:
            assert "are on one GPU" in on.why or "has no NCCL" in on.why


def test_ways_are_named_and_said():
    run(2, ways)


BY_NCCL = """
import sys
import numpy as np
import drumline
from drumline.device import DeviceGroup
from gpus import Driver, standin

with drumline.init_process_group(
    f"file://{sys.argv[1]}/store", rank=0, world_size=1, nccl_library=standin()
) as group:
    driver = Driver()
    with DeviceGroup(group, 0, library=standin(), way="nccl") as on:
        assert on.explain().startswith("by nccl "), on.explain()
        data = driver.array(np.arange(100, dtype=np.float32))
        on.all_reduce(data).wait()
        assert data.get().tolist() == list(range(100))
        try:
            on.all_reduce(driver.array(np.ones(4, np.int32)), "bor")
        except ValueError as error:
            assert "NCCL has no operators on bits" in str(error), error
        else:
            raise AssertionError("it was not refused")
"""


def test_nccl_carries_calls_where_it_is_asked_for(tmp_path):
    # In a process of its own: if torch has loaded a real NCCL into this one, that is taken.
    program = [sys.executable, "-c", BY_NCCL, str(tmp_path)]
    subprocess.run(program, check=True, timeout=60, cwd=Path(__file__).parent)


def test_elements_must_lie_side_by_side():
    class Strided:
        __cuda_array_interface__ = {
            "shape": (2, 3), "typestr": "<f4", "data": (64, False), "version": 3, "strides": (24, 8),
        }  # fmt: skip

    with pytest.raises(ValueError, match="side by side"):
        memory(Strided())
