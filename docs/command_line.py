"""Writes what `--help` prints into docs/reference/command-line.md: python3 docs/command_line.py DRUMLINE

With --check it writes nothing, and fails if the page has something else.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

PAGE = pathlib.Path(__file__).resolve().parent / "reference/command-line.md"
MARK = "<!-- What --help prints: docs/command_line.py -->\n"
COMMANDS = ["", "run", "launch", "env", "check", "explain", "trace", "trace merge", "trace page", "trace summary", "bench"]


def page(drumline: str) -> str:
    written = PAGE.read_text().split(MARK)[0]
    parts = []
    for command in COMMANDS:
        done = subprocess.run([drumline, *command.split(), "--help"], env={**os.environ, "COLUMNS": "100"},
                              capture_output=True, text=True, check=True)
        lines = [line.rstrip() for line in done.stdout.rstrip().splitlines()]
        name = f"drumline {command}".strip()
        parts.append(f"\n## {name}\n\n```text\n" + "\n".join(lines) + "\n```\n")
    return written + MARK + "".join(parts)


def main(drumline: str, *options: str) -> int:
    wanted = page(drumline)
    if "--check" not in options:
        PAGE.write_text(wanted)
    elif PAGE.read_text() != wanted:
        print(f"{PAGE.name} is not what --help prints: make settings", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
