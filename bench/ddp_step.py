"""Times a training step: torch's DDP on gloo, torch's DDP on drumline, and drumline's own DDP.

    python bench/ddp_step.py                      # both models, 2 ranks
    python bench/ddp_step.py --model mlp --ranks 4 --rounds 9

The ways take turns in one process per rank, so that all see the same moods of the machine. `alone` is the same step
without communication, on all ranks at once. The exposed communication of a way is its time minus that of `alone`. The
figure of a turn is the mean of its steps on the slowest rank. A cell is the median over the rounds, with the fastest
and the slowest round. After every turn all ranks must have the same parameters.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

BATCH = {"mlp": 32, "gpt": 4}
GPT = {"vocabulary": 2048, "width": 256, "layers": 6, "heads": 8, "context": 128}


def mlp() -> nn.Module:
    """An MLP of 40 million parameters."""
    widths = [1024, 3072, 3072, 3072, 3072, 3072]
    layers: list[nn.Module] = []
    for before, after in zip(widths, widths[1:]):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], 10))


class Gpt(nn.Module):
    """A small decoder: 6 layers, 5.8 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        width = GPT["width"]
        self.tokens = nn.Embedding(GPT["vocabulary"], width)
        self.places = nn.Embedding(GPT["context"], width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, GPT["heads"], 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(GPT["layers"])
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, GPT["vocabulary"], bias=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        length = text.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        x = self.tokens(text) + self.places(torch.arange(length))
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(self.norm(x))


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    return mlp() if name == "mlp" else Gpt()


def batch(name: str, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    if name == "mlp":
        x = torch.randn(BATCH[name], 1024, generator=generator)
        return x, torch.randint(10, (BATCH[name],), generator=generator)
    shape = (BATCH[name], GPT["context"] + 1)
    text = torch.randint(GPT["vocabulary"], shape, generator=generator)
    return text[:, :-1], text[:, 1:].reshape(-1)


def ways(name: str, on_drumline: Any) -> dict[str, nn.Module]:
    from drumline import DistributedDataParallel

    theirs = nn.parallel.DistributedDataParallel
    return {
        "alone": make(name),
        "torch DDP + gloo": theirs(make(name), gradient_as_bucket_view=True),
        "torch DDP + drumline": theirs(
            make(name), process_group=on_drumline, gradient_as_bucket_view=True
        ),
        "drumline DDP": DistributedDataParallel(
            make(name), process_group=on_drumline, gradient_as_bucket_view=True
        ),
    }


def turn(name: str, model: nn.Module, steps: int, seed: int) -> float:
    """Seconds for a step, on the slowest rank."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    generator = torch.Generator().manual_seed(seed)
    data = [batch(name, generator) for _ in range(steps + 1)]
    started = 0.0
    for number, (x, y) in enumerate(data):
        if number == 1:  # the first step is a warm-up
            dist.barrier()
            started = time.perf_counter()
        optimizer.zero_grad()
        outputs = model(x)
        nn.functional.cross_entropy(outputs.reshape(len(y), -1), y).backward()
        optimizer.step()
    taken = torch.tensor([(time.perf_counter() - started) / steps])
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return taken.item()


def check(name: str, way: str, model: nn.Module) -> None:
    """Fails unless parameters have the same bits on all ranks."""
    digest = torch.tensor([it.detach().view(torch.int32).sum(dtype=torch.int64) for it in model.parameters()])
    least, most = digest.clone(), digest.clone()
    dist.all_reduce(least, dist.ReduceOp.MIN)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    if not torch.equal(least, most):
        raise SystemExit(f"{way}, {name}: ranks have different parameters")


def measure(rank: int, ranks: int, path: str, names: list[str], rounds: int, steps: int) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{path}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    on_drumline = dist.new_group(backend="drumline")
    for name in names:
        models = ways(name, on_drumline)
        times: dict[str, list[float]] = {way: [] for way in models}
        for number in range(rounds):
            for way, model in models.items():
                times[way].append(turn(name, model, steps, number * ranks + rank))
                if way != "alone":
                    check(name, way, model)
        if rank == 0:
            report(name, ranks, times)
        models["drumline DDP"].reducer.stop()
    dist.destroy_process_group()


def report(name: str, ranks: int, times: dict[str, list[float]]) -> None:
    alone = statistics.median(times["alone"])
    exposed = {way: statistics.median(of_way) - alone for way, of_way in times.items()}
    print(f"\n{name}, {ranks} ranks: one step, ms (fastest to slowest round)\n")
    print("| | step | exposed communication | of gloo's |\n|---|---|---|---|")
    for way, of_way in times.items():
        low, middle, high = (1e3 * it for it in (min(of_way), statistics.median(of_way), max(of_way)))
        share = f"{exposed[way] / exposed['torch DDP + gloo']:.2f}" if way != "alone" else ""
        out = f"{1e3 * exposed[way]:.1f}" if way != "alone" else ""
        print(f"| {way} | {middle:.1f} ({low:.1f} to {high:.1f}) | {out} | {share} |")
    print(json.dumps({"model": name, "ranks": ranks, "step_s": times}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", choices=["mlp", "gpt"], action="append")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5, help="of a turn")
    options = parser.parse_args()
    names = options.model or ["mlp", "gpt"]
    with TemporaryDirectory() as path:
        args = (options.ranks, path, names, options.rounds, options.steps)
        mp.spawn(measure, args=args, nprocs=options.ranks)


if __name__ == "__main__":
    main()
