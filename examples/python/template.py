"""A template for training with DDP: one process or several, to be stopped and resumed.

    python examples/python/template.py examples/fashion-mnist/data/digits.csv.gz --ddp
    python examples/python/template.py ... --ddp --resume runs/template/checkpoint-2.pth

On GPUs with ``--backend nccl`` or ``cpu:drumline,cuda:nccl``, on CPUs with ``drumline`` or ``gloo``.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import socket
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import drumline

# torch's own refuses tensors of the CPU.
SyncBatchNorm: Any = getattr(drumline, "SyncBatchNorm", nn.SyncBatchNorm)


def free_port() -> int:
    """A free TCP port."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def load(file: str) -> tuple[TensorDataset, TensorDataset]:
    """Images of 8 x 8 pixels with their classes, for training and for validation."""
    with gzip.open(file, "rt") as lines:
        rows = torch.tensor([[int(cell) for cell in line.split(",")] for line in lines])
    images, classes = rows[:, :64].float().reshape(-1, 1, 8, 8) / 16, rows[:, 64]
    border = len(rows) * 4 // 5
    return (
        TensorDataset(images[:border], classes[:border]),
        TensorDataset(images[border:], classes[border:]),
    )


def new_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Flatten(), nn.Linear(32 * 4 * 4, 10),
    )  # fmt: skip


def device_of(local_rank: int) -> torch.device:
    """A GPU for each process if there are any, else the CPU for all."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def train(local_rank: int, local_world_size: int, args: argparse.Namespace) -> None:
    """One process of the job, on the host with number ``args.rank``."""
    rank = args.rank * local_world_size + local_rank
    if args.ddp:
        dist.init_process_group(
            args.backend,
            init_method=f"tcp://{args.host}:{args.port}",
            rank=rank,
            world_size=args.hosts * local_world_size,
        )
    device = device_of(local_rank)
    torch.manual_seed(args.seed)
    training, validation = load(args.dataset)
    # Shuffling and dropping is the sampler's work where there is one.
    sampler = DistributedSampler(training, shuffle=True, drop_last=True) if args.ddp else None
    loader = DataLoader(
        training, args.batch_size, sampler=sampler, shuffle=sampler is None, drop_last=True,
        pin_memory=device.type == "cuda",
    )  # fmt: skip

    module = new_model()
    if args.ddp and (SyncBatchNorm is not nn.SyncBatchNorm or device.type == "cuda"):
        module = SyncBatchNorm.convert_sync_batchnorm(module)
    module = module.to(device)
    model = DistributedDataParallel(module) if args.ddp else module
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    criterion = nn.CrossEntropyLoss()
    first, steps = 0, 0
    if args.resume:
        state = read_checkpoint(args, rank, device)
        module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first, steps = state["epoch"] + 1, state["steps"]

    for epoch in range(first, args.epochs):
        if sampler is not None:
            sampler.set_epoch(epoch)
        model.train()
        loss = torch.tensor(torch.nan)
        for x, y in loader:
            loss = criterion(model(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            steps += 1
        # One rank writes and validates. It uses the module itself, without the wrapper, whose
        # forward may need the other ranks.
        if rank == 0:
            state = {
                "epoch": epoch,
                "steps": steps,
                "model": module.state_dict(),
                "optimizer": optimizer.state_dict(),
            }
            save(state, Path(args.log_path) / f"checkpoint-{epoch}.pth")
            right = accuracy(module, validation, device)
            print(f"epoch {epoch}: {steps} steps, loss {loss.item():.4f}, {right:.1%} right", flush=True)
    if args.ddp:
        dist.barrier()  # the last checkpoint is written
        dist.destroy_process_group()


def read_checkpoint(args: argparse.Namespace, rank: int, device: torch.device) -> dict[str, Any]:
    """Rank 0 reads the file, and the others get what is in it: they need not see its disk."""
    state = None
    if rank == 0:
        state = torch.load(args.resume, map_location=device, weights_only=True)
    if args.ddp:
        objects = [state]
        dist.broadcast_object_list(objects, src=0)
        state = objects[0]
    assert state is not None
    return state


def save(state: dict[str, Any], file: Path) -> None:
    """The file is there as a whole or not at all."""
    partial = file.with_suffix(".partial")
    torch.save(state, partial)
    os.replace(partial, file)


@torch.no_grad()
def accuracy(module: nn.Module, data: TensorDataset, device: torch.device) -> float:
    """The share of samples that the module knows."""
    module.eval()
    right = sum(
        int((module(x.to(device)).argmax(1) == y.to(device)).sum())
        for x, y in DataLoader(data, batch_size=256)
    )
    return right / len(data)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("dataset", help="lines of 64 pixels and a class, compressed by gzip")
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32, help="of one process")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-path", default="runs/template")
    parser.add_argument("--resume", default="", help="a checkpoint to go on from")
    parser.add_argument("--ddp", action="store_true", help="several processes")
    parser.add_argument("--processes", type=int, default=torch.cuda.device_count() or 2)
    parser.add_argument("--backend", default="drumline")
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--rank", type=int, default=0, help="this host's number")
    parser.add_argument("--host", default="localhost", help="the first host")
    parser.add_argument("--port", type=int, default=0, help="on the first host; 0: any, for one host")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    Path(args.log_path).mkdir(parents=True, exist_ok=True)
    (Path(args.log_path) / "config.json").write_text(json.dumps(vars(args), indent=1))
    if args.ddp:
        args.port = args.port or free_port()
        mp.spawn(train, args=(args.processes, args), nprocs=args.processes)
    else:
        train(0, 1, args)


if __name__ == "__main__":
    main()
