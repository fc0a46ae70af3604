"""HaiScale's names."""

from __future__ import annotations

import importlib
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from ddp_models import bits, connect, network, train
from ranks import run

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

PROGRAM = str(Path(__file__).parents[2] / "examples" / "python" / "haiscale_loop.py")


def with_reducer(rank, world_size, directory):
    from drumline.compat.haiscale import AsyncReduceFloat

    leave = connect(rank, world_size, directory, "gloo")
    out = []
    for sync_backward in (True, False):
        model = network()
        reducer = AsyncReduceFloat(
            "127.0.0.1", 1, rank, world_size, 0, 1, model, sync_backward=sync_backward
        )
        x = torch.full((3, 12), rank + 1.0)
        reducer.sync_grad = False
        model(x).sum().backward()
        alone = [it.grad.clone() for it in model.parameters()]
        reducer.sync_grad = True
        model.zero_grad()
        outputs = model[0](x)  # the other layers take no part
        reducer.filter_unused_parameters(outputs)
        outputs.sum().backward()
        reducer.synchronize()
        averaged = model[0].weight.grad.unique().tolist()
        unused = [it.grad is None for it in model[1:].parameters()]
        reducer.stop()
        out.append((averaged, unused, alone[0].shape == model[0].weight.shape))
    leave()
    return out


def test_the_reducer_of_hfreduce():
    for out in run(2, with_reducer):
        assert out == [([4.5], [True] * 4, True)] * 2


def alone_with_a_port(rank, world_size, directory, port):
    from drumline.compat.haiscale import AsyncReduceFloat

    model = torch.nn.Linear(2, 2, bias=False)
    reducer = AsyncReduceFloat("127.0.0.1", port, rank, world_size, 0, 1, model, True)
    model(torch.full((1, 2), rank + 1.0)).sum().backward()
    reducer.stop()
    return model.weight.grad.tolist()


def test_the_reducer_meets_at_a_port_without_torchs_group():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert run(2, alone_with_a_port, port) == [[[1.5, 1.5]] * 2] * 2


def installed(rank, world_size, directory):
    from drumline.compat import haiscale

    haiscale.install()
    theirs = importlib.import_module("haiscale.ddp").DistributedDataParallel
    assert importlib.import_module("hfreduce.torch").AsyncReduceFloat is haiscale.AsyncReduceFloat
    with pytest.raises(RuntimeError, match="not initialized yet"):
        theirs(network())
    leave = connect(rank, world_size, directory, "gloo")
    model = theirs(network().cuda(), [rank], True, dist.group.WORLD, False)
    assert model.broadcast_buffers and not model.parameters_to_ignore and not model.find_unused_parameters
    assert model.broadcast_bucket_size == 250 << 20 and model.process_group is dist.group.WORLD
    model._sync_params_and_buffers()
    losses = train(model, rank, steps=5)
    model.reducer.stop()
    leave()
    return losses, bits(model), (model.device, next(model.parameters()).device.type)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_programs_find_drumline_under_haiscales_names():
    first, second = run(2, installed)
    assert first[1] == second[1] and (first[2], second[2]) == ((0, "cpu"), (1, "cpu"))
    assert first[0] != second[0]


def test_a_program_of_haiscales_runs_unchanged():
    command = [sys.executable, "-m", "drumline", "run", "--nproc-per-node", "2", "--"]
    done = subprocess.run(
        [*command, sys.executable, "-m", "drumline.compat.haiscale", PROGRAM],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split("] ", 1)[-1] for line in done.stdout.splitlines() if "parameters" in line]
    assert len(lines) == 2 and lines[0] == lines[1], done.stdout
    losses = [float(it) for it in re.findall(r"^\[0\] epoch \d: loss (\S+)$", done.stdout, re.M)]
    assert len(losses) == 4 and losses[-1] < losses[0] / 2, done.stdout
    assert done.stderr.count("no GPU") >= 1, done.stderr


# Nothing is imported at the top, so that every process has to find the modules by itself.
WITH_CHILDREN = """
import importlib.util, multiprocessing, subprocess, sys

FIND = "import importlib.util as it; print([it.find_spec(name).origin for name in ('haiscale', 'hfreduce')])"

def find():
    exec(FIND, {})

def train(rank):
    import torch
    torch.cuda.set_device(rank + 1)
    model = torch.nn.Linear(2, 1).to(f"cuda:{rank}")
    from haiscale.ddp import DistributedDataParallel
    import hfreduce.torch
    import torch.distributed as dist
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = DistributedDataParallel(model, device_ids=[rank])
    model(torch.ones(1, 2, device="cuda").to(rank)).sum().backward()
    print("trained", torch.cuda.current_device(), model.device, model.module.weight.grad.tolist(), flush=True)
    model.reducer.stop()

if __name__ == "__main__":
    assert "torch" in sys.modules  # where programs run
    import torch
    torch.multiprocessing.spawn(train, nprocs=1)
    process = multiprocessing.get_context("forkserver").Process(target=find)
    process.start()
    process.join()
    assert process.exitcode == 0
    subprocess.run([sys.executable, "-c", FIND], check=True)
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_processes_that_a_program_starts_find_the_modules(tmp_path):
    (tmp_path / "program.py").write_text(WITH_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "drumline.compat.haiscale", "program.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    trained, *found = done.stdout.splitlines()
    assert trained == "trained 1 0 [[1.0, 1.0]]" and len(found) == 2, done.stdout
    for line in found:
        assert line.count("/drumline/compat/packages/") == 2, line


def test_every_way_to_import_it_works():
    program = """
import drumline
drumline.ddp.fp16_compress, drumline.device.DeviceGroup, drumline.launch.LaunchConfig, drumline.stores.Store
import drumline.compat.haiscale as here
here.install()
import haiscale.ddp, haiscale.ddp.ddp
from haiscale.ddp import ddp, DistributedDataParallel
from haiscale.ddp.ddp import DistributedDataParallel as same
assert same is DistributedDataParallel is haiscale.ddp.ddp.DistributedDataParallel is here.DistributedDataParallel
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
