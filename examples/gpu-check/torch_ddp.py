"""DistributedDataParallel of torch and of drumline, beside gloo: the losses of one process, and what a step waits for.

    python examples/gpu-check/torch_ddp.py                 # on CUDA, 2 ranks
    python examples/gpu-check/torch_ddp.py --device cpu    # tries the program itself

Ranks take the next GPU as far as they go, so two ranks may share one. First, each way trains a model with batches that
are dealt out to the ranks. The mean loss of every step must be that of one process with the whole batches. Then steps
are timed. The ways take turns, so that all see the same moods of the machine. `alone` is the same step of all ranks at
once without communication. The exposed communication of a way is its time minus that of `alone`; the goal is a third of
gloo's. `make test-gpu` runs this.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

GLOO, TORCHS, OWN = "torch's DDP on gloo", "torch's DDP on drumline", "drumline's DDP"

# Of a rank in a step.
BATCH = 16
# The goal for exposed communication, as a part of gloo's.
GOAL = 1 / 3


class Place:
    """Where a rank computes."""

    def __init__(self, kind: str, rank: int) -> None:
        self.device = torch.device(kind)
        if kind == "cuda":
            self.device = torch.device("cuda", rank % torch.cuda.device_count())
            torch.cuda.set_device(self.device)

    def finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def describe(self) -> str:
        if self.device.type == "cpu":
            return "the CPU"
        return f"{torch.cuda.get_device_name(self.device)}, {torch.cuda.device_count()} in all"


def model_of(width: int, layers: int, place: Place) -> nn.Module:
    torch.manual_seed(0)
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(width, width), nn.Tanh()]
    return nn.Sequential(*parts, nn.Linear(width, 1)).to(place.device)


def samples(width: int, step: int, rank: int, place: Place) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(BATCH, width, generator=generator).to(place.device)


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return (model(batch) - batch.mean(1, keepdim=True).sin()).square().mean()


Wrap = Callable[[nn.Module], nn.Module]


def ways(groups: dict[str, Any], place: Place) -> dict[str, Wrap]:
    from drumline import DistributedDataParallel

    def torchs(group: Any) -> Wrap:
        return lambda model: nn.parallel.DistributedDataParallel(
            model, process_group=group, gradient_as_bucket_view=True
        )

    found = {GLOO: torchs(groups["gloo"])}
    if "drumline" in groups:
        found[TORCHS] = torchs(groups["drumline"])
    found[OWN] = lambda model: DistributedDataParallel(model, process_group=groups.get("drumline", groups["gloo"]))
    return found


def train(model: nn.Module, of_step: Callable[[int], torch.Tensor], steps: int) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, of_step(step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def check_losses(rank: int, ranks: int, place: Place, wraps: dict[str, Wrap], steps: int) -> None:
    """Fails unless all ways have the losses of one process."""
    width, layers = 64, 3

    def whole(step: int) -> torch.Tensor:
        return torch.cat([samples(width, step, other, place) for other in range(ranks)])

    expected = torch.tensor(train(model_of(width, layers, place), whole, steps), dtype=torch.float64)
    if not expected[-1] < 0.9 * expected[0]:
        raise SystemExit(f"one process learns nothing: {expected.tolist()}")
    for name, wrap in wraps.items():
        model = wrap(model_of(width, layers, place))
        own = train(model, lambda step: samples(width, step, rank, place), steps)
        losses = torch.tensor(own, dtype=torch.float64)
        dist.all_reduce(losses)
        losses /= ranks
        apart = ((losses - expected).abs() / expected).max().item()
        if not apart < 1e-3:
            raise SystemExit(f"{name}: losses {losses.tolist()}, of one process {expected.tolist()}")
        check_equal(name, model)
        stop(model)
        if rank == 0:
            say(f"     {name}: the losses of one process over {steps} steps, at most {apart:.1e} apart")


def check_equal(name: str, model: nn.Module) -> None:
    """Fails unless parameters have the same bits on all ranks."""
    sums = [it.detach().view(torch.int32).sum(dtype=torch.int64).cpu() for it in model.parameters()]
    least, most = torch.stack(sums), torch.stack(sums)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    if not torch.equal(least, most):
        raise SystemExit(f"{name}: ranks have different parameters")


def time_steps(
    rank: int, ranks: int, place: Place, wraps: dict[str, Wrap], options: argparse.Namespace
) -> None:
    everything = {"alone": model_of(options.width, options.layers, place)}
    for name, wrap in wraps.items():
        everything[name] = wrap(model_of(options.width, options.layers, place))
    times: dict[str, list[float]] = {name: [] for name in everything}
    batches = [samples(options.width, step, rank, place) for step in range(options.steps + 1)]
    for _ in range(options.rounds):
        for name, model in everything.items():
            times[name].append(turn(model, batches, place))
            if name != "alone":
                check_equal(name, model)
    for model in everything.values():
        stop(model)
    if rank == 0:
        numbers = sum(it.numel() for it in everything["alone"].parameters())
        report(times, f"{4 * numbers / 2**20:.0f} MiB of gradients on {ranks} ranks")


def turn(model: nn.Module, batches: list[torch.Tensor], place: Place) -> float:
    """Seconds for a step, on the slowest rank."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    started = 0.0
    for number, batch in enumerate(batches):
        if number == 1:  # the first step is a warm-up
            place.finish()
            dist.barrier()
            started = time.perf_counter()
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    place.finish()
    taken = torch.tensor([(time.perf_counter() - started) / (len(batches) - 1)])
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return taken.item()


def report(times: dict[str, list[float]], what: str) -> None:
    say(f"     a step with {what}, median of {len(times['alone'])} rounds")
    say(f"{'':>26}{'step, ms':>12}{'exposed, ms':>14}{'of gloo':>10}")
    alone = statistics.median(times["alone"])
    exposed = {name: statistics.median(each) - alone for name, each in times.items()}
    for name, each in times.items():
        line = f"{name:>26}{1e3 * statistics.median(each):>12.2f}"
        if name != "alone":
            line += f"{1e3 * exposed[name]:>14.2f}"
        if name not in ("alone", GLOO) and exposed[GLOO] > 0:
            of_gloo = max(exposed[name], 0) / exposed[GLOO]
            line += f"{of_gloo:>10.2f}  {'reached' if of_gloo <= GOAL else 'missed'}: the goal is {GOAL:.2f}"
        say(line)


def stop(model: nn.Module) -> None:
    """Tells the other ranks that this one needs the model no more."""
    if hasattr(model, "reducer") and hasattr(model.reducer, "stop"):
        model.reducer.stop()


def say(line: str) -> None:
    print(line, flush=True)


def rank_process(rank: int, options: argparse.Namespace, path: str) -> None:
    torch.set_num_threads(1)
    place = Place(options.device, rank)
    store = dist.FileStore(f"{path}/store", options.ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=options.ranks)
    groups: dict[str, Any] = {"gloo": dist.group.WORLD}
    why_not = no_backend()
    if not why_not:
        groups["drumline"] = dist.new_group(backend="drumline")
    if rank == 0:
        say(f"DistributedDataParallel of torch {torch.__version__} on {place.describe()}")
        if why_not:
            say(f"     left out: {TORCHS}: {why_not}")
    wraps = ways(groups, place)
    check_losses(rank, options.ranks, place, wraps, 12)
    time_steps(rank, options.ranks, place, wraps, options)
    dist.destroy_process_group()


def no_backend() -> str:
    """Why this torch takes no backend ``drumline``; empty if it does."""
    from drumline.torch.register import too_old

    return too_old()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10, help="of a round")
    parser.add_argument("--width", type=int, default=1024, help="of a layer of the model that is timed")
    parser.add_argument("--layers", type=int, default=12)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit(f"torch {torch.__version__} finds no GPU: --device cpu tries the program")
    with TemporaryDirectory() as path:
        # CUDA does not survive a fork.
        mp.start_processes(rank_process, (options, path), options.ranks, start_method="spawn")


if __name__ == "__main__":
    main()
