"""Runs a command in an environment of its own: python3 .ci/own_environment.py COMMAND [ARGUMENT ...]

Tests are run so. What the caller has set for jobs (RANK, MASTER_ADDR, DRUMLINE_TIMEOUT_S), for libraries
(OMP_NUM_THREADS), or for the network (proxies), and what earlier programs have left in his HOME, changes no result.
"""

from __future__ import annotations

import os
import pathlib
import re
import sys

# Tools that build and run tests, and what is meant for the tests.
KEPT = re.compile(
    r"PATH|LD_LIBRARY_PATH|TMPDIR|TERM|LANG|LC_\w+|USER|LOGNAME|SHELL|CI|CARGO\w*|RUSTUP\w*|RUSTFLAGS|RUSTDOCFLAGS|CC|CXX"
    r"|CFLAGS|CXXFLAGS|MAKE\w*|PYTEST\w*|OPENBLAS_\w+"
    r"|DRUMLINE_(TEST_\w+|SLOW_TESTS|SOAK|PART)|LEARNER_TEST_\w+"
)
# Found in HOME by those tools.
TOOLS = {"CARGO_HOME": ".cargo", "RUSTUP_HOME": ".rustup"}


def own(environment: dict[str, str], home: pathlib.Path) -> dict[str, str]:
    """What is kept of an environment, with another home."""
    kept = {name: value for name, value in environment.items() if KEPT.fullmatch(name)}
    old = pathlib.Path(environment.get("HOME") or pathlib.Path.home())
    for name, folder in TOOLS.items():
        if (old / folder).is_dir():
            kept.setdefault(name, str(old / folder))
    return kept | {"HOME": str(home)}


def main(command: list[str]) -> None:
    home = pathlib.Path(__file__).resolve().parent.parent / "target/test-home"
    home.mkdir(parents=True, exist_ok=True)
    os.execvpe(command[0], command, own(dict(os.environ), home))


if __name__ == "__main__":
    main(sys.argv[1:])
