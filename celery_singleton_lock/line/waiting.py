"""What becomes of a delayed copy that is due: its message goes on waiting, or is published, or has ended."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from celery_singleton_lock.config.task_config import TaskConfig
from celery_singleton_lock.context import context_of
from celery_singleton_lock.delivery.decision import decide, policy_of
from celery_singleton_lock.delivery.delays import LONGEST_DELAY
from celery_singleton_lock.delivery.noting import note_failure
from celery_singleton_lock.delivery.republish import RetryState, note_state, retry_state_of
from celery_singleton_lock.errors import StoreError, StoreUnavailable
from celery_singleton_lock.holder import Holder
from celery_singleton_lock.line.dispatch import FIRST_RETRY, publish_next
from celery_singleton_lock.line.joining import (
    LONGEST_COPY_DELAY,
    copy_delay,
    leave,
    place_of,
    place_to_join,
    seconds_left,
    send_copy,
    started_by,
    terminate,
)
from celery_singleton_lock.line.message import text_of
from celery_singleton_lock.log import about
from celery_singleton_lock.policies.decisions import Enqueue
from celery_singleton_lock.store.keys import LINE_TOKEN
from celery_singleton_lock.store.protocol import AcquireResult, AcquireStatus, LockStore
from celery_singleton_lock.store.requests import LeaseRequest


def handle_copy(
    task: Any, request: Any, config: TaskConfig, store: LockStore, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> float | None:
    """Let the message of a delayed copy go on waiting, or publish it.

    Return after how many seconds the copy is due again; None if its message has been published, or needs no copy any more.

    Raises:
        StoreUnavailable: the store cannot be asked now.
    """
    state = retry_state_of(request)
    wanted = LeaseRequest(config.base, "", LINE_TOKEN, config.options.lock_ttl, request.id, queued=True)
    try:  # the user's functions may raise, and the parameters may have changed
        wanted = replace(wanted, digest=config.digest(args, kwargs), limit=config.limit(args, kwargs))
        wanted.place = place_of(task, request, config.options.on_duplicate)
        if wanted.place:  # until when the next one is due at the latest, if the message goes on waiting
            wanted.place = wanted.place._replace(due=_longest_delay(wanted.ttl, state) + wanted.ttl)
        result = _acquire(task, store, wanted)
        if result.status is AcquireStatus.DROPPED or _runs(request, result):
            return None
        counts = result.status in (AcquireStatus.REFUSED, AcquireStatus.GRANTED)
        if counts and seconds_left(state.expires) <= 0:
            return _revoke_expired(task, request, wanted, store, state)
        if result.status is AcquireStatus.REFUSED:
            delay = _go_on_waiting(task, request, config, store, wanted, result)
            if delay is not None:
                return delay
    except StoreError as error:
        log = about(task, request.id, wanted.lock)
        context_of(task.app).outages.log(log, "could not ask for its place in line: %s", error)
        note_failure(task, wanted, "acquire", error)
        if isinstance(error, StoreUnavailable):  # else the message will fail with it
            raise
    except Exception as failure:
        _fail(task, request, wanted, store, failure)
        return None
    return _publish_message(task, request, wanted, store, state)


def _go_on_waiting(
    task: Any, request: Any, config: TaskConfig, store: LockStore, wanted: LeaseRequest, result: AcquireResult
) -> float | None:
    """Return when the copy of a message that found the lock held is due again; None if the message is to be published.

    A message that has lost its place joins the line again.
    """
    _, decision = decide(task, request, policy_of(task, config.options, result.holder or Holder()), result)
    if not isinstance(decision, Enqueue):
        return None
    state = retry_state_of(request)
    if result.is_waiting:
        delay = copy_delay(task, request, wanted, decision, result)
    else:
        place, delay = place_to_join(task, request, wanted, decision, result)
        wanted.place = place._replace(next_copy=state.copy)  # with which it comes again if this worker dies
        result = _acquire(task, store, wanted)
        if not result.is_waiting:
            return None
    if decision.terminate and result.holder:
        terminate(task, request, wanted, result.holder)
    note_state(request, state._replace(waited=state.waited + delay))
    return delay


def _longest_delay(ttl: float, state: RetryState) -> float:
    """Return a bound of the seconds until a copy is due again: before it, fewer messages wait than before."""
    return min(min(ttl, LONGEST_COPY_DELAY) + state.waited, LONGEST_DELAY)


def _acquire(task: Any, store: LockStore, wanted: LeaseRequest) -> AcquireResult:
    """Return the store's answer; publish the message that it names, if it names one."""
    result = store.acquire(wanted)
    publish_next(task.app, result.message)
    return result


def _runs(request: Any, result: AcquireResult) -> bool:
    """Tell whether the message itself holds the lock, as after a loss of data that its copy did not know of."""
    holder = result.holder
    return holder is not None and holder.task_id == request.id and holder.state == "running"


def _publish_message(
    task: Any, request: Any, wanted: LeaseRequest, store: LockStore, state: RetryState
) -> float | None:
    """Publish the message that a delayed copy stands for. If that fails, give its turn back, and return when to try again."""
    signature = started_by(task, request, state)
    try:
        signature.apply_async()
    except Exception as failure:
        about(task, request.id, wanted.lock).warning("could not be published in its turn: %r", failure)
        if state.ticket and wanted.digest:
            # It may have been published all the same, so the text has a number of its own.
            text = text_of(task, request, wanted, started_by(task, request, state))
            with suppress(StoreError):  # it has its turn for a TTL
                store.give_back(wanted, state.ticket, text)
        return FIRST_RETRY
    return None


def _revoke_expired(task: Any, request: Any, wanted: LeaseRequest, store: LockStore, state: RetryState) -> float | None:
    """Publish an expired message without its ticket: the worker that receives it stores REVOKED. It leaves the line."""
    delay = _publish_message(task, request, wanted, store, state._replace(ticket=""))
    if delay is None:
        leave(task, store, wanted, state.ticket)
    return delay


def _fail(task: Any, request: Any, wanted: LeaseRequest, store: LockStore, failure: Exception) -> None:
    """Store FAILURE for a message that nobody would publish any more."""
    about(task, request.id, wanted.lock).error("waited in line and could neither go on nor be published: %s", failure)
    task.backend.mark_as_failure(request.id, failure, request=request)
    try:
        if wanted.digest:
            leave(task, store, wanted, retry_state_of(request).ticket)
    except StoreError as error:
        context_of(task.app).outages.log(about(task, request.id, wanted.lock), "could not leave the line: %s", error)


def publish_again(task: Any, request: Any, delay: float) -> None:
    """Publish a copy again, which this worker may not keep any longer. Its number is higher, so the former one counts no more."""
    state = retry_state_of(request)
    send_copy(task, request, delay, state._replace(copy=state.copy + 1 + random.random()))
