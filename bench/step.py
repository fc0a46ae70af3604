"""Draws one training step of drumline's DDP on two ranks: what each rank computes, and which buckets travel meanwhile.

    python bench/step.py            # trains some steps, keeps the times of the fastest one, draws them
    python bench/step.py --draw     # draws what was kept

Buckets are those of the trace of the job. The parts of the step are timed by its program, by the same clock.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

from picture import timeline

DOCS = pathlib.Path(__file__).parent.parent / "docs"
KEPT, DRAWN = DOCS / "notes/step.json", DOCS / "step.svg"
RANKS, STEPS = 2, 15


def train(out: pathlib.Path) -> None:
    """What a rank does. Writes when the parts of each step began and ended."""
    import torch
    import torch.distributed as dist
    from ddp_step import batch, mlp
    from drumline import DistributedDataParallel

    torch.set_num_threads(1)
    dist.init_process_group("drumline")
    model = DistributedDataParallel(mlp(), bucket_cap_mb=16, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    generator = torch.Generator().manual_seed(dist.get_rank())
    steps = []
    for _ in range(STEPS):
        x, y = batch("mlp", generator)
        optimizer.zero_grad()
        dist.barrier()
        times = [time.perf_counter_ns()]
        loss = torch.nn.functional.cross_entropy(model(x), y)
        times.append(time.perf_counter_ns())
        loss.backward()
        times.append(time.perf_counter_ns())
        optimizer.step()
        times.append(time.perf_counter_ns())
        computed = times[1] + model._get_ddp_logging_data()["backward_compute_time"]
        steps.append([["forward", times[0], times[1]], ["backward", times[1], computed],
                      ["waiting", computed, times[2]], ["optimizer", times[2], times[3]]])
    (out / f"steps-{dist.get_rank()}.json").write_text(json.dumps(steps))
    model.reducer.stop()
    dist.destroy_process_group()


def measure() -> dict[str, list]:
    """The parts and buckets of the fastest step, in ms since it began, by rank: (name, begin, end)."""
    with tempfile.TemporaryDirectory() as folder:
        job = ["-m", "drumline", "run", "--nproc-per-node", str(RANKS), "--", sys.executable, __file__, "--rank", folder]
        subprocess.run([sys.executable, *job], check=True, env={**os.environ, "DRUMLINE_TRACE": folder})
        read = lambda name: json.loads((pathlib.Path(folder) / name).read_text())
        steps = [read(f"steps-{rank}.json") for rank in range(RANKS)]
        traces = [read(f"rank-{rank}.json") for rank in range(RANKS)]
    by_step = list(zip(*steps))
    fastest = min(by_step, key=lambda ranks: max(parts[-1][2] - parts[0][1] for parts in ranks))
    zero = min(parts[0][1] for parts in fastest)
    in_ms = lambda bars: [[name, round((begin - zero) / 1e6, 3), round((end - zero) / 1e6, 3)] for name, begin, end in bars]
    return {f"rank {rank}": [in_ms(parts), in_ms(buckets(events, parts[0][1], parts[-1][2]))]
            for rank, (parts, events) in enumerate(zip(fastest, traces))}


def buckets(events: list[dict], begin: int, end: int) -> list[tuple[str, int, int]]:
    """The buckets of a trace that travelled between two times: size, begin and end."""
    begun, found = {}, []
    for event in events:
        ns = round(event.get("ts", 0) * 1000)
        if event.get("cat") != "bucket" or not begin <= ns <= end:
            continue
        if event["ph"] == "b":
            begun[event["id2"]["local"]] = (f"{event['args']['bytes'] / 1e6:.0f} MB", ns)
        elif event["id2"]["local"] in begun:
            found.append((*begun.pop(event["id2"]["local"]), ns))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--draw", action="store_true", help="only draw what was kept")
    parser.add_argument("--rank", type=pathlib.Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        return train(options.rank)
    if not options.draw:
        KEPT.write_text(json.dumps(measure(), indent=1) + "\n")
    DRAWN.write_text(drawn())


def drawn() -> str:
    return timeline("One step of DDP, MLP of 40 million parameters, 2 ranks on 2 cores", json.loads(KEPT.read_text()))


if __name__ == "__main__":
    main()
