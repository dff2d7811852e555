"""How one delivery's lock ends: released when the body is over; at `task_postrun`, whatever is left to do."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from logging import DEBUG
from typing import Any

from celery.signals import task_postrun

from celery_singleton_lock import signals
from celery_singleton_lock.context import ProcessContext
from celery_singleton_lock.delivery.noting import note_failure
from celery_singleton_lock.errors import StoreError
from celery_singleton_lock.events import send
from celery_singleton_lock.lease import Lease, LeaseState
from celery_singleton_lock.line.dispatch import publish_next
from celery_singleton_lock.log import about, logger
from celery_singleton_lock.renewal.pending import PendingRelease
from celery_singleton_lock.store.requests import Kept

#: Attribute of a request: its `Execution`. It is there from before the lock is acquired.
EXECUTION = "_singleton_execution"


class Execution:
    """What is known of one delivery's lock, until `task_postrun`."""

    __slots__ = ("context", "is_replaced", "lease", "next_message", "pending", "state")

    def __init__(self) -> None:
        self.lease = Lease("")  # what the body sees
        self.state: LeaseState | None = None  # of the lease; None where no lock is acquired
        self.context: ProcessContext
        self.pending: PendingRelease | None = None  # a release that needs the outcome of the task
        self.is_replaced = False  # its task has published another one with its id (`Task.replace`)
        self.next_message = ""  # of the next in line, as the release has named it

    def __reduce__(self) -> tuple[type[Execution], tuple[()]]:
        """Make copies and pickles empty: a copied request has nothing to release, and no token."""
        return Execution, ()


def connect() -> None:
    """Have `after_run` called after each task; connecting again has no effect."""
    task_postrun.connect(after_run, weak=False, dispatch_uid=__package__)


def release(execution: Execution, state: LeaseState, success: bool, kept: Kept | None = None) -> None:
    """Release a lease once its body is over; what cannot be done yet becomes a pending release."""
    request, renewer = state.request, execution.context.renewer
    if request.pid != os.getpid():  # a process that the body forked owns nothing
        return
    state.ended = True
    renewer.remove(state)
    cooldown = state.cooldown_until if success and not state.lost else 0.0
    publish = partial(publish_next, state.task.app)
    pending = PendingRelease(request, success, kept=kept, cooldown_until=cooldown, publish=publish)
    # The start of a lease that an operator released has ended, too, and the end of its body is recorded.
    state.unreleased = state.unreleased or request.max_starts is not None or state.loss == "released_by_operator"
    request.noted = request.noted._replace(fence=state.fence, loss=state.loss)
    if state.unreleased:
        try:
            pending.send(execution.context.store)
        except StoreError as error:
            log = about(state.task, request.task_id, request.lock)
            execution.context.outages.log(log, "could not release its lock: %s", error)
            note_failure(state.task, request, "release", error)
        else:
            if logger.isEnabledFor(DEBUG):
                about(state.task, request.task_id, request.lock).debug("released %s", request.lock)
            if not state.lost:
                send(signals.lock_released, state.task, lease=execution.lease)
    if state.reacquired or (state.unreleased and not pending.confirmed):
        execution.pending, pending.publish = pending, _publish_later(execution.context, state)
        renewer.release_later(pending)
    state.unreleased = False
    execution.next_message = pending.next_message


def _publish_later(context: ProcessContext, state: LeaseState) -> Callable[[str], None]:
    """Return what has the next in line published, without delaying the thread that calls it."""
    return lambda message: context.callbacks.call(partial(publish_next, state.task.app, message))


def after_run(sender: Any = None, state: str | None = None, **_: Any) -> None:
    """At `task_postrun`: release what an exception in the wrong moment left, and record the outcome for a redelivery.

    Arguments:
        sender: the task.
        state: how it ended, as the tracer knows it.
    """
    request = getattr(getattr(sender, "request_stack", None), "top", None)
    execution: Execution | None = getattr(request, EXECUTION, None)
    if execution is None or execution.state is None:
        return
    context, lease = execution.context, execution.state
    if lease.unreleased and lease.deadline:
        release(execution, lease, success=False)
    elif lease.unreleased:  # nobody knows whether the store has granted it
        lease.request.is_unfinished = lease.request.redelivered  # an earlier delivery may have begun the body
        unanswered = PendingRelease(lease.request, None, outcome=False, publish=_publish_later(context, lease))
        context.renewer.release_later(unanswered, unanswered=True)
    if (pending := execution.pending) is not None:
        pending.outcome = state == "SUCCESS"
        if pending.redelivery_waits:
            try:
                pending.send(context.store)
            except StoreError as error:  # the renewal thread tries again
                ended = pending.request
                log = about(sender, ended.task_id, ended.lock)
                context.outages.log(log, "may run again when it is redelivered: %s", error)
