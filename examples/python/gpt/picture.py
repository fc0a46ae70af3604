"""A picture of the training, as SVG. matplotlib draws it, where it is installed."""

from __future__ import annotations

import io
import itertools
import re
from pathlib import Path

Series = list[tuple[float, float]]

# Both can be read on light and on dark pages; what is black by itself is light on dark ones.
COLOURS = ["#2f7fd8", "#c8763a"]
DARK = """<style>
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 !important }
  [style*="stroke: #000000"] { stroke: #e6edf3 !important }
}
</style>"""


def draw(file: Path, title: str, lines: dict[str, Series]) -> bool:
    """Draws losses over steps. `False`: there is no matplotlib, and no picture."""
    try:
        from matplotlib import rc_context  # pyright: ignore[reportMissingImports]
        from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]
    except ImportError:
        return False
    # Text stays text, and the same losses make the same bytes.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "gpt"}):
        figure = Figure(figsize=(7.2, 4.2), layout="constrained")
        axes = figure.subplots()
        for (name, points), colour in zip(lines.items(), itertools.cycle(COLOURS)):
            label = f"{name}: {points[-1][1]:.3f} at last" if points else name
            axes.plot(*zip(*points, strict=True), label=label, color=colour)
        axes.set(title=title, xlabel="step", ylabel="loss, nats per character", ylim=(0, None))
        axes.grid(alpha=0.3)
        figure.legend(loc="outside lower center", ncols=len(lines), frameon=False)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None}, transparent=True)
    file.write_text(re.sub(r"(<svg [^>]*>)", lambda tag: f"{tag[1]}\n{DARK}", text.getvalue(), count=1))
    return True
