"""Unmodified programs of torch on two hosts: two launchers of this machine."""

from __future__ import annotations

import os
import pathlib
import socket
import subprocess
import sys

import pytest

pytest.importorskip("torch")

PROGRAM = '''
import os
import torch
import torch.distributed as dist

dist.init_process_group(os.environ["BACKEND"])
numbers = torch.full((3,), dist.get_rank() + 1.0)
dist.all_reduce(numbers)
print("sum", numbers.tolist(), os.environ["MASTER_ADDR"], flush=True)
dist.destroy_process_group()
'''


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.mark.parametrize(("backend", "store"), [("gloo", "user"), ("gloo", "network"), ("drumline", "user")])
def test_ranks_of_two_hosts_sum(tmp_path: pathlib.Path, backend: str, store: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM if backend == "gloo" else "import drumline.torch\n" + PROGRAM)
    endpoint = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "drumline", "run", "--nnodes", "2", "--nproc-per-node", "2", "--torch-store", store,
               "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-conf", "join_timeout=60", str(program)]
    environment = os.environ | {"BACKEND": backend, "DRUMLINE_SECRET": "of the hosts of this test",
                                "PYTHON_EXEC": sys.executable}
    hosts = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
             for _ in range(2)]
    for host in hosts:
        stdout, stderr = host.communicate(timeout=180)
        assert host.returncode == 0, stderr
        assert stdout.count("sum [10.0, 10.0, 10.0] 127.0.0.1") == 2, stdout
