"""What is built on torch.distributed has the same numbers as with gloo."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

PROGRAM = str(Path(__file__).with_name("clients.py"))
CLIENTS = re.findall(r"^@client\ndef (\w+)", Path(PROGRAM).read_text(), re.MULTILINE)
# Those that take more than a minute on a busy machine: only by DRUMLINE_SLOW_TESTS=1.
SLOW = {"compiled"}


def numbers(backend, clients):
    command = [sys.executable, "-m", "drumline", "run", "--nproc-per-node", "2", "--"]
    done = subprocess.run(
        [*command, sys.executable, PROGRAM, backend, *clients],
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return re.findall(r"^\[0\] (\w+: .*)$", done.stdout, re.MULTILINE)


def test_the_numbers_are_those_of_gloo():
    slow_too = os.environ.get("DRUMLINE_SLOW_TESTS", "0") != "0"
    clients = [name for name in CLIENTS if slow_too or name not in SLOW]
    assert len(clients) > 10
    ours, theirs = numbers("drumline", clients), numbers("gloo", clients)
    assert len(ours) == len(clients)
    assert ours == theirs
