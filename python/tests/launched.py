"""Programs that tests start under a launcher: ``python launched.py WHAT``."""

from __future__ import annotations

import os
import sys
import time


def sum_of_ranks() -> None:
    """As an unmodified program, which imports nothing of drumline."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("drumline")
    tensor = torch.ones(2) * dist.get_rank()
    dist.all_reduce(tensor)
    print(f"sum {tensor.tolist()} backend {dist.get_backend()}", flush=True)
    dist.destroy_process_group()


def without_destroy() -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("cpu:drumline")
    dist.all_reduce(torch.ones(2))
    dist.all_reduce(torch.ones(2), async_op=True)


def own_api() -> None:
    import numpy as np

    import drumline

    drumline.init_process_group()
    data = np.array([drumline.get_rank() + 1])
    drumline.all_reduce(data)
    print("sum", data.tolist(), "torch" in sys.modules, flush=True)


def one_raises() -> None:
    import numpy as np

    import drumline

    drumline.init_process_group()
    if drumline.get_rank() == 1:
        raise RuntimeError("out of patience")
    time.sleep(0.2)
    drumline.all_reduce(np.ones(2))


def ddp() -> None:
    """Trains, and prints losses and a digest of the parameters."""
    import torch
    import torch.distributed as dist

    torch.manual_seed(3)
    dist.init_process_group(sys.argv[2])
    rank = dist.get_rank()
    model = torch.nn.Sequential(torch.nn.Linear(20, 50), torch.nn.ReLU(), torch.nn.Linear(50, 1))
    model = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.001)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9)
    data = torch.randn(50, dist.get_world_size(), 8, 20)
    for batch in data[:, rank]:
        loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total, dist.ReduceOp.AVG)
        if rank == 0:
            print(f"loss {total.item():.9e}", flush=True)
    bits = torch.cat([it.detach().reshape(-1) for it in model.parameters()]).numpy().tobytes()
    import hashlib

    print(f"parameters {hashlib.sha256(bits).hexdigest()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    {f.__name__: f for f in (sum_of_ranks, without_destroy, own_api, one_raises, ddp)}[sys.argv[1]]()
