"""A picture of the training, as SVG. matplotlib draws it, where it is installed."""

from __future__ import annotations

from pathlib import Path

Series = list[tuple[float, float]]


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
        for name, points in lines.items():
            label = f"{name}: {points[-1][1]:.3f} at last" if points else name
            axes.plot(*zip(*points, strict=True), label=label)
        axes.set(title=title, xlabel="step", ylabel="loss, nats per character", ylim=(0, None))
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
        figure.savefig(file, metadata={"Date": None})
    return True
