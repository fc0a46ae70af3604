"""A training loop as users of HaiScale write it: it knows nothing of drumline.

    drumline run --nproc-per-node 2 -- python -m drumline.compat.haiscale examples/python/haiscale_loop.py
"""

import os

import torch
import torch.distributed as dist
from haiscale.ddp import DistributedDataParallel

local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group("gloo", init_method="env://")

# Each rank begins with other parameters; the wrapper takes those of rank 0.
torch.manual_seed(dist.get_rank())
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 1))
model = DistributedDataParallel(model.cuda(), device_ids=[local_rank], find_unused_parameters=True)
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
loss_fn = torch.nn.MSELoss()

for epoch in range(4):
    total = 0.0
    for _step in range(20):
        optimizer.zero_grad()
        with model.no_sync():  # the first half of the batch adds up on each rank
            x = torch.randn(8, 8).cuda()
            loss_fn(model(x), x.sum(1, keepdim=True)).backward()
        x = torch.randn(8, 8).cuda()
        loss = loss_fn(model(x), x.sum(1, keepdim=True))
        loss.backward()
        optimizer.step()
        total += loss.item()
    print(f"epoch {epoch}: loss {total / 20:.3f}", flush=True)

with torch.no_grad():
    total = sum((it.double().sum().item() for it in model.parameters()), 0.0)
print(f"parameters {total.hex()}", flush=True)
model.reducer.stop()
dist.destroy_process_group()
