"""What DistributedDataParallel does to weights and gradients, in numbers.

    python examples/python/gradients.py

Two ranks begin with different weights, 2 and 200, and see different samples, 1 and 3. The wrapper gives
both the weight of rank 0, and each backward both the average of their gradients: they stay equal.
"""

from __future__ import annotations

import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

WORLD_SIZE = 2


def example(rank: int, directory: str) -> None:
    dist.init_process_group(
        "drumline", init_method=f"file://{directory}/store", rank=rank, world_size=WORLD_SIZE
    )
    model = torch.nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_([2.0, 200.0][rank])
    say(rank, "weight before", model.weight)
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    say(rank, "weight of rank 0", model.weight)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.125)
    sample = torch.tensor([[[1.0], [3.0]][rank]])
    for step in (1, 2):
        # With loss (w x - 1)^2 a rank's own gradient is 2 x (w x - 1).
        loss = (ddp(sample) - 1).square().sum()
        optimizer.zero_grad()
        loss.backward()
        say(rank, f"average gradient {step}", model.weight.grad)
        optimizer.step()
        say(rank, f"weight after step {step}", model.weight)
    dist.destroy_process_group()


def say(rank: int, what: str, value: torch.Tensor | None) -> None:
    assert value is not None
    # In one piece: two ranks write to one place.
    sys.stdout.write(f"rank {rank}: {what}: {value.item():g}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        # On GPUs: spawn, because CUDA does not survive a fork.
        mp.start_processes(example, (directory,), nprocs=WORLD_SIZE, start_method="fork")
