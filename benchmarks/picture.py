"""The picture of a run: bars with their spread, in SVG."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from benchmarks.report import Bars
from benchmarks.rounds import Spread

WIDTH, LABEL, BAR = 860, 270, 430  # pixels: the whole, the names, the longest bar
LINE, GAP = 22, 46  # pixels: one bar, and what a panel's title takes
OURS, OTHER = "#2f6fb0", "#b9c0c8"
STYLE = "text{font:13px sans-serif;fill:#222}.title{font-weight:bold}.line{stroke:#222;stroke-width:1}"


def svg_of(panels: Sequence[Bars]) -> str:
    """Panels, one below the other, as an SVG document; bars of this library are blue."""
    parts: list[str] = []
    top = 10
    for panel in panels:
        parts.append(_panel(panel, top))
        top += GAP + LINE * len(panel.values)
    size = f'width="{WIDTH}" height="{top}" viewBox="0 0 {WIDTH} {top}"'
    background = f'<rect width="{WIDTH}" height="{top}" fill="white"/>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{STYLE}</style>{background}'
    return "\n".join([head, *parts, "</svg>\n"])


def _panel(panel: Bars, top: int) -> str:
    longest = max((spread.high for spread in panel.values.values()), default=0.0) or 1.0
    title = f'<text class="title" x="10" y="{top + 18}">{escape(panel.title)} ({escape(panel.unit)})</text>'
    bars = [
        _bar(name, spread, top + 28 + LINE * at, BAR / longest)
        for at, (name, spread) in enumerate(panel.values.items())
    ]
    return "\n".join([title, *bars])


def _bar(name: str, spread: Spread, top: int, scale: float) -> str:
    length, low, high = (max(0.0, value * scale) for value in (spread.median, spread.low, spread.high))
    colour = OURS if "this library" in name else OTHER
    middle = top + LINE / 2 - 2
    return (
        f'<text x="{LABEL - 8}" y="{top + 14}" text-anchor="end">{escape(name)}</text>'
        f'<rect x="{LABEL}" y="{top + 2}" width="{length:.1f}" height="{LINE - 8}" fill="{colour}"/>'
        f'<line class="line" x1="{LABEL + low:.1f}" x2="{LABEL + high:.1f}" y1="{middle}" y2="{middle}"/>'
        f'<text x="{LABEL + max(length, high) + 8:.1f}" y="{top + 14}">{spread.median:,.3g}</text>'
    )
