"""Ends a delivery, or a call that is not published: the only module that raises Ignore, Retry or Reject, or stores a state.

Policies decide, this acts: in the same way at a publish, a start, and for a message that waits in line or follows another task.
Only a call that fails at its publish writes no line: its caller has the error.
"""

from __future__ import annotations

import logging
from typing import Any, NoReturn

import celery
from celery.exceptions import Ignore, Reject, Retry
from kombu.exceptions import OperationalError

from celery_singleton_lock import signals
from celery_singleton_lock.delivery.attempt import Attempt
from celery_singleton_lock.delivery.canvas import successors
from celery_singleton_lock.delivery.delays import shortened
from celery_singleton_lock.delivery.properties import delivery_of
from celery_singleton_lock.delivery.republish import signature_of
from celery_singleton_lock.delivery.retry_state import RetryState
from celery_singleton_lock.errors import DuplicateTask, StoreError
from celery_singleton_lock.holder import Holder
from celery_singleton_lock.log import TaskLog, about
from celery_singleton_lock.policies import Policy
from celery_singleton_lock.policies.decisions import Decision, Fail, SkipRun
from celery_singleton_lock.reports.events import TASK_SKIPPED, send
from celery_singleton_lock.result import SingletonResult
from celery_singleton_lock.store.requests import LeaseSpec, Place

_NOT_RUN = "not run: an earlier step was skipped or replaced"


def announce(task: Any, spec: LeaseSpec, holder: Holder, policy: Policy, decision: Decision) -> None:
    """Send the signal for a duplicate that met this holder."""
    pending = decision.pending if isinstance(decision, SkipRun) else ""
    named = {"task_id": spec.task_id, "holder": holder, "policy": policy, "pending": pending}
    send(signals.duplicate, task, key=spec.lock, **named)


def end_call(task: Any, spec: LeaseSpec, holder: Holder, policy: Policy, decision: SkipRun | Fail) -> SingletonResult:
    """End a call that is not published, as the policy decides: return the holder's result.

    Raises:
        DuplicateTask: the decision is to fail.
    """
    announce(task, spec, holder, policy, decision)
    if isinstance(decision, Fail):
        raise DuplicateTask(spec.lock, holder)
    log = about(task, spec.task_id, spec.lock, holder)
    log.log(decision.level, "was not published: %s is held by %s", spec.lock, holder)
    result: SingletonResult = task.AsyncResult(holder.task_id)
    result.duplicate = holder
    return result


def drop(reason: str) -> NoReturn:
    """End a delivery without storing anything: another delivery of its message counts, or the message was published again.

    Raises:
        Ignore: always.
    """
    raise Ignore(reason)


def fail(attempt: Attempt, error: DuplicateTask) -> NoReturn:
    """Let a duplicate fail.

    Raises:
        DuplicateTask: always: this error.
    """
    attempt.log(error.holder).warning("failed as a duplicate: %s", error)
    raise error


def skip(attempt: Attempt, decision: SkipRun, holder: Holder | None, reason: str) -> Any:
    """Store what a skipped message ends with; return that in an eager run.

    Arguments:
        holder: for whom it is skipped; None if for a message in line.
        reason: the rest of what the log says.

    Raises:
        Ignore: the run is not an eager one.
    """
    task, request, log = attempt.task, attempt.request, attempt.log(holder)
    log.log(decision.level, "skipped%s", reason)
    if request.is_eager:
        request.callbacks = None
        return decision.result
    revoke_successors(task, request)
    task.backend.mark_as_done(request.id, decision.result, request, not attempt.ignores_result)
    fields = {"name": task.name, "key": attempt.spec.lock, "holder": holder and holder.as_dict()}
    if decision.pending:
        fields["pending"] = decision.pending
    _send_event(attempt, log, TASK_SKIPPED, **fields)
    raise Ignore("skipped as a duplicate")


def revoke(attempt: Attempt, reason: str) -> NoReturn:
    """Store REVOKED for a task that has stopped.

    Raises:
        Ignore: always.
    """
    task, request, log = attempt.task, attempt.request, attempt.log()
    log.info("%s", reason)
    revoke_successors(task, request)
    task.backend.mark_as_revoked(request.id, reason, request, not attempt.ignores_result)
    _send_event(attempt, log, "task-revoked", terminated=False, signum=None, expired=False)
    raise Ignore(reason)


def _send_event(attempt: Attempt, log: TaskLog, event: str, **fields: Any) -> None:
    """Send an event of a task whose state is stored, so it must not fail now."""
    if not delivery_of(attempt.request).events:
        return
    try:
        attempt.task.send_event(event, **fields)
    except Exception as failure:
        log.warning("could send no event: %s", failure)


def store_failure(attempt: Attempt, failure: Exception) -> None:
    """Store FAILURE for a message in line that nobody would publish any more."""
    attempt.log().error("waited in line and could neither go on nor be published: %s", failure)
    attempt.task.backend.mark_as_failure(attempt.request.id, failure, request=attempt.request)


def revoke_successors(task: Any, request: Any) -> None:
    """Store REVOKED for each task id in the rest of the chain and in the callbacks, so that nobody waits for them."""
    for context in successors(request):
        task.backend.mark_as_revoked(context.id, _NOT_RUN, request=context, store_result=not context.ignore_result)


def postpone(attempt: Attempt, delay: float, error: Exception) -> NoReturn:
    """Publish the message again with a delay in seconds; `error`: why.

    Raises:
        Retry: it is published.
        Reject: the broker is unreachable, and delivers the message again.
        Exception: the given error, if it cannot be published.
    """
    delay, state = shortened(attempt.task.app, delay), attempt.retry_state
    place = attempt.spec.place or Place()
    following = RetryState(
        state.times + 1,
        state.waited + delay,
        # The new message is not called redelivered, but how another delivery of this one has ended still counts.
        redelivery_checks=int(isinstance(error, StoreError) and attempt.is_redelivered),
        ticket=place.ticket,
        copy=place.copy,
        is_unfinished=state.is_unfinished,
    )
    signature = signature_of(attempt, delay, following)
    log = attempt.log(getattr(error, "holder", None))
    is_stored = _mark_as_retry(attempt, error, log)
    publish_or_requeue(attempt, signature, error)
    if is_stored:
        attempt.request.ignore_result = True  # keeps the tracer from storing RETRY once more
    # An outage has one line, see `reports/outage.py`.
    log.log(logging.DEBUG if isinstance(error, StoreError) else logging.INFO, "waits %.1f s: %s", delay, error)
    raise Retry(f"Retry in {delay:.1f} s", error, delay, sig=signature)


def _mark_as_retry(attempt: Attempt, error: Exception, log: TaskLog) -> bool:
    """Store the state RETRY before the message is published; tell whether that is done.

    Celery's tracer stores it afterwards, which could overwrite the FAILURE or REVOKED of a message that comes back quickly. The
    tracer does not store it for a request that ignores its result (5.7).
    """
    task = attempt.task
    if celery.VERSION < (5, 7) or attempt.ignores_result or task.store_errors_even_if_ignored:
        return False
    try:
        task.backend.mark_as_retry(attempt.request.id, error, request=attempt.request)
    except Exception as failure:  # publishing the message matters more
        log.warning("could not store its state RETRY: %s", failure)
        return False
    return True


def publish_or_requeue(attempt: Attempt, signature: Any, error: Exception | None = None) -> None:
    """Publish a message again.

    Raises:
        Reject: the broker is unreachable, and delivers the message again.
        Exception: the given error, or that of the publication: it failed otherwise, or the message was acknowledged.
    """
    try:
        signature.apply_async()
    except Exception as failure:
        # After another failure than that of a connection the message would come back for ever.
        if attempt.task.acks_late and isinstance(failure, (OperationalError, OSError)):
            requeue(failure)
        if error is None:
            raise
        raise error from failure


def requeue(failure: Exception) -> NoReturn:
    """Have the broker deliver the message again, after this failure to publish.

    Raises:
        Reject: always.
    """
    raise Reject(failure, requeue=True) from failure
