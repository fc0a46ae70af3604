"""FSDP2 and torch.distributed.checkpoint: a sharded training, saved by some ranks and resumed by others.

    drumline run --nproc-per-node 2 -- python with_checkpoints.py checkpoint
    drumline run --nproc-per-node 3 -- python with_checkpoints.py checkpoint --resume
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

parser = argparse.ArgumentParser()
parser.add_argument("directory")
parser.add_argument("--resume", action="store_true")
parser.add_argument("--backend", default="drumline")
args = parser.parse_args()

dist.init_process_group(args.backend)
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 20), torch.nn.ReLU(), torch.nn.Linear(20, 3))
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
step = 0
if args.resume:
    weights, state = get_state_dict(model, optimizer)
    saved = {"model": weights, "optimizer": state, "step": step}
    dcp.load(saved, checkpoint_id=args.directory)
    set_state_dict(
        model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"]
    )
    step = saved["step"]
for step in range(step + 1, step + 6):
    # One batch of 12 samples, whatever the number of ranks: so losses can be compared.
    batch = torch.randn(12, 8, generator=torch.Generator().manual_seed(step))
    share = batch.chunk(dist.get_world_size())[dist.get_rank()]
    loss = model(share).square().mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    total = loss.detach().clone()
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        print(f"step {step}: loss {total / dist.get_world_size():.9f}")
if not args.resume:
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state, "step": step}, checkpoint_id=args.directory)
dist.destroy_process_group()
