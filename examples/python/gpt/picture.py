"""A picture of the training, as SVG."""

from __future__ import annotations

from html import escape

WIDTH, HEIGHT = 720, 420
LEFT, RIGHT, TOP, BOTTOM = 60, 700, 60, 370
COLOURS = ["#2f6fb0", "#c4572b", "#3a8f5c"]

Series = list[tuple[float, float]]


def svg(title: str, x_axis: str, lines: dict[str, Series]) -> str:
    """Lines through points, each with its name and its last value."""
    points = [point for series in lines.values() for point in series]
    x_max = max((x for x, _ in points), default=1.0) or 1.0
    y_max = max((y for _, y in points), default=1.0) or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        return LEFT + (RIGHT - LEFT) * x / x_max, BOTTOM - (BOTTOM - TOP) * y / y_max

    drawn = [f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>']
    drawn.append(text(LEFT, 30, title, 'font-size="17" font-weight="600" fill="#222"'))
    drawn.append(text((LEFT + RIGHT) / 2, HEIGHT - 12, x_axis, 'text-anchor="middle"'))
    for part in range(5):
        x, y = x_max * part / 4, y_max * part / 4
        _, at = place(0, y)
        drawn.append(f'<path d="M{LEFT} {at:.1f}H{RIGHT}" stroke="#ddd"/>')
        drawn.append(text(LEFT - 8, at + 4, f"{y:.2f}", 'text-anchor="end"'))
        drawn.append(text(place(x, 0)[0], BOTTOM + 18, f"{x:g}", 'text-anchor="middle"'))
    for (name, series), colour, row in zip(lines.items(), COLOURS, range(len(lines)), strict=False):
        path = " ".join("{:.1f},{:.1f}".format(*place(x, y)) for x, y in series)
        drawn.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        last = f"{name}: {series[-1][1]:.3f}" if series else name
        drawn.append(text(RIGHT, TOP + 16 * row, last, f'text-anchor="end" fill="{colour}"'))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="system-ui, sans-serif" font-size="13" fill="#444">\n'
        + "\n".join(drawn)
        + "\n</svg>\n"
    )


def text(x: float, y: float, words: str, style: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(words)}</text>'
