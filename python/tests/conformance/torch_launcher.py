"""PyTorch's own tests of its launcher, on drumline: python torch_launcher.py DIRECTORY

DIRECTORY is test/distributed/launcher of the sources of PyTorch, in the version that is installed. The tests get
drumline's `elastic_launch`, `LaunchConfig` and errors in place of torch's, and `drumline run` in place of
torch.distributed.run. The exit code is 1 if a test fails that is not named below. docs/notes/launcher-tests.md has the
result.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from pathlib import Path

from drumline import _core
from drumline.launch import agent
from drumline.launch.failures import ChildFailedError

MODULES = ("api_test", "launch_test", "test_run")

# Tests that cannot pass, and why.
_AGENT = "replaces torch's agent by a mock, and looks at the calls that it gets"
_EVENTS = "ranks fail as they should; then it counts torch's events, which are not there"
_DEVICES = "makes torch believe in devices; the launcher looks for devices itself, without torch"
NAMED = {
    "api_test.test_launch_elastic_agent_raise_exception": _AGENT,
    "api_test.test_launch_shutdown": _AGENT,
    "api_test.test_rdzv_handler_shutdown_on_agent_error": _AGENT,
    "api_test.test_rdzv_handler_shutdown_on_agent_signal": _AGENT,
    "api_test.test_launch_elastic_worker_raise_exception": _EVENTS,
    "test_run.test_launch_elastic_agent_raise_exception": _AGENT,
    "test_run.test_launch_shutdown": _AGENT,
    "test_run.test_launch_elastic_worker_raise_exception": _EVENTS,
    "test_run.test_nproc_gpu_launch_configurations": _DEVICES,
    "test_run.test_nproc_xpu_launch_configurations": _DEVICES,
}


class Etcd:
    """torch's server for tests speaks etcd's API v2. This is the etcd of this host."""

    def start(self) -> None:
        program = shutil.which("etcd")
        if program is None:
            raise unittest.SkipTest("etcd is not installed")
        self._directory = tempfile.TemporaryDirectory()
        self._port, peer = _free_port(), _free_port()
        ours, theirs = f"http://127.0.0.1:{self._port}", f"http://127.0.0.1:{peer}"
        self._process = subprocess.Popen(
            [
                program, "--data-dir", self._directory.name, "--listen-client-urls", ours,
                "--advertise-client-urls", ours, "--listen-peer-urls", theirs,
                "--initial-advertise-peer-urls", theirs, "--initial-cluster", f"default={theirs}",
            ],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        until = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", self._port)).close()
                return
            except OSError:
                if time.monotonic() > until or self._process.poll() is not None:
                    raise
                time.sleep(0.05)

    def get_endpoint(self) -> str:
        return f"127.0.0.1:{self._port}"

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        self._directory.cleanup()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def command_line(command: str):
    """torch's ``main(arguments)``: it raises where the command exits."""

    def main(arguments: list[str] | None = None) -> None:
        # A shell would remove these quotes; torch's own parser ignores them.
        words = [word.replace("'", "") for word in arguments or sys.argv[1:]]
        with tempfile.TemporaryDirectory() as name:
            report = Path(name, "report.json")
            line = [command, f"--report={report}", *words]
            process = subprocess.Popen(
                [sys.executable, "-m", "drumline", *line], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            # The tests look at Python's streams.
            errors: list[str] = []
            reader = threading.Thread(target=lambda: errors.extend(process.stderr or []))
            reader.start()
            for text in process.stdout or []:
                sys.stdout.write(text)
            reader.join()
            code = process.wait()
            if code == 2 and not report.exists():
                raise ValueError("".join(errors))
            if code != 0:
                raise agent._error(json.loads(report.read_text()), command)

    return main


def put_drumline_in_the_place_of_torch() -> None:
    import torch.distributed.elastic.multiprocessing.api as processes
    import torch.distributed.elastic.multiprocessing.errors as errors
    import torch.distributed.elastic.rendezvous.etcd_server as etcd_server
    import torch.distributed.launch as torch_launch
    import torch.distributed.launcher.api as api
    import torch.distributed.run as torch_run

    api.LaunchConfig, api.elastic_launch, api.launch_agent = agent.LaunchConfig, agent.elastic_launch, agent.launch_agent
    errors.ChildFailedError, processes.SignalException = ChildFailedError, agent.SignalException
    etcd_server.EtcdServer = Etcd
    torch_run.main, torch_launch.main = command_line("run"), command_line("launch")


def outcome(test: unittest.TestCase) -> tuple[str, str]:
    result = unittest.TestResult()
    test.run(result)
    for _, text in result.failures + result.errors:
        return "failed", text
    for _, why in result.skipped:
        return "skipped", why
    return "passed", ""


def main(directory: str) -> int:
    os.environ.setdefault("DRUMLINE_SECRET", _core.JobStore(f"torch-launcher-{os.getpid()}").secret or "")
    sys.path.insert(0, directory)
    unexpected = 0
    for module in MODULES:
        suite = unittest.defaultTestLoader.loadTestsFromName(module)
        for group in suite:
            tests = list(group)
            set_up = getattr(type(tests[0]), "setUpClass", None)
            set_up()
            for test in tests:
                name = f"{module}.{test.id().rpartition('.')[2]}"
                how, text = outcome(test)
                why = NAMED.get(name)
                print(f"{how:8}{name}" + (f": {why}" if why else ""), flush=True)
                if how == "failed" and why is None or how == "passed" and why is not None:
                    unexpected += 1
                    print(text)
            type(tests[0]).tearDownClass()
    return int(unexpected > 0)


# Processes that tests start import this file again.
put_drumline_in_the_place_of_torch()

if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
