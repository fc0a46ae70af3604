"""Whole programs, under the launcher and torchrun."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = str(Path(__file__).with_name("launched.py"))
DRUMLINE = [sys.executable, "-m", "drumline", "run", "--nproc-per-node", "2", "--", sys.executable]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
LAUNCHERS = {"drumline run": DRUMLINE, "torchrun": TORCHRUN}


def launch(launcher, *args, expected=0):
    done = subprocess.run(
        [*LAUNCHERS[launcher], PROGRAM, *args], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == expected, done.stdout + done.stderr
    return done.stdout, done.stderr


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_script_needs_nothing_but_the_name(launcher):
    pytest.importorskip("torch")
    out, _ = launch(launcher, "sum_of_ranks")
    assert out.count("sum [1.0, 1.0] backend drumline") == 2, out


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_program_may_end_without_taking_leave(launcher):
    pytest.importorskip("torch")
    _, errors = launch(launcher, "without_destroy")
    assert "Error" not in errors and "panic" not in errors, errors


def test_the_direct_api_needs_no_torch():
    out, errors = launch("drumline run", "own_api")
    assert out.count("sum [3] False") == 2, out
    assert errors == ""


def test_a_rank_that_raises_is_named_and_its_exit_code_is_the_jobs():
    out, errors = launch("drumline run", "one_raises", expected=1)
    assert "out of patience" in errors
    assert "rank 1" in errors and "exited with code 1" in errors, errors


def test_ddp_trains_as_with_gloo():
    pytest.importorskip("torch")
    found = {}
    for backend in ("gloo", "drumline"):
        out, _ = launch("drumline run", "ddp", backend)
        digests = re.findall(r"parameters (\w+)", out)
        assert len(digests) == 2 and digests[0] == digests[1], out
        found[backend] = [float(loss) for loss in re.findall(r"loss (\S+)", out)]
    assert len(found["gloo"]) == 50 and all(map(math.isfinite, found["gloo"]))
    assert found["drumline"] == pytest.approx(found["gloo"], rel=1e-6, abs=1e-9)


def test_help_is_no_error():
    done = subprocess.run(
        [sys.executable, "-m", "drumline", "--help"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and "run" in done.stdout
    done = subprocess.run(
        [sys.executable, "-m", "drumline", "run"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2 and "PROGRAM" in done.stderr
