"""What happens around a body: acquire, renew, run, release."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from logging import DEBUG
from typing import Any

from celery.exceptions import Ignore, Reject, Retry
from celery.utils.nodenames import gethostname

from celery_singleton_lock import signals
from celery_singleton_lock.clock import now
from celery_singleton_lock.config.task_config import config_of_call
from celery_singleton_lock.context import context_of
from celery_singleton_lock.delivery.attempt import ATTEMPT, Attempt
from celery_singleton_lock.delivery.properties import take_delivery
from celery_singleton_lock.delivery.recording import record_acquire, record_end
from celery_singleton_lock.delivery.retry_state import forget_retry_state, lock_options_of
from celery_singleton_lock.errors import ConfigurationError, LockLost, StoreError, StoreUnavailable
from celery_singleton_lock.lease import Lease, LeaseState
from celery_singleton_lock.line.joining import place_of, publish_copy
from celery_singleton_lock.line.message import task_id_of
from celery_singleton_lock.log import logger
from celery_singleton_lock.policies.decisions import Enqueue
from celery_singleton_lock.renewal.interrupts import interrupt_here, run
from celery_singleton_lock.reports.events import send
from celery_singleton_lock.reservation import kept_for_retry
from celery_singleton_lock.store.protocol import AcquireResult, AcquireStatus, GracePeriod
from celery_singleton_lock.store.records import NO_RECORD, RunRecord
from celery_singleton_lock.store.requests import LeaseSpec
from celery_singleton_lock.worker.awaitable import completed
from celery_singleton_lock.worker.duplicates import handle_duplicate, handle_store_error
from celery_singleton_lock.worker.join import join
from celery_singleton_lock.worker.release import release
from celery_singleton_lock.worker.replaced import end_replaced

Body = Callable[[], Any]


def run_locked(task: Any, request: Any, args: Sequence[Any], kwargs: Mapping[str, Any], body: Body) -> Any:
    """Run the body of a task under the lock of its call.

    Raises:
        BaseException: what the body raises, or what the policy of a duplicate says.
    """
    attempt = Attempt(task, request)
    setattr(request, ATTEMPT, attempt)
    if request.is_eager and not task.app.conf.get("singleton_lock_eager", False):
        return body()
    attempt.use(config_of_call(task, lock_options_of(request)))
    if attempt.retry_state.original_id:  # see `Copies`; it must not run the body
        raise ConfigurationError(f"task {task.name}: its start_strategy() must call that of its base class")
    # A message that waits in line is run once by the line alone, whatever its options are now.
    if not (attempt.options.singleton or attempt.retry_state.ticket):
        return body()
    body = partial(completed, task, body)
    _prepare(attempt, args, kwargs)
    if attempt.retry_state.follows and (joined := join(attempt)):
        return joined.result
    record_acquire(attempt)
    # From now on `after_run` releases what the store may have granted.
    attempt.state = state = LeaseState(attempt.spec, task)
    state.sends_events = attempt.delivery.events
    try:
        result, sent_at = _acquire(attempt)
        while result.status is not AcquireStatus.GRANTED:
            state.unreleased = False
            decision = handle_duplicate(attempt, result)
            if not isinstance(decision, Enqueue):
                return decision
            attempt.spec.place = publish_copy(attempt, decision, result)
            state.unreleased = True
            result, sent_at = _acquire(attempt)
    except StoreError as error:
        # A store that refuses has granted nothing.
        state.unreleased = isinstance(error, StoreUnavailable) and not isinstance(error, GracePeriod)
        handle_store_error(attempt, error)
        attempt.lease = Lease(attempt.spec.lock)
        return body()
    _note_grant(attempt, state, result, sent_at)
    return _run_granted(attempt, state, body)


def _prepare(attempt: Attempt, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Say what this delivery wants of which store."""
    task, request, config, options = attempt.task, attempt.request, attempt.config, attempt.options
    attempt.delivery = delivery = take_delivery(request)
    attempt.context = context_of(task.app, single=delivery.supervised)
    attempt.store = attempt.context.store
    attempt.spec = LeaseSpec(
        config.base,
        config.digest(args, kwargs),
        delivery.token,
        options.lock_ttl,
        request.id,
        request.hostname or gethostname(),
        attempt.context.pid,
        delivery.supervised,
        attempt.is_redelivered,
        place=place_of(attempt),
        limit=config.limit(args, kwargs),
        stoppable=getattr(options.on_duplicate, "stops_holder", False),
        max_starts=options.max_starts,
        # With "start", the lock does not see how the body ends.
        comes_again=bool(task.acks_late) and not request.is_eager and options.lock_until == "finish",
    )


def _acquire(attempt: Attempt) -> tuple[AcquireResult, float]:
    """Return the answer, and when its call was sent. A grant that came too late to be trusted is asked for again.

    Raises:
        StoreError: the store did not answer in time, or refused.
    """
    spec = attempt.spec
    for _ in range(2):
        sent_at = now()
        result = attempt.store.acquire(spec)
        spec.record = NO_RECORD  # the store has it
        if result.status is not AcquireStatus.GRANTED or now() < sent_at + spec.ttl:
            return result, sent_at
    raise StoreUnavailable("the store answers more slowly than its leases live")


def _note_grant(attempt: Attempt, state: LeaseState, result: AcquireResult, sent_at: float) -> None:
    """Note which slot was granted, and the times that options set."""
    options = attempt.options
    if state.spec.limit:
        state.spec.use_slot(result.slot)
    if options.lock_at_most is not None:
        state.cap = sent_at + options.lock_at_most
    if options.lock_at_least:
        state.cooldown_until = now() + options.lock_at_least
    state.granted(sent_at, result.fence, attempt.context.body_renewal.verify)
    if logger.isEnabledFor(DEBUG):
        attempt.log().debug("acquired %s with fence %d", attempt.spec.lock, result.fence)
    forget_retry_state(attempt.request)


def _run_granted(attempt: Attempt, state: LeaseState, body: Body) -> Any:
    """Run the body with its lock, or with ``lock_until="start"`` without."""
    attempt.lease = Lease(state.spec.lock, state)
    if attempt.options.lock_until == "start":
        state.spec.record = RunRecord(outcome="started")
        send(signals.lock_acquired, state.task, lease=attempt.lease)
        release(attempt, state, success=False)
        attempt.lease = Lease(state.spec.lock)
        return body()
    try:
        return _run_body(attempt, state, body)
    except LockLost as error:
        if state.is_stopped_by(error):
            end_replaced(attempt, task_id_of(attempt.next_message))
        raise


def _run_body(attempt: Attempt, state: LeaseState, body: Body) -> Any:
    success, kept, context = False, None, attempt.context
    try:
        if attempt.options.on_lock_lost == "raise":
            state.interrupt = interrupt_here(state.spec.lock, context.callbacks.call_in_loop)
        context.renewer.add(state)
        send(signals.lock_acquired, state.task, lease=attempt.lease)
        result = body() if state.interrupt is None else _run_interruptible(state, body)
        success = True
        record_end(state.spec, None)
        return result
    except BaseException as error:
        state.spec.is_continued = attempt.is_replaced and isinstance(error, Ignore)
        # After a `Reject` with `requeue`, the broker delivers the message again.
        is_end = isinstance(error, Exception) and not (isinstance(error, Reject) and error.requeue)
        state.spec.is_unfinished = not is_end
        record_end(state.spec, error, stopped=isinstance(error, LockLost) and state.is_stopped_by(error))
        if isinstance(error, Retry):
            kept = kept_for_retry(attempt.task, attempt.config, attempt.request, state.spec, error)
        raise
    finally:
        release(attempt, state, success, kept)


def _run_interruptible(state: LeaseState, body: Body) -> Any:
    def unless_lost() -> Any:
        if state.lost or state.stopped:  # before the interrupt was armed
            raise LockLost(state.spec.lock)
        return body()

    try:
        return run(state.interrupt, unless_lost)
    except LockLost as error:
        error.args = error.args or (state.spec.lock,)  # CPython's asynchronous exceptions come without arguments
        raise
