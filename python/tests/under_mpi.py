"""Programs that tests start under mpiexec: ``python under_mpi.py WHAT``."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import sys
import threading
import time

import numpy as np


def say(text: str) -> None:
    # In one piece: another rank may write between two.
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def own_api(how: str) -> None:
    import drumline

    assert drumline.is_mpi_available()
    if how == "backend":
        group = drumline.init_process_group(backend="mpi")
    elif how == "url":
        group = drumline.init_process_group("mpi://")
    else:
        group = drumline.init_process_group(init_method="mpi://", timeout=60)
    rank, size = group.rank, group.world_size
    data = np.arange(1000, dtype=np.float32) + rank
    drumline.all_reduce(data)
    expected = size * np.arange(1000, dtype=np.float32) + sum(range(size))
    assert (data == expected).all(), data

    data = np.full(3, rank)
    if rank == 0:
        drumline.send(data, size - 1)
    elif rank == size - 1:
        assert drumline.recv(data, 0) == 0 and data.tolist() == [0, 0, 0]

    even = drumline.new_group(range(0, size, 2))
    if rank % 2 == 0:
        assert even.backend == "mpi"
        data = np.ones(5, dtype=np.int64)
        even.all_reduce(data)
        assert data.tolist() == [even.world_size] * 5
        even.destroy()

    objects: list[object] = [None] * size
    drumline.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": it} for it in range(size)], objects
    backend = group.backend
    drumline.destroy_process_group()
    say(f"rank {rank} of {size} on {backend}: fine")


def takes_no_leave() -> None:
    import drumline

    drumline.init_process_group("mpi://")
    data = np.ones(1)
    drumline.all_reduce(data)
    say(f"sum {data[0]}")


def bits(backend: str) -> None:
    """Numbers whose sum depends on the order."""
    import drumline

    drumline.init_process_group(backend, "mpi://")
    assert drumline.get_backend() == backend
    data = np.random.default_rng(drumline.get_rank()).standard_normal(10_001).astype(np.float32)
    drumline.all_reduce(data)
    say(hashlib.sha256(data.tobytes()).hexdigest())


def one_raises() -> None:
    import drumline

    drumline.init_process_group("mpi://")
    drumline.barrier()
    if drumline.get_rank() == 1:
        raise RuntimeError("out of patience")
    try:
        drumline.all_reduce(np.ones(2))
    except drumline.DrumlineError as error:
        say("heard: " + str(error).replace("\n", " "))
        raise


def typed() -> None:
    import drumline

    for how in ({"init_method": "mpi://"}, {"backend": "mpi"}):
        try:
            drumline.init_process_group(**how, rank=0, world_size=2)
        except ValueError as error:
            say(str(error).replace("\n", " "))


def told_to_end(seed: str, *signalled: str) -> None:
    """Calls until SIGTERM has come to these ranks; its handler leaves the group. Says how long each rank lived after its
    own signal or, without one, after its call failed, and how it ended."""
    import drumline

    rank = drumline.init_process_group("mpi://", timeout=1000).rank
    drumline.all_reduce(np.ones(10))
    ends = "after a failed call"
    since = 0.0

    def bye(*_: object) -> None:
        nonlocal ends
        ends = "in the handler"
        try:
            drumline.destroy_process_group()
        except drumline.CollectiveError:
            ends = "in the handler, told"
        end()

    def end() -> None:
        say(f"rank {rank}: {time.monotonic() - since:.2f} s, {ends}")
        sys.exit(0)

    def signal_oneself() -> None:
        nonlocal since
        since = time.monotonic()
        os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGTERM, bye)
    late = random.Random(int(seed))
    if str(rank) in signalled:
        threading.Timer(0.1 + late.uniform(0, 0.05), signal_oneself).start()
    while True:
        try:
            drumline.all_reduce(np.ones(10))
        except drumline.CollectiveError:
            since = since or time.monotonic()
            end()
        if rank == int(seed) % 2:  # so the other one waits in a call most of the time
            time.sleep(late.uniform(0, 0.02))


def torch_api(url: str = "mpi://") -> None:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import drumline.torch  # noqa: F401 (for torch 2.4)

    dist.init_process_group("drumline", init_method=url)
    rank, size = dist.get_rank(), dist.get_world_size()
    data = torch.arange(100.0) + rank
    dist.all_reduce(data)
    assert torch.equal(data, size * torch.arange(100.0) + sum(range(size))), data

    torch.manual_seed(rank)
    model = DistributedDataParallel(torch.nn.Linear(7, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(5, 7)).square().sum().backward()
        optimizer.step()
    weights = model.module.weight.detach()
    all_weights = [torch.empty_like(weights) for _ in range(size)]
    dist.all_gather(all_weights, weights)
    assert all(torch.equal(weights, it) for it in all_weights)

    pair = dist.new_group([0, size - 1])
    if rank in (0, size - 1):
        data = torch.full((4,), rank)
        dist.broadcast(data, size - 1, group=pair)
        assert data.tolist() == [size - 1] * 4
    backend = carrier()
    dist.destroy_process_group()

    dist.init_process_group("drumline", init_method=url)  # again
    data = torch.ones(1)
    dist.all_reduce(data)
    assert data.item() == size
    dist.destroy_process_group()
    say(f"rank {rank} of {size} on {backend}: fine")


def carrier() -> str:
    """What carries torch's groups, which must be one backend for all."""
    from drumline import _core, _exit

    (name,) = {it.backend for it in _exit.watched() if isinstance(it, _core.Group)}
    return name


def torchruns_script() -> None:
    torch_api("env://")


if __name__ == "__main__":
    programs = (own_api, takes_no_leave, bits, one_raises, typed, told_to_end, torch_api, torchruns_script)
    {f.__name__: f for f in programs}[sys.argv[1]](*sys.argv[2:])
