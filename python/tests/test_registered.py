"""Arrays and tensors in memory that the ranks of a host share."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from ranks import run
from torch_versions import needs_backends

import drumline


def connect(rank, world_size, directory, **settings):
    return drumline.init_process_group(
        f"file://{directory}/store", rank=rank, world_size=world_size, **settings
    )


def arrays(rank, world_size, directory):
    with connect(rank, world_size, directory) as group:
        results = {}
        for kind in ("uint8", "float16", "float32", "complex128"):
            data = group.alloc_registered((3, 1000), kind)
            assert data.shape == (3, 1000) and data.dtype == kind and not data.any()
            data += rank + 1
            group.all_reduce(data)
            results[kind] = data
        part = drumline.alloc_registered(5000)[1000:3000]
        part[:] = np.arange(2000) + rank
        group.all_reduce(part, "max")
        group.broadcast(part[:10], 0, async_op=True).wait()
        long = group.alloc_registered(50_000)
        long[:] = np.arange(50_000) + rank
        group.broadcast(long, world_size - 1)
        block = np.full(500_000, rank, np.float32)
        every = group.alloc_registered(world_size * 500_000)
        group.all_gather(every, block)
        group.all_gather(every, every[rank * 500_000 :][:500_000])  # from where it goes to
        mine = []
        for background in (False, True, rank == 0):  # the last: only one rank goes on meanwhile
            mine.append(np.empty(500_000, np.float32))
            work = group.reduce_scatter(mine[-1], every, async_op=background)
            if background:
                work.wait()
            every += 1  # nobody reads it any more
        whole = np.zeros(len(every), np.float32)
        group.gather(every[rank * 500_000 :][:500_000], whole if rank == 0 else None)
        return results, part, long, mine, whole


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_arrays_are_summed_where_they_are_and_outlive_their_group(world_size):
    for rank, (results, part, long, mine, whole) in enumerate(run(world_size, arrays)):
        for data in results.values():
            assert (data == sum(range(1, world_size + 1))).all()
        np.testing.assert_array_equal(part, np.arange(2000) + world_size - 1)
        np.testing.assert_array_equal(long, np.arange(50_000) + world_size - 1)
        for number, block in enumerate(mine):
            assert (block == world_size * (rank + number)).all()
        if rank == 0:
            np.testing.assert_array_equal(whole, 3 + np.arange(world_size).repeat(500_000))


def without_shared_memory(rank, world_size, directory):
    with connect(rank, world_size, directory, shared_memory=False) as group:
        data = group.alloc_registered(1000, np.int32)
        data[:] = rank
        group.all_reduce(data)
        return data.sum()


def test_it_is_ordinary_memory_where_none_is_shared():
    assert run(2, without_shared_memory) == [1000, 1000]


def one_registers(rank, world_size, directory):
    connect(rank, world_size, directory)
    data = drumline.alloc_registered(1000) if rank == 0 else np.zeros(1000, np.float32)
    with pytest.raises(drumline.CollectiveMismatchError) as error:
        drumline.all_reduce(data)
    return str(error.value)


def test_a_rank_that_alone_passes_registered_memory_is_named():
    for rank, text in enumerate(run(2, one_registers)):
        assert f"rank {1 - rank}" in text and "registered" in text, text


def little_room(rank, world_size, directory):
    with connect(rank, world_size, directory, registered_bytes_max=1 << 20) as group:
        with pytest.raises(drumline.DrumlineError, match="no room for a registered buffer"):
            group.alloc_registered(1 << 20)
        for _ in range(100):  # each is given back
            group.alloc_registered(1 << 20, np.uint8)[:] = 1
        array = group.alloc_registered(1000)
        view = array[10:20]
        del array
        with pytest.raises(drumline.DrumlineError, match="no room"):
            group.alloc_registered(1 << 20, np.uint8)
        view[:] = rank  # and this is still there
        del view
        gc.collect()
        group.alloc_registered(1 << 20, np.uint8)
        assert group.alloc_registered((0, 3)).shape == (0, 3)
        with pytest.raises(ValueError, match="negative"):
            group.alloc_registered((-1, 2))
        with pytest.raises(TypeError, match="ranks share"):
            group.alloc_registered(3, object)
    with pytest.raises(ValueError, match="destroyed"):
        group.alloc_registered(3)


def test_memory_is_given_back_with_the_last_view_of_it():
    run(2, little_room)


def test_without_a_group_it_says_what_to_call():
    with pytest.raises((ValueError, RuntimeError), match="init_process_group"):
        drumline.alloc_registered(3)


def tensors(rank, world_size, directory):
    torch = pytest.importorskip("torch")
    dist = torch.distributed
    # A world that is over is not asked.
    ours = drumline.FileStore(f"{directory}/ours", world_size)
    drumline.init_process_group(store=ours, rank=rank, world_size=world_size)
    drumline.destroy_process_group()
    with pytest.raises(ValueError, match="the group has been destroyed: call init_process_group"):
        drumline.alloc_registered(3)
    store = dist.FileStore(f"{directory}/store", world_size)
    dist.init_process_group("drumline", store=store, rank=rank, world_size=world_size)
    out = []
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64):
        data = drumline.alloc_registered((4, 100), dtype)
        assert data.shape == (4, 100) and data.dtype == dtype
        data.copy_(torch.full((4, 100), rank + 1.0))
        dist.all_reduce(data)
        out.append(data.double().unique().tolist())
    pair = dist.new_group([0, 1])
    backend = pair._get_backend(torch.device("cpu"))
    assert backend.supports_tensor_alloc(torch.device("cpu"))
    assert not backend.supports_tensor_alloc(torch.device("meta"))
    data = backend.allocate_tensor(3000, dtype=torch.float64, device=torch.device("cpu"))
    if rank == 1:  # which the other one sees, because it is in that memory
        data = torch.zeros(3000, dtype=torch.float64)
    with pytest.raises(dist.DistBackendError, match="registered"):
        dist.all_reduce(data, group=pair)
    gloo = dist.new_group(backend="gloo")
    with pytest.raises(ValueError, match="not on the backend drumline"):
        drumline.alloc_registered(3, torch.float32, gloo)
    dist.destroy_process_group()
    return out


@needs_backends
def test_tensors_are_summed_where_they_are():
    assert run(2, tensors) == [[[3.0]] * 4] * 2
