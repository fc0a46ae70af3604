"""The training of one_process.py on many: drumline run --nproc-per-node 2 many_processes.py"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("drumline")
points = torch.linspace(-1, 1, 256).reshape(-1, 1)
dataset = TensorDataset(points, 2 * points + 1)
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=32, sampler=sampler)
model = DistributedDataParallel(torch.nn.Linear(1, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
for epoch in range(20):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = torch.nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), "model.pt")
dist.barrier()
dist.destroy_process_group()
