"""Measures drumline beside its peers, in turns, and writes one page: `make bench`.

    python3 bench/bench.py --rounds 5 --only all_reduce,loopback

A section has turns: one program each, which times the section's operations. In every round all turns
are taken one after another (A B C A B C), and between any two the hand-over of a word between the
cores is measured, so that figures are only compared with figures of the same state of the machine.
A cell is the median over the rounds of a turn's median, with the fastest and the slowest round.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pathlib
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass

from hosts import Hosts
from page import Figure, Goal, Ratio, Results, goals, replaced, state, table
from peers import HERE, Absent, Peers, quiet

ROOT = HERE.parent
DRUMLINE = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "release/drumline"
K, M = 1 << 10, 1 << 20
PEERS = Peers()

# What each case of a turn may take. More ranks than cores need no more: they have fewer samples.
TURN_MS = 50.0


@dataclass(frozen=True)
class Turn:
    """One program's part of a round."""

    columns: tuple[str, ...]
    peers: frozenset[str]
    run: Callable[[], list[Figure]]


@dataclass(frozen=True)
class Section:
    """A table."""

    key: str
    title: str
    note: str
    turns: tuple[Turn, ...]
    ratios: tuple[Ratio, ...]
    goals: tuple[Goal, ...]
    rounds_max: int = 100
    with_cpu: bool = False

    def columns(self) -> list[str]:
        return [column for turn in self.turns for column in turn.columns]


def size_name(size: int) -> str:
    for unit, bytes_ in (("MiB", M), ("KiB", K)):
        if size >= bytes_ and size % bytes_ == 0:
            return f"{size // bytes_} {unit}"
    return f"{size} B"


def row_name(operation: str, size: int, several: bool) -> str:
    return f"{operation} {size_name(size)}" if several else size_name(size)


# ---- programs -------------------------------------------------------------------------------------


def drumline(arguments: list[str], limit_s: float) -> list[dict]:
    """`drumline bench` on this host: its rows."""
    with tempfile.TemporaryDirectory() as folder:
        kept = pathlib.Path(folder) / "rows.json"
        quiet([str(DRUMLINE), "bench", *arguments, "--json", str(kept)], limit_s)
        rows = json.loads(kept.read_text())
    if rows["wrong"]:
        raise SystemExit(f"drumline bench {' '.join(arguments)}: {rows['wrong']} elements are wrong")
    return rows["rows"]


def way(row: dict) -> str:
    return row["buffers"] if row["transport"].startswith("shm") else row["transport"].split("+")[0]


def bound_us(row: dict) -> float:
    """What the same operation would take at the speed of a copy, or of a plain stream."""
    return row["time_us"] * row["bound_percent"] / 100


def ours(
    columns: dict[str, str],
    arguments: list[str],
    name: Callable[[dict], str],
    bound: str | None = None,
    limit_s: float = 60,
) -> Turn:
    """`columns`: the titles of ways."""

    def run() -> list[Figure]:
        figures = []
        rows = drumline([*arguments, "--rounds", "1", "--time", f"{TURN_MS}ms"], limit_s)
        for row in rows:
            if way(row) in columns:
                cpu = row["cpu_s_per_gb"]
                figures.append(Figure(name(row), columns[way(row)], row["p50_us"], cpu))
            if bound and way(row) == next(iter(columns)):
                figures.append(Figure(name(row), bound, bound_us(row)))
        return figures

    titles = [*columns.values(), *([bound] if bound else [])]
    return Turn(tuple(titles), frozenset(), run)


def theirs(
    column: str, peer: str, measure: Callable[[], list[dict]], name: Callable[[dict], str], *more: str
) -> Turn:
    def run() -> list[Figure]:
        rows = [row for row in measure() if "absent" not in row]
        wrong = sum(row.get("wrong", 0) for row in rows)
        if wrong:
            raise Absent(f"{column}: {wrong} elements are wrong")
        return [Figure(name(row), column, row["median_us"], row.get("cpu_s_per_gb")) for row in rows]

    return Turn((column,), frozenset({peer, *more}), run)


MPIS = {"Intel MPI": "impi", "MPICH": "mpich", "Open MPI": "openmpi"}


def mpis(ranks: int, manner: str, cases: list[str], name: Callable[[dict], str], limit_s: float = 60) -> list[Turn]:
    def turn(title: str, peer: str) -> Turn:
        return theirs(title, peer, lambda: PEERS.mpi(peer, ranks, manner, TURN_MS, cases, limit_s), name)

    return [turn(title, peer) for title, peer in MPIS.items()]


def gloo(cases: list[str], name: Callable[[dict], str]) -> Turn:
    return theirs("gloo", "gloo", lambda: PEERS.gloo(2, TURN_MS, cases, 120), name)


# ---- sections -------------------------------------------------------------------------------------

SIZES = [8, K, 64 * K, M, 16 * M, 64 * M]
SHARED = {"staged": "staged", "registered": "registered"}
ANY_MPI = tuple(MPIS)


def sizes_of(sizes: list[int]) -> list[str]:
    return ["--sizes", ",".join(map(str, sizes))]


def imb() -> Section:
    name = lambda row: row_name("", row["size"], False)
    arguments = ["all_reduce", *sizes_of(SIZES), "--place", "in", "--buffers", "all", "--untouched"]
    def independent(title: str, peer: str) -> Turn:
        return theirs(title, peer, lambda: PEERS.imb(peer, 2, TURN_MS, SIZES, 60), name, "impi")

    both = ("Intel MPI, IMB", "MPICH, IMB")
    cases = [f"all_reduce:{size}" for size in SIZES]
    openmpi = theirs(
        "Open MPI", "openmpi", lambda: PEERS.mpi("openmpi", 2, "untouched", TURN_MS, cases, 60), name)
    check = theirs(
        "Intel MPI, our loop", "impi", lambda: PEERS.mpi("impi", 2, "untouched", TURN_MS, cases, 60), name)
    best = Ratio("the faster of Intel MPI and MPICH / staged", both, "staged")
    intel = Ratio("Intel MPI / staged", both[:1], "staged")
    registered = Ratio("Intel MPI / registered", both[:1], "registered")
    return Section(
        "imb",
        "all_reduce, 2 ranks of one host, in IMB's way",
        "Calls in a row on buffers that nobody touches between them, timed by IMB-MPI1 for Intel MPI and "
        "MPICH and by `mpi_loop.c` for Open MPI; the loop's figure for Intel MPI stands beside IMB's. "
        "Registered buffers that nobody touches stay in the caches of the ranks that sum them: the next "
        "table is the one to believe.",
        (ours(SHARED, arguments, name), independent(both[0], "impi"), independent(both[1], "mpich"),
         openmpi, check),
        (best, intel, registered),
        (Goal(best, ("8 B",), 1.0),
         Goal(intel, ("1 KiB", "64 KiB", "1 MiB"), 1.0),
         Goal(registered, ("1 KiB", "64 KiB", "1 MiB"), 1.5),
         Goal(intel, ("16 MiB", "64 MiB"), 2.0)),
    )


def all_reduce() -> Section:
    name = lambda row: row_name("", row["size"], False)
    cases = [f"all_reduce:{size}" for size in SIZES]
    arguments = ["all_reduce", *sizes_of(SIZES), "--place", "in", "--buffers", "all"]
    mpi = Ratio("fastest MPI / staged", ANY_MPI, "staged")
    registered = Ratio("fastest MPI / registered", ANY_MPI, "registered")
    copy = Ratio("memcpy / registered", ("memcpy",), "registered")
    torch = Ratio("gloo / staged", ("gloo",), "staged")
    return Section(
        "all_reduce",
        "all_reduce, 2 ranks of one host, buffers rewritten before each call",
        "`memcpy` copies as many bytes on both ranks at once. MPI is called out of place, which is its "
        "plain form, through `mpi_loop.c`; gloo from Python.",
        (ours(SHARED, arguments, name, "memcpy"), *mpis(2, "rewritten", cases, name), gloo(cases, name)),
        (mpi, registered, copy, torch),
        (Goal(copy, ("16 MiB", "64 MiB"), 1.2),),
    )


def collectives() -> Section:
    operations = ["all_gather", "reduce_scatter", "broadcast", "all_to_all"]
    sizes = [M, 16 * M]
    name = lambda row: row_name(row["operation"], row["size"], True)
    cases = [f"{operation}:{size}" for operation in operations for size in sizes]
    arguments = [",".join(operations), *sizes_of(sizes)]
    intel = Ratio("Intel MPI / ours", ("Intel MPI",), "drumline")
    torch = Ratio("gloo / ours", ("gloo",), "drumline")
    rows = tuple(row_name(operation, size, True) for operation in operations for size in sizes)
    return Section(
        "collectives",
        "Other collectives, 2 ranks of one host, buffers rewritten",
        "Sizes are those of the longest buffer of a rank.",
        (ours({"staged": "drumline"}, arguments, name), *mpis(2, "rewritten", cases, name), gloo(cases, name)),
        (intel, torch),
        (Goal(intel, rows, 1.0),),
    )


def crowded() -> Section:
    """Sizes and ranks of one round are programs of their own, with limits of their own."""
    turns: list[Turn] = []
    sizes = [8, M]
    for ranks in (4, 8):
        name = lambda row, ranks=ranks: f"{ranks} ranks, {size_name(row['size'])}"
        cases = [f"all_reduce:{size}" for size in sizes]
        arguments = ["all_reduce", *sizes_of(sizes), "--place", "in", "--buffers", "all"]
        turns.append(ours(SHARED, [*arguments, "--nproc-per-node", str(ranks)], name))
        turns += mpis(ranks, "rewritten", cases, name, 30)
    intel = Ratio("Intel MPI / staged", ("Intel MPI",), "staged")
    openmpi = Ratio("Open MPI / staged", ("Open MPI",), "staged")
    rows = tuple(f"{ranks} ranks, {size_name(size)}" for ranks in (4, 8) for size in sizes)
    return Section(
        "crowded",
        f"all_reduce with more ranks than the {os.cpu_count()} cores, buffers rewritten",
        "",
        tuple(turns),
        (intel, openmpi),
        (Goal(intel, rows, 2.0), Goal(openmpi, rows, 2.0)),
        rounds_max=3,
        with_cpu=True,
    )


def narrow() -> Section:
    turns = []
    for dtype, size in (("bf16", 16 * M), ("f32", 32 * M)):
        columns = {way: f"{dtype} {way}" for way in SHARED}
        arguments = ["all_reduce", "-d", dtype, *sizes_of([size]), "--place", "in", "--buffers", "all"]
        turns.append(ours(columns, arguments, lambda _: "8 Mi elements"))
    ratios = tuple(Ratio(f"f32 / bf16, {way}", (f"f32 {way}",), f"bf16 {way}") for way in SHARED)
    return Section(
        "bf16", "all_reduce of bf16 and of f32, 2 ranks of one host", "", tuple(turns), ratios,
        tuple(Goal(ratio, ("8 Mi elements",), 1 / 0.7) for ratio in ratios),
    )


def loopback() -> Section:
    sizes = [8, K, 64 * K, M, 64 * M]
    name = lambda row: row_name("", row["size"], False)
    arguments = ["all_reduce", *sizes_of(sizes), "--place", "in", "--transport", "unix,tcp"]
    cases = [f"all_reduce:{size}" for size in sizes]
    ratio = Ratio("gloo / tcp", ("gloo",), "tcp")
    return Section(
        "loopback",
        "all_reduce over sockets, 2 ranks of one host, buffers rewritten",
        "`stream` sends and receives as many bytes at once over a plain TCP connection.",
        (ours({"tcp": "tcp", "unix": "unix"}, arguments, name, "stream"), gloo(cases, name)),
        (ratio, Ratio("stream / tcp", ("stream",), "tcp")),
        (Goal(ratio, ("8 B",), 1 / 0.3), Goal(ratio, ("1 MiB", "64 MiB"), 2.0)),
    )


def links() -> Section:
    size = 64 * M

    def turn(gigabits: int) -> list[Turn]:
        row = f"{gigabits} Gb/s"
        arguments = ["all_reduce", *sizes_of([size]), "--place", "in", "--rounds", "1", "-w", "2", "--time", "500ms"]

        def both() -> list[Figure]:
            with Hosts(gigabits) as hosts:
                (figure,) = hosts.drumline(DRUMLINE, 1, arguments, 90)
            return [Figure(row, "drumline", figure["p50_us"]), Figure(row, "stream", bound_us(figure))]

        def iperf() -> list[Figure]:
            with Hosts(gigabits) as hosts:
                return [Figure(row, "iperf3", size / hosts.iperf(3) * 1e6)]

        columns = ("drumline", "stream")
        return [Turn(columns, frozenset(), both), Turn(("iperf3",), frozenset({"iperf3"}), iperf)]

    ratio = Ratio("iperf3 / ours", ("iperf3",), "drumline")
    stream = Ratio("stream / ours", ("stream",), "drumline")
    return Section(
        "links",
        "all_reduce of 64 MiB between two hosts (network namespaces; links shaped by tbf)",
        "`iperf3`: the time that it takes for as many bytes both ways at once; `stream`: our own plain "
        "stream, in the run of the operation.",
        tuple(turn(1) + turn(10)),
        (ratio, stream),
        (Goal(ratio, ("1 Gb/s", "10 Gb/s"), 0.95),),
        rounds_max=3,
    )


def hierarchy() -> Section:
    row = "64 MiB"

    def run() -> list[Figure]:
        arguments = ["all_reduce", *sizes_of([64 * M]), "--place", "in", "--transport", "shm,unix",
                     "--rounds", "1", "-w", "2", "--iters", "3"]
        with Hosts(1) as hosts:
            rows = hosts.drumline(DRUMLINE, 4, arguments, 150)
        by_way = {found["transport"].split("+")[0]: found for found in rows}
        return [
            Figure(row, "by hosts", by_way["shm"]["p50_us"]),
            Figure(row, "all with all", by_way["unix"]["p50_us"]),
            Figure(row, "bound", bound_us(by_way["shm"])),
        ]

    times = Ratio("all with all / by hosts", ("all with all",), "by hosts")
    bound = Ratio("bound / by hosts", ("bound",), "by hosts")
    return Section(
        "hierarchy",
        "all_reduce between two hosts with 4 ranks each, link of 1 Gb/s",
        "`by hosts` adds on the host first; `all with all` does not share memory; `bound` is a plain "
        "stream of the bytes that a host must send and get.",
        (Turn(("by hosts", "all with all", "bound"), frozenset(), run),),
        (times, bound),
        (Goal(times, (row,), 2.0), Goal(bound, (row,), 0.9)),
        rounds_max=2,
    )


def tensors() -> Section:
    row, size = "46 tensors", 46 * 4 * M
    example = ROOT / "crates/drumline/examples/async_reduce_speed.rs"

    def run() -> list[Figure]:
        if not example.exists():
            raise Absent(f"there is no {example.name}")
        program = DRUMLINE.parent / "examples/async_reduce_speed"
        env = {**os.environ, "WARM_UP": "3", "STEPS": "12"}
        text = quiet([str(DRUMLINE), "run", "--nproc-per-node", "2", str(program)], 60, env=env)
        # way, best, 10th percentile, median: GB/s
        found = re.findall(r"^\[0\]\s+(named|one) +[\d.]+ +[\d.]+ +([\d.]+)", text, re.MULTILINE)
        titles = {"named": "by name", "one": "one all_reduce"}
        return [Figure(row, titles[way], size / float(speed) / 1e3) for way, speed in found]

    ratio = Ratio("one all_reduce / by name", ("one all_reduce",), "by name")
    return Section(
        "tensors",
        "46 tensors of 4 MiB in another order on each rank, against one all_reduce of 184 MiB",
        "Registered memory, 2 ranks of one host.",
        (Turn(("by name", "one all_reduce"), frozenset(), run),),
        (ratio,),
        (Goal(ratio, (row,), 0.9),),
    )


SECTIONS = [imb, all_reduce, collectives, crowded, narrow, loopback, links, hierarchy, tensors]


# ---- the run --------------------------------------------------------------------------------------


def hand_over() -> list[float]:
    """Of a word between two cores, in ns."""
    try:
        return drumline(["barrier", "--iters", "1", "--rounds", "1", "-w", "1"], 20)[0]["hand_over_ns"][-1:]
    except Absent:
        return []


def measure(section: Section, rounds: int, reasons: dict[str, str]) -> Results:
    results = Results()
    turns = [turn for turn in section.turns if all(PEERS.has(peer) for peer in turn.peers)]
    broken: set[int] = set()
    before = hand_over()
    for number in range(min(rounds, section.rounds_max)):
        started = time.monotonic()
        for at, turn in enumerate(turns):
            if at in broken:
                continue
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
        "ratios say how many times as fast ours is. Cores are *near* while they hand over a word in less "
        "than 100 ns, before a turn and after it, and *far* otherwise; only like is compared with like."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="sections, with commas between them: "
                        + ", ".join(build().key for build in SECTIONS))
    parser.add_argument("--page", type=pathlib.Path, help="replace the tables of this page")
    options = parser.parse_args()

    sections = [build() for build in SECTIONS]
    keys = [section.key for section in sections]
    only = [key for key in options.only.split(",") if key] or keys
    if unknown := set(only) - set(keys):
        parser.error(f"there is no section {', '.join(unknown)}; there are {', '.join(keys)}")
    if not DRUMLINE.exists():
        parser.error(f"{DRUMLINE} is not there: cargo build --release -p drumline-launch")
    chosen = [section for section in sections if section.key in only]
    PEERS.install({peer for section in chosen for turn in section.turns for peer in turn.peers})

    reasons: dict[str, str] = {}
    results = {}
    parts = [heading(options.rounds)]
    for section in chosen:
        found = results[section.key] = measure(section, options.rounds, reasons)
        columns = list(dict.fromkeys(section.columns()))
        part = f"### {section.title}\n\n{section.note}\n\n" if section.note else f"### {section.title}\n\n"
        parts.append(part + table(found, columns, list(section.ratios), section.with_cpu))
    wanted = [(section.key, goal) for section in chosen for goal in section.goals]
    parts.insert(1, "### Goals\n\n" + goals(results, wanted))
    missing = {**PEERS.absent, **reasons}
    if missing:
        parts.append("Left out:\n\n" + "\n".join(f"- {what}: {why}" for what, why in missing.items()))
    text = "\n\n".join(parts) + "\n"
    print(text)
    if options.page and only == keys:
        options.page.write_text(replaced(options.page.read_text(), text))
        print(f"{options.page} is up to date", file=sys.stderr)
    elif options.page:
        print(f"{options.page} stays as it is: only some sections were measured", file=sys.stderr)


if __name__ == "__main__":
    main()
