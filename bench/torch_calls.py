"""Times torch's collectives on CPU tensors, one call right behind the other, on drumline, on gloo, and on two backends
that do nothing: torch's own `fake`, and one in Python, which is the least that a backend in Python costs.

    drumline run --nproc-per-node 2 -- python bench/torch_calls.py [--rounds 9] [--only all_reduce]

A round times every backend once for each case, one after the other (A B A B), so that all see the same moods of the
machine. The figure of a round is the median of its many calls, on the slowest rank. The table has the median of the
rounds, with the fastest and the slowest round. Each backend's group is the default group while it is timed, as in most
programs. Build drumline for release: `make bench-torch`.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch_all_reduce import figure

import drumline  # noqa: F401  (registers the backend)

BACKENDS = ["drumline", "idle", "fake", "gloo"]
# For one backend and case in a round.
TURN_S, CALLS_MIN, CALLS_MAX, WARM_UP = 0.1, 3, 5000, 3


class Work(dist.Work):
    """A call that has ended."""

    def wait(self, timeout: Any = None) -> bool:
        return True


class Idle(getattr(torch._C._distributed_c10d, "Backend")):  # noqa: B009  (older ones have another class)
    """A backend in Python that does nothing."""

    def getBackendName(self) -> str:  # noqa: N802  (torch's name)
        return "idle"

    def call(self, *given: Any) -> Work | None:
        return Work() if given[-1].asyncOp else None

    allreduce = broadcast = all_gather_single = reduce_scatter_single = barrier = call


def cases(sizes: list[int]) -> dict[str, Callable[[], object]]:
    """The calls by their names. Every tensor of the sizes is what one rank brings."""
    found: dict[str, Callable[[], object]] = {"barrier": dist.barrier}
    for size in sizes:
        own, all_ranks = torch.ones(size // 4), torch.ones(dist.get_world_size() * size // 4)

        def begin(own: torch.Tensor = own) -> None:
            dist.all_reduce(own, async_op=True).wait()  # type: ignore[union-attr]

        found |= {
            f"all_reduce {size} B": lambda own=own: dist.all_reduce(own, dist.ReduceOp.MAX),
            f"all_reduce {size} B, async": begin,
        }
        if size == sizes[0]:
            found |= {
                f"broadcast {size} B": lambda own=own: dist.broadcast(own, 0),
                f"all_gather_into_tensor {size} B": lambda own=own, all_ranks=all_ranks: dist.all_gather_into_tensor(
                    all_ranks, own
                ),
                f"reduce_scatter_tensor {size} B": lambda own=own, all_ranks=all_ranks: dist.reduce_scatter_tensor(
                    own, all_ranks, dist.ReduceOp.MAX
                ),
            }
    return found


def seconds_of(call: Callable[[], object], calls: int) -> float:
    """The time of a call on this rank: the median of some, of which each is begun when the one before has ended."""
    times = [time.perf_counter()]
    for _ in range(calls):
        call()
        times.append(time.perf_counter())
    return statistics.median(after - before for before, after in itertools.pairwise(times))


def turn(call: Callable[[], object], group: Any, world: Any) -> float:
    """The time of a call, on the slowest rank."""
    dist.GroupMember.WORLD = group
    cycle = min(seconds_of(call, 1) for _ in range(WARM_UP))
    dist.GroupMember.WORLD = world
    calls = torch.tensor(min(max(int(TURN_S / cycle), CALLS_MIN), CALLS_MAX))
    dist.all_reduce(calls, dist.ReduceOp.MIN)
    dist.GroupMember.WORLD = group
    seconds = torch.tensor(seconds_of(call, int(calls)), dtype=torch.float64)
    dist.GroupMember.WORLD = world
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item()


def main() -> None:
    parser = argparse.ArgumentParser(description="Times torch's collectives, one right behind the other.")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--sizes", default="4,65536,1048576,67108864", help="bytes")
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--without", default="", help="backends to leave out")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.Backend.register_backend(
        "idle", lambda options, _: Idle(options.group_rank, options.group_size), extended_api=True, devices=["cpu"]
    )
    # It is torch's, for tests.
    from torch.testing._internal.distributed import fake_pg  # noqa: F401

    dist.init_process_group("drumline")
    world = dist.GroupMember.WORLD
    backends = [name for name in BACKENDS if name not in args.without.split(",")]
    groups = {name: dist.new_group(backend=name) for name in backends}
    is_first = dist.get_rank() == 0
    if is_first:
        print(f"{dist.get_world_size()} ranks, f32, torch {torch.__version__}, {args.rounds} rounds\n")
        print(f"| call | {' | '.join(backends)} |")
        print("|---" + "|---:" * len(backends) + "|")
    for name, call in cases([int(size) for size in args.sizes.split(",")]).items():
        if args.only not in name:
            continue
        rounds: dict[str, list[float]] = {name: [] for name in backends}
        for _ in range(args.rounds):
            for backend, group in groups.items():
                rounds[backend].append(turn(call, group, world))
        if is_first:
            print(f"| {name} | {' | '.join(figure(rounds[backend]) for backend in backends)} |", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
