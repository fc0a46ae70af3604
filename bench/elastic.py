"""What a job on several hosts does when ranks, hosts, cables and etcd fail, and how long it takes.

Hosts are network namespaces with names of their own, joined by a bridge. Needs root, `ip` and `unshare`; `etcd` for some
rows. Writes one table to stdout:

    python3 bench/elastic.py [--rounds 3] [--only killed]
"""

from __future__ import annotations

import argparse
import os
import pathlib
import re
import secrets
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable

from hosts import Network, run

ROOT = pathlib.Path(__file__).parent.parent
DRUMLINE = ROOT / "target/release/drumline"
STEPS = ROOT / "target/release/examples/steps"
PATIENCE = 60.0


class Cables(Network):
    """A network in which a host can be cut off, or become slow."""

    def cable(self, host: int, plugged: bool) -> None:
        run("ip", "-n", self.switch, "link", "set", f"port{host}", "up" if plugged else "down")

    def slow_down(self, host: int) -> None:
        run("tc", "-n", self.names[host], "qdisc", "add", "dev", "eth0", "root", "tbf",
            "rate", "256kbit", "burst", "4kb", "latency", "500ms")


class Process:
    """A process of a host, with its lines and when they came."""

    def __init__(self, network: Cables, host: int, command: list[str], environment: dict[str, str]) -> None:
        inside = ["ip", "netns", "exec", network.names[host], "unshare", "--uts", "sh", "-c",
                  f'hostname host{host}; exec "$@"', "sh", *command]
        self.process = subprocess.Popen(inside, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                        env=os.environ | environment)
        self.lines: list[tuple[float, str]] = []
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), line.rstrip()))

    def wait_for(self, pattern: str, since: float = 0.0) -> float:
        """When the first line that matches came after `since`."""
        return first_line([self], pattern, since)

    def kill(self) -> None:
        """Ends the launcher as a crash would."""
        self.process.kill()

    def end(self) -> int:
        self.process.terminate()
        return self.process.wait(PATIENCE)


def first_line(processes: list[Process], pattern: str, since: float) -> float:
    """When the first line of these processes that matches came after `since`."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        for process in processes:
            for at, line in list(process.lines):
                if at > since and re.search(pattern, line):
                    return at
        time.sleep(0.005)
    told = [line for process in processes for _, line in process.lines if "] step " not in line]
    raise RuntimeError(f"no line matches {pattern!r}:\n" + "\n".join(told[-40:]))


class Job:
    """The job of one scenario."""

    def __init__(self, network: Cables, nnodes: str, backend: str, directory: pathlib.Path) -> None:
        self.network, self.directory = network, directory
        secret = secrets.token_hex(32)
        self.environment = {"DRUMLINE_SECRET": secret}
        endpoint = {"c10d": f"{network.addresses[0]}:29400", "etcd": f"{network.addresses[3]}:2379"}[backend]
        self.etcd = None
        if backend == "etcd":
            self.etcd = self.start_etcd()
        self.options = ["--nnodes", nnodes, "--rdzv-backend", backend, "--rdzv-endpoint", endpoint,
                        "--rdzv-conf", "last_call_timeout=0", "--nproc-per-node", "1"]
        self.hosts: dict[int, Process] = {}

    def start_etcd(self) -> Process:
        address = self.network.addresses[3]
        command = ["etcd", "--data-dir", str(self.directory / "etcd"),
                   "--listen-client-urls", f"http://{address}:2379", "--advertise-client-urls", f"http://{address}:2379",
                   "--listen-peer-urls", f"http://{address}:2380",
                   "--initial-advertise-peer-urls", f"http://{address}:2380",
                   "--initial-cluster", f"default=http://{address}:2380"]
        server = Process(self.network, 3, command, {})
        server.wait_for("ready to serve client requests|serving (insecure )?client")
        return server

    def start(self, host: int, *more: str) -> Process:
        command = [str(DRUMLINE), "run", *self.options, *more, str(STEPS), str(self.directory / "checkpoint")]
        self.hosts[host] = Process(self.network, host, command, self.environment)
        return self.hosts[host]

    def step_of(self, ranks: int, since: float = 0.0) -> float:
        """Rank 0 tells steps, on any host."""
        return first_line(list(self.hosts.values()), rf"step \d+ of {ranks} ranks", since)

    def close(self) -> None:
        for process in [*self.hosts.values(), *([self.etcd] if self.etcd else [])]:
            if process.process.poll() is None:
                process.process.terminate()
        for process in [*self.hosts.values(), *([self.etcd] if self.etcd else [])]:
            try:
                process.process.wait(10)
            except subprocess.TimeoutExpired:
                process.process.kill()


def workers_of(host: Process) -> list[int]:
    """The processes of the ranks below this launcher: those that the keeper has started."""
    children = lambda pid: [int(it) for it in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [worker for keeper in children(host.process.pid) for worker in children(keeper)]


# Each scenario returns the seconds from its event to each of its outcomes.
Outcome = dict[str, float]


def start(job: Job) -> Outcome:
    began = time.monotonic()
    for host in range(3):
        job.start(host)
    return {"first step of 3 ranks": job.step_of(3) - began}


def rank_killed(job: Job) -> Outcome:
    for host in range(3):
        job.start(host, "--max-restarts", "3", "--restart-delay", "0")
    job.step_of(3)
    os.kill(workers_of(job.hosts[1])[0], signal.SIGKILL)
    at = time.monotonic()
    return {"next step": job.step_of(3, at) - at}


def host_killed(job: Job) -> Outcome:
    for host in range(3):
        job.start(host)
    job.step_of(3)
    job.hosts[2].kill()
    at = time.monotonic()
    named = job.hosts[0].wait_for("host host2 at .* does not answer", at)
    return {"named": named - at, "next step of 2 ranks": job.step_of(2, at) - at}


def cable(job: Job) -> Outcome:
    for host in range(3):
        job.start(host)
    job.step_of(3)
    job.network.cable(2, False)
    at = time.monotonic()
    named = job.hosts[0].wait_for("host host2 at .* does not answer", at)
    alone = job.step_of(2, at)
    job.network.cable(2, True)
    back = time.monotonic()
    return {"named": named - at, "next step of 2 ranks": alone - at,
            "plugged in: next step of 3 ranks": job.step_of(3, back) - back}


def host_added(job: Job) -> Outcome:
    for host in range(2):
        job.start(host)
    job.step_of(2)
    at = time.monotonic()
    job.start(2)
    return {"next step of 3 ranks": job.step_of(3, at) - at}


def first_host_killed(job: Job) -> Outcome:
    for host in range(3):
        job.start(host)
    job.step_of(3)
    job.hosts[0].kill()
    at = time.monotonic()
    if not job.etcd:
        told = [job.hosts[host].wait_for("first host of the job is lost", at) - at for host in (1, 2)]
        ended = [job.hosts[host].process.wait(PATIENCE) for host in (1, 2)]
        assert ended == [1, 1], ended
        return {"the others end, saying so": max(told)}
    return {"next step of 2 ranks": job.step_of(2, at) - at}


def etcd_stopped(job: Job) -> Outcome:
    assert job.etcd
    for host in range(2):
        job.start(host)
    job.step_of(2)
    job.etcd.process.send_signal(signal.SIGSTOP)
    time.sleep(10)
    job.etcd.process.send_signal(signal.SIGCONT)
    at = time.monotonic()
    return {"etcd answers again after 10 s: next step": job.step_of(2, at) - at}


def slow_host(job: Job) -> Outcome:
    job.network.slow_down(2)
    began = time.monotonic()
    for host in range(3):
        job.start(host)
    first = job.step_of(3) - began
    time.sleep(10)
    lines = [line for host in job.hosts.values() for _, line in host.lines]
    assert not any("does not answer" in line for line in lines), lines
    return {"first step; nobody is lost in 10 s": first}


SCENARIOS: list[tuple[str, Callable[[Job], Outcome], str, str]] = [
    ("three hosts start", start, "3", "c10d"),
    ("a rank is killed", rank_killed, "3", "c10d"),
    ("a host's launcher is killed", host_killed, "2:3", "c10d"),
    ("a cable is pulled and put back", cable, "2:3", "c10d"),
    ("a host is added", host_added, "2:3", "c10d"),
    ("the first host is killed", first_host_killed, "2:3", "c10d"),
    ("the first host is killed, over etcd", first_host_killed, "2:3", "etcd"),
    ("etcd is stopped for 10 s", etcd_stopped, "2", "etcd"),
    ("a host with a line of 256 kbit/s", slow_host, "3", "c10d"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="a part of the scenario's name")
    options = parser.parse_args()
    if os.geteuid() != 0 or not shutil.which("ip"):
        sys.exit("network namespaces take root and iproute2")
    print("| what happens | until | median | all |\n|---|---|---|---|")
    for name, scenario, nnodes, backend in SCENARIOS:
        if options.only not in name or (backend == "etcd" and not shutil.which("etcd")):
            continue
        times: dict[str, list[float]] = {}
        for _ in range(options.rounds):
            with Cables(4) as network, tempfile.TemporaryDirectory() as directory:
                job = Job(network, nnodes, backend, pathlib.Path(directory))
                try:
                    for outcome, seconds in scenario(job).items():
                        times.setdefault(outcome, []).append(seconds)
                finally:
                    job.close()
        for outcome, seconds in times.items():
            every = ", ".join(f"{it:.2f}" for it in seconds)
            print(f"| {name} | {outcome} | {statistics.median(seconds):.2f} s | {every} |", flush=True)


if __name__ == "__main__":
    main()
