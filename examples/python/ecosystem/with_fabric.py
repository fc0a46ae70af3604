"""A training loop of one's own with Lightning's Fabric, on CPUs.

    drumline run --nproc-per-node 2 -- python with_fabric.py
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from torch.utils.data import DataLoader, TensorDataset

fabric = Fabric(
    accelerator="cpu",
    devices=int(os.environ["LOCAL_WORLD_SIZE"]),
    strategy=DDPStrategy(
        process_group_backend=sys.argv[1] if len(sys.argv) > 1 else "drumline"
    ),
)
fabric.launch()
fabric.seed_everything(1, verbose=False)
inputs = torch.randn(120, 8)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.05))
loader = fabric.setup_dataloaders(DataLoader(data, batch_size=10))
for epoch in range(3):
    total = torch.zeros(())
    for x, y in loader:
        loss = torch.nn.functional.mse_loss(model(x), y)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        total += loss.detach()
    mean = fabric.all_reduce(total / len(loader), reduce_op="mean")
    largest = fabric.all_gather(total).max()
    fabric.print(f"epoch {epoch}: loss {mean:.9f}, largest share {largest:.9f}")
fabric.barrier()
dist.destroy_process_group()
