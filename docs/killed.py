"""Draws docs/killed.svg: three ranks train, one is killed, and what the terminal shows then.

    python docs/killed.py        with drumline installed

The lines are those of the run; only long ones are folded.
"""

from __future__ import annotations

import html
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import textwrap

WIDTH = 104
LINE, CHARACTER, MARGIN = 19, 8.0, 16
COLOURS = {"plain": "#d8dee4", "typed": "#7ee787", "told": "#8b949e", "named": "#ffa198"}

PROGRAM = """
import os, sys
import drumline, numpy as np

group = drumline.init_process_group()
gradient = np.ones(1 << 20, np.float32)
try:
    for step in range(10**9):
        drumline.all_reduce(gradient, "avg")
        if step == 200 and group.rank == 0:
            print("step 200", flush=True)
        if step == 200 and group.rank == 1:
            print("pid", os.getpid(), flush=True)
except drumline.CollectiveError as error:
    print(error, file=sys.stderr)
    os._exit(1)
"""


def run() -> list[str]:
    """What the launcher prints, from the start to the end."""
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "train.py").write_text(PROGRAM)
        drumline = pathlib.Path(sys.executable).parent / "drumline"
        job = subprocess.Popen(
            [drumline, "run", "--nproc-per-node", "3", "--", sys.executable, "train.py"],
            cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        assert job.stdout is not None
        lines, killed = [], False
        for line in job.stdout:
            if "pid " in line and not killed:
                os.kill(int(line.split()[-1]), signal.SIGKILL)
                killed = True
            elif line.startswith("[") and "step" in line or killed:
                lines.append(line.rstrip())
        return [*lines, f"$ echo $?\n{job.wait()}"]


def colour(line: str) -> str:
    if line.startswith("#"):
        return "told"
    if line.startswith("$"):
        return "typed"
    return "named" if "rank 1" in line else "plain"


def picture(lines: list[str]) -> str:
    rows = []
    for line in lines:
        for part in line.splitlines():
            kind = colour(part)
            rows += [(kind, row) for row in textwrap.wrap(part, WIDTH, subsequent_indent="    ") or [""]]
    width, height = int(WIDTH * CHARACTER + 2 * MARGIN), LINE * len(rows) + 2 * MARGIN
    texts = "\n".join(
        f'<text x="{MARGIN}" y="{MARGIN + LINE * number + 14}" fill="{COLOURS[kind]}">{html.escape(row, quote=False)}</text>'
        for number, (kind, row) in enumerate(rows)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">\n'
        "<title>A rank is killed; the others and the launcher name it</title>\n"
        f'<rect width="{width}" height="{height}" rx="8" fill="#161b22"/>\n'
        '<g font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, monospace" font-size="13" style="white-space: pre">\n'
        f"{texts}\n</g>\n</svg>\n"
    )


def main() -> None:
    typed = ["$ drumline run --nproc-per-node 3 -- python train.py"]
    lines = run()
    at = next(number for number, line in enumerate(lines) if "step" not in line)
    shown = [*typed, *lines[:at], "# and now, elsewhere: kill -9 of rank 1", *lines[at:]]
    (pathlib.Path(__file__).parent / "killed.svg").write_text(picture(shown))


if __name__ == "__main__":
    main()
