"""Locks that are acquired when a task is published (``lock_from="publish"``).

The publisher acquires the lock with the message's task id: a reservation. The delivery that starts this message turns it into a
lease. Some messages are sent without a reservation: those that were given a task id, such as members of a chain, group or
chord, and those with a parent id, such as linked callbacks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from celery.utils import uuid

from celery_singleton_lock.config.call_options import LOCK_OPTIONS_HEADER
from celery_singleton_lock.config.task_config import TaskConfig, config_of_call
from celery_singleton_lock.context import ProcessContext, context_of
from celery_singleton_lock.delivery.decision import policy_of
from celery_singleton_lock.delivery.ending import end_call
from celery_singleton_lock.delivery.recording import record_failure
from celery_singleton_lock.errors import StoreError, StoreUnavailable
from celery_singleton_lock.holder import Holder
from celery_singleton_lock.line.dispatch import publish_next
from celery_singleton_lock.log import about
from celery_singleton_lock.policies import name_of
from celery_singleton_lock.policies.decisions import Duplicate, Fail, SkipRun
from celery_singleton_lock.reservation import (
    RESERVATION_HEADER,
    free_reservation,
    has_ended,
    has_lost_result,
    header_of,
    lifetime,
    reservation,
)
from celery_singleton_lock.result import SingletonResult
from celery_singleton_lock.store.keys import queued_token
from celery_singleton_lock.store.protocol import AcquireStatus, GracePeriod
from celery_singleton_lock.store.records import NO_RECORD, RunRecord
from celery_singleton_lock.store.requests import LeaseSpec


def is_locked_at_publish(task: Any) -> bool:
    """Tell whether a call of a task acquires the lock. It needs no store, as most publishers have none."""
    conf = task.app.conf
    chosen = task.lock_from or conf.get("singleton_lock_from")
    return chosen == "publish" and not conf.task_always_eager and getattr(type(task).__call__, "_singleton", False)


def publish(
    task: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: Mapping[str, Any],
    send: Callable[..., SingletonResult],
) -> SingletonResult:
    """Publish a call unless it is a duplicate; return its `AsyncResult`, with the `Holder` that it met as `duplicate`, or None.

    Arguments:
        options: of `apply_async`.
        send: publishes the call under a `task_id`.
    """
    config = config_of_call(task, (options.get("headers") or {}).get(LOCK_OPTIONS_HEADER))
    if not config.options.singleton:
        return send()
    ttl = lifetime(task, options.get("countdown") or options.get("eta"), options.get("expires") or task.expires)
    spec = reservation(config, uuid(), args, kwargs, ttl)
    try:
        holder = _reserve(task, config, spec)
    except BaseException as error:
        is_refused = isinstance(error, StoreError) and not isinstance(error, StoreUnavailable)
        if not is_refused:  # the store may have granted it
            _free_later(task, config, spec)
        raise
    if holder is not None:
        existing = _instead(task, config, spec, holder)
        if existing is not None:
            return existing
    try:
        result = send(task_id=spec.task_id, **({} if holder else _named(config, spec, options)))
    except BaseException:
        if holder is None:
            _cancel(task, config, spec)
        raise
    result.duplicate = holder
    return result


def _named(config: TaskConfig, spec: LeaseSpec, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the option of `apply_async` that has the message name its reservation."""
    return {"headers": {**(options.get("headers") or {}), RESERVATION_HEADER: header_of(config, spec)}}


def _reserve(task: Any, config: TaskConfig, spec: LeaseSpec) -> Holder | None:
    """Acquire the lock for a message; return who holds it instead."""
    context = context_of(task.app)
    # Under other policies the call may be sent, and is counted when it starts.
    policy = config.options.on_duplicate
    counts = getattr(policy, "ends_duplicates", False)
    spec.record = RunRecord(name_of(policy) if counts else "")
    try:
        result = context.store.acquire(spec)
        if result.holder is not None and (_will_not_start(context, result.holder) or has_ended(task, result.holder)):
            _free(task, config, spec, result.holder)
            result = context.store.acquire(spec)
    except GracePeriod as error:  # it meets its lock when it starts
        context.outages.log(about(task, spec.task_id, spec.lock), "is sent without its lock: %s", error)
        return None
    except StoreError as error:
        fails = not isinstance(error, StoreUnavailable) or config.options.on_store_error == "raise"
        text = "could not acquire its lock: %s" if fails else "could not acquire its lock, and is sent without it: %s"
        context.outages.log(about(task, spec.task_id, spec.lock), text, error)
        record_failure(task, spec, "acquire", error)
        if fails:
            raise
        context.outages.count("without")
        return None
    if result.status is AcquireStatus.REFUSED:
        return result.holder
    context.register(task.name, config.options.lock_group or task.name)
    return None


def _instead(task: Any, config: TaskConfig, spec: LeaseSpec, holder: Holder) -> SingletonResult | None:
    """Return the holder's result if the policy skips the call, None if it is to be sent."""
    policy = policy_of(task, config.options, holder)
    decision = policy.decide(Duplicate(holder))
    if not isinstance(decision, (SkipRun, Fail)):
        return None
    is_paused = holder.state == "paused"
    if is_paused and not isinstance(decision, Fail):  # there is no other run whose result could be returned
        return None
    if isinstance(decision, SkipRun) and has_lost_result(task, holder):
        return None
    if is_paused or not spec.record.policy:  # else the script has counted it
        context_of(task.app).tally.count(spec.base, f"duplicates:{name_of(config.options.on_duplicate)}")
    return end_call(task, spec, holder, policy, decision)


def _cancel(task: Any, config: TaskConfig, spec: LeaseSpec) -> None:
    try:
        _release(task, config, spec)
    except StoreError as error:
        log = about(task, spec.task_id, spec.lock)
        context_of(task.app).outages.log(log, "could not release its reservation: %s", error)
        record_failure(task, spec, "release", error)
        if isinstance(error, StoreUnavailable):  # else it expires
            _free_later(task, config, spec)


def _will_not_start(context: ProcessContext, holder: Holder) -> bool:
    """Tell whether this process is about to release the reservation of a message: it was never sent, or will not be started."""
    return holder.state == "queued" and context.renewer.is_releasing(queued_token(holder.task_id))


def _free_later(task: Any, config: TaskConfig, spec: LeaseSpec) -> None:
    """Release a reservation that the store may have granted, in the background."""
    app, call = task.app, context_of(task.app).callbacks.call
    released = replace(spec, ttl=config.options.lock_ttl)
    free_reservation(app, released, lambda message: call(partial(publish_next, app, message)), unanswered=True)


def _free(task: Any, config: TaskConfig, spec: LeaseSpec, holder: Holder) -> None:
    """Release the reservation of a message that has ended, or was never sent."""
    about(task, spec.task_id, spec.lock, holder).info("is published, as task %s will not run", holder.task_id)
    ended = replace(spec, token=queued_token(holder.task_id), task_id=holder.task_id, place=None, record=NO_RECORD)
    _release(task, config, ended)


def _release(task: Any, config: TaskConfig, spec: LeaseSpec) -> None:
    released = context_of(task.app).store.release(replace(spec, ttl=config.options.lock_ttl), success=False)
    publish_next(task.app, released.message)
