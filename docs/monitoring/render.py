"""Draws the panels of dashboard.json as an HTML page, with the answers of a Prometheus to their queries; it needs no Grafana.

python docs/monitoring/render.py http://127.0.0.1:9090 --minutes 5 --rate-interval 20s > dashboard.html
"""

from __future__ import annotations

import argparse
import html
import json
import math
import time
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlencode
from urllib.request import urlopen

DASHBOARD = json.loads((Path(__file__).parent / "dashboard.json").read_text(encoding="utf-8"))
COLUMN, ROW, GAP = 56, 34, 8  # pixels of Grafana's grid
COLOURS = ("#73bf69", "#f2cc0c", "#5794f2", "#ff780a", "#f2495c", "#b877d9", "#8ab8ff", "#37872d", "#e0b400", "#8e8e8e")
NAMED = dict(zip(("green", "yellow", "blue", "orange", "red", "purple"), COLOURS, strict=False), gray="#8e8e8e")
UNITS = {
    "bytes": (2**-20, " MiB"),
    "min": (1 / 60, " min"),
    "s": (1, " s"),
    "ops": (1, "/s"),
    "percentunit": (100, " %"),
}
STYLE = """
body { background: #111217; color: #ccccdc; font: 12px "DejaVu Sans", sans-serif; margin: 0; }
section { background: #181b1f; border: 1px solid #2a2d33; border-radius: 3px; position: absolute; overflow: hidden; }
h2 { font-size: 13px; margin: 8px 10px 0; } p { margin: 2px 10px; line-height: 17px; }
b { display: block; font-size: 34px; text-align: center; margin-top: 18px; } text { fill: #9fa7b3; font-size: 10px; }
i { display: inline-block; width: 12px; height: 3px; margin: 3px 5px; } span { white-space: nowrap; }
"""


class Frame(NamedTuple):
    """The area of a chart, in pixels, and its scales."""

    begin: float
    end: float
    top: float
    width: int
    height: int

    def at(self, moment: float, value: float) -> str:
        """Return the place of a value."""
        x = 62 + (moment - self.begin) / (self.end - self.begin) * (self.width - 74)
        return f"{x:.1f},{self.height - 18 - value / self.top * (self.height - 26):.1f}"


def ask(server: str, expr: str, variables: dict, begin: float, end: float) -> list:
    """Return labels and points of the series that a query gives, with Grafana's variables filled in."""
    for name, value in variables.items():
        expr = expr.replace(name, value)
    words = urlencode({"query": expr, "start": begin, "end": end, "step": max(1, round((end - begin) / 150))})
    with urlopen(f"{server}/api/v1/query_range?{words}") as answer:
        found = json.load(answer)["data"]["result"]
    points = [[(float(t), float(v)) for t, v in one["values"] if math.isfinite(float(v))] for one in found]
    return [(one["metric"], values) for one, values in zip(found, points, strict=True) if values]


def shown(value: float, unit: str) -> str:
    """Return a value with its unit, as Grafana does."""
    unit = "min" if unit == "s" and value >= 60 else unit
    factor, suffix = UNITS.get(unit, (1, ""))
    return f"{value * factor:.3g}{suffix}"


def axes(frame: Frame, unit: str) -> str:
    """Return lines and texts of the axes."""
    scale = 60 if unit == "s" and frame.top >= 60 else 2**20 if unit == "bytes" else 1
    power = 10 ** math.floor(math.log10(frame.top / scale / 2.5))
    tick = next(size * power for size in (1, 2, 5, 10) if frame.top / scale / (size * power) <= 5) * scale
    parts = []
    for value in (tick * number for number in range(int(frame.top / tick) + 1)):
        x, y = frame.at(frame.begin, value).split(",")
        parts.append(f'<path d="M{x},{y}H{frame.width - 12}" stroke="#2a2d33"/>')
        parts.append(f'<text x="56" y="{float(y) + 3}" text-anchor="end">{shown(value, unit)}</text>')
    for moment, anchor in ((frame.begin, "start"), ((frame.begin + frame.end) / 2, "middle"), (frame.end, "end")):
        when, x = time.strftime("%H:%M:%S", time.gmtime(moment)), frame.at(moment, 0).split(",")[0]
        parts.append(f'<text x="{x}" y="{frame.height - 4}" text-anchor="{anchor}">{when}</text>')
    return "".join(parts)


def line(frame: Frame, points: list, colour: str, stacked: bool) -> str:
    """Return a line, broken where there was nothing, and under a stacked one its area."""
    over, area = [frame.at(t, v) for t, v, _ in points], ""
    if stacked:
        if all(v == low for _, v, low in points):
            return ""
        under = [frame.at(t, low) for t, _, low in reversed(points)]
        area = f'<polygon points="{" ".join(over + under)}" fill="{colour}" fill-opacity="0.3"/>'
    gap = (frame.end - frame.begin) / 60
    breaks = [n for n in range(1, len(points)) if points[n][0] - points[n - 1][0] > gap]
    pieces = [" ".join(over[a:b]) for a, b in zip([0, *breaks], [*breaks, len(points)], strict=True)]
    style = f'fill="none" stroke="{colour}" stroke-width="1.6"'
    return area + "".join(f'<polyline points="{one}" {style}/>' for one in pieces)


def graph(panel: dict, series: list, begin: float, end: float, width: int, height: int) -> str:
    """Return the lines of a panel as SVG, and their names."""
    settings = panel["fieldConfig"]["defaults"]
    if panel["type"] == "stat":
        return figure(settings, series)
    own = {one["matcher"]["options"]: one["properties"][0] for one in panel["fieldConfig"]["overrides"]}
    names = [name for name, _ in series]
    colours = [NAMED[own[n]["value"]["fixedColor"]] if n in own else COLOURS[i % 10] for i, n in enumerate(names)]
    stacked, floor, lines = settings["custom"]["stacking"]["mode"] == "normal", {}, []
    for _, points in series:
        lines.append([(t, v + floor.get(t, 0.0), floor.get(t, 0.0)) for t, v in points])
        floor.update({t: v for t, v, _ in lines[-1]} if stacked else {})
    top = max((v for points in lines for _, v, _ in points), default=0.0) * 1.08 or 1.0
    rows = 1 + sum(len(name) * 7.5 + 30 for name in names) // width + (max(map(len, names), default=0) > 25)
    frame = Frame(begin, end, top, width, int(height - 36 - 17 * rows))
    drawn = "".join(line(frame, points, colour, stacked) for points, colour in zip(lines, colours, strict=True))
    pairs = zip(names, colours, strict=True)
    legend = "".join(f'<span><i style="background:{c}"></i>{html.escape(n)}</span>' for n, c in pairs)
    return f'<svg width="{width}" height="{frame.height}">{axes(frame, settings["unit"])}{drawn}</svg><p>{legend}</p>'


def figure(settings: dict, series: list) -> str:
    """Return the last value of a panel with one number."""
    if not series:
        return "<b>no data</b>"
    value = series[0][1][-1][1]
    steps = settings.get("thresholds", {}).get("steps", [{"color": "green"}])
    colour = [step["color"] for step in steps if value >= (step.get("value") or 0)][-1]
    words = settings.get("mappings", [{"options": {}}])[0]["options"].get(f"{value:g}", {}).get("text")
    text = words or shown(round(value) if settings.get("decimals") == 0 else value, settings["unit"])
    return f'<b style="color:{NAMED[colour]}">{text}</b>'


def draw(panel: dict, server: str, variables: dict, begin: float, end: float) -> str:
    """Return a panel at its place."""
    series = []
    for target in panel["targets"]:
        for labels, points in ask(server, target["expr"], variables, begin, end):
            name = target["legendFormat"]
            for label, value in labels.items():
                name = name.replace(f"{{{{{label}}}}}", value)
            series.append((name, points))
    grid = panel["gridPos"]
    width, height = grid["w"] * COLUMN - GAP, grid["h"] * ROW - GAP
    style = f"left:{grid['x'] * COLUMN + GAP}px;top:{grid['y'] * ROW + GAP}px;width:{width}px;height:{height}px"
    body = graph(panel, series, begin, end, width, height)
    return f'<section style="{style}"><h2>{html.escape(panel["title"])}</h2>{body}</section>'


def main() -> None:
    """Print the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("server", help="URL of a Prometheus")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--rate-interval", default="1m", help="at least four times the interval of scrapes")
    words = parser.parse_args()
    end, variables = time.time(), {"$job": ".+", "$task": ".*", "$__rate_interval": words.rate_interval}
    panels = [draw(one, words.server, variables, end - words.minutes * 60, end) for one in DASHBOARD["panels"]]
    print(f'<!doctype html><meta charset="utf-8"><title>{DASHBOARD["title"]}</title><style>{STYLE}</style>', *panels)


if __name__ == "__main__":
    main()
