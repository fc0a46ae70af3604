#!/usr/bin/env python3
"""`cargo test` that goes on after a failure: python3 .ci/cargo_test.py [ARGUMENT OF CARGO TEST ...]

Few tests that fail beside all others run once more, each alone. One that fails again ends the run with an error. One that
passes has shown a fault that comes and goes, in it or in what it tests: it is named in the last line, to be mended.
"""

from __future__ import annotations

import re
import subprocess
import sys

# More than these fail for one reason.
FEW = 3
# What cargo says before it runs a program: its kind or file, and the program with a hash behind its name.
RUNNING = re.compile(r"\s+Running (unittests )?(\S+) \(.*/(.+)-[0-9a-f]{16}\)")


def run(*command: str) -> tuple[int, list[str]]:
    """Its exit status, and what it printed, which is passed on."""
    lines = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace") as it:
        assert it.stdout is not None
        for line in it.stdout:
            print(line, end="", flush=True)
            lines.append(line.rstrip("\n"))
    return it.returncode, lines


def failed_tests(lines: list[str]) -> list[tuple[str, ...]] | None:
    """The options that choose the target of a test, and its name, for each that failed. None if anything else failed."""
    failed: list[tuple[str, ...]] = []
    targets, programs, target, named = 0, 0, (), []
    for line in lines:
        if found := RUNNING.fullmatch(line):
            unit, file, program = found.groups()
            target = ("--test", program) if not unit else ("--lib",) if file == "src/lib.rs" else ("--bins",)
        elif line.startswith("   Doc-tests"):
            target = ()
        elif line == "failures:":
            named = []  # again before the names alone
        elif line.startswith("    "):
            named.append(line.strip())
        elif line.startswith("test result: FAILED"):
            failed += [(*target, test) for test in named if target]
            programs += bool(named and target)
        elif found := re.fullmatch(r"error: (\d+) targets? failed:", line):
            targets = int(found[1])
    return failed if programs == targets > 0 else None


def main(arguments: list[str]) -> int:
    status, lines = run("cargo", "test", "--no-fail-fast", *arguments)
    failed = failed_tests(lines) if status != 0 else None
    if failed is None or len(failed) > FEW:
        return status
    for *target, test in failed:
        print("once more, alone:", test, flush=True)
        again, lines = run("cargo", "test", *arguments, *target, "--", "--exact", test)
        if again != 0 or not any(it.startswith("test result: ok. 1 passed") for it in lines):
            return status
    print("failed beside the others and passed alone, so it is to be mended:", *(test for *_, test in failed))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
