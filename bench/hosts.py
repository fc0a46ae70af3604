"""Hosts on one machine: network namespaces, joined by links of a given speed."""

from __future__ import annotations

import json
import os
import pathlib
import secrets
import subprocess
import tempfile
import time
from collections.abc import Mapping
from typing import TypeVar

from peers import Absent, Peers, quiet

PORT = 29517

N = TypeVar("N", bound="Network")


def run(*words: str | int) -> str:
    return quiet([str(word) for word in words], 20)


# A hash of its two ports puts a connection into one of these classes. 256 are few enough to set up, and enough that
# four connections seldom share a class.
CLASSES, FIRST_CLASS = 256, 0x100


def by_flow(gigabits: int, flow_gigabits: int) -> str:
    """Commands for `tc -batch` that limit the speed of each connection. (The kernel may lack `fq`.)"""
    hashed = [
        "40 0 0 34",      # load the source port: behind 14 bytes of Ethernet and 20 of IP
        "7 0 0 0",
        "40 0 0 36",      # xor the destination port
        "172 0 0 0",
        "36 0 0 40503",   # times an odd number: the upper bits of the product depend on all bits
        "116 0 0 7",
        f"84 0 0 {CLASSES - 1}",
        f"4 0 0 {0x10000 + FIRST_CLASS}",
        "22 0 0 0",
    ]
    speed = lambda gigabits: f"rate {gigabits}gbit burst {512 * gigabits}kb quantum 60000"
    return "\n".join([
        "qdisc add dev eth0 root handle 1: htb default 1",
        f"class add dev eth0 parent 1: classid 1:1 htb {speed(gigabits)}",
        *(f"class add dev eth0 parent 1: classid 1:{minor:x} htb {speed(flow_gigabits)}"
          for minor in range(FIRST_CLASS, FIRST_CLASS + CLASSES)),
        f'filter add dev eth0 parent 1: protocol ip bpf bytecode "{len(hashed)},{",".join(hashed)}"',
    ]) + "\n"


def shape(name: str, gigabits: int, flow_gigabits: int | None) -> None:
    """Limits what a namespace sends."""
    # The bucket holds a few milliseconds: a smaller one starves a fast link between two ticks.
    if flow_gigabits is None:
        run("tc", "-n", name, "qdisc", "add", "dev", "eth0", "root", "tbf", "rate",
            f"{gigabits}gbit", "burst", f"{512 * gigabits}kb", "latency", "50ms")
    else:
        with tempfile.NamedTemporaryFile("w") as commands:
            commands.write(by_flow(gigabits, flow_gigabits))
            commands.flush()
            run("tc", "-n", name, "-batch", commands.name)


class Network:
    """Hosts 0, 1, ... at one switch. Each is a network namespace. Leaving the context removes them.

    Needs root, and `ip` of iproute2; otherwise `Absent`.
    """

    def __init__(self, hosts: int) -> None:
        if os.geteuid() != 0:
            raise Absent("network namespaces take root")
        tag = f"dl{os.getpid()}"
        self.switch = f"{tag}s"
        self.names = [f"{tag}h{host}" for host in range(hosts)]
        # 198.18.0.0/15 is reserved for tests of networks.
        self.addresses = [f"198.18.7.{host + 1}" for host in range(hosts)]
        try:
            self.join()
        except Absent:
            self.close()
            raise

    def join(self) -> None:
        run("ip", "netns", "add", self.switch)
        run("ip", "-n", self.switch, "link", "add", "br0", "type", "bridge")
        run("ip", "-n", self.switch, "link", "set", "br0", "up")
        for host, (name, address) in enumerate(zip(self.names, self.addresses)):
            run("ip", "netns", "add", name)
            run("ip", "link", "add", "eth0", "netns", name, "type", "veth",
                "peer", "name", f"port{host}", "netns", self.switch)
            run("ip", "-n", self.switch, "link", "set", f"port{host}", "master", "br0", "up")
            run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            run("ip", "-n", name, "link", "set", "lo", "up")
            run("ip", "-n", name, "link", "set", "eth0", "up")
            run("ip", "-n", name, "route", "add", "default", "dev", "eth0")

    def close(self) -> None:
        for name in [*self.names, self.switch]:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def __enter__(self: N) -> N:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

class Hosts(Network):
    """Hosts with lines of a given speed, and ranks on them. Needs `tc` of iproute2, too."""

    def __init__(self, gigabits: int, flow_gigabits: int | None = None, count: int = 2) -> None:
        """With `flow_gigabits`, the line of a host limits each connection to that speed."""
        super().__init__(count)
        try:
            for name in self.names:
                shape(name, gigabits, flow_gigabits)
        except Absent:
            self.close()
            raise

    def inside(self, host: int) -> list[str]:
        return ["ip", "netns", "exec", self.names[host]]

    def ranks(
        self,
        per_host: int,
        command: list[str],
        limit_s: float,
        settings: Mapping[str, str | float] | None = None,
    ) -> list[str]:
        """Runs a command as `per_host` ranks on each host, with the variables of `settings`: what each rank prints."""
        secret = secrets.token_hex(16)
        running = []
        for rank in range(len(self.names) * per_host):
            host = rank // per_host
            variables = {
                "RANK": rank, "WORLD_SIZE": len(self.names) * per_host,
                "LOCAL_RANK": rank % per_host, "LOCAL_WORLD_SIZE": per_host, "GROUP_RANK": host,
                "MASTER_ADDR": self.addresses[0], "MASTER_PORT": PORT,
                "DRUMLINE_SECRET": secret, **(settings or {}),
            }
            env = {**os.environ, **{name: str(value) for name, value in variables.items()}}
            running.append(subprocess.Popen(
                [*self.inside(host), *command], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        deadline = time.monotonic() + limit_s
        try:
            said = [rank.communicate(timeout=max(deadline - time.monotonic(), 1)) for rank in running]
        except subprocess.TimeoutExpired:
            raise Absent(f"{command[0]}: nothing within {limit_s:.0f} s") from None
        finally:
            for rank in running:
                rank.kill()
                rank.wait()
        if any(rank.returncode != 0 for rank in running):
            raise Absent(f"{command[0]}: " + "".join(err for _, err in said).strip()[-300:])
        return [out for out, _ in said]

    def drumline(
        self,
        program: pathlib.Path,
        per_host: int,
        arguments: list[str],
        limit_s: float,
        settings: dict[str, str] | None = None,
    ) -> list[dict]:
        """Runs `drumline bench` with `per_host` ranks on each host and the variables of `settings`: its rows."""
        with tempfile.TemporaryDirectory() as folder:
            kept = pathlib.Path(folder) / "rows.json"
            command = [str(program), "bench", *arguments, "--json", str(kept)]
            self.ranks(per_host, command, limit_s, {"DRUMLINE_TIMEOUT_S": limit_s, **(settings or {})})
            return json.loads(kept.read_text())["rows"]

    def iperf(self, seconds: float, flows: int = 1) -> float:
        """Bytes per second in each direction, measured at once, with `flows` connections each way."""
        command = Peers.iperf_command()
        server = subprocess.Popen(
            [*self.inside(1), *command, "-s", "-1"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            for attempt in range(20):
                time.sleep(0.1)
                try:
                    client = [*self.inside(0), *command, "-c", self.addresses[1], "--bidir", "-J",
                              "-P", str(flows)]
                    end = json.loads(quiet([*client, "-t", str(seconds)], seconds + 20))["end"]
                    break
                except Absent:
                    if attempt == 19 or server.poll() is not None:
                        raise
            both = [end["sum_received"], end["sum_received_bidir_reverse"]]
            return sum(way["bits_per_second"] for way in both) / 8 / len(both)
        finally:
            server.kill()
            server.wait()
