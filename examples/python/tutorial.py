"""The three steps of torch's DDP tutorial: a module, a checkpoint, a module on several devices.

    python examples/python/tutorial.py [WORLD_SIZE]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Toy(nn.Module):
    """Two layers, on one device or on two."""

    def __init__(self, first: torch.device, second: torch.device) -> None:
        super().__init__()
        self.first, self.second = first, second
        self.net1 = nn.Linear(10, 10).to(first)
        self.net2 = nn.Linear(10, 5).to(second)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.net1(x.to(self.first)))
        return self.net2(x.to(self.second))


def device(number: int) -> torch.device:
    """A GPU of this host if there are enough, else the CPU."""
    has_it = number < torch.cuda.device_count()
    return torch.device("cuda", number) if has_it else torch.device("cpu")


def train_once(ddp: nn.Module) -> float:
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.001)
    outputs = ddp(torch.randn(20, 10))
    loss = nn.functional.mse_loss(outputs, torch.randn(20, 5, device=outputs.device))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def basic(rank: int, directory: Path) -> None:
    """One replica on every rank. All begin with the parameters of rank 0."""
    torch.manual_seed(rank)
    ddp = DistributedDataParallel(Toy(device(rank), device(rank)))
    train_once(ddp)
    same: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(same, [parameter.sum().item() for parameter in ddp.parameters()])
    assert all(it == same[0] for it in same), same
    say(rank, "basic: all ranks have the same parameters after a step")


def checkpoint(rank: int, directory: Path) -> None:
    """Rank 0 saves, for all are equal; the others load when it has."""
    torch.manual_seed(rank)
    ddp = DistributedDataParallel(Toy(device(rank), device(rank)))
    file = directory / "model.checkpoint"
    if rank == 0:
        torch.save(ddp.state_dict(), file)
    dist.barrier()
    # Saved on the device of rank 0, loaded onto this rank's.
    ddp.load_state_dict(torch.load(file, map_location=device(rank), weights_only=True))
    train_once(ddp)
    dist.barrier()  # all have read it
    if rank == 0:
        file.unlink()
    say(rank, "checkpoint: saved by one rank, loaded by all")


def model_parallel(rank: int, directory: Path) -> None:
    """A module on two devices of its rank: no device_ids, and outputs are where they are."""
    ddp = DistributedDataParallel(Toy(device(2 * rank), device(2 * rank + 1)))
    train_once(ddp)
    say(rank, "model parallel: a module on two devices")


def say(rank: int, text: str) -> None:
    if rank == 0:
        print(text, flush=True)


def run(rank: int, world_size: int, directory: Path) -> None:
    for demo in (basic, checkpoint, model_parallel):
        store = f"file://{directory}/{demo.__name__}.store"
        dist.init_process_group("drumline", init_method=store, rank=rank, world_size=world_size)
        demo(rank, directory)
        dist.destroy_process_group()


if __name__ == "__main__":
    world_size = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    # CUDA does not survive a fork; without it, a fork need not import torch again.
    method = "spawn" if torch.cuda.is_available() else "fork"
    with tempfile.TemporaryDirectory() as name:
        args = (world_size, Path(name))
        mp.start_processes(run, args, nprocs=world_size, start_method=method)
