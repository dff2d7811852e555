"""The command `check`: a plug-in for Nagios, Icinga and others that take its exit status and its one line.

A value above its bound is a warning, above twice its bound it is critical.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import click

from celery_singleton_lock import locks
from celery_singleton_lock.cli.duration import DURATION, duration_text
from celery_singleton_lock.cli.group import as_json, in_one_line, option, singleton
from celery_singleton_lock.cli.output import print_json, printable
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
class Verdict:
    """What a check has found."""

    status: int = OK
    text: str = ""
    values: dict[str, float | None] = field(default_factory=dict)
    perfdata: str = ""

    def __str__(self) -> str:
        text = printable(self.text).replace("|", "/")  # what comes after a bar is read as numbers
        return f"SINGLETON {NAMES[self.status]} - {text}" + (f" | {self.perfdata}" if self.perfdata else "")


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


def judge(found: Sequence[Statistics], bounds: Bounds, named: Sequence[str], now: float) -> Verdict:
    """Compare the statistics of tasks with the bounds.

    Arguments:
        named: tasks that must have succeeded, though they may never have started.
        now: seconds since 1970.
    """
    verdict, problems, worst = Verdict(), [], [0.0] * len(_MEASURES)
    for one in found:
        for place, value in enumerate(_values(one, one.task in named, now)):
            worst[place] = max(worst[place], value)
            status = _status(value, bounds[place])
            if status:
                problems.append((status, f"{one.task}: {_problem(_MEASURES[place], value)}"))
    count = sum(one.held for one in found)
    problems.sort(key=lambda problem: -problem[0])
    verdict.status = problems[0][0] if problems else OK
    verdict.text = "; ".join(text for _, text in problems) or f"{count} locks of {len(found)} tasks"
    measured = {one.perfdata: None if value == math.inf else value for one, value in zip(_MEASURES, worst, strict=True)}
    verdict.values = {"locks": count, **measured}
    verdict.perfdata = " ".join([f"locks={count};;;0", *_perfdata(worst, bounds)])
    return verdict


def _values(one: Statistics, named: bool, now: float) -> tuple[float, float, float, float]:
    """Return the values of a task, in the order of `Bounds`."""
    age = max(0.0, now - one.oldest) if one.oldest else 0.0
    lost = one.sum("lost") - one.counters.get("lost:revoked", 0)  # an operator's release is no alarm
    return age, one.blocked, lost, _since_success(one, named, now)


def _since_success(one: Statistics, named: bool, now: float) -> float:
    """Return seconds since the last success, or since the first start; infinity if that is not known."""
    if last := one.counters.get("last_success", 0):
        return max(0.0, now - last / 1000)
    if not (named or one.counters.get("last_start")) or one.counters.get("released:started"):
        return 0.0  # with `lock_until="start"`, the end of a body is not seen
    has_ended = any(map(one.sum, ("released", "expired", "revoked")))
    return max(0.0, now - one.oldest) if one.oldest and not has_ended else math.inf


def _status(value: float, bound: float | None) -> int:
    if bound is None or value <= bound:
        return OK
    return WARNING if value <= 2 * bound else CRITICAL


def _problem(measure: _Measure, value: float) -> str:
    if value == math.inf:
        return "no success yet"
    return measure.problem.format(duration_text(value) if measure.unit == "s" else f"{value:g}")


def _perfdata(worst: Sequence[float], bounds: Bounds) -> Iterator[str]:
    for measure, value, bound in zip(_MEASURES, worst, bounds, strict=True):
        limits = ";" if bound is None else f"{bound:g};{2 * bound:g}"
        yield f"{measure.perfdata}={'U' if value == math.inf else f'{value:.0f}{measure.unit}'};{limits};0"


class _Check(click.Command):
    """A command whose errors are the status UNKNOWN: Nagios takes 2, as click exits with, for CRITICAL."""

    def make_context(self, info_name: str | None, args: list[str], *more: Any, **options: Any) -> click.Context:
        as_json = "--json" in args  # click takes them out as it reads them
        try:
            return super().make_context(info_name, args, *more, **options)
        except click.UsageError as error:
            raise _told(Verdict(UNKNOWN, error.format_message()), as_json) from error

    def invoke(self, context: click.Context) -> Any:
        try:
            verdict = super().invoke(context)
        except Exception as failure:
            error = in_one_line(context, failure)
            verdict = Verdict(UNKNOWN, getattr(error, "message", str(error)))
        raise _told(verdict, context.params["as_json"])


def _told(verdict: Verdict, as_json: bool = False) -> click.exceptions.Exit:
    if as_json:
        print_json({"status": NAMES[verdict.status], "text": verdict.text, "values": verdict.values})
    else:
        click.echo(verdict)
    return click.exceptions.Exit(verdict.status)


@singleton.command(cls=_Check)
@option("--max-age", type=DURATION, help="How long a body may hold a lock: 45s, 30m, 2h, 1d.")
@option("--max-blocked", type=click.IntRange(0), help="How many duplicates a holder may meet.")
@option("--max-lost", type=click.IntRange(0), help="How many locks may have been lost since the store has its data.")
@option(
    "--no-success-for", type=DURATION, help="How long a task that has started, or is named, may go without success."
)
@option(
    "--task", "named", multiple=True, metavar="NAME", help="Only this task or lock group; several times for several."
)
@as_json
@click.pass_obj
def check(obj: Any, /, named: Sequence[str], as_json: bool, **bounds: Any) -> Verdict:
    """Check the locks as a Nagios plug-in.

    Prints one line with performance data. Exits with 0 (OK), 1 (WARNING: a value is above its bound), 2 (CRITICAL: above twice
    its bound) or 3 (UNKNOWN: the store cannot be asked, or knows no task).
    """
    known = locks.tasks(obj.app)
    missing = [] if bounds["no_success_for"] is not None else [name for name in named if name not in known]
    if missing or not (known or named):
        return Verdict(UNKNOWN, f"no worker has registered {', '.join(missing) or 'a task'} in this store")
    found = [one for name in named or known for one in locks.stats(obj.app, name)]
    return judge(found, Bounds(**bounds), named, time.time())
