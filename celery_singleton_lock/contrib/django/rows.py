"""What the tables of the admin's pages show of locks, statistics and runs."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from typing import Any

from django.conf import settings

from celery_singleton_lock.store.records import Lock, Run, Statistics


def contains(lock: Lock, text: str) -> bool:
    """Tell whether a text that a log line shows names this lock."""
    return any(text in one for one in (lock.key, lock.holder.task_id, lock.holder.node))


def row_of(lock: Lock) -> dict[str, Any]:
    """Return a row of the list."""
    held = {"age": _span(lock.holder.age), "remaining": _span(lock.holder.remaining), "since": _time(lock.since)}
    renewed = "" if lock.holder.renewed is None else _span(lock.holder.renewed)
    return {"lock": lock, "renewed": renewed, **held}


def sums_of(found: Statistics) -> dict[str, Any]:
    """Return a row of the statistics."""
    count = found.counters.get
    return {
        "task": found.task,
        "states": found.states,
        "oldest": _time(found.oldest),
        "counts": _counts(found),
        "last_start": _time(count("last_start", 0) / 1000),
        "last_success": _time(count("last_success", 0) / 1000),
    }


def _counts(found: Statistics) -> Sequence[int]:
    """Return the numbers of the columns from "acquired" to "lost"."""
    outcomes = (found.counters.get(f"released:{outcome}", 0) for outcome in ("success", "failure"))
    return [found.sum("acquired"), found.sum("duplicates"), *outcomes, found.sum("expired"), found.sum("lost")]


def row_of_run(run: Run) -> dict[str, Any]:
    """Return a row of the last runs."""
    return {"run": run, "started": _time(run.started), "ended": _time(run.ended), "duration": _span(run.duration)}


def _span(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def _time(seconds: float) -> datetime | None:
    """Return a time for templates, which show it in the time zone of the settings."""
    return datetime.fromtimestamp(seconds, timezone.utc if settings.USE_TZ else None) if seconds else None
