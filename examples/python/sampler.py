"""How a DistributedSampler deals out samples, and how ranks look at each other's.

    drumline run --nproc-per-node 2 -- python examples/python/sampler.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler

SAMPLES, BATCH, EPOCHS = 16, 4, 2


class Tens(Dataset[int]):
    """0, 10, 20, ..."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        return 10 * index


def main() -> None:
    dist.init_process_group("drumline")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sampler = DistributedSampler(Tens(), shuffle=True)
    # Of every rank: a step sees world_size times as many samples.
    loader = DataLoader(Tens(), batch_size=BATCH, sampler=sampler)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)  # without it, every epoch has the same order
        seen: list[int] = []
        for batch in loader:
            everybodys = [torch.zeros_like(batch) for _ in range(world_size)]
            dist.all_gather(everybodys, batch)  # all ranks call it
            seen += torch.cat(everybodys).tolist()
            print(f"epoch {epoch}: rank {rank} has {batch.tolist()}", flush=True)
        if rank == 0:  # one rank writes the logs
            print(f"epoch {epoch}: all have seen {sorted(seen)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
