"""Ends tasks that a newer message replaces (`Replace`)."""

from __future__ import annotations

from typing import Any, NoReturn

from celery.exceptions import Ignore
from celery.states import READY_STATES

from celery_singleton_lock.errors import StoreError
from celery_singleton_lock.holder import Holder
from celery_singleton_lock.log import about
from celery_singleton_lock.store.protocol import LeaseRequest, LockStore
from celery_singleton_lock.worker.canvas import revoke_successors
from celery_singleton_lock.worker.delivery import delivery_of
from celery_singleton_lock.worker.postpone import stored_state
from celery_singleton_lock.worker.republish import ignores_result

#: How long a worker may take to say whether its pool can terminate tasks, in seconds.
_PATIENCE = 1.0


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


def terminate(task: Any, request: Any, wanted: LeaseRequest, holder: Holder) -> None:
    """Have the holder's worker terminate it, if its pool can; else, or if the worker cannot be asked, go on waiting."""
    # A publisher should not import what Celery's workers do.
    from celery_singleton_lock.worker.control import CANNOT_TERMINATE, singleton_replace

    log = about(task, request.id, wanted.lock, holder)
    arguments = {"task_id": holder.task_id, "replacement": request.id}
    try:
        log.warning("has %s terminated, which did not stop", holder)
        # Not with a connection of the pool: after a question without an answer its channel still polls. A main process forks
        # children, and Kombu has each of them close the pool, which waits for an answer to that poll.
        with task.app.connection_for_write() as connection:
            answers = task.app.control.broadcast(
                singleton_replace.__name__, arguments, [holder.node], connection, reply=True, timeout=_PATIENCE
            )
    except Exception as failure:  # the broker; the next copy tries again
        log.warning("could not have %s terminated: %r", holder, failure)
        return
    if not answers:
        log.warning("%s did not answer within %g s", holder.node, _PATIENCE)
    elif [{holder.node: {"error": CANNOT_TERMINATE}}] == answers:
        log.warning("waits, as its pool cannot terminate %s", holder)
