"""A bar chart as SVG, readable on light and on dark pages."""

from __future__ import annotations

from html import escape

# In pixels.
WIDTH, LEFT, RIGHT, TOP, PLOT, BOTTOM = 720, 44, 16, 66, 220, 40
BAR = 30

STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #24292f; }
  .title { font-weight: 600; }
  .grid { stroke: #d0d7de; }
  .one { stroke: #24292f; stroke-dasharray: 5 4; }
  .bar0 { fill: #0969da; }
  .bar1 { fill: #2da44e; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; }
    .grid { stroke: #3d444d; }
    .one { stroke: #e6edf3; }
    .bar0 { fill: #58a6ff; }
    .bar1 { fill: #3fb950; }
  }
"""


def bars(title: str, kinds: list[str], groups: list[tuple[str, list[float]]], one: str) -> str:
    """Each group is a label and a value for each kind. A dashed line, named `one`, stands at 1."""
    top = max((value for _, values in groups for value in values), default=1.0)
    top = max(2, int(top) + 1)
    y = lambda value: TOP + PLOT * (1 - value / top)
    parts = [f'<text class="title" x="{LEFT}" y="20">{escape(title)}</text>']
    x = LEFT
    for at, kind in enumerate(kinds):
        parts.append(f'<rect class="bar{at}" x="{x}" y="32" width="12" height="12"/>')
        parts.append(f'<text x="{x + 18}" y="43">{escape(kind)}</text>')
        x += 38 + 7 * len(kind)
    parts.append(f'<line class="one" x1="{x}" x2="{x + 24}" y1="38" y2="38"/>')
    parts.append(f'<text x="{x + 30}" y="43">{escape(one)}</text>')
    for tick in range(0, top + 1):
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick}×</text>')
    room = (WIDTH - LEFT - RIGHT) / max(len(groups), 1)
    for index, (label, values) in enumerate(groups):
        middle = LEFT + room * (index + 0.5)
        for at, value in enumerate(values):
            left = middle + (at - len(values) / 2) * (BAR + 4)
            parts.append(f'<rect class="bar{at}" x="{left:.1f}" y="{y(value):.1f}" width="{BAR}" '
                         f'height="{TOP + PLOT - y(value):.1f}"/>')
            parts.append(f'<text x="{left + BAR / 2:.1f}" y="{y(value) - 5:.1f}" '
                         f'text-anchor="middle">{value:.1f}</text>')
        parts.append(f'<text x="{middle:.1f}" y="{TOP + PLOT + 20}" text-anchor="middle">{escape(label)}</text>')
    parts.append(f'<line class="one" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(1):.1f}" y2="{y(1):.1f}"/>')
    height = TOP + PLOT + BOTTOM
    body = "\n".join(f"  {part}" for part in parts)
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
            f'aria-label="{escape(title, quote=True)}">\n  <style>{STYLE}  </style>\n{body}\n</svg>\n')
