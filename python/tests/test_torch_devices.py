"""torch's functions on real devices: on the CPU, and on CUDA where a GPU is there.

Ranks share GPUs. Values are small whole numbers, so every sum is exact.
"""

from __future__ import annotations

import os

import pytest
from ranks import run
from torch_versions import needs_backends

pytestmark = [needs_backends, pytest.mark.usefixtures("torch_base")]


def devices():
    # Looked at without CUDA: the ranks are forks of this process.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    torch = pytest.importorskip("torch")
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def start(rank, world_size, directory, kind):
    """The device of this rank, as a member of the group of all."""
    import torch
    import torch.distributed as dist

    device = torch.device("cpu")
    if kind == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    store = dist.FileStore(f"{directory}/store", world_size)
    dist.init_process_group("drumline", store=store, rank=rank, world_size=world_size)
    return device


def full(size, value, device):
    import torch

    return torch.full((size,) if isinstance(size, int) else size, float(value), device=device)


def collectives(rank, world_size, directory, kind):
    import torch
    import torch.distributed as dist

    device, ranks = start(rank, world_size, directory, kind), range(world_size)
    total = sum(ranks)

    def check(tensor, *expected):
        wanted = torch.tensor(expected).to(tensor.dtype).reshape(-1)
        found = tensor.cpu().reshape(-1)
        assert torch.equal(found, wanted.repeat_interleave(found.numel() // wanted.numel())), (
            f"{found} is not {wanted}"
        )

    # Kernels make what is sent, and use what comes, on one stream and without a wait of the host.
    for size in (1, 1000, 3_000_000):
        data, expected = full(size, 0, device), 0
        for _ in range(5):
            data.add_(rank)
            dist.all_reduce(data)
            expected = world_size * expected + total
        check(data, expected)
    data = full((40, 30), rank, device)
    dist.all_reduce(data.t())
    dist.all_reduce(data[:, 3:7], op=dist.ReduceOp.AVG)
    check(data, total)
    work = dist.all_reduce(data, op=dist.ReduceOp.MAX, async_op=True)
    work.wait()
    check(data, total)
    data = full(9, rank, device)
    dist.broadcast(data, world_size - 1)
    check(data, world_size - 1)
    data = full(9, rank, device)
    dist.reduce(data, 0)
    check(data, total if rank == 0 else rank)

    every = full(4 * world_size, -1, device)
    dist.all_gather_into_tensor(every, full(4, rank, device))
    check(every, *ranks)
    own = full(4, -1, device)
    dist.reduce_scatter_tensor(own, every)
    check(own, world_size * rank)
    got = [full(1 + of, -1, device) for of in ranks]
    dist.all_gather(got, full(1 + rank, rank, device))
    for of in ranks:
        check(got[of], of)
    own = full(1 + rank, -1, device)
    dist.reduce_scatter(own, [full(1 + to, rank + to, device) for to in ranks])
    check(own, total + world_size * rank)
    got = [full(5, -1, device) for _ in ranks] if rank == 0 else None
    dist.gather(full(5, rank, device), got, dst=0)
    for of, tensor in enumerate(got or ()):
        check(tensor, of)
    own = full(5, -1, device)
    dist.scatter(own, [full(5, 7 + to, device) for to in ranks] if rank == 0 else None, src=0)
    check(own, 7 + rank)
    got = [full(1 + of + rank, -1, device) for of in ranks]
    dist.all_to_all(got, [full(1 + rank + to, 10 * rank + to, device) for to in ranks])
    for of in ranks:
        check(got[of], 10 * of + rank)
    sizes = [1 + rank + other for other in ranks]
    rows = torch.cat([full((n, 2), 10 * rank + to, device) for to, n in enumerate(sizes)])
    got = full((sum(sizes), 2), -1, device)
    dist.all_to_all_single(got, rows, sizes, sizes)
    check(got[: sizes[0]], rank)
    with dist._coalescing_manager(async_ops=True) as several:
        tensors = [full(n, rank, device) for n in (3, 70_000, 1)]
        for tensor in tensors:
            dist.all_reduce(tensor)
    several.wait()
    for tensor in tensors:
        check(tensor, total)
    dist.barrier(device_ids=[device.index] if kind == "cuda" else None)
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", devices())
@pytest.mark.parametrize("world_size", [2, 3])
def test_collectives(world_size, kind):
    run(world_size, collectives, kind)


def messages(rank, world_size, directory, kind):
    import torch
    import torch.distributed as dist

    device = start(rank, world_size, directory, kind)
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    got, sent = full(1000, -1, device), full(1000, rank, device)
    operations = [dist.P2POp(dist.isend, sent, right), dist.P2POp(dist.irecv, got, left)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert torch.equal(got.cpu(), full(1000, left, "cpu"))
    if rank > 0:
        # Received on the device, sent from the CPU by every second rank.
        dist.send(full(3, rank, device if rank % 2 else "cpu"), 0, tag=4)
    else:
        sources = set()
        for _ in range(1, world_size):
            got = full(3, -1, device)
            source = dist.recv(got, tag=4)
            assert got.tolist() == [source] * 3
            sources.add(source)
        assert sources == set(range(1, world_size))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", devices())
def test_messages(kind):
    run(3, messages, kind)


def training(rank, world_size, directory, kind, whose):
    import torch
    import torch.distributed as dist

    import drumline

    device = start(rank, world_size, directory, kind)
    wrap = {
        "torch": torch.nn.parallel.DistributedDataParallel,
        "drumline": drumline.DistributedDataParallel,
    }[whose]
    torch.manual_seed(rank)
    module = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6))).to(device)
    model = wrap(module, bucket_cap_mb=0.02)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    for step in range(4):
        torch.manual_seed(100 * step + rank)
        model(torch.randn(8, 64, device=device)).square().mean().backward()
        if step == 0:
            # The average of what each rank would have alone.
            own = [it.grad.clone() for it in module.parameters()]
            for tensor in own:
                mean = tensor.clone()
                dist.all_reduce(mean, op=dist.ReduceOp.AVG)
                torch.testing.assert_close(mean, tensor)
        optimizer.step()
        optimizer.zero_grad()
    flat = torch.cat([it.detach().reshape(-1) for it in module.parameters()]).cpu()
    every = [torch.empty_like(flat) for _ in range(world_size)]
    dist.all_gather(every, flat)
    assert all(torch.equal(flat, other) for other in every)
    dist.destroy_process_group()
    return flat.tolist()


@pytest.mark.parametrize("kind", devices())
def test_training_has_one_result(kind):
    found = [run(2, training, kind, whose)[0] for whose in ("torch", "drumline")]
    assert found[0] == pytest.approx(found[1], rel=1e-4, abs=1e-6)
