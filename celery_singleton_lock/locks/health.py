"""The health check: compares what is recorded of locks with bounds.

A value above its bound is a warning, above twice its bound it is critical.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from celery_singleton_lock.clock import duration_text
from celery_singleton_lock.store.records import Statistics

OK, WARNING, CRITICAL, UNKNOWN = range(4)
NAMES = ("OK", "WARNING", "CRITICAL", "UNKNOWN")


class Bounds(NamedTuple):
    """How much of each measure is allowed, None: any; seconds for times."""

    max_age: float | None = None
    max_blocked: float | None = None
    max_lost: float | None = None
    no_success_for: float | None = None


@dataclass
class Health:
    """The answer of a health check.

    Arguments:
        status: `OK`, `WARNING`, `CRITICAL` or `UNKNOWN`, as numbers from 0 to 3: the exit status of a Nagios plug-in.
        text: what is wrong, the worst first, or how many locks there are.
        values: the measured values by their names, those of the worst task; None: not known.
        perfdata: the values as Nagios writes them, with the bounds.
    """

    status: int = OK
    text: str = ""
    values: dict[str, float | None] = field(default_factory=dict)
    perfdata: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The status by its name, the text and the values, for JSON."""
        return {"status": NAMES[self.status], "text": self.text, "values": self.values}


class _Measure(NamedTuple):
    bound: str  # which of the bounds
    perfdata: str
    unit: str
    problem: str


_MEASURES = (
    _Measure("max_age", "oldest", "s", "a lock is held for {}"),
    _Measure("max_blocked", "blocked", "", "a holder has met {} duplicates"),
    _Measure("max_lost", "lost", "c", "locks lost: {}"),
    _Measure("no_success_for", "since_success", "s", "no success for {}"),
)


def evaluate(
    found: Sequence[Statistics],
    bounds: Bounds,
    named: Sequence[str],
    now: float,
    refusal: str = "",
    store_start: float = -math.inf,
) -> Health:
    """Compare the statistics of tasks with the bounds.

    Arguments:
        named: tasks that must have succeeded, though they may never have started.
        now: seconds since 1970.
        refusal: why the store takes no writes.
        store_start: when the store started, in seconds since 1970, if it tells.
    """
    health, worst = Health(), [0.0] * len(_MEASURES)
    problems = [(CRITICAL, f"the store takes no writes: {refusal}")] if refusal else []
    for one in found:
        for place, value in enumerate(_values(one, one.task in named, now, store_start)):
            worst[place] = max(worst[place], value)
            status = _status(value, bounds[place])
            if status:
                known = place < len(_MEASURES) - 1 or bool(one.counters.get("last_success"))
                problems.append((status, f"{one.task}: {_problem(_MEASURES[place], value, known)}"))
    count, paused = sum(one.held for one in found), sum(one.states.get("paused", 0) for one in found)
    problems.sort(key=lambda problem: -problem[0])
    health.status = problems[0][0] if problems else OK
    health.text = (
        "; ".join(text for _, text in problems)
        or f"{count} locks of {len(found)} tasks{f', {paused} paused' if paused else ''}"
    )
    measured = {one.perfdata: None if value == math.inf else value for one, value in zip(_MEASURES, worst, strict=True)}
    health.values = {"locks": count, **measured}
    health.perfdata = " ".join([f"locks={count};;;0", *_perfdata(worst, bounds)])
    return health


def _values(one: Statistics, named: bool, now: float, store_start: float) -> tuple[float, float, float, float]:
    """Return the values of a task, in the order of `Bounds`."""
    age = max(0.0, now - one.oldest) if one.oldest else 0.0
    lost = one.sum("lost") - one.counters.get("lost:released_by_operator", 0)  # an operator's release is no alarm
    return age, one.blocked, lost, _since_success(one, named, now, store_start)


def _since_success(one: Statistics, named: bool, now: float, store_start: float) -> float:
    """Return seconds since the last success, or the first start, or the start of the store; infinity if that is not known."""
    if last := one.counters.get("last_success", 0):
        return max(0.0, now - last / 1000)
    if not (named or one.counters.get("last_start")) or one.counters.get("released:started"):
        return 0.0  # with `lock_until="start"`, the end of a body is not seen
    has_ended = any(map(one.sum, ("released", "expired", "released_by_operator")))
    return max(0.0, now - (one.oldest if one.oldest and not has_ended else store_start))


def _status(value: float, bound: float | None) -> int:
    if bound is None or value <= bound:
        return OK
    return WARNING if value <= 2 * bound else CRITICAL


def _problem(measure: _Measure, value: float, known: bool) -> str:
    if value == math.inf:
        return "no success yet"
    if not known:
        return f"no success since the store started, or a first run, {duration_text(value)} ago"
    return measure.problem.format(duration_text(value) if measure.unit == "s" else f"{value:g}")


def _perfdata(worst: Sequence[float], bounds: Bounds) -> Iterator[str]:
    for measure, value, bound in zip(_MEASURES, worst, bounds, strict=True):
        limits = ";" if bound is None else f"{bound:g};{2 * bound:g}"
        yield f"{measure.perfdata}={'U' if value == math.inf else f'{value:.0f}{measure.unit}'};{limits};0"
