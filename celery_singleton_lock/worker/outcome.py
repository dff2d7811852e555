"""Handles deliveries that did not acquire their lock: duplicates, and tasks whose store failed. Policies decide, this acts."""

from __future__ import annotations

import time
from typing import Any, NoReturn

import celery
from celery.exceptions import Ignore, Reject, Retry
from celery.states import SUCCESS
from kombu.exceptions import OperationalError

from celery_singleton_lock import signals
from celery_singleton_lock.config.options import Options
from celery_singleton_lock.errors import ConfigurationError, DuplicateTask, StoreError, StoreUnavailable, TooManyStarts
from celery_singleton_lock.events import send
from celery_singleton_lock.holder import Holder
from celery_singleton_lock.log import logger
from celery_singleton_lock.policies import Policy, RetryLater, Skip, as_policy
from celery_singleton_lock.policies.decisions import Decision, Duplicate, Fail, RunLater, SkipRun
from celery_singleton_lock.store.protocol import AcquireResult, AcquireStatus, LeaseRequest
from celery_singleton_lock.worker.canvas import revoke_successors
from celery_singleton_lock.worker.delivery import delivery_of
from celery_singleton_lock.worker.destination import goes_to_several_queues, shortened
from celery_singleton_lock.worker.republish import (
    RetryState,
    ignores_result,
    is_redelivered,
    retry_state_of,
    signature_of,
)

FIRST_REDELIVERY_CHECK = 0.2  # seconds


def handle_duplicate(
    task: Any, request: Any, options: Options, lease_request: LeaseRequest, result: AcquireResult
) -> Any:
    """Do what the policy decides for a duplicate; return the task's result in an eager run that is skipped.

    Raises:
        DuplicateTask: the decision is to fail.
        TooManyStarts: the signature was started too often.
        Ignore, Retry, Reject: the end of this delivery, as Celery's tracer expects it.
    """
    key, holder = lease_request.lock, result.holder or Holder()
    error = DuplicateTask(key, holder)  # its text says who holds the lock
    if result.status is AcquireStatus.COMPLETED:
        logger.info("Task %s[%s] dropped: another delivery of it held %s and succeeded", task.name, request.id, key)
        raise Ignore("another delivery of this task succeeded")
    if result.status is AcquireStatus.TOO_MANY_STARTS:
        _refuse_start(task, request, key, options)
    if holder.task_id == request.id and not request.is_eager:
        if goes_to_several_queues(task.app, request):
            logger.info("Task %s[%s] dropped: another worker runs this broadcast: %s", task.name, request.id, error)
            raise Ignore("another worker runs this broadcast task")
        if holder.state != "held" or is_redelivered(request):  # else a user has used a task id twice
            _check_redelivery_later(task, request, options, error)
    policy, decision = _decide(task, request, _policy_of(task, options, holder), holder)
    send(signals.duplicate, task, key=key, task_id=request.id, holder=holder, policy=policy)
    if isinstance(decision, SkipRun):
        return _skip(task, request, decision.result, error)
    if isinstance(decision, RunLater):
        _run_later(task, request, decision.delay, error)
    logger.warning("Task %s[%s] failed as a duplicate: %s", task.name, request.id, error)
    raise error


def _refuse_start(task: Any, request: Any, key: str, options: Options) -> NoReturn:
    limit = options.max_starts
    assert limit is not None
    error = TooManyStarts(key, limit.n, limit.count)
    logger.warning("Task %s[%s] failed: %s", task.name, request.id, error)
    raise error


def handle_store_error(task: Any, request: Any, options: Options, key: str, error: StoreError) -> None:
    """Do what ``on_store_error`` says after a store call failed; return if the body is to run without a lock.

    Raises:
        StoreError: the store refused.
        StoreUnavailable: the option says so, or the task cannot be retried.
        Retry, Reject: the task is retried later.
    """
    logger.warning("Task %s[%s] could not acquire %s: %s", task.name, request.id, key, error)
    send(signals.store_error, task, key=key, task_id=request.id, error=error)
    if not isinstance(error, StoreUnavailable) or options.on_store_error == "raise":
        raise error
    if options.on_store_error == "retry":
        _, decision = _decide(task, request, _retry_policy_of(options), Holder())
        if isinstance(decision, RunLater):
            _run_later(task, request, decision.delay, error)
        raise error


def _policy_of(task: Any, options: Options, holder: Holder) -> Policy:
    chosen = options.on_duplicate
    if not callable(chosen):
        return chosen
    policy = as_policy(answer := chosen(task, holder))
    if policy is None:
        raise ConfigurationError(f"task {task.name}: on_duplicate returned {answer!r}, which is no policy")
    return policy


def _retry_policy_of(options: Options) -> RetryLater:
    return options.on_duplicate if isinstance(options.on_duplicate, RetryLater) else RetryLater()


def _decide(task: Any, request: Any, policy: Policy, holder: Holder) -> tuple[Policy, Decision]:
    """Ask the policy. In place of running later a broadcast message is skipped, and an eager run fails."""
    state, is_broadcast = retry_state_of(request), goes_to_several_queues(task.app, request)
    can_run_later = not is_broadcast and not request.is_eager
    decision = policy.decide(Duplicate(holder, state.times, state.waited, can_run_later))
    if isinstance(decision, RunLater) and not can_run_later:
        return (Skip(), SkipRun()) if is_broadcast else (policy, Fail())
    return policy, decision


def _skip(task: Any, request: Any, result: Any, error: DuplicateTask) -> Any:
    logger.info("Task %s[%s] skipped: %s", task.name, request.id, error)
    if request.is_eager:
        request.callbacks = None
        return result
    revoke_successors(task, request)
    task.backend.mark_as_done(request.id, result, request, not ignores_result(task, request))
    if delivery_of(request).events:
        try:
            task.send_event("task-singleton-skipped", key=error.key, holder=error.holder.as_dict())
        except Exception as failure:  # the task is stored as done, so it must not fail now
            logger.warning("Task %s[%s]: no event could be sent: %s", task.name, request.id, failure)
    raise Ignore("skipped as a duplicate")


def _run_later(task: Any, request: Any, delay: float, error: Exception) -> NoReturn:
    """Publish the message again and raise `Retry`. Raise `Reject` or the given error if that fails."""
    delay, state = shortened(task.app, delay), retry_state_of(request)
    signature = signature_of(task, request, delay, RetryState(state.times + 1, state.waited + delay))
    is_stored = _mark_as_retry(task, request, error)
    try:
        signature.apply_async()
    except Exception as failure:
        # The broker is unreachable. After any other failure the message would come back for ever.
        if task.acks_late and isinstance(failure, (OperationalError, OSError)):
            raise Reject(failure, requeue=True) from failure
        raise error from failure
    if is_stored:
        request.ignore_result = True  # keeps the tracer from storing RETRY once more
    logger.info("Task %s[%s] waits %.1f s: %s", task.name, request.id, delay, error)
    raise Retry(f"Retry in {delay:.1f} s", error, delay, sig=signature)


def _mark_as_retry(task: Any, request: Any, error: Exception) -> bool:
    """Store the state RETRY before the message is published; tell whether that is done.

    Celery's tracer stores it afterwards, which could overwrite the FAILURE or REVOKED of a message that comes back quickly. The
    tracer does not store it for a request that ignores its result (5.7).
    """
    if celery.VERSION < (5, 7) or ignores_result(task, request) or task.store_errors_even_if_ignored:
        return False
    try:
        task.backend.mark_as_retry(request.id, error, request=request)
    except Exception as failure:  # publishing the message matters more
        logger.warning("Task %s[%s]: its state RETRY could not be stored: %s", task.name, request.id, failure)
        return False
    return True


def _check_redelivery_later(task: Any, request: Any, options: Options, error: DuplicateTask) -> NoReturn:
    """Publish a redelivered message again while its other delivery runs, store nothing, and raise `Ignore` or `Reject`."""
    state = retry_state_of(request)
    delay = FIRST_REDELIVERY_CHECK * 2 ** min(state.redelivery_checks, 64)
    delay = min(delay, max(_retry_policy_of(options).delay, FIRST_REDELIVERY_CHECK))
    if error.holder.state == "held":
        if _has_succeeded(task, request):
            logger.info("Task %s[%s] dropped: another delivery of it succeeded: %s", task.name, request.id, error)
            raise Ignore("another delivery of this task succeeded")
        delay = max(delay, error.holder.remaining)
    delay = shortened(task.app, delay)
    logger.info("Task %s[%s] redelivered while another delivery of it runs: %s", task.name, request.id, error)
    try:
        checked = state._replace(redelivery_checks=state.redelivery_checks + 1)
        signature_of(task, request, delay, checked).apply_async()
    except Exception as failure:
        if task.acks_late:
            time.sleep(FIRST_REDELIVERY_CHECK)  # the broker delivers it again at once
            raise Reject(failure, requeue=True) from failure
        logger.error("Task %s[%s]: this redelivery of it is lost: %s", task.name, request.id, failure)
    raise Ignore("another delivery of this task is running")


def _has_succeeded(task: Any, request: Any) -> bool:
    """Tell whether the result of another delivery is stored. A worker may have died between its release and that."""
    try:
        return bool(task.backend.get_state(request.id) == SUCCESS)
    except Exception as failure:  # there may be no backend, or none that a worker can ask
        logger.debug("Task %s[%s]: its state is not known: %s", task.name, request.id, failure)
        return False
