"""Times a training step of FSDP2, in every process of a job: prints the median of rank 0 as JSON.

    RANK=0 WORLD_SIZE=8 MASTER_ADDR=... python bench/fsdp_step.py
"""

from __future__ import annotations

import json
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import drumline  # noqa: F401  (registers the backend)
from ddp_step import BATCH, GPT, Gpt

STEPS, WARM_UP = 5, 2


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("drumline")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(1)
    model = Gpt()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(dist.get_rank())
    shape = (BATCH["gpt"], GPT["context"] + 1)
    seconds = []
    for _ in range(WARM_UP + STEPS):
        text = torch.randint(GPT["vocabulary"], shape, generator=generator)
        dist.barrier()
        started = time.perf_counter()
        logits = model(text[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
        seconds.append(time.perf_counter() - started)
    if dist.get_rank() == 0:
        median = statistics.median(seconds[WARM_UP:])
        print(json.dumps({"median_us": median * 1e6, "loss": float(loss)}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
