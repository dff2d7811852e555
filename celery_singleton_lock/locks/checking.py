"""Whether the locks of an app, and its store, are as they should be."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from celery_singleton_lock.context import context_of
from celery_singleton_lock.errors import StoreError
from celery_singleton_lock.locks.health import UNKNOWN, Bounds, Health, evaluate
from celery_singleton_lock.locks.naming import groups_of, reader_of
from celery_singleton_lock.locks.reading import stats


def check(
    app: Any,
    tasks: Sequence[str] = (),
    max_age: float | None = None,
    max_blocked: float | None = None,
    max_lost: float | None = None,
    no_success_for: float | None = None,
) -> Health:
    """Compare what `stats` tells with bounds, and try whether the store takes writes, as `check` does; times are in seconds.

    Arguments:
        tasks: only these tasks or groups, which must have succeeded if `no_success_for` is given.
        max_age: how long a body may hold a lock.
        max_blocked: how many duplicates a holder may meet.
        max_lost: how many locks may have been lost since the store has its data.
        no_success_for: how long a task that has started may go without success.
    """
    known = groups_of(app).values()
    found = [one for name in tasks or ("",) for one in stats(app, name)]
    refusal = ""
    try:
        probe(app)
    except StoreError as error:
        refusal = str(error)
    missing = [] if no_success_for is not None else [name for name in tasks if name not in known]
    if (missing or not found) and not refusal:
        return Health(UNKNOWN, f"no worker has registered {', '.join(missing) or 'a task'} in this store")
    bounds, now = Bounds(max_age, max_blocked, max_lost, no_success_for), time.time()
    return evaluate(found, bounds, tasks, now, refusal, now - (math.inf if no_success_for is None else _uptime(app)))


def _uptime(app: Any) -> float:
    """Return for how many seconds the server of the store has been up; infinity if it does not tell."""
    with suppress(StoreError, KeyError):  # some services, and some logins, have no INFO
        return float(server(app)["uptime_in_seconds"])
    return math.inf


def probe(app: Any) -> None:
    """Raise `StoreError` if the store takes no writes, as one that is full, or a replica: no lock can be acquired there.

    It writes a key of its own, which expires.
    """
    context = context_of(app)
    context.store.check(f"{context.settings.prefix}:{{}}")


def server(app: Any) -> Mapping[str, str]:
    """Return what the server of the store says of itself (INFO)."""
    return reader_of(app).server()
