"""Draws the panels of dashboard.json as an HTML page, with the answers of a Prometheus to their queries; it needs no Grafana.

python docs/monitoring/render.py http://127.0.0.1:9090 --job locks --minutes 5 > dashboard.html
"""

from __future__ import annotations

import argparse
import html
import json
import math
import time
from pathlib import Path
from urllib.parse import urlencode
from urllib.request import urlopen

DASHBOARD = json.loads((Path(__file__).parent / "dashboard.json").read_text(encoding="utf-8"))
COLUMN, ROW, GAP = 56, 34, 8  # pixels of Grafana's grid
NAMED = {
    "green": "#73bf69",
    "red": "#f2495c",
    "orange": "#ff9830",
    "yellow": "#f2cc0c",
    "purple": "#b877d9",
    "gray": "#8e8e8e",
}
COLOURS = ("#73bf69", "#f2cc0c", "#5794f2", "#ff780a", "#f2495c", "#b877d9", "#8ab8ff", "#37872d", "#e0b400", "#c4162a")
STYLE = """
body { background: #111217; color: #ccccdc; font: 12px "DejaVu Sans", sans-serif; margin: 0; }
section { background: #181b1f; border: 1px solid #2a2d33; border-radius: 3px; position: absolute; overflow: hidden; }
h2 { font-size: 13px; font-weight: 600; margin: 8px 10px 0; }
b { display: block; font-size: 34px; font-weight: 600; text-align: center; margin-top: 18px; }
p { margin: 2px 10px; line-height: 17px; } i { display: inline-block; width: 12px; height: 3px; margin: 3px 5px 3px 0; }
span { margin-right: 12px; white-space: nowrap; }
text { fill: #9fa7b3; font: 10px "DejaVu Sans", sans-serif; }
"""


def ask(server: str, expr: str, job: str, begin: float, end: float) -> list[tuple[dict, list[tuple[float, float]]]]:
    """Return the series that a query of the dashboard gives, with Grafana's variables filled in."""
    for name, value in (("$job", job), ("$task", ".*"), ("$__rate_interval", "20s")):
        expr = expr.replace(name, value)
    words = urlencode({"query": expr, "start": begin, "end": end, "step": max(1, round((end - begin) / 150))})
    with urlopen(f"{server}/api/v1/query_range?{words}") as answer:
        found = json.load(answer)["data"]["result"]
    points = [[(float(t), float(v)) for t, v in one["values"] if math.isfinite(float(v))] for one in found]
    return [(one["metric"], values) for one, values in zip(found, points, strict=True) if values]


def shown(value: float, unit: str) -> str:
    """Return a value with its unit, as Grafana does."""
    if unit == "bytes":
        return f"{value / 2**20:.3g} MiB"
    if unit == "s" and value >= 60:
        return f"{value / 60:.3g} min"
    suffix = {"s": " s", "ops": "/s", "percentunit": " %"}.get(unit, "")
    return f"{value * (100 if unit == 'percentunit' else 1):.3g}{suffix}"


def chart(panel: dict, series: list, colours: list, begin: float, end: float, width: int, height: int) -> str:
    """Return the lines of a panel, stacked if it says so, as SVG."""
    unit = panel["fieldConfig"]["defaults"]["unit"]
    stacked = panel["fieldConfig"]["defaults"]["custom"]["stacking"]["mode"] == "normal"
    floor: dict[float, float] = {}
    lines = []
    for _, points in series:
        line = [
            (t, v + (floor.get(t, 0.0) if stacked else 0.0), floor.get(t, 0.0) if stacked else 0.0) for t, v in points
        ]
        floor.update({t: v for t, v, _ in line})
        lines.append(line)
    top = max((v for line in lines for _, v, _ in line), default=0.0) * 1.08 or 1.0
    scale = 60 if unit == "s" and top >= 60 else 2**20 if unit == "bytes" else 1
    power = 10 ** math.floor(math.log10(top / scale / 2.5))
    tick = next(size * power for size in (1, 2, 5, 10) if top / scale / (size * power) <= 5) * scale
    left, bottom = 62, height - 18

    def at(t: float, v: float) -> str:
        return f"{left + (t - begin) / (end - begin) * (width - left - 12):.1f},{bottom - v / top * (bottom - 8):.1f}"

    parts = []
    for number in range(int(top / tick) + 1):
        x, y = at(begin, tick * number).split(",")
        parts.append(f'<path d="M{x},{y}H{width - 12}" stroke="#2a2d33"/>')
        parts.append(f'<text x="{left - 6}" y="{float(y) + 3}" text-anchor="end">{shown(tick * number, unit)}</text>')
    for number, anchor in enumerate(("start", "middle", "middle", "end")):
        moment = begin + (end - begin) * number / 3
        when = time.strftime("%H:%M:%S", time.gmtime(moment))
        parts.append(f'<text x="{at(moment, 0).split(",")[0]}" y="{height - 4}" text-anchor="{anchor}">{when}</text>')
    for line, colour in zip(lines, colours, strict=True):
        over, under = [at(t, v) for t, v, _ in line], [at(t, low) for t, _, low in reversed(line)]
        if stacked:
            if all(v == low for _, v, low in line):
                continue
            parts.append(f'<polygon points="{" ".join(over + under)}" fill="{colour}" fill-opacity="0.3"/>')
        gap = (end - begin) / 60  # a line is broken where there was nothing
        breaks = [n for n in range(1, len(line)) if line[n][0] - line[n - 1][0] > gap]
        for first, last in zip([0, *breaks], [*breaks, len(line)], strict=True):
            points = " ".join(over[first:last])
            parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
    return f'<svg width="{width}" height="{height}">{"".join(parts)}</svg>'


def draw(panel: dict, server: str, job: str, begin: float, end: float) -> str:
    """Return a panel at its place."""
    series = []
    for target in panel["targets"]:
        for labels, points in ask(server, target["expr"], job, begin, end):
            name = target["legendFormat"]
            for label, value in labels.items():
                name = name.replace(f"{{{{{label}}}}}", value)
            series.append((name, points))
    grid, settings = panel["gridPos"], panel["fieldConfig"]["defaults"]
    width, height = grid["w"] * COLUMN - GAP, grid["h"] * ROW - GAP
    style = f"left:{grid['x'] * COLUMN + GAP}px;top:{grid['y'] * ROW + GAP}px;width:{width}px;height:{height}px"
    if panel["type"] == "stat":
        value = series[0][1][-1][1] if series else math.nan
        steps = settings.get("thresholds", {}).get("steps", [{"color": "green"}])
        colour = [step["color"] for step in steps if value >= (step.get("value") or 0)][-1:] or ["gray"]
        words = settings.get("mappings", [{"options": {}}])[0]["options"].get(f"{value:g}", {}).get("text")
        text = words or shown(round(value) if settings.get("decimals") == 0 else value, settings["unit"])
        body = f'<b style="color:{NAMED[colour[0]]}">{text}</b>'
    else:
        own = {one["matcher"]["options"]: one["properties"][0] for one in panel["fieldConfig"]["overrides"]}
        names = [name for name, _ in series]
        colours = [NAMED[own[n]["value"]["fixedColor"]] if n in own else COLOURS[i % 10] for i, n in enumerate(names)]
        items = zip(names, colours, strict=True)
        legend = "".join(f'<span><i style="background:{c}"></i>{html.escape(n)}</span>' for n, c in items)
        lines = 1 + sum(len(name) * 7.5 + 30 for name in names) // width + (max(map(len, names), default=0) > 25)
        body = chart(panel, series, colours, begin, end, width, int(height - 36 - 17 * lines)) + f"<p>{legend}</p>"
    return f'<section style="{style}"><h2>{html.escape(panel["title"])}</h2>{body}</section>'


def main() -> None:
    """Print the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("server", help="URL of a Prometheus")
    parser.add_argument("--job", default=".+", help="job of the exporter, a regular expression")
    parser.add_argument("--minutes", type=float, default=5.0)
    words = parser.parse_args()
    end = time.time()
    panels = [draw(one, words.server, words.job, end - words.minutes * 60, end) for one in DASHBOARD["panels"]]
    head = f'<!doctype html><meta charset="utf-8"><title>{DASHBOARD["title"]}</title><style>{STYLE}</style>'
    print(head + "\n".join(panels))


if __name__ == "__main__":
    main()
