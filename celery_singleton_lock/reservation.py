"""Reservations: locks of messages that no worker has started yet (``lock_from="publish"``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from celery.exceptions import Retry
from celery.states import PENDING, READY_STATES
from celery.utils.time import maybe_iso8601, maybe_make_aware

from celery_singleton_lock.config.task_config import TaskConfig
from celery_singleton_lock.context import context_of
from celery_singleton_lock.errors import LockKeyError
from celery_singleton_lock.holder import Holder
from celery_singleton_lock.renewal.pending import PendingRelease
from celery_singleton_lock.store.keys import queued_token
from celery_singleton_lock.store.requests import AfterRelease, LeaseSpec, Place

#: Header of a message that was published with its lock: the lock key, its `lock_limit` and its `lock_ttl`.
RESERVATION_HEADER = "singleton_reservation"


def reservation(
    config: TaskConfig, task_id: str, args: Sequence[Any], kwargs: Mapping[str, Any], ttl: float
) -> LeaseSpec:
    """Return the request for a reservation of this message."""
    digest, limit = config.digest(args, kwargs), config.limit(args, kwargs)
    place = Place() if getattr(config.options.on_duplicate, "uses_line", False) else None  # behind those that wait
    more: dict[str, Any] = {"queued": True, "place": place, "limit": limit, "grace": config.options.lock_ttl}
    return LeaseSpec(config.base, digest, queued_token(task_id), ttl, task_id, **more)


def header_of(config: TaskConfig, spec: LeaseSpec) -> list[Any]:
    """Return the header of a message that has this reservation."""
    return [spec.lock, spec.limit, config.options.lock_ttl]


def reservation_of(headers: Any, prefix: str) -> LeaseSpec | None:
    """Return the reservation that a message names, whether or not this process knows its task; None if it names none.

    Arguments:
        headers: of the message.
        prefix: of the app's keys.
    """
    try:
        lock, limit, ttl = headers[RESERVATION_HEADER]
        limit, ttl, task_id = int(limit), float(ttl), str(headers["id"])
        base, _, digest = lock.rpartition(":lock:")
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
    if not base.startswith(f"{prefix}:{{"):
        return None
    return LeaseSpec(base, digest, queued_token(task_id), ttl, task_id, queued=True, limit=limit)


def free_reservation(app: Any, spec: LeaseSpec, publish: Callable[[str], object], unanswered: bool = False) -> None:
    """Release the reservation of a message that no worker will start, in the background; `publish` the next in line.

    Arguments:
        unanswered: the store may not have it. In an outage, some of these are left to expire.
    """
    pending = PendingRelease(spec, success=False, outcome=False, publish=publish)
    context_of(app).renewer.release_later(pending, unanswered)


def has_ended(task: Any, holder: Holder) -> bool:
    """Tell whether the message that has a reservation is known to have ended: its state is final, and nobody has freed its lock.

    It was revoked while it waits in a queue, or a worker without this library has discarded it.
    """
    if holder.state != "queued" or not holder.task_id:
        return False
    try:
        return task.backend.get_state(holder.task_id) in READY_STATES
    except Exception:  # there may be no backend, or none that a publisher can ask
        return False


def has_lost_result(task: Any, holder: Holder) -> bool:
    """Tell whether the run before a cooldown has no result any more: a caller that is given its `AsyncResult` waits for ever.

    Between the end of a body and the storing of its result, it has none yet: a call that comes then is skipped when it starts.
    """
    if holder.state != "cooldown" or not holder.task_id or task.ignore_result:
        return False
    try:
        return bool(task.backend.get_state(holder.task_id) == PENDING)
    except Exception:  # there may be no backend, or none that a publisher can ask
        return False


def kept_for_retry(task: Any, config: TaskConfig, request: Any, lease: LeaseSpec, retry: Retry) -> AfterRelease | None:
    """Return the reservation that a lease becomes when its task retries itself with the same lock key."""
    options = config.options
    if options.lock_from == "start" or options.lock_until == "start" or retry.sig is None:
        return None
    try:
        digest = config.digest(retry.sig.args, retry.sig.kwargs)
    except (TypeError, LockKeyError):
        return None
    if digest != lease.digest:
        return None
    return AfterRelease("queued", lifetime(task, retry.when, request.expires), queued_token(request.id))


def lifetime(task: Any, starts: Any, expires: Any) -> float:
    """Return the seconds that a reservation lasts: `singleton_lock_queue_ttl` after the start, but not past the expiry.

    Both times are seconds from now, datetimes or ISO texts, as Celery takes them.
    """
    lifetime = context_of(task.app).settings.queue_ttl + max(0.0, _seconds(task.app, starts) or 0.0)
    until = _seconds(task.app, expires)
    return lifetime if until is None else max(0.001, min(lifetime, until))


def _seconds(app: Any, time: Any) -> float | None:
    """Return the seconds from now to a time; None if there is none."""
    if isinstance(time, str):
        time = maybe_iso8601(time)
    if isinstance(time, datetime):
        return float((maybe_make_aware(time, app.timezone) - app.now()).total_seconds())
    return None if time is None else float(time)
