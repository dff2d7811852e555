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
from celery_singleton_lock.config.options import Options
from celery_singleton_lock.config.task_config import TaskConfig, config_of_call
from celery_singleton_lock.context import ProcessContext, context_of
from celery_singleton_lock.delivery.noting import note_acquire, note_end
from celery_singleton_lock.delivery.properties import delivery_of, take_token
from celery_singleton_lock.delivery.republish import forget_retry_state, is_redelivered, lock_options_of, retry_state_of
from celery_singleton_lock.errors import ConfigurationError, LockLost, StoreError, StoreUnavailable
from celery_singleton_lock.events import send
from celery_singleton_lock.lease import Lease, LeaseState
from celery_singleton_lock.line.joining import place_of, publish_copy
from celery_singleton_lock.line.message import task_id_of
from celery_singleton_lock.log import about, logger
from celery_singleton_lock.policies.decisions import Enqueue
from celery_singleton_lock.renewal.interrupts import interrupt_here, run
from celery_singleton_lock.reservation import kept_for_retry
from celery_singleton_lock.store.protocol import AcquireResult, AcquireStatus, GracePeriod
from celery_singleton_lock.store.records import NOTHING, Noted
from celery_singleton_lock.store.requests import LeaseRequest
from celery_singleton_lock.worker.awaitable import completed
from celery_singleton_lock.worker.join import join
from celery_singleton_lock.worker.outcome import handle_duplicate, handle_store_error
from celery_singleton_lock.worker.release import EXECUTION, Execution, release
from celery_singleton_lock.worker.replaced import end_replaced

Body = Callable[[], Any]


def run_locked(task: Any, request: Any, args: Sequence[Any], kwargs: Mapping[str, Any], body: Body) -> Any:
    """Run the body of a task under the lock of its call.

    Raises:
        BaseException: what the body raises, or what the policy of a duplicate says.
    """
    execution = Execution()
    setattr(request, EXECUTION, execution)
    if request.is_eager and not task.app.conf.get("singleton_lock_eager", False):
        return body()
    config = config_of_call(task, lock_options_of(request))
    options = config.options
    waiting = retry_state_of(request)
    if waiting.original_id:  # see `Copies`; it must not run the body
        raise ConfigurationError(f"task {task.name}: its start_strategy() must call that of its base class")
    if not (options.singleton or waiting.ticket):  # what waits in line is run once by the line alone
        return body()
    body = partial(completed, task, body)
    delivery = delivery_of(request)
    execution.context = context = context_of(task.app, single=delivery.supervised)
    wanted = LeaseRequest(
        config.base,
        config.digest(args, kwargs),
        take_token(request),
        options.lock_ttl,
        request.id,
        request.hostname or gethostname(),
        context.pid,
        delivery.supervised,
        is_redelivered(request),
        place=place_of(task, request, options.on_duplicate),
        limit=config.limit(args, kwargs),
        stoppable=getattr(options.on_duplicate, "stops_holder", False),
        max_starts=options.max_starts,
        # With "start", the lock does not see how the body ends.
        comes_again=bool(task.acks_late) and not request.is_eager and options.lock_until == "finish",
    )
    if waiting.follows and (joined := join(task, request, options, context.store, wanted)):
        return joined.result
    note_acquire(context, wanted, options, waiting)
    # From now on `after_run` releases what the store may have granted.
    execution.state = state = LeaseState(wanted, task)
    state.sends_events = delivery.events
    try:
        result, sent_at = _acquire(context, wanted)
        while result.status is not AcquireStatus.GRANTED:
            state.unreleased = False
            decision = handle_duplicate(task, request, options, context.store, wanted, result)
            if not isinstance(decision, Enqueue):
                return decision
            wanted.place = publish_copy(task, request, wanted, decision, result)
            state.unreleased = True
            result, sent_at = _acquire(context, wanted)
    except StoreError as error:
        # A store that refuses has granted nothing.
        state.unreleased = isinstance(error, StoreUnavailable) and not isinstance(error, GracePeriod)
        handle_store_error(task, request, options, wanted, error)
        execution.lease = Lease(wanted.lock)
        return body()
    _note_grant(state, options, result, sent_at)
    state.granted(sent_at, result.fence, context.body_renewal.verify)
    if logger.isEnabledFor(DEBUG):
        about(task, request.id, wanted.lock).debug("acquired %s with fence %d", wanted.lock, result.fence)
    forget_retry_state(request)
    if options.lock_until == "start":
        wanted.noted = Noted(outcome="started")
        release(execution, state, success=False)
        execution.lease = Lease(wanted.lock)
        return body()
    execution.lease = Lease(wanted.lock, state)
    return _run_until_replaced(request, execution, state, config, body)


def _acquire(context: ProcessContext, wanted: LeaseRequest) -> tuple[AcquireResult, float]:
    """Return the answer, and when its call was sent. A grant that came too late to be trusted is asked for again.

    Raises:
        StoreError: the store did not answer in time, or refused.
    """
    for _ in range(2):
        sent_at = now()
        result = context.store.acquire(wanted)
        wanted.noted = NOTHING  # the store has it
        if result.status is not AcquireStatus.GRANTED or now() < sent_at + wanted.ttl:
            return result, sent_at
    raise StoreUnavailable("the store answers more slowly than its leases live")


def _note_grant(state: LeaseState, options: Options, result: AcquireResult, sent_at: float) -> None:
    """Note which slot was granted, and the times that options set."""
    if state.request.limit:
        state.request.use_slot(result.slot)
    if options.lock_at_most is not None:
        state.cap = sent_at + options.lock_at_most
    if options.lock_at_least:
        state.cooldown_until = now() + options.lock_at_least


def _run_until_replaced(request: Any, execution: Execution, state: LeaseState, config: TaskConfig, body: Body) -> Any:
    try:
        return _run_body(execution, state, config, body)
    except LockLost as error:
        if state.is_stopped_by(error):
            replacement = task_id_of(execution.next_message)
            end_replaced(state.task, request, execution.context.store, state.request, replacement)
        raise


def _run_body(execution: Execution, state: LeaseState, config: TaskConfig, body: Body) -> Any:
    success, kept = False, None
    try:
        if config.options.on_lock_lost == "raise":
            state.interrupt = interrupt_here(state.request.lock, execution.context.callbacks.call_in_loop)
        execution.context.renewer.add(state)
        send(signals.lock_acquired, state.task, lease=execution.lease)
        result = body() if state.interrupt is None else _run_interruptible(state, body)
        success = True
        note_end(state.request, None)
        return result
    except BaseException as error:
        state.request.is_continued = execution.is_replaced and isinstance(error, Ignore)
        # The last of these has the broker deliver the message again.
        is_end = isinstance(error, Exception) and not (isinstance(error, Reject) and error.requeue)
        state.request.is_unfinished = not is_end
        note_end(state.request, error, stopped=state.stopped and isinstance(error, LockLost))
        if isinstance(error, Retry):
            kept = kept_for_retry(state.task, config, state.task.request, state.request, error)
        raise
    finally:
        release(execution, state, success, kept)


def _run_interruptible(state: LeaseState, body: Body) -> Any:
    def unless_lost() -> Any:
        if state.lost or state.stopped:  # before the interrupt was armed
            raise LockLost(state.request.lock)
        return body()

    try:
        return run(state.interrupt, unless_lost)
    except LockLost as error:
        error.args = error.args or (state.request.lock,)  # CPython's asynchronous exceptions come without arguments
        raise
