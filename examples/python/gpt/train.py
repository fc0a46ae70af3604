"""Trains a small GPT on a text, on any number of processes, to be stopped and resumed.

    drumline run --nproc-per-node 2 -- python examples/python/gpt/train.py TEXT [--resume FILE]

Writes checkpoints to ``--out``, and ``loss.svg`` where matplotlib is installed. A run that was stopped and resumed gives the same bits as
one that was not.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from model import Gpt
from picture import Series, draw
from text import Text, Windows
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from drumline import DistributedSampler, evaluation_shard


class Training:
    """All that a step depends on, and what a checkpoint holds."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.text = Text(args.text)
        self.windows, self.validation = self.text.windows(args.places)
        torch.manual_seed(args.seed)
        self.module = Gpt(len(self.text.alphabet), args.places, args.layers, args.width)
        self.model = DistributedDataParallel(self.module)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr)
        # It knows how far it is, so that a resumed run sees the rest of the epoch.
        self.sampler = DistributedSampler(self.windows, seed=args.seed)
        self.steps = 0
        self.losses: dict[str, Series] = {"training": [], "validation": []}
        self.is_drawn = False

    def state(self) -> dict[str, Any]:
        return {
            "alphabet": self.text.alphabet,
            "model": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "sampler": self.sampler.state_dict(),
            "steps": self.steps,
            "losses": self.losses,
        }

    def resume(self, state: dict[str, Any]) -> None:
        if state["alphabet"] != self.text.alphabet:
            sys.exit("the checkpoint is of another text")
        self.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.sampler.load_state_dict(state["sampler"])
        self.steps, self.losses = state["steps"], state["losses"]

    def run(self) -> None:
        """Trains up to ``--steps``, from wherever it is."""
        while self.steps < self.args.steps:
            for batch in DataLoader(self.windows, self.args.batch_size, sampler=self.sampler):
                self.step(batch)
                if self.steps % self.args.every == 0 or self.steps == self.args.steps:
                    self.look()
                if self.steps == self.args.steps:
                    return
            self.sampler.set_epoch(self.sampler.epoch + 1)

    def step(self, batch: torch.Tensor) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.steps, self.args.steps_planned, self.args.lr)
        loss = loss_of(self.model, batch)
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.sampler.advance(len(batch))
        self.steps += 1
        self.losses["training"].append((self.steps, mean_of_ranks(loss.detach())))

    def look(self) -> None:
        """Validates, on all ranks; rank 0 tells and saves."""
        loss = self.validated()
        self.losses["validation"].append((self.steps, loss))
        if dist.get_rank() == 0:
            training = self.losses["training"][-1][1]
            print(f"step {self.steps}: loss {training:.4f}, validation {loss:.4f}", flush=True)
            save(self.state(), Path(self.args.out) / f"checkpoint-{self.steps}.pt")
            title = f"{Path(self.args.text).stem}, {dist.get_world_size()} ranks"
            self.is_drawn = draw(Path(self.args.out) / "loss.svg", title, self.losses)

    @torch.no_grad()
    def validated(self) -> float:
        """The loss over all windows for validation. Each rank computes a part."""
        part = evaluation_shard(len(self.validation), dist.get_world_size(), dist.get_rank())
        sums = torch.zeros(2, dtype=torch.float64)
        for batch in DataLoader(self.validation, 2 * self.args.batch_size, sampler=part):
            sums += torch.tensor([loss_of(self.module, batch).item() * len(batch), len(batch)])
        dist.all_reduce(sums)
        return (sums[0] / sums[1]).item()

    def digest(self) -> str:
        """Of all parameters: the same on all ranks, and after a resume."""
        bits = hashlib.sha256()
        for parameter in self.module.parameters():
            bits.update(parameter.detach().numpy().tobytes())
        return bits.hexdigest()[:16]


def loss_of(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """In nats for a character."""
    scores = model(batch[:, :-1])
    return functional.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten())


def mean_of_ranks(loss: torch.Tensor) -> float:
    dist.all_reduce(loss, dist.ReduceOp.AVG)
    return loss.item()


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Up for a twentieth of the steps, then down along a cosine to a tenth."""
    warm_up = max(steps // 20, 1)
    if step < warm_up:
        return peak * (step + 1) / warm_up
    done = min((step - warm_up) / max(steps - warm_up, 1), 1.0)
    return peak * (0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2)


def save(state: dict[str, Any], file: Path) -> None:
    """The file is there as a whole or not at all."""
    partial = file.with_suffix(".partial")
    torch.save(state, partial)
    os.replace(partial, file)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains a small GPT on a text.")
    parser.add_argument("text", help="a file in UTF-8")
    parser.add_argument("--out", default="runs/gpt")
    parser.add_argument("--steps", type=int, default=400, help="stop after so many")
    parser.add_argument("--steps-planned", type=int, help="for the learning rate; else --steps")
    parser.add_argument("--every", type=int, default=50, help="validate and save every so many steps")
    parser.add_argument("--batch-size", type=int, default=16, help="windows of one rank")
    parser.add_argument("--places", type=int, default=64, help="characters of a window")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--init-method", default="env://", help="how ranks meet; mpi:// under mpirun")
    parser.add_argument("--resume", metavar="FILE", help="a checkpoint to go on from")
    args = parser.parse_args()
    args.steps_planned = args.steps_planned or args.steps
    return args


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)  # a process for every core
    dist.init_process_group("drumline", init_method=args.init_method)
    Path(args.out).mkdir(parents=True, exist_ok=True)
    training, started = Training(args), time.monotonic()
    if args.resume:
        training.resume(torch.load(args.resume, weights_only=True))
    before = training.steps
    training.run()
    seconds = time.monotonic() - started
    print(f"parameters {training.digest()} after {training.steps} steps", flush=True)
    if dist.get_rank() == 0:
        start = training.text.numbers(training.text.text(training.windows[0].tolist())[:20])
        print(training.text.text(training.module.continued(start, 200, args.seed)))
        rate = (training.steps - before) / seconds
        drawn = f"the loss is drawn in {Path(args.out) / 'loss.svg'}"
        without = "the loss is not drawn: pip install matplotlib"
        print(f"{rate:.1f} steps/s; {drawn if training.is_drawn else without}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
