"""Libraries on top of torch.distributed give the same numbers as with gloo."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
from torch_versions import BASES, VERSION, needs_backends

pytest.importorskip("torch")
pytestmark = needs_backends

PROGRAM = str(Path(__file__).with_name("clients.py"))
FOUND = re.findall(r"^@client(?:_since\((\d+), (\d+)\).*)?\ndef (\w+)", Path(PROGRAM).read_text(), re.MULTILINE)
CLIENTS = [name for large, small, name in FOUND if VERSION >= (int(large or 0), int(small or 0))]
# Clients that take more than a minute on a busy machine.
SLOW = ["compiled"]
# Those with ranks in two directions, and a stage on each rank.
ON_FOUR = [name for name in ("hsdp", "tensor_parallel", "tensor_parallel_in_fsdp2", "pipeline") if name in CLIENTS]
QUICK = [name for name in CLIENTS if name not in (*SLOW, *ON_FOUR)]


def numbers(ways, clients, ranks):
    """The numbers of each client, for each backend, or base of drumline."""
    command = [sys.executable, "-m", "drumline", "run", "--nproc-per-node", ranks, "--"]
    done = subprocess.run(
        [*command, sys.executable, PROGRAM, ",".join(ways), *clients],
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(r"^\[0\] (\S+) (\w+): (.*)$", done.stdout, re.MULTILINE)
    return [
        {name: json.loads(result) for whose, name, result in found if whose == way} for way in ways
    ]


@pytest.mark.parametrize(
    ("clients", "ranks"),
    [(QUICK, "2"), (["ddp_once", *ON_FOUR], "4"), pytest.param(SLOW, "2", marks=pytest.mark.slow)],
    ids=["quick", "on_four", "slow"],
)
def test_the_numbers_are_those_of_gloo(clients, ranks):
    assert len(CLIENTS) >= 10 and set(SLOW) < set(CLIENTS)
    *all_ours, theirs = numbers([*(f"drumline/{base}" for base in BASES), "gloo"], clients, ranks)
    for ours in all_ours:
        assert list(ours) == list(theirs) == clients
        if VERSION < (2, 11):
            # Where FSDP2 asks for an average, gloo of an older torch sums. The numbers are those of DDP.
            theirs.update((name, ours["ddp_once"]) for name in ("fsdp2", "hsdp") if name in ours)
            if both := ours.get("tensor_parallel_in_fsdp2"):
                theirs["tensor_parallel_in_fsdp2"] = [both[1]] * 2
            if "checkpoint" in ours:
                theirs["checkpoint"] = ours["checkpoint"]  # compares by itself
        for name in clients:
            assert flat(ours[name]) == pytest.approx(flat(theirs[name]), rel=1e-6, abs=1e-9), name
            assert all(map(math.isfinite, flat(ours[name]))), name


def flat(value):
    """All numbers of a value."""
    if isinstance(value, dict):
        value = list(value.values())
    return [number for part in value for number in flat(part)] if isinstance(value, list) else [value]
