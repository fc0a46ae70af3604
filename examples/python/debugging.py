"""Mistakes that every distributed program makes once, and what its ranks are told.

    python examples/python/debugging.py

Each runs two ranks that do something wrong; whoever is told of it prints the error.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def a_rank_does_not_come(rank: int) -> None:
    """monitored_barrier names it; the group can be used afterwards."""
    if rank != 1:
        dist.monitored_barrier(timeout=timedelta(seconds=1))


def shapes_differ(rank: int) -> None:
    """The error has both calls, without TORCH_DISTRIBUTED_DEBUG=DETAIL."""
    dist.all_reduce(torch.randn([10, 20][rank]))


def one_rank_calls_something_else(rank: int) -> None:
    tensor = torch.ones(4)
    dist.broadcast(tensor, src=0) if rank == 0 else dist.all_reduce(tensor)


def a_rank_dies(rank: int) -> None:
    """The others hear of it at once, not when their time is over."""
    if rank == 1:
        os._exit(3)
    dist.all_reduce(torch.ones(4))


class TwoLayers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Linear(10, 10, bias=False)
        self.b = torch.nn.Linear(10, 1, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.a(x), self.b(x)


def a_parameter_is_not_used(rank: int) -> None:
    """torch notices it in the second step. As with TORCH_DISTRIBUTED_DEBUG=INFO it names the parameter."""
    dist.set_debug_level(dist.DebugLevel.INFO)
    ddp = DistributedDataParallel(TwoLayers())
    for _ in range(2):
        _, b = ddp(torch.randn(10, 10))
        b.sum().backward()


MISTAKES = [
    a_rank_does_not_come,
    shapes_differ,
    one_rank_calls_something_else,
    a_rank_dies,
    a_parameter_is_not_used,
]


def run(rank: int, mistake: Callable[[int], None], directory: str) -> None:
    store = f"file://{directory}/{mistake.__name__}"
    dist.init_process_group("drumline", init_method=store, rank=rank, world_size=2)
    try:
        mistake(rank)
        dist.destroy_process_group()
    except Exception as error:
        say(f"rank {rank}: {type(error).__name__}: {error}")


def say(text: str) -> None:
    """In one piece: two ranks write to one place."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> None:
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as directory:
        for mistake in MISTAKES:
            say(f"--- {mistake.__name__.replace('_', ' ')}")
            ranks = [
                context.Process(target=run, args=(rank, mistake, directory)) for rank in range(2)
            ]
            for process in ranks:
                process.start()
            for process in ranks:
                process.join()


if __name__ == "__main__":
    main()
