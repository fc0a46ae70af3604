"""Hosts on this machine, each with a network, processes, memory and a /tmp of its own."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from collections.abc import Sequence

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
SCRIPT = ROOT / "crates/drumline-testing/src/hosts.sh"


class Network:
    """Hosts 0, 1, ... of one network, until the context ends. Skips the test where this machine does not let us."""

    def __init__(self, count: int, directory: pathlib.Path, family: int = 4) -> None:
        """Hosts that all see ``directory``, with the addresses of IPv4 or of IPv6."""
        self.family, self.directory = family, directory
        seen = [str(directory), str(ROOT), sys.prefix, sys.base_prefix]
        self._maker = subprocess.Popen(["sh", str(SCRIPT), str(count), str(family), *seen],
                                       stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._maker.stdout is not None
        # First that of the bridge.
        self.pids = self._maker.stdout.readline().split()[1:]
        if len(self.pids) != count:
            self.close()
            assert "DRUMLINE_TEST_HOSTS" not in os.environ, "no hosts here: hosts.sh has said why"
            pytest.skip("this takes root and iproute2")

    def address(self, host: int) -> str:
        return f"198.18.0.{host + 1}" if self.family == 4 else f"fd00::{host + 1:x}"

    def endpoint(self, host: int, port: int) -> str:
        """As it stands in URLs and options."""
        return f"{self.address(host)}:{port}" if self.family == 4 else f"[{self.address(host)}]:{port}"

    def start(self, host: int, command: Sequence[str], **variables: str) -> subprocess.Popen[str]:
        """Starts a command on a host, in the directory that all hosts see."""
        enter = ["nsenter", "--target", self.pids[host], "--net", "--mount", "--uts", "--ipc", "--pid",
                 f"--wdns={self.directory}", "--"]
        return subprocess.Popen([*enter, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                env={**os.environ, "TMPDIR": "/tmp", **variables})

    def close(self) -> None:
        assert self._maker.stdin is not None
        self._maker.stdin.close()
        self._maker.wait()

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
