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


def chart(panel: dict, series: list, begin: float, end: float, width: int, height: int) -> str:
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
    left, bottom = 62, height - 18

    def at(t: float, v: float) -> str:
        return f"{left + (t - begin) / (end - begin) * (width - left - 12):.1f},{bottom - v / top * (bottom - 8):.1f}"

    parts = []
    for number in range(4):
        x, y = at(begin, top * number / 3).split(",")
        parts.append(f'<path d="M{x},{y}H{width - 12}" stroke="#2a2d33"/>')
        parts.append(
            f'<text x="{left - 6}" y="{float(y) + 3}" text-anchor="end">{shown(top * number / 3, unit)}</text>'
        )
        moment = begin + (end - begin) * number / 3
        when, anchor = time.strftime("%H:%M:%S", time.gmtime(moment)), ("start", "middle", "middle", "end")[number]
        parts.append(f'<text x="{at(moment, 0).split(",")[0]}" y="{height - 4}" text-anchor="{anchor}">{when}</text>')
    for line, colour in zip(lines, COLOURS * len(lines), strict=False):
        over, under = [at(t, v) for t, v, _ in line], [at(t, low) for t, _, low in reversed(line)]
        opacity = 0.3 if stacked else 0.08
        parts.append(f'<polygon points="{" ".join(over + under)}" fill="{colour}" fill-opacity="{opacity}"/>')
        parts.append(f'<polyline points="{" ".join(over)}" fill="none" stroke="{colour}" stroke-width="1.4"/>')
    return f'<svg width="{width}" height="{height}">{"".join(parts)}</svg>'


def legend(names: list[str]) -> str:
    """Return the names of the lines with their colours."""
    pairs = zip(names, COLOURS * len(names), strict=False)
    return "".join(f'<span><i style="background:{colour}"></i>{html.escape(name)}</span>' for name, colour in pairs)


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
        steps = settings.get("thresholds", {}).get("steps", [{"color": "#73bf69"}])
        colour = [step["color"] for step in steps if value >= (step.get("value") or 0)][-1:] or ["grey"]
        words = settings.get("mappings", [{"options": {}}])[0]["options"].get(f"{value:g}", {}).get("text")
        body = f'<b style="color:{colour[0]}">{words or shown(value, settings["unit"])}</b>'
    else:
        picture = chart(panel, series, begin, end, width, height - 62)
        body = f"{picture}<p>{legend([name for name, _ in series])}</p>"
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
