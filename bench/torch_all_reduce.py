"""Times dist.all_reduce on drumline (also with tensors of `alloc_registered`) and on gloo, in turns, in the same
processes.

    drumline run --nproc-per-node 2 -- python bench/torch_all_reduce.py [--rounds 9] [--sizes 4,67108864]

A round times every way once for each size, one after the other (A B A B), so that all see the same moods of the
machine. Buffers are rewritten before each call, as in training, and every result is checked. The time of a call runs
from a barrier to the end of the slowest rank. The figure of a round is the median of its calls. Build drumline for
release: `make bench-torch`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist

import drumline

WAYS = ["drumline", "registered", "gloo"]
# For one way and size in a round.
TURN_S, CALLS_MIN, CALLS_MAX, WARM_UP = 0.4, 5, 2000, 5
# Goals by size in bytes: how many times as fast as gloo.
GOALS = {4: 3.0, 64 << 20: 8.0}


class Case:
    """One size and one way, with the buffer of all its calls."""

    def __init__(self, size: int, way: str, group: Any) -> None:
        self.group = group
        ranks, rank = dist.get_world_size(), dist.get_rank()
        pattern = torch.arange(max(size // 4, 1)) % 5
        self.values = (pattern + rank).float()
        self.expected = (pattern * ranks + sum(range(ranks))).float()
        if way == "registered":
            self.data = drumline.alloc_registered(self.values.shape, self.values.dtype, group)
        else:
            self.data = torch.empty_like(self.values)

    def once(self) -> float:
        """Seconds for a call on this rank."""
        self.data.copy_(self.values)
        dist.barrier(group=self.group)
        start = time.perf_counter()
        dist.all_reduce(self.data, group=self.group)
        seconds = time.perf_counter() - start
        if not torch.equal(self.data, self.expected):
            raise SystemExit(f"{dist.get_backend(self.group)}: the sum is wrong")
        return seconds

    def turn(self) -> float:
        """The median time of some calls, in seconds."""
        cycle = min(self._timed_cycle() for _ in range(WARM_UP))
        calls = agreed(min(max(int(TURN_S / cycle), CALLS_MIN), CALLS_MAX))
        times = torch.tensor([self.once() for _ in range(calls)], dtype=torch.float64)
        dist.all_reduce(times, dist.ReduceOp.MAX)
        return times.median().item()

    def _timed_cycle(self) -> float:
        start = time.perf_counter()
        self.once()
        return time.perf_counter() - start


def agreed(count: int) -> int:
    """The smallest of all ranks' numbers, on every rank."""
    least = torch.tensor([count])
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return int(least)


def shown(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def figure(rounds: list[float]) -> str:
    """The median of the rounds, with the fastest and the slowest round."""
    return f"{shown(statistics.median(rounds))} ({shown(min(rounds))}–{shown(max(rounds))})"


def main() -> None:
    parser = argparse.ArgumentParser(description="Times dist.all_reduce on drumline and on gloo.")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--sizes", default="4,1024,65536,1048576,67108864", help="bytes")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("drumline")
    groups = {
        way: dist.new_group(backend="gloo" if way == "gloo" else "drumline") for way in WAYS
    }
    if dist.get_rank() == 0:
        ranks = dist.get_world_size()
        print(f"dist.all_reduce of f32, {ranks} ranks, torch {torch.__version__}, {args.rounds} rounds\n")
        print("| bytes | " + " | ".join([*WAYS, "times as fast", "registered", "goal"]) + " |")
        print("|--:" * (len(WAYS) + 4) + "|")
    for size in map(int, args.sizes.split(",")):
        cases = {way: Case(size, way, group) for way, group in groups.items()}
        rounds: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(args.rounds):
            for way, case in cases.items():
                rounds[way].append(case.turn())
        if dist.get_rank() == 0:
            ours, registered, theirs = (statistics.median(rounds[way]) for way in WAYS)
            cells = [figure(rounds[way]) for way in WAYS]
            cells += [f"{theirs / ours:.1f}", f"{theirs / registered:.1f}"]
            cells += [f"{GOALS[size]:g}" if size in GOALS else ""]
            print(f"| {size} | {' | '.join(cells)} |", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
