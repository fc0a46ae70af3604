"""A torch without backends in Python is told so, and is not harmed; drumline's own goes on with it."""

from __future__ import annotations

import subprocess
import sys

import pytest
from torch_versions import HAS_BACKENDS

torch = pytest.importorskip("torch")

# One that is older, or says so.
PROGRAM = """
import os, sys, warnings
import torch, torch.distributed as dist
if sys.argv[1] == "pretend":
    dist.Backend._plugins.pop("DRUMLINE")
    torch.__version__ = "2.13.1+cpu"
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    os.environ["DRUMLINE_REPLACE_GLOO"] = "1"
    import drumline.ddp
print(*(it.message for it in said))
from drumline.torch.register import register
for ask in (
    register,
    lambda: dist.init_process_group("drumline", store=dist.HashStore(), rank=0, world_size=1),
):
    try:
        ask()
    except ImportError as error:
        print(error)
"""


@pytest.fixture(scope="module")
def said() -> list[str]:
    how = "pretend" if HAS_BACKENDS else "real"
    command = [sys.executable, "-c", PROGRAM, how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_who_asks_for_the_backend_is_told_what_torch_lacks(said):
    version = "2.13.1" if HAS_BACKENDS else torch.__version__
    assert len(said) == 3, said
    for line in said:
        assert f"needs torch 2.14 or newer, and this is {version}" in line, line
        assert "DistributedDataParallel" in line, line
    assert "cannot take the place of gloo" in said[0]
