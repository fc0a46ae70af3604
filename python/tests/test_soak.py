"""What goes on for long leaves nothing behind: memory, file descriptors and threads stay what they are.

The long form is for `make soak`: DRUMLINE_SOAK=1.
"""

from __future__ import annotations

import collections
import ctypes
import gc
import os
import time
from pathlib import Path

import numpy as np
import pytest
from ranks import run
from torch_versions import needs_backends

import drumline

IS_LONG = os.environ.get("DRUMLINE_SOAK", "0") != "0"
ITERATIONS = 10_000 if IS_LONG else 400
CYCLES = 200 if IS_LONG else 16
# The allocator's own coming and going; what leaks 1 KB per operation or 20 KB per group is found.
RSS_KB_MAX = 4096
LIMIT_S = 1800.0 if IS_LONG else 120.0

TYPES = ["uint8", "int32", "int64", "float16", "float32", "float64"]
LENGTHS = [0, 1, 5, 100, 3_000, 70_000]
IN_FLIGHT_MAX = 4


class OfNumpy:
    """The direct API."""

    def __init__(self, rank, world_size, directory, name):
        url = f"file://{directory}/{name}"
        self.group = drumline.init_process_group(url, rank=rank, world_size=world_size)

    def __getattr__(self, name):
        return getattr(self.group, name)

    def full(self, length, value, kind):
        return np.full(length, value, kind)

    def exchange(self, data, to, got, source, tag):
        return [self.group.isend(data, to, tag), self.group.irecv(got, source, tag)]

    def objects(self, mine):
        return self.group.all_gather_object(None, mine)

    def subgroup(self, ranks):
        return self.group.new_group(ranks) if self.group.rank in ranks else None

    def close(self):
        drumline.destroy_process_group()


class OfTorch:
    """The backend of torch, with the same names."""

    def __init__(self, rank, world_size, directory, name):
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)  # its threads would wait for each other's cores
        self.torch, self.dist = torch, dist
        store = dist.FileStore(f"{directory}/{name}", world_size)
        dist.init_process_group("drumline", store=store, rank=rank, world_size=world_size)

    def full(self, length, value, kind):
        return self.torch.full((length,), value, dtype=getattr(self.torch, kind))

    def operator(self, op):
        return getattr(self.dist.ReduceOp, op.upper())

    def all_reduce(self, data, op, async_op):
        return self.dist.all_reduce(data, self.operator(op), async_op=async_op)

    def reduce(self, data, dst, op, async_op):
        return self.dist.reduce(data, dst, self.operator(op), async_op=async_op)

    def broadcast(self, data, src, async_op):
        return self.dist.broadcast(data, src, async_op=async_op)

    def all_gather(self, outputs, data, async_op):
        return self.dist.all_gather(outputs, data, async_op=async_op)

    def gather(self, data, outputs, dst, async_op):
        return self.dist.gather(data, outputs, dst, async_op=async_op)

    def scatter(self, output, inputs, src, async_op):
        return self.dist.scatter(output, inputs, src, async_op=async_op)

    def reduce_scatter(self, output, inputs, op, async_op):
        return self.dist.reduce_scatter(output, inputs, self.operator(op), async_op=async_op)

    def all_to_all(self, outputs, inputs, async_op):
        return self.dist.all_to_all(outputs, inputs, async_op=async_op)

    def barrier(self, async_op=False):
        return self.dist.barrier(async_op=async_op)

    def exchange(self, data, to, got, source, tag):
        return [self.dist.isend(data, to, tag=tag), self.dist.irecv(got, source, tag=tag)]

    def objects(self, mine):
        gathered = [None] * self.dist.get_world_size()
        self.dist.all_gather_object(gathered, mine)
        return gathered

    def subgroup(self, ranks):
        return self.dist.new_group(ranks)

    def close(self):
        self.dist.destroy_process_group()


APIS = {"numpy": OfNumpy, "torch": OfTorch}
KINDS = ["numpy", pytest.param("torch", marks=needs_backends)]


def call(api, rank, size, name, length, kind, root, is_async):
    """One operation; what is under way, and what must be in which array at its end."""
    own = api.full(length, rank + 1, kind)
    everybody = range(1, size + 1)
    room = lambda: [api.full(length, 0, kind) for _ in range(size)]  # noqa: E731
    mine = lambda: [api.full(length, 10 * rank + to, kind) for to in range(size)]  # noqa: E731
    if name == "all_reduce":
        return api.all_reduce(own, "sum", async_op=is_async), [(own, sum(everybody))]
    if name == "reduce":
        expected = size if rank == root else rank + 1
        return api.reduce(own, root, "max", async_op=is_async), [(own, expected)]
    if name == "broadcast":
        return api.broadcast(own, root, async_op=is_async), [(own, root + 1)]
    if name == "all_gather":
        parts = room()
        return api.all_gather(parts, own, async_op=is_async), list(zip(parts, everybody))
    if name == "gather":
        parts = room() if rank == root else None
        work = api.gather(own, parts, root, async_op=is_async)
        return work, list(zip(parts or [], everybody))
    if name == "scatter":
        work = api.scatter(own, mine() if rank == root else None, root, async_op=is_async)
        return work, [(own, 10 * root + rank)]
    if name == "reduce_scatter":
        work = api.reduce_scatter(own, mine(), "sum", async_op=is_async)
        return work, [(own, sum(10 * at + rank for at in range(size)))]
    if name == "all_to_all":
        parts = room()
        work = api.all_to_all(parts, mine(), async_op=is_async)
        return work, [(part, 10 * at + rank) for at, part in enumerate(parts)]
    if name == "exchange":
        got = api.full(length, 0, kind)
        before = (rank - 1) % size
        works = api.exchange(own, (rank + 1) % size, got, before, length)
        return works, [(got, before + 1)]
    if name == "objects":
        assert api.objects({"rank": rank, "of": size}) == [{"rank": r, "of": size} for r in range(size)]
    return api.barrier(async_op=is_async), []


CALLS = [
    "all_reduce", "reduce", "broadcast", "all_gather", "gather", "scatter", "reduce_scatter",
    "all_to_all", "exchange", "objects", "barrier",
]  # fmt: skip


def settle(work, expected):
    for one in work if isinstance(work, list) else [work]:
        if one is not None:
            one.wait()
    for array, value in expected:
        assert bool((array == value).all()), (array, value)


def resources():
    """Threads, file descriptors, and memory in KB."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    status = dict(
        line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines()
    )
    held = sum(int(status[name].split()[0]) for name in ("RssAnon", "RssShmem"))
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), held


def resources_after(before):
    """Those at the end. Threads that have done their work may take a moment to go."""
    until = time.monotonic() + 20
    while (now := resources())[:2] != before[:2] and time.monotonic() < until:
        time.sleep(0.02)
    return now


def random_calls(rank, world_size, directory, kind, iterations):
    api = APIS[kind](rank, world_size, directory, "store")
    chance = np.random.default_rng(5)  # the same on all ranks
    under_way = collections.deque()
    before = None
    for iteration in range(iterations):
        if iteration == iterations // 3:
            while under_way:
                settle(*under_way.popleft())
            before = resources()
        name = CALLS[chance.integers(len(CALLS))]
        length = LENGTHS[chance.integers(len(LENGTHS))]
        element = TYPES[chance.integers(len(TYPES))]
        root, is_async = int(chance.integers(world_size)), bool(chance.integers(2))
        begun = call(api, rank, world_size, name, length, element, root, is_async)
        if chance.integers(20):  # else nobody waits for it
            under_way.append(begun)
        if len(under_way) > IN_FLIGHT_MAX or not is_async:
            settle(*under_way.popleft()) if under_way else None
    while under_way:
        settle(*under_way.popleft())
    api.barrier()
    after = resources_after(before)
    api.close()
    return before, after


def cycles(rank, world_size, directory, kind, count):
    before = None
    for cycle in range(count):
        api = APIS[kind](rank, world_size, directory, f"store{cycle}")
        for is_async in (False, True):
            settle(*call(api, rank, world_size, "all_reduce", 1000, "float32", 0, is_async))
        settle(*call(api, rank, world_size, "exchange", 10, "int64", 0, False))
        api.subgroup([1])
        api.close()
        del api
        if cycle == count // 3:
            before = resources()
    return before, resources_after(before)


def check(outcomes):
    for rank, (before, after) in enumerate(outcomes):
        (threads, files, held), (threads_after, files_after, held_after) = before, after
        assert (threads_after, files_after) == (threads, files), f"rank {rank}"
        assert held_after < held + RSS_KB_MAX, f"rank {rank}: {held} KB became {held_after} KB"


@pytest.mark.parametrize("kind", KINDS)
def test_random_collectives_leave_nothing_behind(kind):
    check(run(2, random_calls, kind, ITERATIONS, limit_s=LIMIT_S))


@pytest.mark.parametrize("kind", KINDS)
def test_groups_leave_nothing_behind(kind):
    check(run(2, cycles, kind, CYCLES, limit_s=LIMIT_S))
