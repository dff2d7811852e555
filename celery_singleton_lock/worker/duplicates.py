"""Handles deliveries that did not acquire their lock: duplicates, and tasks whose store failed. `delivery.ending` ends them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NoReturn

from celery_singleton_lock.delivery import ending
from celery_singleton_lock.delivery.attempt import Attempt
from celery_singleton_lock.delivery.decision import decide, policy_of
from celery_singleton_lock.delivery.recording import record_failure
from celery_singleton_lock.delivery.routing import goes_to_several_queues
from celery_singleton_lock.errors import DuplicateTask, StoreError, StoreUnavailable, TooManyStarts
from celery_singleton_lock.holder import Holder
from celery_singleton_lock.line.dispatch import publish_next
from celery_singleton_lock.line.joining import leave
from celery_singleton_lock.policies import RetryLater
from celery_singleton_lock.policies.decisions import Enqueue, Follow, RunLater, SkipRun
from celery_singleton_lock.store.protocol import AcquireResult, AcquireStatus, GracePeriod
from celery_singleton_lock.worker.join import follow
from celery_singleton_lock.worker.redelivery import check_later, retry_policy_of
from celery_singleton_lock.worker.replaced import drop_replaced


def handle_duplicate(attempt: Attempt, result: AcquireResult) -> Any:
    """Do what the policy decides for a duplicate; return the decision `Enqueue`, or the task's result.

    Raises:
        DuplicateTask: the decision is to fail.
        TooManyStarts: tasks with this lock key were started too often.
        Ignore, Retry, Reject: the end of this delivery, as Celery's tracer expects it.
    """
    task, spec = attempt.task, attempt.spec
    publish_next(task.app, result.message)
    holder = result.holder or Holder()
    error = DuplicateTask(spec.lock, holder)  # its text says who holds the lock
    if result.status is AcquireStatus.TOO_MANY_STARTS:
        _refuse_start(attempt)
    _end_without_policy(attempt, result, error)
    if holder.task_id == attempt.request.id and not attempt.request.is_eager:
        _drop_delivery(attempt, error, result.shares_id)
    if spec.comes_again and spec.redelivered and attempt.store.has_begun(spec):
        attempt.note(is_unfinished=True)
    policy, decision = decide(attempt, policy_of(task, attempt.options, holder), result)
    if holder.task_id or holder.state == "paused":  # else nobody holds the lock, which is free only after a quiet time
        ending.announce(task, spec, holder, policy, decision)
    if isinstance(decision, Enqueue):
        return decision
    if isinstance(decision, RunLater):
        ending.postpone(attempt, decision.delay, error)
    if attempt.ticket:
        leave(attempt)
    if isinstance(decision, Follow):
        return follow(attempt, decision, holder)
    if isinstance(decision, SkipRun):
        place = f", as task {decision.pending} runs in its place" if decision.pending else ""
        return ending.skip(attempt, decision, holder, f"{place}: {error}")
    ending.fail(attempt, error)


def _come_again(attempt: Attempt, result: AcquireResult, error: DuplicateTask) -> NoReturn:
    """Publish a message again whose lock an operator released before its body began: its token is granted nothing any more."""
    attempt.log().warning("comes again, as an operator released its lock before it began")
    _, decision = decide(attempt, RetryLater(), result)
    if isinstance(decision, RunLater):
        ending.postpone(attempt, decision.delay, error)
    ending.fail(attempt, error)


def _end_without_policy(attempt: Attempt, result: AcquireResult, error: DuplicateTask) -> None:
    """End a delivery for whose message another one stands, or that comes again. Return if a policy decides."""
    if result.status is AcquireStatus.REVOKED:
        _come_again(attempt, result, error)
    if result.status is AcquireStatus.SUPERSEDED:
        newer = f"task {result.head}" if result.head else "a newer message"
        ending.skip(attempt, SkipRun(pending=result.head), None, f", as {newer} took its place in line")
    if result.status is AcquireStatus.REPLACED:
        drop_replaced(attempt)
    if result.status is AcquireStatus.COMPLETED:
        attempt.log().info("dropped: another delivery of it held %s and succeeded", attempt.spec.lock)
        ending.drop("another delivery of this task succeeded")
    if result.status is AcquireStatus.DROPPED:
        attempt.log().debug("dropped: another copy of it has started, or comes later")
        ending.drop("another copy of this message counts")
    if result.waiting:
        _drop_waiting(attempt, result, error)


def _drop_delivery(attempt: Attempt, error: DuplicateTask, shares_id: bool) -> None:
    """Drop a delivery whose message another delivery runs, or has run; return if a user has used a task id twice.

    Another message with the holder's task id (`shares_id`) comes again while that runs: its end would become the holder's state.
    """
    if goes_to_several_queues(attempt.task.app, attempt.request):
        attempt.log(error.holder).info("dropped: another worker runs this broadcast: %s", error)
        ending.drop("another worker runs this broadcast task")
    if error.holder.state != "cooldown" or (attempt.is_redelivered and not shares_id):
        check_later(attempt, error, shares_id)


def _drop_waiting(attempt: Attempt, result: AcquireResult, error: DuplicateTask) -> None:
    """Drop a delivery whose message waits in line."""
    place = attempt.spec.place
    if place and place.room and result.is_waiting:
        if result.quiet:
            attempt.log().info("waits for %.1f s without another call", result.quiet)
        else:
            attempt.log(error.holder).info("waits in line (%d waiting): %s", result.waiting, error)
        ending.drop("waits in line")
    # Its worker died before it acknowledged the message. One with a ticket was published in its turn, and has no copy any more.
    if result.is_head and attempt.spec.redelivered and not attempt.ticket:
        ending.drop("waits in line already")


def _refuse_start(attempt: Attempt) -> NoReturn:
    limit = attempt.options.max_starts
    assert limit is not None
    if attempt.ticket:
        leave(attempt)
    error = TooManyStarts(attempt.spec.lock, limit.n, limit.count)
    attempt.log().warning("failed: %s", error)
    raise error


def handle_store_error(attempt: Attempt, error: StoreError) -> None:
    """Do what ``on_store_error`` says after a store call failed; return if the body is to run without a lock.

    In a grace period the task waits, whatever that says: the store answers, and the lock may be held.

    Raises:
        StoreError: the store refused.
        StoreUnavailable: the option says so, or the task cannot be retried.
        Retry, Reject: the task is retried later.
    """
    outages, place = attempt.context.outages, attempt.spec.place
    outages.log(attempt.log(), "could not acquire its lock: %s", error)
    is_grace = isinstance(error, GracePeriod)
    if not is_grace:
        record_failure(attempt.task, attempt.spec, "acquire", error)
    reaction = attempt.options.on_store_error
    in_line = place and (place.room or place.ticket)  # or has a copy: it must not end yet
    if in_line or is_grace:
        reaction = "retry"
    if not isinstance(error, StoreUnavailable) or reaction == "raise":
        raise error
    if reaction == "retry":
        policy = _after_grace(error) if isinstance(error, GracePeriod) else retry_policy_of(attempt.options)
        if attempt.ticket:  # the time in line does not count
            policy = replace(policy, max_wait=math.inf)
        _, decision = decide(attempt, policy, AcquireResult(AcquireStatus.REFUSED))
        if isinstance(decision, RunLater):
            outages.count("postponed")
            ending.postpone(attempt, decision.delay, error)
        raise error
    outages.count("without")


def _after_grace(error: GracePeriod) -> RetryLater:
    left = max(0.1, error.left)
    return RetryLater(1.05 * left, 1.0, 1.05 * left, 0.05, math.inf)
