"""Measures drumline beside its peers, in turns, and writes the pages of figures: `make bench`.

    python3 bench/bench.py --rounds 5 --only all_reduce,loopback

A section is a table. It has turns: each turn is one program, which times the calls of the section. In every round all
turns follow one another (A B C A B C). Between two turns the hand-over of a word between the cores is measured, so that
only figures of the same state of the machine are compared. A cell is the median of the turn's medians over the
rounds, with the fastest and the slowest round.
"""

from __future__ import annotations

import argparse
import datetime
import os
import pathlib
import platform
import sys
import time

import between_hosts
import sections
import summary
from page import Figure, Results, goals, replaced, section_mark, state, table
from peers import Absent, quiet
from sections import DRUMLINE, PEERS, ROOT, Section, drumline

SECTIONS = [*sections.SECTIONS, *between_hosts.SECTIONS]

def hand_over() -> list[float]:
    """Time of the hand-over of a word between two cores, in ns. Empty if it cannot be measured."""
    try:
        return drumline(["barrier", "--iters", "1", "--rounds", "1", "-w", "1"], 20)[0]["hand_over_ns"][-1:]
    except Absent:
        return []


# How often a turn is taken at most. It is taken again if the cores changed during it (the figure then says little), or if
# their state is not that of the first turn of the round (the figure is then compared with nothing).
TRIES = 3


def measure(section: Section, rounds: int, reasons: dict[str, str]) -> Results:
    results = Results()
    turns = [turn for turn in section.turns if all(PEERS.has(peer) for peer in turn.peers)]
    broken: set[int] = set()
    before = hand_over()
    for number in range(min(rounds, section.rounds_max)):
        started, wanted = time.monotonic(), None
        for at, turn in enumerate(turns):
            for _ in range(0 if at in broken else TRIES):
                figures: list[Figure] = []
                try:
                    figures = turn.run()
                except Absent as reason:
                    broken.add(at)
                    reasons[f"{section.key}, {', '.join(turn.columns)}"] = str(reason)
                after = hand_over()
                cores = state(before + after)
                for figure in figures:
                    results.add(figure, cores)
                before = after
                if cores != "mixed":
                    wanted = wanted or cores
                if at in broken or cores == wanted:
                    break
        taken = time.monotonic() - started
        print(f"{section.key}: round {number + 1}, {taken:.1f} s", file=sys.stderr)
    return results


def heading(rounds: int) -> str:
    commit = "unknown"
    try:
        commit = quiet(["git", "-C", str(ROOT), "rev-parse", "--short=10", "HEAD"], 10).strip()
        commit += ", changed" if quiet(["git", "-C", str(ROOT), "status", "--porcelain", "-uno"], 10) else ""
    except Absent:
        pass
    model = "unknown processor"
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    today = datetime.date.today().isoformat()
    return (
        f"{today}, commit {commit}; {model}, {os.cpu_count()} cores, Linux {platform.release()}; "
        f"`make bench ROUNDS={rounds}`. Times of `f32` in microseconds, median of the rounds (fastest–slowest); "
        "ratios say how many times as fast drumline is. Cores are *near* if they hand over a word in less than 100 ns "
        "before and after a turn, and *far* otherwise; only figures of the same state are compared."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="sections, separated by commas: "
                        + ", ".join(build().key for build in SECTIONS))
    parser.add_argument("--page", type=pathlib.Path, help="rewrite this short page, and the page of all tables")
    parser.add_argument("--tables", type=pathlib.Path, default=ROOT / "docs/notes/measurements.md",
                        help="the page of all tables (%(default)s)")
    options = parser.parse_args()

    built = [build() for build in SECTIONS]
    keys = [section.key for section in built]
    only = [key for key in options.only.split(",") if key] or keys
    if unknown := set(only) - set(keys):
        parser.error(f"there is no section {', '.join(unknown)}; there are {', '.join(keys)}")
    if not DRUMLINE.exists():
        parser.error(f"{DRUMLINE} is not there: cargo build --profile release-lto -p drumline-cli")
    chosen = [section for section in built if section.key in only]
    PEERS.install({peer for section in chosen for turn in section.turns for peer in turn.peers})

    reasons: dict[str, str] = {}
    results = {}
    parts = [heading(options.rounds)]
    for section in chosen:
        found = results[section.key] = measure(section, options.rounds, reasons)
        columns = list(dict.fromkeys(section.columns()))
        part = f"### {section.title}\n\n{section_mark(section.key)}\n\n"
        part += f"{section.note}\n\n" if section.note else ""
        parts.append(part + table(found, columns, list(section.ratios), section.with_cpu))
    wanted = [(section.key, goal) for section in chosen for goal in section.goals]
    parts.insert(1, f"### Goals\n\n{section_mark('goals')}\n\n" + goals(results, wanted))
    missing = {**PEERS.absent, **reasons}
    if missing:
        parts.append("Left out:\n\n" + "\n".join(f"- {what}: {why}" for what, why in missing.items()))
    text = "\n\n".join(parts) + "\n"
    print(text)
    if options.page and only == keys:
        options.tables.write_text(replaced(options.tables.read_text(), text))
        summary.write(options.tables.resolve(), options.page.resolve())
        print(f"{options.page} and {options.tables} are up to date", file=sys.stderr)
    elif options.page:
        print(f"{options.page} stays as it is: only some sections were measured", file=sys.stderr)


if __name__ == "__main__":
    main()
