"""Times torch's gloo as `drumline bench` times drumline: the same sizes, turns and figures.

    python gloo_loop.py 2 100 all_reduce:8 all_gather:1048576

The counterpart of mpi_loop.c, whose comment says what is timed. Buffers are rewritten before each call. The figures
include the cost of a call from Python, some microseconds: gloo is reached only through Python here.
"""

import json
import resource
import socket
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

WARM_UP = 5
SAMPLES_MAX = 10_000


class Case:
    """One collective on this rank's buffers."""

    def __init__(self, operation: str, size: int, rank: int, ranks: int) -> None:
        count = size // 4
        block = count // ranks
        count = count if operation in ("all_reduce", "broadcast", "reduce") else block * ranks
        self.inputs = torch.zeros(block if operation == "all_gather" else count)
        self.outputs = torch.zeros(block if operation == "reduce_scatter" else count)
        values = torch.arange(self.inputs.numel()) % 4
        self.values = (values + rank).float()
        self.call, self.data, whole = {
            "all_reduce": (lambda: dist.all_reduce(self.inputs), self.inputs, True),
            "broadcast": (lambda: dist.broadcast(self.inputs, 0), self.inputs, False),
            "reduce": (lambda: dist.reduce(self.inputs, 0), self.inputs, True),
            "all_gather": (lambda: dist.all_gather_into_tensor(self.outputs, self.inputs), self.outputs, False),
            "reduce_scatter": (
                lambda: dist.reduce_scatter_tensor(self.outputs, self.inputs), self.outputs, True),
            "all_to_all": (lambda: dist.all_to_all_single(self.outputs, self.inputs), self.outputs, False),
        }[operation]
        places = torch.arange(self.data.numel())
        sources = torch.zeros_like(places)
        if operation in ("all_gather", "all_to_all"):
            sources, places = places // block, places % block
        if operation in ("reduce_scatter", "all_to_all"):
            places = places + rank * block
        values = places % 4
        self.expected = (values * ranks + sum(range(ranks)) if whole else values + sources).float()
        # Only the root of a reduce gets a result.
        self.has_result = operation != "reduce" or rank == 0

    def rewrite(self) -> None:
        self.inputs.copy_(self.values)

    def wrong(self) -> int:
        return int((self.data != self.expected).sum()) if self.has_result else 0


def measure(rank: int, ranks: int, port: int, turn_ms: float, cases: list[str]) -> None:
    store = dist.TCPStore("127.0.0.1", port, ranks, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    time_cases(turn_ms, cases)
    dist.destroy_process_group()


def time_cases(turn_ms: float, cases: list[str]) -> None:
    """Times the cases on the default group. Rank 0 prints a line for each."""
    torch.set_num_threads(1)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for text in cases:
        operation, size = text.split(":")
        case = Case(operation, int(size), rank, ranks)

        def once() -> tuple[float, int]:
            case.rewrite()
            dist.barrier()
            start = time.perf_counter()
            case.call()
            return time.perf_counter() - start, case.wrong()

        try:
            cycle = float("inf")
            for _ in range(WARM_UP):
                start = time.perf_counter()
                once()
                cycle = min(cycle, time.perf_counter() - start)
        except (RuntimeError, NotImplementedError) as error:
            # All ranks get here: the backend lacks this collective.
            if rank == 0:
                print(json.dumps({"operation": operation, "size": int(size), "absent": str(error)[:200]}))
            continue
        agreed = torch.tensor([cycle], dtype=torch.float64)
        dist.all_reduce(agreed, dist.ReduceOp.MAX)
        count = min(max(int(turn_ms / 1e3 / agreed.item()), 3), SAMPLES_MAX)
        samples = [once() for _ in range(count)]
        times = torch.tensor([sample[0] for sample in samples], dtype=torch.float64)
        dist.all_reduce(times, dist.ReduceOp.MAX)

        billed = max(2, int(0.02 / times.mean().item()))
        dist.barrier()
        before = resource.getrusage(resource.RUSAGE_SELF)
        for _ in range(billed):
            case.call()
        after = resource.getrusage(resource.RUSAGE_SELF)
        switches = (after.ru_nvcsw + after.ru_nivcsw) - (before.ru_nvcsw + before.ru_nivcsw)
        cpu = (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime)
        wrong = sum(sample[1] for sample in samples)
        sums = torch.tensor([cpu, float(switches), float(wrong)], dtype=torch.float64)
        dist.all_reduce(sums)
        if rank == 0:
            micros = (times * 1e6).sort().values
            print(json.dumps({
                "operation": operation,
                "size": int(size),
                "mean_us": micros.mean().item(),
                "median_us": micros[count // 2].item(),
                "p99_us": micros[int(0.99 * (count - 1))].item(),
                "min_us": micros[0].item(),
                "samples": count,
                "wrong": int(sums[2].item()),
                "cpu_s_per_gb": sums[0].item() / billed * 1e9 / int(size),
                "switches": sums[1].item() / billed,
            }), flush=True)


if __name__ == "__main__":
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free_port = probe.getsockname()[1]
    world_size = int(sys.argv[1])
    mp.spawn(measure, args=(world_size, free_port, float(sys.argv[2]), sys.argv[3:]), nprocs=world_size)
