"""Trains the GPT of examples/gpt on two hosts that a slow line joins: `make bench-gpt`.

    python3 bench/gpt_hosts.py 1 TEXT --batch-size 4   # a line of 1 Gb/s; the rest goes to the program

The hosts are network namespaces of this machine, with a rank and a core each. Needs root, `ip` and `tc`.
"""

from __future__ import annotations

import sys

from hosts import Hosts
from peers import HERE


class PinnedHosts(Hosts):
    """Hosts with a core each."""

    def inside(self, host: int) -> list[str]:
        return [*super().inside(host), "taskset", "--cpu-list", str(host)]


def main() -> None:
    gigabits, *arguments = sys.argv[1:]
    command = [str(HERE.parent / "target/release/gpt-burn"), *arguments]
    with PinnedHosts(int(gigabits)) as hosts:
        print(hosts.ranks(1, command, 3600)[0], end="")


if __name__ == "__main__":
    main()
