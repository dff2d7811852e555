"""Ends tasks that a newer message replaces (`Replace`)."""

from __future__ import annotations

from typing import NoReturn

from celery.states import READY_STATES

from celery_singleton_lock.delivery import ending
from celery_singleton_lock.delivery.attempt import Attempt
from celery_singleton_lock.errors import StoreError
from celery_singleton_lock.worker.redelivery import stored_state


def end_replaced(attempt: Attempt, replacement: str = "") -> NoReturn:
    """Store REVOKED for a task that has stopped because a newer message replaces it, and end the delivery.

    Arguments:
        replacement: the task id of the newer message, if the release has named it.

    Raises:
        Ignore: always: the end of this delivery, as Celery's tracer expects it.
    """
    ending.revoke(attempt, _reason(attempt, replacement))


def drop_replaced(attempt: Attempt) -> NoReturn:
    """End a redelivery of a message that was replaced while it ran. If its first delivery died, its end is stored.

    Raises:
        Ignore: always.
    """
    if stored_state(attempt.task, attempt.request) in READY_STATES:
        attempt.log().info("dropped: it was replaced, and another delivery of it has ended")
        ending.drop("another delivery of this task has ended")
    end_replaced(attempt)


def _reason(attempt: Attempt, replacement: str) -> str:
    """Return the reason of the revocation, with the task id of the replacement if that is known.

    One that the release has not named, as only its copy can start it, holds the lock by now, or has ended.
    """
    if replacement:
        return f"replaced by task {replacement}"
    try:
        holder = attempt.store.holder(attempt.spec.lock)
    except StoreError:
        holder = None
    if holder is None or holder.task_id in ("", attempt.request.id):
        return "replaced"
    return f"replaced by task {holder.task_id}"
