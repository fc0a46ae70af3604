"""The short page of performance, made of the tables that `bench.py` wrote: a picture, one table, the goals.

    python3 bench/summary.py docs/notes/measurements.md docs/performance.md

`bench.py` calls it after a whole run. By itself it needs no measurement, so the page can change its form alone.
"""

from __future__ import annotations

import argparse
import pathlib
import re
import sys
from dataclasses import dataclass

from page import micros, replaced, within_marks
from picture import MATPLOTLIB, speeds

MPIS = ("Intel MPI", "MPICH", "Open MPI")


@dataclass(frozen=True)
class Line:
    """One line of the table: a row of a section, and the columns that are shown of it."""

    what: str
    section: str
    row: str
    ours: str = "staged"
    registered: str | None = "registered"
    others: tuple[str, ...] = MPIS
    gloo: bool = True


LINES = [
    *(Line(f"all_reduce {size}", "all_reduce", size) for size in ("8 B", "64 KiB", "1 MiB", "64 MiB")),
    Line("all_gather 16 MiB", "collectives", "all_gather 16 MiB"),
    Line("reduce_scatter 16 MiB", "collectives", "reduce_scatter 16 MiB"),
    Line("broadcast 16 MiB", "collectives", "broadcast 16 MiB"),
    Line("all_to_all 16 MiB", "collectives", "all_to_all 16 MiB"),
    Line("all_reduce 1 MiB, 4 ranks", "crowded", "4 ranks, 1 MiB", gloo=False),
    Line("all_reduce 64 MiB over TCP", "loopback", "64 MiB", ours="tcp", registered=None, others=()),
    Line("all_reduce 64 MiB, 2 hosts, 10 Gb/s", "links", "10 Gb/s", ours="drumline", registered=None,
         others=("iperf3",), gloo=False),
    *(Line(f"{operation} 64 MiB, 2 hosts of 4 ranks, 1 Gb/s, in torch", "torch_hosts", f"{operation} 64 MiB, 2 x 4",
           ours="drumline", registered=None, others=()) for operation in ("all_gather", "reduce_scatter", "broadcast")),
    *(Line(what, "launcher", what, ours="drumline run", registered=None, others=("torchrun",), gloo=False)
      for what in ("an empty job, 2 ranks", "an empty job, 8 ranks", "a job with a restart, 2 ranks")),
]

# What the picture shows of `all_reduce`: the bytes of its rows, and its columns with their names there.
PICTURED = {"8 B": 8, "1 KiB": 1 << 10, "64 KiB": 64 << 10, "1 MiB": 1 << 20, "16 MiB": 16 << 20, "64 MiB": 64 << 20}
CURVES = {"registered": "drumline, registered buffer", "staged": "drumline, any buffer", **{peer: peer for peer in (*MPIS, "gloo")}}

Row = dict[str, str]


class Tables:
    """The tables of the page of measurements, by section."""

    def __init__(self, text: str) -> None:
        block = within_marks(text)
        self.heading = block.strip().split("\n\n", 1)[0]
        self.rows: dict[str, list[Row]] = {}
        key, columns = None, None
        for line in block.splitlines():
            if mark := re.fullmatch(r"<!-- section: (\w+) -->", line):
                key, columns = mark[1], None
                self.rows[key] = []
            elif key and line.startswith("|"):
                cells = [cell.strip() for cell in line.strip("|").split("|")]
                if columns is None:
                    columns = cells
                elif not line.startswith("|---"):
                    self.rows[key].append(dict(zip(columns, cells)))

    def row(self, section: str, name: str) -> Row | None:
        """The row of near cores if there is one: the more common case of two cores of one machine."""
        found = [row for row in self.rows.get(section, []) if row[""] == name]
        return min(found, key=lambda row: row["cores"] != "near", default=None)


def time_us(cell: str) -> float | None:
    """The median of a cell such as `13.9 ms (10.4 ms–16.4 ms)` or `91 (90–94)`, in µs."""
    found = re.match(r"([\d,.]+)( ms)?", cell)
    return float(found[1].replace(",", "")) * (1e3 if found[2] else 1) if found else None


def shown(us: float | None) -> str:
    if us is None:
        return ""
    return micros(us) if us >= 10_000 else f"{micros(us)} µs"


def times(row: Row, peer: str, ours: str) -> float | None:
    """How many times as fast `ours` is. The tables' own ratio if there is one, because their times are rounded."""
    any_mpi = [f"fastest MPI / {ours}"] if peer in MPIS else []
    for title in (*any_mpi, f"{peer} / {ours}", f"{peer} / ours"):
        if cell := row.get(title, ""):
            return float(cell.strip("*"))
    mine, theirs = time_us(row.get(ours, "")), time_us(row.get(peer, ""))
    return theirs / mine if mine and theirs else None


def bold(ratio: float | None) -> str:
    if ratio is None:
        return ""
    return f"**{ratio:.0f}**" if ratio >= 100 else f"**{ratio:.1f}**" if ratio >= 10 else f"**{ratio:.2f}**"


def fastest(row: Row, columns: tuple[str, ...]) -> tuple[str, float] | None:
    found = [(name, time_us(row.get(name, ""))) for name in columns]
    return min(((name, us) for name, us in found if us is not None), key=lambda peer: peer[1], default=None)


def table(tables: Tables) -> str:
    lines = [
        "| call | drumline | registered | fastest peer | times as fast | gloo | times as fast |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for line in LINES:
        row = tables.row(line.section, line.row)
        if row is None:
            continue
        ours = time_us(row[line.ours])
        registered = time_us(row[line.registered]) if line.registered else None
        peer = fastest(row, line.others)
        gloo = time_us(row.get("gloo", "")) if line.gloo else None
        cells = [
            line.what, shown(ours), shown(registered),
            f"{shown(peer[1])} ({peer[0]})" if peer else "",
            bold(times(row, peer[0], line.ours)) if peer else "",
            shown(gloo), bold(times(row, "gloo", line.ours)) if gloo else "",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def pictured(tables: Tables) -> dict[str, list[tuple[str, float]]]:
    """The median of each size in µs, by the name of the curve."""
    curves: dict[str, list[tuple[str, float]]] = {}
    for size in PICTURED:
        row = tables.row("all_reduce", size) or {}
        for column, name in CURVES.items():
            if (us := time_us(row.get(column, ""))) is not None:
                curves.setdefault(name, []).append((size, us))
    return curves


def picture(tables: Tables) -> str:
    return speeds("all_reduce of f32 between 2 ranks of one host", PICTURED, pictured(tables))


def goals(tables: Tables) -> str:
    rows = tables.rows.get("goals", [])
    missed = [row for row in rows if row["reached"] != "yes"]
    if not missed:
        return f"All {len(rows)} goals are reached."
    lines = [f"{len(rows) - len(missed)} of {len(rows)} goals are reached. The others, as peer's time / ours:", ""]
    for row in missed:
        values = [row[state] for state in ("near", "far") if row[state]]
        what, _, ratio = row["goal"].rpartition(": ")
        lines.append(f"- {what}, {ratio}: {' and '.join(values) or 'not measured'} (wanted: {row['at least']})")
    return "\n".join(lines)


def summary(tables: Tables, picture_name: str, tables_name: str) -> str:
    when = tables.heading.split("; `make bench", 1)[0]
    return f"""{when}; f32, medians.

![Time and throughput of all_reduce beside MPI and gloo]({picture_name})

{table(tables)}

*drumline*: a buffer of any kind; *times as fast* compares this column. *registered*: a buffer of
`alloc_registered`. Two ranks on one host unless the row says otherwise. Ranks rewrite their buffers before
each call. Where ranks outnumber the cores, times are means. The fastest peer is the fastest of Intel MPI,
MPICH and Open MPI; between hosts it is iperf3, with as many bytes both ways; of jobs it is torchrun.

{goals(tables)}

[All tables]({tables_name}), with the spread of each figure.
"""


def write(measurements: pathlib.Path, page: pathlib.Path) -> None:
    """Replaces what stands between the marks of `page`, and writes its picture beside it."""
    tables = Tables(measurements.read_text())
    drawn = page.with_suffix(".svg")
    try:
        drawn.write_text(picture(tables))
    except ImportError:
        print(f"{drawn} stays as it is: pip install matplotlib=={MATPLOTLIB}", file=sys.stderr)
    text = summary(tables, drawn.name, measurements.relative_to(page.parent).as_posix())
    page.write_text(replaced(page.read_text(), text))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("measurements", type=pathlib.Path, help="the page with all tables")
    parser.add_argument("page", type=pathlib.Path, help="the short page")
    options = parser.parse_args()
    write(options.measurements, options.page)


if __name__ == "__main__":
    main()
