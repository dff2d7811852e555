"""What happens around a body: acquire, renew, run, release."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from celery.signals import task_postrun
from celery.utils.nodenames import gethostname

from celery_singleton_lock import signals
from celery_singleton_lock.clock import now
from celery_singleton_lock.config.task_config import TaskConfig, config_for
from celery_singleton_lock.context import ProcessContext, context_of
from celery_singleton_lock.errors import LockLost, StoreError, StoreUnavailable
from celery_singleton_lock.events import send
from celery_singleton_lock.lease import Lease
from celery_singleton_lock.log import logger
from celery_singleton_lock.renewal.interrupts import interrupt_here
from celery_singleton_lock.renewal.interrupts import run as run_interruptible
from celery_singleton_lock.store.protocol import AcquireResult, AcquireStatus, LeaseRequest
from celery_singleton_lock.worker.delivery import POSTPONED, delivery_of
from celery_singleton_lock.worker.outcome import handle_duplicate, handle_store_error
from celery_singleton_lock.worker.republish import is_redelivered

Body = Callable[[], Any]

#: Attribute of a request: the lease of its body.
LEASE = "_singleton_lease"
#: Attribute of a request: a claim that the store may have granted, though no answer came.
DOUBT = "_singleton_doubt"
#: Attribute of a request: the claim of a lease that the store may still hold.
LEFT = "_singleton_left"
#: Attribute of a request: what to settle for a waiting copy of its message.
TWIN = "_singleton_twin"

_NONE = Lease("")  # there is nothing that could change it


def run_locked(task: Any, request: Any, args: Sequence[Any], kwargs: Mapping[str, Any], body: Body) -> Any:
    """Run the body under the lock of its signature.

    Arguments:
        task: the task.
        request: its request, as the tracer made it.
        args, kwargs: what it is called with.
        body: runs it, with all that users put around it.

    Raises:
        BaseException: what the body raises, or what its policy says for a duplicate.
    """
    setattr(request, LEASE, _NONE)
    if request.is_eager and not task.app.conf.get("singleton_lock_eager", False):
        return body()
    plan = config_for(task)
    if not plan.options.singleton:
        return body()
    attempt = delivery_of(request)
    runtime = context_of(task.app, single=attempt.supervised)
    claim = LeaseRequest(
        plan.base,
        plan.digest(args, kwargs),
        attempt.token,
        plan.options.lock_ttl,
        request.id,
        request.hostname or gethostname(),
        runtime.pid,
        attempt.supervised,
        is_redelivered(request),
    )
    try:
        return _acquire_and_run(task, request, plan, runtime, claim, body)
    except BaseException:
        if getattr(request, DOUBT, None) or getattr(request, LEASE, _NONE).owned:
            ask_for_after_run()
        raise


def _acquire_and_run(
    task: Any, request: Any, plan: TaskConfig, runtime: ProcessContext, claim: LeaseRequest, body: Body
) -> Any:
    setattr(request, DOUBT, claim)
    try:
        verdict, sent_at = _acquire(runtime, claim)
    except StoreError as error:
        ask_for_after_run()
        handle_store_error(task, request, plan.options, claim.lock, error)
        setattr(request, LEASE, Lease(claim.lock))
        return body()
    if verdict.answer is not AcquireStatus.GRANTED:
        setattr(request, DOUBT, None)
        return handle_duplicate(task, request, plan.options, claim, verdict)
    lease = Lease(claim.lock, claim, task)
    lease.granted(sent_at, verdict.fence, runtime.renewer.verify)
    setattr(request, LEASE, lease)
    setattr(request, DOUBT, None)
    return _run_body(request, plan, runtime, lease, body)


def _acquire(runtime: ProcessContext, claim: LeaseRequest) -> tuple[AcquireResult, float]:
    """The answer, and when it was asked for. A grant that came too late to be trusted is asked for again.

    Raises:
        StoreError: the store did not answer in time, or refused.
    """
    for _ in range(2):
        sent_at = now()
        verdict = runtime.store.acquire(claim)
        if verdict.answer is not AcquireStatus.GRANTED or now() < sent_at + claim.ttl:
            return verdict, sent_at
    raise StoreUnavailable("the store answers more slowly than its leases live")


def _run_body(request: Any, plan: TaskConfig, runtime: ProcessContext, lease: Lease, body: Body) -> Any:
    if request.headers and POSTPONED in request.headers:  # not for the task's own retries
        request.headers = {name: value for name, value in request.headers.items() if name != POSTPONED}
    success = False
    try:
        if plan.options.on_lock_lost == "raise":
            lease.interrupt = interrupt_here(lease.key, runtime.hub.call_in_loop)
        runtime.renewer.add(lease)
        send(signals.lock_acquired, lease.task, lease=lease)
        result = body() if lease.interrupt is None else _run(lease, body)
        success = True
        return result
    finally:
        release(request, runtime, lease, success)


def _run(lease: Lease, body: Body) -> Any:
    def unless_lost() -> Any:
        if lease.lost:  # before the interrupt was armed
            raise LockLost(lease.key)
        return body()

    try:
        return run_interruptible(lease.interrupt, unless_lost)
    except LockLost as error:
        error.args = error.args or (lease.key,)  # CPython's asynchronous exceptions come without arguments
        raise


def release(request: Any, runtime: ProcessContext, lease: Lease, success: bool) -> None:
    """Give a lease back, once; where the store is away, as soon as it is back, unless it has expired by then.

    Arguments:
        request: of the task whose body is over.
        runtime: where the lease is renewed.
        lease: what to give back.
        success: whether the body returned.
    """
    claim = lease.claim
    if claim is None or claim.pid != os.getpid():  # a process that the body forked owns nothing
        return
    runtime.renewer.remove(lease)
    if lease.retaking is not None:  # by a call that the store may come to yet
        _leave(request, LEFT, claim)
    if not lease.owned:
        return
    try:
        if runtime.store.release(claim, success):
            _leave(request, TWIN, claim)
            runtime.renewer.finishing(claim)
    except StoreError as error:
        logger.warning(
            "Task %s[%s]: its lock %s could not be released: %s", lease.task.name, claim.task_id, lease.key, error
        )
        send(signals.store_error, lease.task, key=lease.key, task_id=claim.task_id, error=error)
        _leave(request, LEFT, claim)
    else:
        if not lease.lost:
            send(signals.lock_released, lease.task, lease=lease)
    lease.owned = False


def ask_for_after_run() -> None:
    """Have `after_run` called from now on in this process; not before something is left, as Celery's way to a receiver is long.

    Once, however often it is asked for; of a weak receiver Celery would keep a finalizer each time.
    """
    task_postrun.connect(after_run, weak=False, dispatch_uid=__package__)


def _leave(request: Any, name: str, claim: LeaseRequest) -> None:
    ask_for_after_run()  # first, lest a signal comes between
    setattr(request, name, claim)


def after_run(sender: Any = None, state: str | None = None, **_: Any) -> None:
    """At `task_postrun`: release what a signal in the wrong moment left, and tell a waiting copy of the message how it ended.

    Arguments:
        sender: the task that has been traced.
        state: its end, as the tracer knows it.
    """
    task = sender
    request = getattr(getattr(task, "request_stack", None), "top", None)
    lease: Lease | None = getattr(request, LEASE, None)
    if lease is not None and lease.owned:
        release(request, context_of(task.app), lease, success=False)
    left: LeaseRequest | None = getattr(request, LEFT, None)
    if left is not None:
        context_of(task.app).renewer.doubt(left, success=state == "SUCCESS")
    doubt: LeaseRequest | None = getattr(request, DOUBT, None)
    if doubt is not None:
        _give_back(context_of(task.app), doubt)
    twin: LeaseRequest | None = getattr(request, TWIN, None)
    if twin is not None:
        _settle(task, twin, success=state == "SUCCESS")


def _give_back(runtime: ProcessContext, claim: LeaseRequest) -> None:
    """At once, for the message's next delivery; and again later, as the store may come to the claim after that."""
    with suppress(StoreError):
        runtime.store.release(claim, success=False)
    runtime.renewer.doubt(claim)


def _settle(task: Any, claim: LeaseRequest, success: bool) -> None:
    context_of(task.app).renewer.finished(claim)
    try:
        context_of(task.app).store.record_outcome(claim, success)
    except StoreError as error:
        logger.warning("Task %s[%s]: a copy of its message may run again: %s", task.name, claim.task_id, error)
        context_of(task.app).renewer.doubt(claim, success)
