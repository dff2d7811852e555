"""Handles deliveries that did not acquire their lock: duplicates, and tasks whose store failed. Policies decide, this acts."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NoReturn

from celery.exceptions import Ignore

from celery_singleton_lock import signals
from celery_singleton_lock.config.options import Options
from celery_singleton_lock.context import context_of
from celery_singleton_lock.delivery.decision import decide, policy_of
from celery_singleton_lock.delivery.noting import note_failure
from celery_singleton_lock.delivery.properties import delivery_of
from celery_singleton_lock.delivery.republish import (
    ignores_result,
    is_redelivered,
    note_unfinished,
)
from celery_singleton_lock.delivery.routing import goes_to_several_queues
from celery_singleton_lock.errors import DuplicateTask, StoreError, StoreUnavailable, TooManyStarts
from celery_singleton_lock.events import TASK_SKIPPED, send
from celery_singleton_lock.holder import Holder
from celery_singleton_lock.line.dispatch import publish_next
from celery_singleton_lock.line.joining import leave
from celery_singleton_lock.log import about
from celery_singleton_lock.policies import RetryLater
from celery_singleton_lock.policies.decisions import Enqueue, Follow, RunLater, SkipRun
from celery_singleton_lock.store.protocol import AcquireResult, AcquireStatus, GracePeriod, LockStore
from celery_singleton_lock.store.requests import LeaseRequest
from celery_singleton_lock.worker.canvas import revoke_successors
from celery_singleton_lock.worker.join import follow
from celery_singleton_lock.worker.postpone import check_redelivery_later, retry_policy_of, run_later
from celery_singleton_lock.worker.replaced import drop_replaced


def handle_duplicate(
    task: Any, request: Any, options: Options, store: LockStore, wanted: LeaseRequest, result: AcquireResult
) -> Any:
    """Do what the policy decides for a duplicate; return the decision `Enqueue`, or the task's result.

    Raises:
        DuplicateTask: the decision is to fail.
        TooManyStarts: tasks with this lock key were started too often.
        Ignore, Retry, Reject: the end of this delivery, as Celery's tracer expects it.
    """
    publish_next(task.app, result.message)
    holder = result.holder or Holder()
    error = DuplicateTask(wanted.lock, holder)  # its text says who holds the lock
    if result.status is AcquireStatus.TOO_MANY_STARTS:
        _refuse_start(task, request, store, wanted, options)
    _drop(task, request, store, wanted, result, error)
    if holder.task_id == request.id and not request.is_eager:
        _drop_delivery(task, request, options, error)
    if wanted.comes_again and wanted.redelivered and store.has_begun(wanted):
        note_unfinished(request)
    policy, decision = decide(task, request, policy_of(task, options, holder), result)
    if holder.task_id or holder.state == "paused":  # else nobody holds the lock, which is free only after a quiet time
        pending = decision.pending if isinstance(decision, SkipRun) else ""
        named = {"task_id": request.id, "holder": holder, "policy": policy, "pending": pending}
        send(signals.duplicate, task, key=wanted.lock, **named)
    if isinstance(decision, Enqueue):
        return decision
    if isinstance(decision, RunLater):
        run_later(task, request, decision.delay, error, wanted)
    if wanted.place and wanted.place.ticket:
        leave(task, store, wanted, wanted.place.ticket)
    if isinstance(decision, Follow):
        return follow(task, request, wanted, decision, holder)
    if isinstance(decision, SkipRun):
        place = f", as task {decision.pending} runs in its place" if decision.pending else ""
        return _skip(task, request, decision, error.key, holder, f"{place}: {error}")
    about(task, request.id, error.key, error.holder).warning("failed as a duplicate: %s", error)
    raise error


def _drop(
    task: Any, request: Any, store: LockStore, wanted: LeaseRequest, result: AcquireResult, error: DuplicateTask
) -> None:
    """End a delivery for whose message another delivery, another copy, or another message stands."""
    if result.status is AcquireStatus.SUPERSEDED:
        newer = f"task {result.head}" if result.head else "a newer message"
        reason = f", as {newer} took its place in line"
        _skip(task, request, SkipRun(pending=result.head), wanted.lock, None, reason)
    if result.status is AcquireStatus.REPLACED:
        drop_replaced(task, request, store, wanted)
    if result.status is AcquireStatus.COMPLETED:
        about(task, request.id, wanted.lock).info("dropped: another delivery of it held %s and succeeded", wanted.lock)
        raise Ignore("another delivery of this task succeeded")
    if result.status is AcquireStatus.DROPPED:
        about(task, request.id, wanted.lock).debug("dropped: another copy of it has started, or comes later")
        raise Ignore("another copy of this message counts")
    if result.waiting:
        _drop_waiting(task, request, wanted, result, error)


def _drop_delivery(task: Any, request: Any, options: Options, error: DuplicateTask) -> None:
    """Drop a delivery whose message another delivery runs, or has run; return if a user has used a task id twice."""
    if goes_to_several_queues(task.app, request):
        about(task, request.id, error.key, error.holder).info("dropped: another worker runs this broadcast: %s", error)
        raise Ignore("another worker runs this broadcast task")
    if error.holder.state != "cooldown" or is_redelivered(request):
        check_redelivery_later(task, request, options, error)


def _drop_waiting(task: Any, request: Any, wanted: LeaseRequest, result: AcquireResult, error: DuplicateTask) -> None:
    """Drop a delivery whose message waits in line."""
    if wanted.place and wanted.place.room and result.is_waiting:
        if result.quiet:
            about(task, request.id, wanted.lock).info("waits for %.1f s without another call", result.quiet)
        else:
            about(task, request.id, error.key, error.holder).info(
                "waits in line (%d waiting): %s", result.waiting, error
            )
        raise Ignore("waits in line")
    # Its worker died before it acknowledged the message. One with a ticket was published in its turn, and has no copy any more.
    if result.head == request.id and wanted.redelivered and not (wanted.place and wanted.place.ticket):
        raise Ignore("waits in line already")


def _refuse_start(task: Any, request: Any, store: LockStore, wanted: LeaseRequest, options: Options) -> NoReturn:
    limit = options.max_starts
    assert limit is not None
    if wanted.place and wanted.place.ticket:
        leave(task, store, wanted, wanted.place.ticket)
    error = TooManyStarts(wanted.lock, limit.n, limit.count)
    about(task, request.id, wanted.lock).warning("failed: %s", error)
    raise error


def handle_store_error(task: Any, request: Any, options: Options, wanted: LeaseRequest, error: StoreError) -> None:
    """Do what ``on_store_error`` says after a store call failed; return if the body is to run without a lock.

    In a grace period the task waits, whatever that says: the store answers, and the lock may be held.

    Raises:
        StoreError: the store refused.
        StoreUnavailable: the option says so, or the task cannot be retried.
        Retry, Reject: the task is retried later.
    """
    outages = context_of(task.app).outages
    outages.log(about(task, request.id, wanted.lock), "could not acquire its lock: %s", error)
    is_grace = isinstance(error, GracePeriod)
    if not is_grace:
        note_failure(task, wanted, "acquire", error)
    reaction = options.on_store_error
    in_line = wanted.place and (wanted.place.room or wanted.place.ticket)  # or has a copy: it must not end yet
    if in_line or is_grace:
        reaction = "retry"
    if not isinstance(error, StoreUnavailable) or reaction == "raise":
        raise error
    if reaction == "retry":
        policy = _after_grace(error) if isinstance(error, GracePeriod) else retry_policy_of(options)
        if wanted.place and wanted.place.ticket:  # the time in line does not count
            policy = replace(policy, max_wait=math.inf)
        _, decision = decide(task, request, policy, AcquireResult(AcquireStatus.REFUSED))
        if isinstance(decision, RunLater):
            outages.count("postponed")
            run_later(task, request, decision.delay, error, wanted)
        raise error
    outages.count("without")


def _after_grace(error: GracePeriod) -> RetryLater:
    left = max(0.1, error.left)
    return RetryLater(1.05 * left, 1.0, 1.05 * left, 0.05, math.inf)


def _skip(task: Any, request: Any, decision: SkipRun, key: str, holder: Holder | None, reason: str) -> Any:
    """Store what a skipped message ends with; `holder` is None if it is not the holder for whom the message is skipped."""
    log = about(task, request.id, key, holder)
    log.info("skipped%s", reason)
    if request.is_eager:
        request.callbacks = None
        return decision.result
    revoke_successors(task, request)
    task.backend.mark_as_done(request.id, decision.result, request, not ignores_result(task, request))
    if delivery_of(request).events:
        fields = {"name": task.name, "key": key, "holder": holder and holder.as_dict()}
        if decision.pending:
            fields["pending"] = decision.pending
        try:
            task.send_event(TASK_SKIPPED, **fields)
        except Exception as failure:  # the task is stored as done, so it must not fail now
            log.warning("could send no event: %s", failure)
    raise Ignore("skipped as a duplicate")
