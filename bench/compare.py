"""Times our all_reduce and gloo's in turn, and prints one table in Markdown.

    cargo build --release -p drumline-launch -p drumline --bins --example all_reduce_speed
    python3 bench/compare.py --python /path/to/python/with/torch --rounds 5

Each round runs both programs once, one after the other, so that both see the same moods of the
machine. A cell is the median over the rounds of a run's median, with the smallest and the largest
behind it, in microseconds. `memcpy` is a copy of as many bytes by all ranks at once.
"""

import argparse
import pathlib
import re
import statistics
import subprocess
import sys

HERE = pathlib.Path(__file__).parent
RELEASE = HERE.parent / "target" / "release"
WAYS = ["memcpy", "registered", "staged", "unix", "tcp"]


def run(command: list[str]) -> list[str]:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def ours(ranks: str) -> dict[int, dict[str, float]]:
    """Microseconds by bytes and way: every cell is printed as `median (fastest)`."""
    launcher, program = RELEASE / "drumline", RELEASE / "examples" / "all_reduce_speed"
    rows = {}
    for line in run([str(launcher), "run", "--nproc-per-node", ranks, str(program)]):
        row = re.match(r"\[0\]\s+(\d+)\s", line)
        if row:
            medians = re.findall(r"([\d.]+) \([\d.]+\)", line)
            rows[int(row[1])] = dict(zip(WAYS, map(float, medians)))
    return rows


def gloo(python: str, ranks: str) -> dict[int, float]:
    """Microseconds by bytes."""
    rows = [line.split() for line in run([python, str(HERE / "gloo_all_reduce.py"), ranks])]
    return {int(row[0]): float(row[2]) for row in rows if len(row) == 5 and row[0].isdigit()}


def cell(times: list[float]) -> str:
    digits = 2 if statistics.median(times) < 10 else 0
    return f"{statistics.median(times):,.{digits}f} ({min(times):,.{digits}f}–{max(times):,.{digits}f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", default=sys.executable, help="an interpreter with torch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()

    ranks = str(options.ranks)
    times: dict[int, dict[str, list[float]]] = {}
    for _ in range(options.rounds):
        for size, row in ours(ranks).items():
            for way, median in row.items():
                times.setdefault(size, {}).setdefault(way, []).append(median)
        for size, median in gloo(options.python, ranks).items():
            if size in times:
                times[size].setdefault("gloo", []).append(median)

    columns = [*WAYS, "gloo"]
    ratios = {"memcpy / registered": ("memcpy", "registered"), "gloo / registered": ("gloo", "registered"),
              "gloo / staged": ("gloo", "staged"), "gloo / tcp": ("gloo", "tcp")}
    print("| bytes |", " | ".join([*columns, *ratios]), "|")
    print("|---:" * (1 + len(columns) + len(ratios)) + "|")
    for size, row in times.items():
        medians = {way: statistics.median(values) for way, values in row.items()}
        cells = [cell(row[way]) if way in row else "" for way in columns]
        cells += [
            f"{medians[a] / medians[b]:.1f}" if a in medians and b in medians else ""
            for a, b in ratios.values()
        ]
        print(f"| {size:,} |", " | ".join(cells), "|")


if __name__ == "__main__":
    main()
