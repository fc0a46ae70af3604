"""What is measured: the sections, with their turns, ratios and goals."""

from __future__ import annotations

import json
import os
import pathlib
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass

from hosts import Hosts
from page import Figure, Goal, Ratio
from peers import HERE, TORCHRUN, Absent, Peers, quiet

ROOT = HERE.parent
DRUMLINE = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "release-lto/drumline"
K, M = 1 << 10, 1 << 20
PEERS = Peers()

# Time for each row of a turn, in ms, with rewriting and verifying.
TURN_MS = 50.0


@dataclass(frozen=True)
class Turn:
    """One program's part of a round."""

    columns: tuple[str, ...]
    peers: frozenset[str]
    run: Callable[[], list[Figure]]


@dataclass(frozen=True)
class Section:
    """One table of the page."""

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
    """`drumline bench` on this host: its rows. Ranks that share cores run without restartable sequences."""
    ranks = int(dict(zip(arguments, arguments[1:])).get("--nproc-per-node", "2"))
    if ranks > len(os.sched_getaffinity(0)):
        arguments = [*arguments, "--disable-rseq"]
    with tempfile.TemporaryDirectory() as folder:
        kept = pathlib.Path(folder) / "rows.json"
        try:
            quiet([str(DRUMLINE), "bench", *arguments, "--json", str(kept)], limit_s)
        except Absent:
            text = kept.read_text() if kept.exists() else ""
            if text and json.loads(text)["wrong"]:
                raise SystemExit(f"drumline bench {' '.join(arguments)} gives wrong results") from None
            raise
        return json.loads(kept.read_text())["rows"]


def way(row: dict) -> str:
    return row["buffers"] if row["transport"].startswith("shm") else row["transport"].split("+")[0]


def bound_us(row: dict) -> float:
    """Time of the same bytes at the speed of a copy, or of a plain stream."""
    return row["time_us"] * row["bound_percent"] / 100


def ours(
    columns: dict[str, str],
    arguments: list[str],
    name: Callable[[dict], str],
    bound: str | None = None,
    average: str = "median",
) -> Turn:
    """A turn of `drumline bench`. `columns` maps ways to titles."""
    us = {"median": "p50_us", "mean": "time_us"}[average]

    def run() -> list[Figure]:
        figures = []
        rows = drumline([*arguments, "--rounds", "1", "--time", f"{TURN_MS}ms"], 60)
        for row in rows:
            if way(row) in columns:
                cpu = row["cpu_s_per_gb"]
                figures.append(Figure(name(row), columns[way(row)], row[us], cpu))
            if bound and way(row) == next(iter(columns)):
                figures.append(Figure(name(row), bound, bound_us(row)))
        return figures

    titles = [*columns.values(), *([bound] if bound else [])]
    return Turn(tuple(titles), frozenset(), run)


def theirs(
    column: str,
    peer: str,
    measure: Callable[[], list[dict]],
    name: Callable[[dict], str],
    more: tuple[str, ...] = (),
    average: str = "median",
) -> Turn:
    """A turn of another library. `more`: peers that must be installed beside `peer`."""
    def run() -> list[Figure]:
        rows = [row for row in measure() if "absent" not in row]
        wrong = sum(row.get("wrong", 0) for row in rows)
        if wrong:
            raise Absent(f"{column}: {wrong} elements are wrong")
        return [Figure(name(row), column, row[f"{average}_us"], row.get("cpu_s_per_gb")) for row in rows]

    return Turn((column,), frozenset({peer, *more}), run)


MPIS = {"Intel MPI": "impi", "MPICH": "mpich", "Open MPI": "openmpi"}


def mpis(ranks: int, cases: list[str], name: Callable[[dict], str], average: str = "median") -> list[Turn]:
    def turn(title: str, peer: str) -> Turn:
        run = lambda: PEERS.mpi(peer, ranks, "rewritten", TURN_MS, cases, 45)
        return theirs(title, peer, run, name, average=average)

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
        return theirs(title, peer, lambda: PEERS.imb(peer, 2, SIZES, 60), name, ("impi",))

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
        "Calls in a row on buffers that stay untouched between them. IMB-MPI1 times Intel MPI and "
        "MPICH, `mpi_loop.c` times Open MPI; the loop's figure for Intel MPI stands beside IMB's. "
        "Untouched registered buffers stay in the caches of the ranks that sum them, so the next "
        "table is closer to training.",
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
        "`memcpy` copies as many bytes on both ranks at once. `mpi_loop.c` calls MPI out of place, "
        "which is its plain form; gloo is called from Python.",
        (ours(SHARED, arguments, name, "memcpy"), *mpis(2, cases, name), gloo(cases, name)),
        (mpi, registered, copy, torch),
        (Goal(copy, ("16 MiB", "64 MiB"), 1.2),),
    )


def collectives() -> Section:
    operations = ["all_gather", "reduce_scatter", "broadcast", "all_to_all"]
    sizes = [M, 16 * M]
    name = lambda row: row_name(row["operation"], row["size"], True)
    cases = [f"{operation}:{size}" for operation in operations for size in sizes]
    arguments = [",".join(operations), *sizes_of(sizes), "--buffers", "all"]
    intel = Ratio("Intel MPI / staged", ("Intel MPI",), "staged")
    registered = Ratio("Intel MPI / registered", ("Intel MPI",), "registered")
    torch = Ratio("gloo / staged", ("gloo",), "staged")
    rows = tuple(row_name(operation, size, True) for operation in operations for size in sizes)
    return Section(
        "collectives",
        "Other collectives, 2 ranks of one host, buffers rewritten",
        "The size is that of the longest buffer of a rank. Short registered buffers are copied "
        "through slots, too.",
        (ours(SHARED, arguments, name), *mpis(2, cases, name), gloo(cases, name)),
        (intel, registered, torch),
        (Goal(intel, rows, 1.0),),
    )


def in_a_row(ranks: int) -> list[Turn]:
    """Turns that time 8 B in IMB's way."""
    name = lambda _: f"{ranks} ranks, 8 B in a row"
    arguments = ["all_reduce", *sizes_of([8]), "--place", "in", "--buffers", "all", "--untouched"]
    loop = lambda: PEERS.mpi("openmpi", ranks, "untouched", TURN_MS, ["all_reduce:8"], 45)
    return [
        ours(SHARED, [*arguments, "--nproc-per-node", str(ranks)], name, average="mean"),
        theirs("Intel MPI", "impi", lambda: PEERS.imb("impi", ranks, [8], 45), name),
        theirs("Open MPI", "openmpi", loop, name, average="mean"),
    ]


def crowded() -> Section:
    """More ranks than cores. Each size and number of ranks is a program of its own, with its own time limit."""
    turns: list[Turn] = []
    sizes = [8, M]
    for ranks in (4, 8, 16):
        name = lambda row, ranks=ranks: f"{ranks} ranks, {size_name(row['size'])}"
        cases = [f"all_reduce:{size}" for size in sizes]
        arguments = ["all_reduce", *sizes_of(sizes), "--place", "in", "--buffers", "all"]
        arguments += ["--nproc-per-node", str(ranks)]
        turns.append(ours(SHARED, arguments, name, average="mean"))
        turns += mpis(ranks, cases, name, "mean")
        turns += in_a_row(ranks)
    intel = Ratio("Intel MPI / staged", ("Intel MPI",), "staged")
    openmpi = Ratio("Open MPI / staged", ("Open MPI",), "staged")
    rows = tuple(f"{ranks} ranks, {size}" for ranks in (4, 8) for size in ("8 B", "1 MiB", "8 B in a row"))
    return Section(
        "crowded",
        f"all_reduce with more ranks than the {os.cpu_count()} cores, buffers rewritten",
        "Means, not medians: most calls are fast, and some wait for a rank that has no core. *In a "
        "row* is IMB's way: calls one after another without a barrier between them; IMB-MPI1 times "
        "Intel MPI. drumline's ranks run with `--disable-rseq`.",
        tuple(turns),
        (intel, openmpi),
        (Goal(intel, rows, 2.0), Goal(openmpi, rows, 2.0)),
        rounds_max=3,
        with_cpu=True,
    )


def over_mpi() -> Section:
    """The backend `mpi` beside the same library's own call. Each MPI and number of ranks is a program of its own."""
    sizes = [8, 4 * K, 64 * K, M, 16 * M]
    turns: list[Turn] = []
    rows = lambda sizes: tuple(f"{title}, 2 ranks, {size_name(size)}" for size in sizes for title in MPIS)
    for title, peer in MPIS.items():
        for ranks, lengths in ((2, sizes), (4, sizes[:1])):
            average, us = ("median", "p50_us") if ranks == 2 else ("mean", "time_us")
            name = lambda row, title=title, ranks=ranks: f"{title}, {ranks} ranks, {size_name(row['size'])}"
            arguments = ["all_reduce", *sizes_of(lengths), "--place", "in", "--untouched", "--rounds", "1"]
            arguments += ["--time", f"{TURN_MS}ms"]
            cases = [f"all_reduce:{size}" for size in lengths]

            def ours(column: str, more: dict[str, str], peer=peer, ranks=ranks, us=us, name=name,
                     arguments=arguments) -> Turn:
                def run() -> list[Figure]:
                    found = PEERS.over_mpi(peer, ranks, DRUMLINE, arguments, more, 60)
                    return [Figure(name(row), column, row[us]) for row in found]

                return Turn((column,), frozenset({peer}), run)

            turns.append(ours("backend mpi", {}))
            turns.append(ours("MPI's sums", {"DRUMLINE_SUM_ORDER": "backend"}))
            loop = lambda peer=peer, ranks=ranks, cases=cases: PEERS.mpi(peer, ranks, "untouched", TURN_MS, cases, 60)
            turns.append(theirs("MPI_Allreduce", peer, loop, name, average=average))
    ratio = Ratio("MPI_Allreduce / backend mpi", ("MPI_Allreduce",), "backend mpi")
    return Section(
        "mpi",
        "all_reduce by the backend mpi, beside the same library's MPI_Allreduce",
        "Calls in a row. `MPI's sums`: with `DRUMLINE_SUM_ORDER=backend`. With 4 ranks, means.",
        tuple(turns),
        (ratio,),
        (Goal(ratio, rows(sizes[:1]), 1 / 4), Goal(ratio, rows(sizes[3:]), 1 / 1.25)),
    )


def throughput() -> Section:
    """The throughput that is lost with more ranks than cores."""
    sizes = [M, 4 * M, 16 * M, 64 * M]
    arguments = ["all_reduce", *sizes_of(sizes), "--place", "in", "--buffers", "all", "--untouched"]
    arguments += ["--rounds", "1", "--time", f"{TURN_MS}ms", "--nproc-per-node"]
    name = lambda size, kind: f"{size_name(size)}, {kind}"

    def turn(ranks: int) -> Turn:
        column = f"{ranks} ranks"

        def run() -> list[Figure]:
            rows = drumline([*arguments, str(ranks)], 60)
            return [Figure(name(row["size"], way(row)), column, row["time_us"] / ranks) for row in rows]

        return Turn((column,), frozenset(), run)

    ratio = Ratio("2 ranks / 8 ranks", ("2 ranks",), "8 ranks")
    rows = tuple(name(size, kind) for kind in SHARED for size in sizes)
    return Section(
        "throughput",
        f"all_reduce of 8 ranks on the {os.cpu_count()} cores beside that of 2",
        "Calls in a row. The time of a call divided by the number of ranks: the time for one rank's "
        "buffer.",
        (turn(2), turn(8)),
        (ratio,),
        (Goal(ratio, rows, 0.5),),
        rounds_max=3,
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
        "`iperf3`: its time for as many bytes both ways at once. `stream`: a plain stream of "
        "drumline, in the same run as the call.",
        tuple(turn(1) + turn(10)),
        (ratio, stream),
        (Goal(ratio, ("1 Gb/s", "10 Gb/s"), 0.95),),
        rounds_max=3,
    )


def flows() -> Section:
    size, connections = 64 * M, (1, 4)
    arguments = ["all_reduce", *sizes_of([size]), "--place", "in", "--rounds", "1", "-w", "2", "--time", "500ms"]
    title = lambda count: f"{count} connections" if count > 1 else "1 connection"

    def turn(count: int) -> Turn:
        def run() -> list[Figure]:
            with Hosts(10, 1) as hosts:
                (figure,) = hosts.drumline(DRUMLINE, 1, arguments, 90, {"DRUMLINE_STREAMS": str(count)})
            return [Figure(size_name(size), title(count), figure["p50_us"])]

        return Turn((title(count),), frozenset(), run)

    def iperf() -> list[Figure]:
        with Hosts(10, 1) as hosts:
            return [Figure(size_name(size), "iperf3", size / hosts.iperf(3, connections[-1]) * 1e6)]

    one, several = map(title, connections)
    return Section(
        "flows",
        "all_reduce between two hosts, link of 10 Gb/s that gives each connection 1 Gb/s",
        f"`DRUMLINE_STREAMS` 1 and {connections[-1]}; `iperf3` with {connections[-1]} connections in each direction.",
        (*map(turn, connections), Turn(("iperf3",), frozenset({"iperf3"}), iperf)),
        (Ratio(f"{one} / {several}", (one,), several), Ratio(f"iperf3 / {several}", ("iperf3",), several)),
        (),
        rounds_max=3,
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


# Tells when its rank begins. Rank 1 of the first start fails once rank 0 has begun, and tells when.
RESTARTED = """
at() { date +%s%N > "$TOLD/$1.$RANK"; }
at "begun.$TORCHELASTIC_RESTART_COUNT"
[ "$TORCHELASTIC_RESTART_COUNT" = 1 ] && exit 0
[ "$RANK" = 0 ] && exec sleep 600
while ! [ -e "$TOLD/begun.0.0" ]; do sleep 0.01; done
at failed
exit 1
"""


def launcher() -> Section:
    """Jobs that do nothing: what is timed is the launcher."""
    launchers = {"drumline run": [str(DRUMLINE), "run"], "torchrun": [str(TORCHRUN)]}

    def empty_us(command: list[str], ranks: int) -> float:
        started = time.perf_counter()
        quiet([*command, "--nproc-per-node", str(ranks), "--no-python", "true"], 120)
        return (time.perf_counter() - started) * 1e6

    def restart_us(command: list[str]) -> tuple[float, float]:
        """The whole job, and from the end of the rank that fails until both ranks run again."""
        with tempfile.TemporaryDirectory() as folder:
            env = {**os.environ, "TOLD": folder, "PET_RESTART_DELAY": "0"}
            job = ["--nproc-per-node", "2", "--max-restarts", "1", "--no-python", "sh", "-c", RESTARTED]
            started = time.perf_counter()
            quiet([*command, *job], 120, env=env)
            whole = (time.perf_counter() - started) * 1e6
            at = lambda name: int((pathlib.Path(folder) / name).read_text())
            return whole, (max(at("begun.1.0"), at("begun.1.1")) - at("failed.1")) / 1e3

    empty, restart = ("an empty job, 2 ranks", "an empty job, 8 ranks"), "a job with a restart, 2 ranks"

    def turn(column: str, times: int) -> Turn:
        command = launchers[column]

        def run() -> list[Figure]:
            found = [(row, statistics.median(empty_us(command, ranks) for _ in range(times)))
                     for row, ranks in zip(empty, (2, 8))]
            whole, parts = zip(*(restart_us(command) for _ in range(times)))
            found += [(restart, statistics.median(whole)), ("of which the restart", statistics.median(parts))]
            return [Figure(row, column, us) for row, us in found]

        return Turn((column,), frozenset({"torchrun"} if column == "torchrun" else ()), run)

    ratio = Ratio("torchrun / drumline run", ("torchrun",), "drumline run")
    return Section(
        "launcher",
        "Jobs that do nothing, from the start of the launcher to its end",
        "Ranks of an empty job are `true`. In the job with a restart one rank fails, the other is ended, and both start "
        "again without a pause. *Of which the restart*: from the failure until both run again. Of this time "
        "`drumline run` waits 100 ms for other ranks to fail, so that its report names the first; torchrun looks "
        "every 100 ms whether a rank has ended.",
        (turn("drumline run", 10), turn("torchrun", 1)),
        (ratio,),
        (Goal(ratio, empty, 20.0), Goal(ratio, (restart,), 10.0)),
    )


SECTIONS = [imb, all_reduce, collectives, crowded, over_mpi, throughput, narrow, loopback, links, flows, tensors,
            launcher]
