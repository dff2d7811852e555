"""Handles deliveries that did not acquire their lock. Every effect of a duplicate is in `handle_duplicate`."""

from __future__ import annotations

import time
from typing import Any, NoReturn

import celery
from celery.exceptions import Ignore, Reject, Retry
from kombu.exceptions import OperationalError

from celery_singleton_lock import signals
from celery_singleton_lock.config.options import Options
from celery_singleton_lock.errors import ConfigurationError, DuplicateTask, StoreError, StoreUnavailable
from celery_singleton_lock.events import send
from celery_singleton_lock.holder import Holder
from celery_singleton_lock.log import logger
from celery_singleton_lock.policies import Policy, RetryLater, Skip, as_policy
from celery_singleton_lock.store.protocol import AcquireResult, AcquireStatus, LeaseRequest
from celery_singleton_lock.worker.canvas import revoke_successors
from celery_singleton_lock.worker.delivery import delivery_of
from celery_singleton_lock.worker.republish import (
    RetryState,
    goes_to_several_queues,
    ignores_result,
    retry_state_of,
    shortened,
    signature_of,
)

FIRST_CHECK_DELAY = 0.2  # seconds until another attempt of the same task id is looked at again


def handle_duplicate(task: Any, request: Any, options: Options, claim: LeaseRequest, verdict: AcquireResult) -> Any:
    """Act on a duplicate as its policy says; return the result where the caller is to return one.

    Raises:
        DuplicateTask: the policy is to raise, or has waited long enough.
        Ignore, Retry, Reject: to tell Celery's tracer that all is done.
    """
    holder = verdict.holder or Holder()
    if verdict.answer is AcquireStatus.COMPLETED:
        logger.info(
            "Task %s[%s] dropped: another delivery of it has held %s and succeeded", task.name, request.id, claim.lock
        )
        raise Ignore("another delivery of this task has succeeded")
    if holder.task_id == request.id and not request.is_eager:
        if goes_to_several_queues(task.app, request):
            logger.info(
                "Task %s[%s] dropped: another worker runs this broadcast: %s is held by %s",
                task.name, request.id, claim.lock, holder,
            )  # fmt: skip
            raise Ignore("another worker runs this broadcast task")
        _look_again(task, request, options, claim, holder)
    policy = _policy(task, options, holder)
    if isinstance(policy, RetryLater) and goes_to_several_queues(task.app, request):
        policy = Skip()
    send(signals.duplicate, task, key=claim.lock, task_id=request.id, holder=holder, policy=policy)
    if isinstance(policy, Skip):
        return _skip(task, request, policy, claim, holder)
    error = DuplicateTask(claim.lock, holder)
    if isinstance(policy, RetryLater):
        _postpone(task, request, policy, error)
    logger.warning("Task %s[%s] refused: %s is held by %s", task.name, request.id, claim.lock, holder)
    raise error


def handle_store_error(task: Any, request: Any, options: Options, key: str, error: StoreError) -> None:
    """Act on a store call that failed as ``on_store_error`` says; return if the body is to run unprotected.

    Raises:
        StoreError: it refused.
        StoreUnavailable: the option says so, or trying again later is not possible.
        Retry, Reject: it is tried again later.
    """
    logger.warning("Task %s[%s]: no lock %s: %s", task.name, request.id, key, error)
    send(signals.store_error, task, key=key, task_id=request.id, error=error)
    away = isinstance(error, StoreUnavailable)
    if away and options.on_store_error == "run":
        return
    if away and options.on_store_error == "retry":
        policy = options.on_duplicate if isinstance(options.on_duplicate, RetryLater) else RetryLater()
        _postpone(task, request, policy, error)
    raise error


def _policy(task: Any, options: Options, holder: Holder) -> Policy:
    chosen = options.on_duplicate
    if not callable(chosen):
        return chosen
    policy = as_policy(answer := chosen(task, holder))
    if policy is None:
        raise ConfigurationError(f"task {task.name}: on_duplicate returned {answer!r}, which is no policy")
    return policy


def _skip(task: Any, request: Any, policy: Skip, claim: LeaseRequest, holder: Holder) -> Any:
    logger.info("Task %s[%s] skipped: %s is held by %s", task.name, request.id, claim.lock, holder)
    if request.is_eager:
        request.callbacks = None
        return policy.result
    revoke_successors(task, request)
    task.backend.mark_as_done(request.id, policy.result, request, not ignores_result(task, request))
    if delivery_of(request).events:
        _send_event(task, request, claim, holder)
    raise Ignore("skipped as a duplicate")


def _send_event(task: Any, request: Any, claim: LeaseRequest, holder: Holder) -> None:
    try:
        task.send_event("task-singleton-skipped", key=claim.lock, holder=holder.as_dict())
    except Exception as error:  # the task has been stored as done: it must not fail now
        logger.warning("Task %s[%s]: no event could be sent: %s", task.name, request.id, error)


def _postpone(task: Any, request: Any, policy: RetryLater, error: Exception) -> None:
    """Publish the message again; return if it has waited long enough, runs in the caller, or would be multiplied.

    Raises:
        Retry: it was published.
        Reject: it could not be published, but its message can go back to the broker.
        Exception: it could not be published: the given error.
    """
    times, waited, _ = retry_state_of(request)
    if request.is_eager or waited >= policy.max_wait or goes_to_several_queues(task.app, request):
        return
    delay = shortened(task.app, policy.delay_for(times, waited))
    again = signature_of(task, request, delay, RetryState(times + 1, waited + delay))
    retry = Retry(f"Retry in {delay:.1f} s", error, delay, sig=again)  # the reason is in our own line of the log
    is_stored = _store_retry(task, request, error)
    _publish(task, again, error)
    if is_stored:
        request.ignore_result = True
    logger.info("Task %s[%s] waits %.1f s: %s", task.name, request.id, delay, error)
    raise retry


def _store_retry(task: Any, request: Any, error: Exception) -> bool:
    """Store RETRY before the message is published, and tell whether that is done.

    Celery's tracer does it after that, and would overwrite the FAILURE or REVOKED of a message that comes back quickly. It leaves
    it out for a request that ignores its result (5.7).
    """
    if celery.VERSION < (5, 7) or ignores_result(task, request) or task.store_errors_even_if_ignored:
        return False
    try:
        task.backend.mark_as_retry(request.id, error, request=request)
    except Exception as failure:  # the message must not be lost for it
        logger.warning("Task %s[%s]: its state RETRY could not be stored: %s", task.name, request.id, failure)
        return False
    return True


def _look_again(task: Any, request: Any, options: Options, claim: LeaseRequest, holder: Holder) -> NoReturn:
    """Publish a redelivered message again while its other delivery runs, and store nothing.

    Raises:
        Ignore: the message was published again, or is lost.
        Reject: it could not be published, but goes back to the broker.
    """
    before = retry_state_of(request)
    longest = options.on_duplicate.delay if isinstance(options.on_duplicate, RetryLater) else RetryLater.delay
    delay = shortened(task.app, min(FIRST_CHECK_DELAY * 2 ** min(before.looks, 64), max(longest, FIRST_CHECK_DELAY)))
    logger.info(
        "Task %s[%s] is running in another delivery of it: %s is held by %s", task.name, request.id, claim.lock, holder
    )
    try:
        signature_of(task, request, delay, before._replace(looks=before.looks + 1)).apply_async()
    except Exception as error:
        if task.acks_late:
            time.sleep(FIRST_CHECK_DELAY)  # the broker delivers it again at once
            raise Reject(error, requeue=True) from error
        logger.error("Task %s[%s]: this delivery of it is lost: %s", task.name, request.id, error)
    raise Ignore("another delivery of this task is running")


def _publish(task: Any, signature: Any, error: Exception) -> None:
    try:
        signature.apply_async()
    except Exception as reason:
        # The broker is away; after any other error the message would return for ever.
        if task.acks_late and isinstance(reason, (OperationalError, OSError)):
            raise Reject(reason, requeue=True) from reason
        raise error from reason
