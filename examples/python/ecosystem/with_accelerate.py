"""A training loop of accelerate on CPUs, with gradient accumulation and metrics over all ranks.

    drumline run --nproc-per-node 2 -- python with_accelerate.py

accelerate asks for gloo by name, but takes a group that is there already.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group(sys.argv[1] if len(sys.argv) > 1 else "drumline")
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
set_seed(1)
inputs = torch.randn(200, 8)  # no multiple of the batches of all ranks
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
model, optimizer, training, validation = accelerator.prepare(
    model, optimizer, DataLoader(data, batch_size=8), DataLoader(data, batch_size=16)
)
for epoch in range(3):
    model.train()
    for x, y in training:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        errors = [accelerator.gather_for_metrics((model(x) - y).square()) for x, y in validation]
    everything = torch.cat(errors)
    accelerator.print(f"epoch {epoch}: {len(everything)} samples, error {everything.mean():.9f}")
accelerator.end_training()  # destroys the group
