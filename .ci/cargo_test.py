#!/usr/bin/env python3
"""`cargo test` with three test programs at once: python3 .ci/cargo_test.py [ARGUMENT OF CARGO ...]

Cargo runs one after the other, and many of them wait. The output of each is printed when it ends.

Few tests that fail beside all others run once more, each alone. One that fails again ends the run with an error. One that
passes has shown a fault that comes and goes, in it or in what it tests: it is named in the last line, to be mended.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile

# Each of them runs as many tests at once as there are cores, and some of these have many ranks.
AT_ONCE = 3
# To tell a hang from slowness. The longest of them takes four minutes beside other builds.
LIMIT_S = 1500
# More than these fail for one reason.
FEW = 3


@dataclasses.dataclass(frozen=True)
class Program:
    name: str
    command: tuple[str, ...]
    folder: pathlib.Path | None = None

    def run(self, *arguments: str) -> tuple[int | str, str]:
        """Its exit status, or that it has none, and what it printed."""
        where = {} if self.folder is None else {"CARGO_MANIFEST_DIR": str(self.folder)}
        print(f"     Running {self.name}", *arguments, flush=True)
        # Processes that a program has left behind may keep its output open.
        with tempfile.TemporaryFile("w+", errors="replace") as said:
            try:
                status = subprocess.run(
                    [*self.command, *arguments], cwd=self.folder, env=os.environ | where, stdin=subprocess.DEVNULL,
                    stdout=said, stderr=subprocess.STDOUT, check=False, timeout=LIMIT_S,
                ).returncode  # fmt: skip
            except subprocess.TimeoutExpired:
                status = f"it has not ended within {LIMIT_S} s"
            said.seek(0)
            output = said.read()
        print(f"\n     Ended {self.name}: {status}\n{output}", flush=True)
        return status, output


def program(line: str) -> Program | None:
    """The test program that this message of cargo is about, if any."""
    it = json.loads(line) if line.startswith("{") else {}
    if not (it.get("executable") and it.get("profile", {}).get("test")):
        return None
    folder = pathlib.Path(it["manifest_path"]).parent
    source = pathlib.Path(it["target"]["src_path"]).relative_to(folder)
    return Program(f"{folder.name}/{source}", (it["executable"],), folder)


def failures(output: str) -> list[str]:
    """The tests that the end of a program's output names: a line for each, between the last `failures:` and a blank one."""
    _, found, names = output.rpartition("\nfailures:\n")
    return [line.strip() for line in names.splitlines() if line.startswith("    ")] if found else []


def main(arguments: list[str]) -> int:
    build = ["cargo", "test", "--no-run", "--message-format=json-render-diagnostics", *arguments]
    built = subprocess.run(build, stdout=subprocess.PIPE, text=True, check=False)
    if built.returncode != 0:
        return built.returncode
    found = [it for it in map(program, built.stdout.splitlines()) if it]
    # Programs of a folder `tests` take longer than those of the sources, those of examples train models, and the examples of
    # the documentation take longest. What is long and comes last runs alone.
    found.sort(key=lambda it: ("/tests/" not in it.name, it.folder.parent.name != "examples"))
    found.insert(0, Program("the examples of the documentation", ("cargo", "test", "--doc", *arguments)))
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        ended = list(zip(found, pool.map(Program.run, found), strict=True))

    failed = [(it, failures(output)) for it, (status, output) in ended if status != 0]
    tests = [(it, test) for it, names in failed for test in names]
    print(f"{len(ended)} programs, of which {len(failed)} failed", *(f"{it.name}: {test}" for it, test in tests), sep="\n    ")
    if not all(it.folder and names for it, names in failed) or len(tests) > FEW:
        return 1
    for it, test in tests:
        status, output = it.run("--exact", test)
        if status != 0 or "test result: ok. 1 passed" not in output:
            return 1
    if tests:
        print("failed beside the others and passed alone, so it is to be mended:", *(test for _, test in tests))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
