"""Ends tasks that a newer message replaces (`Replace`)."""

from __future__ import annotations

from typing import Any, NoReturn

from celery.exceptions import Ignore
from celery.states import READY_STATES

from celery_singleton_lock.delivery.properties import delivery_of
from celery_singleton_lock.delivery.republish import ignores_result
from celery_singleton_lock.errors import StoreError
from celery_singleton_lock.log import about
from celery_singleton_lock.store.protocol import LockStore
from celery_singleton_lock.store.requests import LeaseRequest
from celery_singleton_lock.worker.canvas import revoke_successors
from celery_singleton_lock.worker.postpone import stored_state


def end_replaced(task: Any, request: Any, store: LockStore, wanted: LeaseRequest, replacement: str = "") -> NoReturn:
    """Store REVOKED for a task that has stopped because a newer message replaces it, and end the delivery.

    Arguments:
        replacement: the task id of the newer message, if the release has named it.

    Raises:
        Ignore: always: the end of this delivery, as Celery's tracer expects it.
    """
    reason = _reason(request, store, wanted, replacement)
    about(task, request.id, wanted.lock).info("%s", reason)
    revoke_successors(task, request)
    task.backend.mark_as_revoked(request.id, reason, request, not ignores_result(task, request))
    if delivery_of(request).events:
        try:
            task.send_event("task-revoked", terminated=False, signum=None, expired=False)
        except Exception as failure:  # the task is stored as revoked, so it must not fail now
            about(task, request.id, wanted.lock).warning("could send no event: %s", failure)
    raise Ignore(reason)


def drop_replaced(task: Any, request: Any, store: LockStore, wanted: LeaseRequest) -> NoReturn:
    """End a redelivery of a message that was replaced while it ran. If its first delivery died, its end is stored.

    Raises:
        Ignore: always.
    """
    if stored_state(task, request) in READY_STATES:
        about(task, request.id, wanted.lock).info("dropped: it was replaced, and another delivery of it has ended")
        raise Ignore("another delivery of this task has ended")
    end_replaced(task, request, store, wanted)


def _reason(request: Any, store: LockStore, wanted: LeaseRequest, replacement: str) -> str:
    """Return the reason of the revocation, with the task id of the replacement if that is known.

    One that the release has not named, as only its copy can start it, holds the lock by now, or has ended.
    """
    if replacement:
        return f"replaced by task {replacement}"
    try:
        holder = store.holder(wanted.lock)
    except StoreError:
        holder = None
    if holder is None or holder.task_id in ("", request.id):
        return "replaced"
    return f"replaced by task {holder.task_id}"
