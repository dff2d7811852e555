"""Draws the picture, an SVG with a lane for each worker and, below, a lane for each lock key."""

from collections.abc import Iterable
from html import escape

from example_project.constants import IMPORT_EVERY, LOCK_TTL
from example_project.story import Event, Run, Story

WIDTH, LEFT, RIGHT, TOP = 860, 136, 14, 118
ROW, BAR = 22, 16
COLOURS = {
    "import_rates": "#2563eb",
    "sync_account": "#0d9488",
    "statement": "#be185d",
    "monthly_report": "#9333ea",
    "revalue": "#d97706",
    "close_book": "#475569",
}
FATES = {
    "Skip": ("#64748b", "skipped"),
    "RetryLater": ("#0f766e", "retried later"),
    "RunOnceMore": ("#a16207", "once more"),
    "Raise": ("#be123c", "refused"),
}
RED = "#dc2626"
STYLE = """
text { font: 12px system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif; fill: #334155 }
.title { font-size: 18px; font-weight: 600; fill: #0f172a } .head { font-weight: 600; fill: #0f172a }
.small { font-size: 11px; fill: #475569 } .on { font-size: 11px; fill: #fff } .red { fill: #dc2626; font-weight: 600 }
.page { fill: #fff } .band { fill: #f1f5f9 } .line { stroke: #e2e8f0 }
@media (prefers-color-scheme: dark) {
text { fill: #cbd5e1 } .title, .head { fill: #f1f5f9 } .small { fill: #94a3b8 } .on { fill: #fff } .red { fill: #f87171 }
.page { fill: #0d1117 } .band { fill: #1e293b } .line { stroke: #334155 }
}
"""


class Picture:
    """Collects shapes from top to bottom. The x axis is time in seconds since the demo's start."""

    def __init__(self, story: Story) -> None:
        """Take the story to draw."""
        self.story = story
        self.shapes: list[str] = []
        self.y = float(TOP)
        self._scale = (WIDTH - LEFT - RIGHT) / max(story.end, 1.0)
        self._mids: dict[tuple[str, float], float] = {}

    def draw(self) -> str:
        """Return the whole picture."""
        for node in self.story.nodes:
            self._worker(node)
        self.y += 30
        self._text(LEFT, self.y - 10, "The same runs by lock key: bars in one row never overlap", "head")
        for work in dict.fromkeys(run.work for run in sorted(self.story.runs, key=_place)):
            self._lock_key(work)
        body = [*self._axis(), *self.shapes]
        self.shapes = []
        self._kill()
        self._legend()
        height = self.y + 44
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" '
            f'width="{WIDTH}" height="{height:.0f}" role="img"><style>{STYLE}</style>'
            f'<rect width="100%" height="100%" class="page"/>'
        )
        return "\n".join([head, *body, *self.shapes, "</svg>\n"])

    def _x(self, seconds: float) -> float:
        return LEFT + seconds * self._scale

    def _text(self, x: float, y: float, words: str, css: str = "", anchor: str = "start") -> None:
        self.shapes.append(f'<text x="{x:.1f}" y="{y:.1f}" class="{css}" text-anchor="{anchor}">{escape(words)}</text>')

    def _worker(self, node: str) -> None:
        runs = [run for run in self.story.runs if run.node == node]
        rows = _rows(runs, self.story)
        height = ROW * max(len(rows), 1) + 26
        self._band(node, height)
        for number, row in enumerate(rows):
            for run in row:
                self._run(run, self.y + 22 + number * ROW, run.work)
        for event in self.story.events:
            if event.node == node and event.kind in FATES:
                self._fate(event, self.y + 11)
        self.y += height + 6

    def _band(self, node: str, height: float) -> None:
        wide = WIDTH - LEFT - RIGHT
        self.shapes.append(f'<rect x="{LEFT}" y="{self.y}" width="{wide}" height="{height}" class="band" rx="4"/>')
        self._text(LEFT - 12, self.y + height / 2, node.partition("@")[0], "head", "end")
        self._text(LEFT - 12, self.y + height / 2 + 14, "worker", "small", "end")
        kill = self.story.kill
        if kill is None or kill.node != node:
            return
        back = min((e.at for e in self.story.events if e.node == node and e.at > kill.at), default=self.story.end)
        x, width = self._x(kill.at), (back - kill.at) * self._scale
        self.shapes.append(f'<rect x="{x:.1f}" y="{self.y}" width="{width:.1f}" height="{height}" fill="url(#dead)"/>')
        self._text(x + width / 2, self.y + height - 8, "killed with all its children", "small", "middle")
        if back < self.story.end:
            self._text(x + width + 4, self.y + height - 8, "restarted", "small")

    def _run(self, run: Run, y: float, label: str) -> None:
        x, end = self._x(run.started), self.story.until(run)
        width = max((end - run.started) * self._scale, 3)
        cut = self.story.is_cut(run)
        edge = f' stroke="{RED}" stroke-width="2"' if cut else ""
        hint = f"{run.work} on {run.node}: {run.started:.2f} s to {end:.2f} s{', killed' if cut else ''}"
        self.shapes.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{BAR}" rx="3" '
            f'fill="{COLOURS.get(run.task, "#334155")}"{edge}><title>{escape(hint)}</title></rect>'
        )
        if width > 6.2 * len(label) + 6:
            self._text(x + 5, y + 12, label, "on")

    def _fate(self, event: Event, y: float) -> None:
        hint = f"{event.task} {FATES[event.kind][1]} at {event.at:.2f} s, held by {event.holder}"
        self.shapes.append(f"<g><title>{escape(hint)}</title>{_mark(event.kind, self._x(event.at), y)}</g>")

    def _lock_key(self, work: str) -> None:
        self._text(LEFT - 12, self.y + 12, work, "", "end")
        x = WIDTH - RIGHT
        self.shapes.append(f'<path d="M{LEFT} {self.y + BAR / 2}H{x}" class="line"/>')
        for run in self.story.runs:
            if run.work == work:
                self._run(run, self.y, run.node.partition("@")[0])
                self._mids[work, run.started] = self.y + BAR / 2
        self.y += ROW

    def _axis(self) -> Iterable[str]:
        bottom = self.y + 4
        step = 1 if self.story.end < 20 else 2 if self.story.end < 50 else 5
        for second in range(0, int(self.story.end) + 1, step):
            x = self._x(second)
            yield f'<path d="M{x:.1f} {TOP - 8}V{bottom:.1f}" class="line"/>'
            yield f'<text x="{x:.1f}" y="{bottom + 14:.1f}" text-anchor="middle" class="small">{second} s</text>'

    def _kill(self) -> None:
        kill = self.story.kill
        if kill is None:
            return
        x = self._x(kill.at)
        self.shapes.append(f'<path d="M{x:.1f} {TOP - 8}V{self.y + 2:.1f}" stroke="{RED}" stroke-width="1.6"/>')
        self._text(x, TOP - 14, f"SIGKILL {kill.at:.1f} s", "red", "middle")
        for takeover in self.story.takeovers():
            if takeover.next:
                self._takeover(takeover.cut, takeover.gone, takeover.next, x)

    def _takeover(self, cut: Run, gone: float | None, following: Run, x: float) -> None:
        y, end = self._mids[cut.work, cut.started], self._x(following.started)
        self.shapes.append(
            f'<path d="M{x:.1f} {y}H{end - 6:.1f}" stroke="{RED}" stroke-width="1.6" stroke-dasharray="4 3"/>'
            f'<path d="M{end - 8:.1f} {y - 4}l8 4l-8 4z" fill="{RED}"/>'
        )
        if gone is not None:
            self.shapes.append(
                f'<circle cx="{self._x(gone):.1f}" cy="{y}" r="4" fill="#fff" stroke="{RED}" stroke-width="2"/>'
            )
        self._text(x + 4, y - 3, f"{following.started - self.story.until(cut):.1f} s", "red")

    def _legend(self) -> None:
        self._text(14, 28, "One run at a time: three workers, their runs and their duplicates", "title")
        setting = f"lock_ttl {LOCK_TTL:g} s; two beats, each sends an import every {IMPORT_EVERY:g} s"
        self._text(14, 46, setting, "small")
        x = 14.0
        for task, colour in COLOURS.items():
            self.shapes.append(f'<rect x="{x}" y="57" width="14" height="12" rx="3" fill="{colour}"/>')
            self._text(x + 19, 67, task)
            x += 32 + 7 * len(task)
        x = 14.0
        for kind, (_, words) in FATES.items():
            self.shapes.append(_mark(kind, x + 6, 82))
            self._text(x + 16, 86, words)
            x += 32 + 7 * len(words)
        if self.story.kill:
            self.shapes.append(f'<circle cx="{x + 6}" cy="82" r="4" class="page" stroke="{RED}" stroke-width="2"/>')
            self._text(x + 16, 86, "killed worker's key expired")
            self._text(x + 190, 86, "┄▸ next run", "red")
        self.shapes.append(
            '<defs><pattern id="dead" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
            '<rect width="7" height="7" fill="#fee2e2"/><path d="M0 0V7" stroke="#fecaca" stroke-width="5"/></pattern></defs>'
        )


def render(story: Story) -> str:
    """Return the picture as a self-contained SVG."""
    return Picture(story).draw()


def _rows(runs: list[Run], story: Story) -> list[list[Run]]:
    rows: list[list[Run]] = []
    for run in sorted(runs, key=lambda run: run.started):
        for row in rows:
            if story.until(row[-1]) <= run.started:
                row.append(run)
                break
        else:
            rows.append([run])
    return rows


def _place(run: Run) -> tuple[int, str]:
    return list(COLOURS).index(run.task), run.work


def _mark(kind: str, x: float, y: float) -> str:
    colour = FATES[kind][0]
    if kind == "Skip":
        return f'<path d="M{x:.1f} {y - 5}l5 5l-5 5l-5 -5z" fill="{colour}"/>'
    if kind == "RunOnceMore":
        return f'<path d="M{x - 4:.1f} {y}h8m-4 -4v8" stroke="{colour}" stroke-width="2.4"/>'
    if kind == "RetryLater":
        return f'<circle cx="{x:.1f}" cy="{y}" r="4" fill="none" stroke="{colour}" stroke-width="2"/>'
    return f'<path d="M{x - 4:.1f} {y - 4}l8 8m0 -8l-8 8" stroke="{colour}" stroke-width="2.4"/>'
