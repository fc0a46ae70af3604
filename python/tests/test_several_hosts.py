"""Unmodified programs on hosts with networks of their own."""

from __future__ import annotations

import pathlib
import sys

import pytest
from hosts import Network

pytest.importorskip("torch")

# Joins one group after another.
PROGRAM = '''
import os, pathlib, sys
import numpy as np
import torch
import torch.distributed as dist

def train(wrap):
    torch.manual_seed(dist.get_rank())
    model = wrap(torch.nn.Linear(4, 1))
    model(torch.full((2, 4), dist.get_rank() + 1.0)).sum().backward()
    return model.module.weight.grad[0, 0].item()

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
tcp, directory = sys.argv[1], pathlib.Path.cwd()
for backend, init_method in [
    ("gloo", "env://"), ("drumline", "env://"), ("drumline", f"tcp://{tcp}"), ("drumline", f"file://{directory}/store"),
]:
    dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=size)
    numbers = torch.tensor([rank + 1.0])
    dist.all_reduce(numbers)
    is_ours = type(dist.group.WORLD._get_backend(torch.device("cpu"))).__module__.startswith("drumline")
    print(f"{backend} {init_method.split(':')[0]} ours={is_ours} sum {numbers.item():g}", flush=True)
    told = [train(torch.nn.parallel.DistributedDataParallel)]
    if backend == "drumline":
        import drumline
        told.append(train(drumline.DistributedDataParallel))
        pair = dist.new_group([0, size - 1])
        if rank in (0, size - 1):
            dist.all_reduce(numbers, group=pair)
    print(f"averages {told}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
with drumline.init_process_group() as group:
    numbers = np.array([rank + 1.0])
    drumline.all_reduce(numbers)
    print(f"numpy sum {numbers[0]:g}", flush=True)
'''


@pytest.mark.parametrize(("family", "ranks", "options", "variables"), [
    (4, 2, ["--rdzv-backend", "c10d", "--rdzv-endpoint", "HOST0"], {}),
    (4, 1, ["--rdzv-backend", "file", "--rdzv-endpoint", "FILE", "--torch-store", "network"],
     {"DRUMLINE_REPLACE_GLOO": "1"}),
    (6, 1, ["--rdzv-backend", "c10d", "--rdzv-endpoint", "HOST0"], {}),
])
def test_unmodified_programs_of_torch_sum_and_train(
    tmp_path: pathlib.Path, family: int, ranks: int, options: list[str], variables: dict[str, str]
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    with Network(2, tmp_path, family) as network:
        places = {"HOST0": network.endpoint(0, 29400), "FILE": str(tmp_path / "meet")}
        options = [places.get(option, option) for option in options]
        run = [sys.executable, "-m", "drumline", "run", "--nnodes", "2", "--nproc-per-node", str(ranks), *options]
        program = ["--rdzv-conf", "join_timeout=60", "program.py", network.endpoint(0, 29511)]
        secret = {"DRUMLINE_SECRET": "of the hosts of this test", "PYTHON_EXEC": sys.executable}
        hosts = [network.start(host, [*run, "--node-rank", str(host), *program], **secret, **variables)
                 for host in range(2)]
        size = 2 * ranks
        total, mean = size * (size + 1) / 2, size + 1
        for host in hosts:
            stdout, stderr = host.communicate(timeout=300)
            assert host.returncode == 0, stderr
            gloo = "DRUMLINE_REPLACE_GLOO" in variables
            for line in [f"gloo env ours={gloo} sum {total:g}", f"averages [{mean:.1f}]",
                         *(f"drumline {kind} ours=True sum {total:g}" for kind in ("env", "tcp", "file"))]:
                assert stdout.count(line) == ranks, f"{line}: {stdout}"
            assert stdout.count(f"averages [{mean:.1f}, {mean:.1f}]") == 3 * ranks, stdout
            assert stdout.count(f"numpy sum {total:g}") == ranks, stdout
