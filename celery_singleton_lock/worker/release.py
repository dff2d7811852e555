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
from celery_singleton_lock.delivery.attempt import Attempt, attempt_of
from celery_singleton_lock.delivery.recording import record_failure
from celery_singleton_lock.errors import StoreError
from celery_singleton_lock.lease import LeaseState
from celery_singleton_lock.line.dispatch import publish_next
from celery_singleton_lock.log import logger
from celery_singleton_lock.renewal.pending import PendingRelease
from celery_singleton_lock.reports.events import send
from celery_singleton_lock.store.requests import AfterRelease


def release(attempt: Attempt, state: LeaseState, success: bool, kept: AfterRelease | None = None) -> None:
    """Release a lease once its body is over; what cannot be done yet becomes a pending release."""
    spec, renewer = state.spec, attempt.context.renewer
    if spec.pid != os.getpid():  # a process that the body forked owns nothing
        return
    state.ended = True
    renewer.remove(state)
    cooldown = state.cooldown_until if success and not state.lost else 0.0
    publish = partial(publish_next, state.task.app)
    pending = PendingRelease(spec, success, kept=kept, cooldown_until=cooldown, publish=publish)
    # The start of a lease that an operator released has ended, too, and the end of its body is recorded.
    state.unreleased = state.unreleased or spec.max_starts is not None or state.loss == "released_by_operator"
    spec.record = spec.record._replace(fence=state.fence, loss=state.loss)
    if state.unreleased:
        _send_release(attempt, state, pending)
    if state.reacquired or (state.unreleased and not pending.confirmed):
        attempt.pending, pending.publish = pending, _publish_later(attempt.context, state)
        renewer.release_later(pending)
    state.unreleased = False
    attempt.next_message = pending.next_message


def _send_release(attempt: Attempt, state: LeaseState, pending: PendingRelease) -> None:
    """Release a lease now, if the store can be asked."""
    spec = state.spec
    try:
        pending.send(attempt.store)
    except StoreError as error:
        attempt.context.outages.log(attempt.log(), "could not release its lock: %s", error)
        record_failure(state.task, spec, "release", error)
        return
    if logger.isEnabledFor(DEBUG):
        attempt.log().debug("released %s", spec.lock)
    if not state.lost:
        send(signals.lock_released, state.task, lease=attempt.lease)


def _publish_later(context: ProcessContext, state: LeaseState) -> Callable[[str], None]:
    """Return what has the next in line published, without delaying the thread that calls it."""
    return lambda message: context.callbacks.call(partial(publish_next, state.task.app, message))


def after_run(sender: Any = None, state: str | None = None, **_: Any) -> None:
    """At `task_postrun`: release what an exception in the wrong moment left, and record the outcome for a redelivery.

    Arguments:
        sender: the task.
        state: how it ended, as the tracer knows it.
    """
    attempt = attempt_of(sender) if hasattr(sender, "request_stack") else None
    if attempt is None:
        return
    if attempt.state is not None:
        _finish(attempt, attempt.state, state)
    attempt.request = None  # each knows the other, so the task's arguments would stay until Python collects garbage


def _finish(attempt: Attempt, lease: LeaseState, state: str | None) -> None:
    """Release the lease if that is still to be done, and tell a redelivery that waits how the task ended."""
    context = attempt.context
    if lease.unreleased and lease.deadline:
        release(attempt, lease, success=False)
    elif lease.unreleased:  # nobody knows whether the store has granted it
        lease.spec.is_unfinished = lease.spec.redelivered  # an earlier delivery may have begun the body
        unanswered = PendingRelease(lease.spec, None, outcome=False, publish=_publish_later(context, lease))
        context.renewer.release_later(unanswered, unanswered=True)
    if (pending := attempt.pending) is not None:
        pending.outcome = state == "SUCCESS"
        if pending.redelivery_waits:
            try:
                pending.send(attempt.store)
            except StoreError as error:  # the renewal thread tries again
                context.outages.log(attempt.log(), "may run again when it is redelivered: %s", error)


task_postrun.connect(after_run, weak=False)
