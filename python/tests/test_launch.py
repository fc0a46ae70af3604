"""Whole programs, under the launcher and torchrun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from torch_versions import needs_backends, needs_entry_points, needs_torchrun

PROGRAM = str(Path(__file__).with_name("launched.py"))
DRUMLINE = [sys.executable, "-m", "drumline", "run", "--nproc-per-node", "2", "--", sys.executable]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
LAUNCHERS = {"drumline run": DRUMLINE, "torchrun": TORCHRUN}


def launch(launcher, *args, expected=0, **environment):
    done = subprocess.run(
        [*LAUNCHERS[launcher], PROGRAM, *args],
        capture_output=True, text=True, timeout=300, env={**os.environ, **environment},
    )  # fmt: skip
    assert done.returncode == expected, done.stdout + done.stderr
    return done.stdout, done.stderr


@pytest.mark.parametrize(
    ("launcher", "backends", "environment"),
    [
        ("drumline run", ["cpu:drumline"], {}),
        ("torchrun", ["drumline", "gloo"], {"DRUMLINE_REPLACE_GLOO": "1"}),
    ],
)
@needs_entry_points
@needs_backends
def test_a_script_needs_nothing_but_the_name_and_may_just_end(launcher, backends, environment):
    out, errors = launch(launcher, "unmodified", *backends, **environment)
    for backend in backends:
        assert out.count(f"sum [1, 1] of {backend}") == 2, out
    assert "Error" not in errors and "panic" not in errors, errors


@needs_backends
def test_the_interpreter_ends_when_callbacks_have_returned():
    out, errors = launch("drumline run", "callbacks")
    # On a slow machine the client of torch's store warns.
    of_others = [line for line in errors.splitlines() if "[c10d]" not in line]
    assert out.count("told") == 8 and not of_others, out + errors


def test_the_direct_api_needs_no_torch():
    out, errors = launch("drumline run", "own_api")
    assert out.count("sum [3] False") == 2, out
    assert errors == ""


@needs_torchrun
def test_programs_that_know_no_torch_run_under_torchrun():
    out, _ = launch("torchrun", "own_api")
    assert out.count("sum [3] False") == 2, out
    # A program in Rust: its ranks meet in torch's store, and print nothing if they are alone.
    command = str(Path(sys.executable).with_name("drumline"))
    measure = ["bench", "all_reduce", "--sizes", "8", "--iters", "1", "--rounds", "1"]
    done = subprocess.run(
        [*TORCHRUN, "--no-python", command, *measure], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 ranks on 1 host" in done.stdout and "wrong elements: 0 OK" in done.stdout, done.stdout


def test_a_rank_that_raises_is_named_and_its_exit_code_is_the_jobs():
    out, errors = launch("drumline run", "one_raises", expected=1)
    assert "out of patience" in errors
    assert "rank 1" in errors and "exited with code 1" in errors, errors


def test_control_c_ends_the_job():
    job = subprocess.Popen(
        [*DRUMLINE, PROGRAM, "waits"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    assert job.stdout is not None
    for _ in range(2):
        assert "waits" in job.stdout.readline()
    os.killpg(job.pid, signal.SIGINT)  # as a terminal does
    _, errors = job.communicate(timeout=60)
    assert job.returncode == 128 + signal.SIGINT, errors
    assert "KeyboardInterrupt" in errors and "panic" not in errors, errors


def test_the_command_is_no_python_script_and_starts_the_python_beside_it(tmp_path: Path):
    command = Path(sys.executable).with_name("drumline")
    assert command.read_bytes().startswith(b"\x7fELF")
    script = tmp_path / "which.py"
    script.write_text("import sys, drumline; print(sys.prefix, sys.argv[1:])")
    for how, arguments in (
        ([command, "run"], []),
        ([command, "launch"], ["--local-rank=0"]),
        ([sys.executable, "-m", "drumline.launch"], ["--local-rank=0"]),
    ):
        done = subprocess.run(
            [*how, script], env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, timeout=60
        )
        assert done.stdout == f"[0] {sys.prefix} {arguments}\n", done.stdout + done.stderr


def test_help_is_no_error():
    done = subprocess.run(
        [sys.executable, "-m", "drumline", "--help"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and "run" in done.stdout
    done = subprocess.run(
        [sys.executable, "-m", "drumline", "run"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2 and "PROGRAM" in done.stderr


def test_the_check_tries_numpy_and_torch():
    done = subprocess.run(
        [sys.executable, "-m", "drumline.check"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ok: 2 processes on numpy\n" in done.stdout, done.stdout
    why_not = "torch is not installed", "backend was not tried: "
    assert "as backend of torch" in done.stdout or any(it in done.stdout for it in why_not)
    assert "FAILED" not in done.stdout and "all_reduce " in done.stdout, done.stdout
