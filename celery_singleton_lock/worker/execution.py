"""What happens around a body: acquire, renew, run, release; and at `task_postrun`, whatever is left to do."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from celery.exceptions import Retry
from celery.signals import task_postrun
from celery.utils.nodenames import gethostname

from celery_singleton_lock import signals
from celery_singleton_lock.clock import now
from celery_singleton_lock.config.options import Options
from celery_singleton_lock.config.task_config import TaskConfig, config_of_call
from celery_singleton_lock.context import ProcessContext, context_of
from celery_singleton_lock.errors import LockLost, StoreError, StoreUnavailable
from celery_singleton_lock.events import send
from celery_singleton_lock.lease import Lease, LeaseState
from celery_singleton_lock.log import logger
from celery_singleton_lock.policies.decisions import Enqueue
from celery_singleton_lock.renewal.interrupts import interrupt_here, run
from celery_singleton_lock.renewal.pending import PendingRelease
from celery_singleton_lock.reservation import kept_for_retry
from celery_singleton_lock.store.protocol import AcquireResult, AcquireStatus, Kept, LeaseRequest
from celery_singleton_lock.worker.delivery import delivery_of, take_token
from celery_singleton_lock.worker.line import handle_copy, place_of, publish_copy, wake
from celery_singleton_lock.worker.outcome import handle_duplicate, handle_store_error
from celery_singleton_lock.worker.republish import forget_retry_state, is_redelivered, lock_options_of, retry_state_of

Body = Callable[[], Any]

#: Attribute of a request: its `Execution`. It is there from before the lock is acquired.
EXECUTION = "_singleton_execution"


class Execution:
    """What is known of one delivery's lock, until `task_postrun`."""

    __slots__ = ("context", "lease", "pending", "state")

    def __init__(self) -> None:
        self.lease = Lease("")  # what the body sees
        self.state: LeaseState | None = None  # of the lease; None where no lock is acquired
        self.context: ProcessContext
        self.pending: PendingRelease | None = None  # a release that needs the outcome of the task

    def __reduce__(self) -> tuple[type[Execution], tuple[()]]:
        """Make copies and pickles empty: a copied request has nothing to release, and no token."""
        return Execution, ()


def connect() -> None:
    """Have `after_run` called after each task; connecting again has no effect."""
    task_postrun.connect(after_run, weak=False, dispatch_uid=__package__)


def run_locked(task: Any, request: Any, args: Sequence[Any], kwargs: Mapping[str, Any], body: Body) -> Any:
    """Run the body of a task under the lock of its signature.

    Raises:
        BaseException: what the body raises, or what the policy of a duplicate says.
    """
    execution = Execution()
    setattr(request, EXECUTION, execution)
    if request.is_eager and not task.app.conf.get("singleton_lock_eager", False):
        return body()
    config = config_of_call(task, lock_options_of(request))
    options = config.options
    if not options.singleton:
        return body()
    supervised = delivery_of(request).supervised
    execution.context = context = context_of(task.app, single=supervised)
    retry_state = retry_state_of(request)
    if retry_state.stands_for:
        handle_copy(task, request, config, context.store, args, kwargs)
    wanted = LeaseRequest(
        config.base,
        config.digest(args, kwargs),
        take_token(request),
        options.lock_ttl,
        request.id,
        request.hostname or gethostname(),
        context.pid,
        supervised,
        is_redelivered(request),
        place=place_of(retry_state, options.on_duplicate),
        limit=config.limit(args, kwargs),
        max_starts=options.max_starts,
    )
    # From now on `after_run` releases what the store may have granted.
    execution.state = state = LeaseState(wanted, task)
    try:
        result, sent_at = _acquire(context, wanted)
        while result.status is not AcquireStatus.GRANTED:
            state.unreleased = False
            decision = handle_duplicate(task, request, options, context.store, wanted, result)
            if not isinstance(decision, Enqueue):
                return decision
            wanted.place = publish_copy(task, request, wanted, decision)
            state.unreleased = True
            result, sent_at = _acquire(context, wanted)
    except StoreError as error:
        state.unreleased = isinstance(error, StoreUnavailable)  # a store that refuses has granted nothing
        handle_store_error(task, request, options, wanted, error)
        execution.lease = Lease(wanted.lock)
        return body()
    _note_grant(state, options, result, sent_at)
    state.granted(sent_at, result.fence, context.body_renewal.verify)
    forget_retry_state(request)
    if options.lock_until == "start":
        _release(execution, state, success=False)
        execution.lease = Lease(wanted.lock)
        return body()
    execution.lease = Lease(wanted.lock, state)
    return _run_body(execution, state, config, body)


def _acquire(context: ProcessContext, wanted: LeaseRequest) -> tuple[AcquireResult, float]:
    """Return the answer, and when its call was sent. A grant that came too late to be trusted is asked for again.

    Raises:
        StoreError: the store did not answer in time, or refused.
    """
    for _ in range(2):
        sent_at = now()
        result = context.store.acquire(wanted)
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
        state.held_until = now() + options.lock_at_least


def _run_body(execution: Execution, state: LeaseState, config: TaskConfig, body: Body) -> Any:
    success, kept = False, None
    try:
        if config.options.on_lock_lost == "raise":
            state.interrupt = interrupt_here(state.request.lock, execution.context.callbacks.call_in_loop)
        execution.context.renewer.add(state)
        send(signals.lock_acquired, state.task, lease=execution.lease)
        result = body() if state.interrupt is None else _run_interruptible(state, body)
        success = True
        return result
    except Retry as retry:
        kept = kept_for_retry(state.task, config, state.task.request, state.request, retry)
        raise
    finally:
        _release(execution, state, success, kept)


def _run_interruptible(state: LeaseState, body: Body) -> Any:
    def unless_lost() -> Any:
        if state.lost:  # before the interrupt was armed
            raise LockLost(state.request.lock)
        return body()

    try:
        return run(state.interrupt, unless_lost)
    except LockLost as error:
        error.args = error.args or (state.request.lock,)  # CPython's asynchronous exceptions come without arguments
        raise


def _release(execution: Execution, state: LeaseState, success: bool, kept: Kept | None = None) -> None:
    """Release a lease once its body is over; what cannot be done yet becomes a pending release."""
    request, renewer = state.request, execution.context.renewer
    if request.pid != os.getpid():  # a process that the body forked owns nothing
        return
    state.ended = True
    renewer.remove(state)
    pending = PendingRelease(
        request, success, kept=kept, held_until=state.held_until if success and not state.lost else 0.0
    )
    # The start of a revoked lease has ended, too.
    state.unreleased = state.unreleased or request.max_starts is not None
    if state.unreleased:
        try:
            pending.send(execution.context.store)
        except StoreError as error:
            logger.warning(
                "Task %s[%s] could not release its lock %s: %s", state.task.name, request.task_id, request.lock, error
            )
            send(signals.store_error, state.task, key=request.lock, task_id=request.task_id, error=error)
        else:
            if not state.lost:
                send(signals.lock_released, state.task, lease=execution.lease)
            if pending.line_waits:
                wake(state.task, execution.context.store, request)
    if state.reacquired or (state.unreleased and not pending.confirmed):
        execution.pending = pending
        renewer.release_later(pending)
    state.unreleased = False


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
        _release(execution, lease, success=False)
    elif lease.unreleased:  # nobody knows whether the store has granted it
        context.renewer.release_later(PendingRelease(lease.request, None, outcome=False), unanswered=True)
    if (pending := execution.pending) is not None:
        pending.outcome = state == "SUCCESS"
        if pending.redelivery_waits:
            try:
                pending.send(context.store)
            except StoreError as error:  # the renewal thread tries again
                logger.warning("Task id %s: a redelivery of it may run again: %s", pending.request.task_id, error)
