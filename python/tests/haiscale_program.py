"""A training loop as HaiScale's users write them: it knows nothing of drumline."""

import os

import torch
import torch.distributed as dist
from haiscale.ddp import DistributedDataParallel

local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group("drumline", init_method="env://")

torch.manual_seed(dist.get_rank())
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 1))
model = DistributedDataParallel(model.cuda(), device_ids=[local_rank], find_unused_parameters=True)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for _step in range(6):
    optimizer.zero_grad()
    with model.no_sync():
        model(torch.randn(4, 8).cuda()).square().mean().backward()
    loss = model(torch.randn(4, 8).cuda()).square().mean()
    loss.backward()
    optimizer.step()
with torch.no_grad():
    total = sum(it.double().sum().item() for it in model.parameters())
print(f"parameters {total.hex()}", flush=True)
model.reducer.stop()
dist.destroy_process_group()
