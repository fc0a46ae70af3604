"""Pictures of measurements as SVG, readable on light and on dark pages. Drawn by matplotlib."""

from __future__ import annotations

import io
import re

# The kept pictures are of this version; another one may place things elsewhere.
MATPLOTLIB = "3.10.9"

INK, GRID = "#24292f", "#d0d7de"
# On dark pages these two change. All other colours can be read on both.
STYLE = f"""
@media (prefers-color-scheme: dark) {{
  text, [style*="fill: {INK}"] {{ fill: #e6edf3 !important }}
  [style*="stroke: {INK}"] {{ stroke: #e6edf3 !important }}
  [style*="stroke: {GRID}"] {{ stroke: #3d444d !important }}
}}
"""
COLOURS = ["#2f7fd8", "#2a9d5c", "#c8763a", "#a468c8", "#b8922c", "#808890"]

SETTINGS = {
    "svg.fonttype": "none", "svg.hashsalt": "drumline", "font.size": 10, "axes.titlesize": 11, "axes.titlelocation": "left",
    "text.color": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK, "axes.edgecolor": GRID,
    "grid.color": GRID, "axes.grid": True, "axes.axisbelow": True, "axes.spines.top": False, "axes.spines.right": False,
    "xtick.minor.bottom": False, "ytick.minor.left": False, "legend.frameon": False, "savefig.transparent": True,
}

Series = dict[str, list[tuple[str, float]]]


def speeds(title: str, sizes: dict[str, int], series: Series) -> str:
    """Time and throughput by size, side by side. `series`: (size, µs) by name; `sizes`: their bytes."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(SETTINGS):
        figure = Figure(figsize=(9.6, 4.4), layout="constrained")
        figure.suptitle(title, fontsize=12, x=0.01, ha="left")
        times, rates = figure.subplots(1, 2)
        for at, (name, points) in enumerate(series.items()):
            x, us = [sizes[size] for size, _ in points], [us for _, us in points]
            line = {"color": COLOURS[at % len(COLOURS)], "marker": "o", "markersize": 4, "linewidth": 2 if at < 2 else 1.2}
            times.plot(x, us, label=name, **line)
            rates.plot(x, [size / time / 1e3 for size, time in zip(x, us)], **line)
        for axes in (times, rates):
            axes.set_xscale("log", base=2)
            axes.set_xticks(list(sizes.values()), list(sizes), rotation=30, ha="right", rotation_mode="anchor")
            axes.set_xlabel("size of the buffer of each rank")
        times.set_yscale("log")
        ticks = [10.0**power for power in range(-1, 6)]
        times.set_yticks(ticks, ["0.1 µs", "1 µs", "10 µs", "100 µs", "1 ms", "10 ms", "100 ms"])
        times.set_title("time of a call (lower is better)")
        rates.set_ylim(bottom=0)
        rates.set_title("bytes of the buffer / time, GB/s (higher is better)")
        figure.legend(loc="outside lower center", ncols=len(series))
        return drawn(figure, title)


PARTS = {"forward": COLOURS[3], "backward": COLOURS[0], "waiting": COLOURS[5], "optimizer": COLOURS[4]}


def timeline(title: str, ranks: dict[str, list[list[tuple[str, float, float]]]]) -> str:
    """What ranks compute, and below it what travels: (name, begin, end) in ms. What overlaps has rows of its own."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({**SETTINGS, "axes.grid.axis": "x"}):
        figure = Figure(layout="constrained")
        axes, rows = figure.subplots(), []
        total = max(end for parts, _ in ranks.values() for _, _, end in parts)
        for rank, (parts, buckets) in ranks.items():
            levels: list[list[tuple[str, float, float]]] = []
            for bar in sorted(buckets, key=lambda bar: bar[1]):
                level = next((level for level in levels if level[-1][2] <= bar[1]), None)
                levels.append([bar]) if level is None else level.append(bar)
            for name, bars in [(f"{rank}: computes", parts), *((f"{rank}: buckets" if at == 0 else "", it) for at, it in enumerate(levels))]:
                for what, begin, end in bars:
                    axes.barh(len(rows), end - begin, left=begin, height=0.8, color=PARTS.get(what, COLOURS[1]), edgecolor=GRID)
                    if what not in PARTS and end - begin > total / 22:
                        axes.text((begin + end) / 2, len(rows), what, ha="center", va="center", fontsize=7, clip_on=True)
                rows.append(name)
        figure.set_size_inches(9.6, 1.3 + 0.28 * len(rows))
        axes.set_yticks(range(len(rows)), rows)
        axes.invert_yaxis()
        axes.set_xlim(left=0)
        axes.set_xlabel("ms since the step began")
        axes.set_title(title)
        for what, colour in {**PARTS, "a bucket travels": COLOURS[1]}.items():
            axes.barh(0, 0, color=colour, label=what)
        figure.legend(loc="outside lower center", ncols=len(PARTS) + 1)
        return drawn(figure, title)


def drawn(figure: object, title: str) -> str:
    """The figure as the text of an SVG. The same figure makes the same text."""
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Title": title})  # type: ignore[attr-defined]
    text = out.getvalue()
    return re.sub(r"(<svg [^>]*>)", lambda tag: f"{tag[1]}\n <style>{STYLE}</style>", text, count=1)
