"""Makes tables of figures: medians, spread, ratios, and which goals are reached."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Ratio:
    """How many times as fast `ours` is as the fastest of `others`."""

    title: str
    others: tuple[str, ...]
    ours: str


@dataclass(frozen=True)
class Goal:
    """The least that a ratio must be in some rows."""

    ratio: Ratio
    rows: tuple[str, ...]
    least: float


@dataclass(frozen=True)
class Figure:
    """One turn's median of one operation."""

    row: str
    column: str
    us: float
    cpu_s_per_gb: float | None = None


# On the machines measured so far, cores that share a cache hand a word over in 45 ns, others in 150 to 220 ns.
NEAR_NS_MAX = 100.0


def state(hand_overs_ns: list[float]) -> str:
    """Whether the cores were near or far during a turn, by the hand-overs before and after it."""
    if not hand_overs_ns:
        return "unknown"
    near = [ns < NEAR_NS_MAX for ns in hand_overs_ns]
    return "near" if all(near) else "mixed" if any(near) else "far"


@dataclass
class Results:
    """The figures of a section, by row, state and column."""

    us: dict[tuple[str, str, str], list[float]] = field(default_factory=dict)
    cpu: dict[tuple[str, str, str], list[float]] = field(default_factory=dict)
    rows: list[str] = field(default_factory=list)

    def add(self, figure: Figure, cores: str) -> None:
        if figure.row not in self.rows:
            self.rows.append(figure.row)
        key = (figure.row, cores, figure.column)
        self.us.setdefault(key, []).append(figure.us)
        if figure.cpu_s_per_gb is not None:
            self.cpu.setdefault(key, []).append(figure.cpu_s_per_gb)

    def median(self, row: str, cores: str, column: str) -> float | None:
        values = self.us.get((row, cores, column))
        return statistics.median(values) if values else None

    def ratio(self, row: str, cores: str, ratio: Ratio) -> float | None:
        others = [self.median(row, cores, column) for column in ratio.others]
        there = [other for other in others if other is not None]
        ours = self.median(row, cores, ratio.ours)
        return min(there) / ours if there and ours else None

    def states(self, row: str) -> list[str]:
        """The states in which the row was measured. Mixed and unknown ones count only if there are no others."""
        states = sorted({cores for at, cores, _ in self.us if at == row})
        return [cores for cores in states if cores in ("near", "far")] or states


def micros(us: float) -> str:
    return f"{us / 1e3:,.1f} ms" if us >= 10_000 else f"{us:,.2f}" if us < 10 else f"{us:,.0f}"


def cell(values: list[float] | None) -> str:
    if not values:
        return ""
    median, low, high = statistics.median(values), min(values), max(values)
    if len(values) == 1:
        return micros(median)
    return f"{micros(median)} ({micros(low)}–{micros(high)})"


def table(results: Results, columns: list[str], ratios: list[Ratio], with_cpu: bool) -> str:
    """A table in Markdown: a line for each row and state."""
    cpu_columns = [f"{column}: CPU s/GB" for column in columns] if with_cpu else []
    titles = ["", "cores", "rounds", *columns, *(ratio.title for ratio in ratios), *cpu_columns]
    lines = ["| " + " | ".join(titles) + " |", "|---|---|" + "---:|" * (len(titles) - 2)]
    for row in results.rows:
        for cores in results.states(row):
            turns = [results.us.get((row, cores, column)) for column in columns]
            counts = [len(values) for values in turns if values]
            values = [results.ratio(row, cores, ratio) for ratio in ratios]
            cells = [row, cores, str(max(counts, default=0)), *map(cell, turns)]
            cells += ["" if value is None else f"**{value:.2f}**" for value in values]
            if with_cpu:
                used = [results.cpu.get((row, cores, column)) for column in columns]
                cells += [f"{statistics.median(values):.3g}" if values else "" for values in used]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def goals(results: dict[str, Results], wanted: list[tuple[str, Goal]]) -> str:
    """A table of all goals, each with its ratio in both states."""
    lines = ["| goal | at least | near | far | reached |", "|---|---:|---:|---:|---|"]
    for section, goal in wanted:
        found = results.get(section)
        for row in goal.rows:
            by_state = {}
            if found:
                by_state = {cores: found.ratio(row, cores, goal.ratio) for cores in found.states(row)}
            values = {cores: value for cores, value in by_state.items() if value is not None}
            # Without a hand-over, or if it changed in every turn, there is only one figure.
            other = next((value for cores, value in values.items() if cores not in ("near", "far")), None)
            near, far = values.get("near", other), values.get("far")
            reached = {
                (True, True): "yes",
                (False, False): "no",
            }.get((all(v >= goal.least for v in values.values()), any(v >= goal.least for v in values.values())), "in one state")
            shown = ["" if value is None else f"{value:.2f}" for value in (near, far)]
            verdict = reached if values else "not measured"
            lines.append(f"| {row}: {goal.ratio.title} | {goal.least:.2f} | {shown[0]} | {shown[1]} | {verdict} |")
    return "\n".join(lines)


BEGIN, END = "<!-- bench: begin -->", "<!-- bench: end -->"


def section_mark(key: str) -> str:
    """Stands below the title of a section, so that `summary.py` finds the table."""
    return f"<!-- section: {key} -->"


def parts_of(page: str) -> tuple[str, str, str]:
    """What stands before the marks, between them, and after them."""
    before, begin, rest = page.partition(BEGIN)
    between, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"the page has no {BEGIN} and {END}, between which the tables belong")
    return before, between, after


def within_marks(page: str) -> str:
    return parts_of(page)[1]


def replaced(page: str, text: str) -> str:
    """The page with `text` between the marks; what stands around them stays."""
    before, _, after = parts_of(page)
    return f"{before}{BEGIN}\n\n{text.strip()}\n\n{END}{after}"
