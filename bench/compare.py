"""Times our all_reduce and gloo's in turn, and prints one table in Markdown.

    cargo build --release -p drumline --example all_reduce_speed
    python3 bench/compare.py --python /path/to/python/with/torch --rounds 5

Each round runs both programs once, one after the other, so that both see the same moods of the
machine. A cell is the median over the rounds of a run's median, with the smallest and the largest
behind it.
"""

import argparse
import pathlib
import statistics
import subprocess
import sys

HERE = pathlib.Path(__file__).parent
OURS = HERE.parent / "target" / "release" / "examples" / "all_reduce_speed"


def medians(command: list[str]) -> dict[int, float]:
    """Microseconds by bytes, from the table that both programs print."""
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    rows = [line.split() for line in output.splitlines()]
    return {int(row[0]): float(row[2]) for row in rows if len(row) == 5 and row[0].isdigit()}


def cell(times: list[float]) -> str:
    return f"{statistics.median(times):,.0f} ({min(times):,.0f}–{max(times):,.0f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", default=sys.executable, help="an interpreter with torch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--drumline", default=str(OURS), help="the built example")
    options = parser.parse_args()

    ranks = str(options.ranks)
    gloo_program = str(HERE / "gloo_all_reduce.py")
    ours: dict[int, list[float]] = {}
    gloo: dict[int, list[float]] = {}
    for _ in range(options.rounds):
        for times, command in (
            (ours, [options.drumline, ranks]),
            (gloo, [options.python, gloo_program, ranks]),
        ):
            for size, median in medians(command).items():
                times.setdefault(size, []).append(median)

    print("| bytes | drumline, µs | gloo, µs | gloo / drumline |")
    print("|---:|---:|---:|---:|")
    for size in ours:
        ratio = statistics.median(gloo[size]) / statistics.median(ours[size])
        print(f"| {size:,} | {cell(ours[size])} | {cell(gloo[size])} | {ratio:.1f} |")


if __name__ == "__main__":
    main()
