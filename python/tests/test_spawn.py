"""Ranks as processes of a program."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import drumline


def summing(rank, add):
    drumline.init_process_group()
    data = np.array([rank + add])
    drumline.all_reduce(data)
    assert data.item() == 2 * add + 1
    drumline.destroy_process_group()


def test_spawned_processes_connect():
    drumline.spawn(summing, (5,), nprocs=2)


def listeners(pid):
    """The TCP sockets on which a process listens."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(descriptor))
    lines = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
    ]
    return [line[1] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in inodes]


def told(rank, reports):
    drumline.init_process_group()
    drumline.barrier()
    names = ("DRUMLINE_STORE", "DRUMLINE_SECRET", "MASTER_ADDR", "MASTER_PORT")
    place = {name: os.environ[name] for name in names if name in os.environ}
    reports.put((place, [listeners("self"), listeners(os.getppid())]))
    drumline.barrier()
    drumline.destroy_process_group()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_spawned_job_listens_on_no_tcp_port_and_has_a_secret(method, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "of-an-outer-job")
    reports = multiprocessing.get_context(method).SimpleQueue()
    job = drumline.spawn(told, (reports,), nprocs=2, start_method=method, join=False)
    (first, listening), (second, others) = reports.get(), reports.get()
    assert listening == others == [[], []]
    assert first == second and set(first) == {"DRUMLINE_STORE", "DRUMLINE_SECRET"}
    assert first["DRUMLINE_STORE"].startswith("unix:@") and len(first["DRUMLINE_SECRET"]) == 64
    assert "DRUMLINE_SECRET" not in os.environ
    while not job.join():
        pass


def test_a_spawned_job_uses_the_users_own_secret(monkeypatch):
    monkeypatch.setenv("DRUMLINE_SECRET", "chosen-by-the-user-0001")
    reports = multiprocessing.get_context("fork").SimpleQueue()
    drumline.spawn(told, (reports,), nprocs=2, start_method="fork")
    assert reports.get()[0]["DRUMLINE_SECRET"] == "chosen-by-the-user-0001"


STRANGER = """
import os, sys, drumline
try:
    drumline.init_process_group(timeout=5)
except drumline.DrumlineError as error:
    sys.exit(f"refused: {error}")
"""


def with_a_stranger(rank, reports):
    if rank == 1:
        for secret in ("guessed-by-a-stranger-1", None):
            variables = {**os.environ, "DRUMLINE_SECRET": secret or ""}
            if secret is None:
                del variables["DRUMLINE_SECRET"]
            done = subprocess.run(
                [sys.executable, "-c", STRANGER], capture_output=True, text=True, env=variables, timeout=60
            )
            reports.put((done.returncode, done.stderr))
    summing(rank, 5)


def test_a_stranger_without_the_secret_is_refused_and_the_job_goes_on():
    reports = multiprocessing.get_context("fork").SimpleQueue()
    drumline.spawn(with_a_stranger, (reports,), nprocs=2, start_method="fork")
    for _ in range(2):
        code, error = reports.get()
        # One is refused by the store; the other is told before it asks.
        assert code == 1 and ("refused: " in error or "asks for the job's secret" in error), error


def failing(rank, how):
    drumline.init_process_group()
    if rank == 1:
        if how == "raises":
            raise RuntimeError("out of patience")
        if how == "exits":
            os._exit(3)
        os.kill(os.getpid(), signal.SIGKILL)
    drumline.barrier()


@pytest.mark.parametrize(
    ("how", "text", "code"),
    [("raises", "out of patience", 1), ("exits", "code 3|rank 1", None), ("dies", "signal 9|rank 1", None)],
)
def test_the_failure_is_that_of_the_rank(how, text, code):
    with pytest.raises(drumline.ProcessRaisedError, match=text) as raised:
        drumline.spawn(failing, (how,), nprocs=2)
    if code is not None:
        assert (raised.value.error_index, raised.value.exit_code) == (1, code)
