"""Gradients by name, in the memory of a GPU, on a stand-in for its driver."""

from __future__ import annotations

import os
import socket

import numpy as np
import pytest
from gpus import Driver, standin
from ranks import run

import drumline
from drumline.device import AsyncReduce

LENGTHS = {"bias": 10, "weight": 3000, "scale": 1, "head": 5000}


def connect(rank, world_size, directory):
    return drumline.init_process_group(
        f"file://{directory}/store", rank=rank, world_size=world_size
    )


def values(rank, step, name):
    return np.sin(np.arange(LENGTHS[name]) + rank * 7 + step * 3 + len(name)).astype(np.float32)


def steps(rank, world_size, directory):
    with connect(rank, world_size, directory) as group:
        driver = Driver()
        fused = driver.array(np.zeros(sum(LENGTHS.values()), np.float32))
        reduce = AsyncReduce(
            group, LENGTHS, fused, device=0, library=standin(), bucket_bytes=8192, window_bytes=4096
        )
        assert reduce.place("bias") == slice(0, 10)
        assert reduce.place("weight") == slice(10, 3010)
        for step in range(3):
            arrays = {name: driver.array(values(rank, step, name)) for name in LENGTHS}
            names = list(LENGTHS)
            for name in names[(rank + step) % 4 :] + names[: (rank + step) % 4]:
                reduce.async_reduce(name, arrays[name])
            reduce.synchronize()
            reduce.wait()
            found = fused.get()
            for name in LENGTHS:
                expected = values(rank, step, name)
                group.all_reduce(expected, "avg")
                np.testing.assert_array_equal(found[reduce.place(name)], expected)
        assert reduce.counts()[0] == 3
        # A tensor that one rank lacks is named, and the next step goes on.
        for name in LENGTHS:
            if (rank, name) != (world_size - 1, "head"):
                reduce.async_reduce(name)
        with pytest.raises(drumline.NotBroughtError, match=f"rank {world_size - 1} has not .*head"):
            reduce.synchronize()
        with pytest.raises(ValueError, match="no tensor `nobody`"):
            reduce.async_reduce("nobody")
        with pytest.raises(ValueError, match="cannot take 10 elements"):
            reduce.async_reduce("head", driver.array(np.zeros(10, np.float32)))
        for name in LENGTHS:
            reduce.async_reduce(name)
        reduce.synchronize()
        reduce.stop()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_gradients_come_by_name_in_any_order(world_size):
    run(world_size, steps)


def native(rank, world_size, directory, port):
    from drumline.compat import haiscale

    os.environ["DRUMLINE_CUDA_LIBRARY"] = standin()
    driver = Driver()
    reducer = haiscale.NativeAsyncReduceFloat(
        "127.0.0.1", port, 0, rank, world_size, 0, 1, len(LENGTHS)
    )
    with pytest.raises(ValueError, match="set_fused_dest"):
        reducer.synchronize(0)
    for name, numel in LENGTHS.items():
        reducer.register_float_tensor(name, numel)
    fused = driver.array(np.zeros(reducer.total_tensor_floats(), np.float32))
    reducer.set_fused_dest(fused.address)
    arrays = {name: driver.array(values(rank, 0, name)) for name in LENGTHS}
    for name, numel in LENGTHS.items():
        reducer.async_reduce(0, name, arrays[name].address, numel)
    reducer.synchronize(0)
    reducer._core.wait()
    expected = sum(values(of, 0, "weight") for of in range(world_size))
    np.testing.assert_allclose(fused.get()[10:3010], expected, rtol=1e-6, atol=1e-6)
    reducer.stop()


def test_the_native_class_of_hfreduce_takes_pointers():
    pytest.importorskip("torch")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    run(2, native, port)
