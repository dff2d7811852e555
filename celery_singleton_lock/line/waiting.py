"""What becomes of a delayed copy that is due: its message goes on waiting, or is published, or has ended."""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import replace

from celery_singleton_lock.delivery import ending
from celery_singleton_lock.delivery.attempt import Attempt
from celery_singleton_lock.delivery.decision import decide, policy_of
from celery_singleton_lock.delivery.delays import LONGEST_DELAY
from celery_singleton_lock.delivery.recording import record_failure
from celery_singleton_lock.delivery.retry_state import RetryState
from celery_singleton_lock.errors import StoreError, StoreUnavailable
from celery_singleton_lock.holder import Holder
from celery_singleton_lock.line.dispatch import FIRST_RETRY, publish_next
from celery_singleton_lock.line.joining import (
    LONGEST_COPY_DELAY,
    copy_delay,
    copy_of,
    leave,
    place_of,
    place_to_join,
    seconds_left,
    started_by,
    terminate,
)
from celery_singleton_lock.line.message import text_of
from celery_singleton_lock.policies.decisions import Enqueue
from celery_singleton_lock.store.keys import LINE_TOKEN
from celery_singleton_lock.store.protocol import AcquireResult, AcquireStatus, GracePeriod
from celery_singleton_lock.store.requests import LeaseSpec, Place


def handle_copy(attempt: Attempt) -> float | None:
    """Let the message of a delayed copy go on waiting, or publish it.

    Return after how many seconds the copy is due again; None if its message has been published, or needs no copy any more.

    Raises:
        StoreUnavailable: the store cannot be asked now.
    """
    config, request, state = attempt.config, attempt.request, attempt.retry_state
    attempt.spec = LeaseSpec(config.base, "", LINE_TOKEN, config.options.lock_ttl, request.id, queued=True)
    try:  # the user's functions may raise, and the parameters may have changed
        digest, limit = config.digest(request.args, request.kwargs), config.limit(request.args, request.kwargs)
        attempt.spec = replace(attempt.spec, digest=digest, limit=limit, place=_place(attempt))
        result = _acquire(attempt)
        if result.status is AcquireStatus.DROPPED:
            return None
        counts = result.status in (AcquireStatus.REFUSED, AcquireStatus.GRANTED)
        if counts and seconds_left(state.expires) <= 0:
            # Nothing is stored under a task id while another message with it runs.
            return FIRST_RETRY if result.shares_id else _revoke_expired(attempt)
        if result.status is AcquireStatus.REFUSED:
            delay = _go_on_waiting(attempt, result)
            if delay is not None:
                return delay
    except StoreError as error:
        attempt.context.outages.log(attempt.log(), "could not ask for its place in line: %s", error)
        if not isinstance(error, GracePeriod):  # the store has answered
            record_failure(attempt.task, attempt.spec, "acquire", error)
        if isinstance(error, StoreUnavailable):  # else the message will fail with it
            raise
    except Exception as failure:
        _fail(attempt, failure)
        return None
    return _publish_message(attempt, state)


def _place(attempt: Attempt) -> Place | None:
    """Return the place of the message, with the time until which the next copy is due at the latest if it goes on waiting."""
    place, ttl = place_of(attempt), attempt.options.lock_ttl
    return place and place._replace(due=_longest_delay(ttl, attempt.retry_state) + ttl)


def _go_on_waiting(attempt: Attempt, result: AcquireResult) -> float | None:
    """Return when the copy of a message that found the lock held is due again; None if the message is to be published.

    A message that has lost its place joins the line again.
    """
    policy = policy_of(attempt.task, attempt.options, result.holder or Holder())
    _, decision = decide(attempt, policy, result)
    if not isinstance(decision, Enqueue):
        return None
    state = attempt.retry_state
    if result.is_waiting:
        delay = copy_delay(attempt, decision, result)
    else:
        place, delay = place_to_join(attempt, decision, result)
        attempt.spec.place = place._replace(next_copy=state.copy)  # with which it comes again if this worker dies
        result = _acquire(attempt)
        if not result.is_waiting:
            return None
    if decision.terminate and result.holder:
        terminate(attempt, result.holder)
    attempt.note(waited=state.waited + delay)
    return delay


def _longest_delay(ttl: float, state: RetryState) -> float:
    """Return a bound of the seconds until a copy is due again: before it, fewer messages wait than before."""
    return min(min(ttl, LONGEST_COPY_DELAY) + state.waited, LONGEST_DELAY)


def _acquire(attempt: Attempt) -> AcquireResult:
    """Return the store's answer; publish the message that it names, if it names one."""
    result = attempt.store.acquire(attempt.spec)
    publish_next(attempt.task.app, result.message)
    return result


def _publish_message(attempt: Attempt, state: RetryState) -> float | None:
    """Publish the message that a delayed copy stands for. If that fails, give its turn back, and return when to try again."""
    signature = started_by(attempt, state)
    try:
        signature.apply_async()
    except Exception as failure:
        attempt.log().warning("could not be published in its turn: %r", failure)
        if state.ticket and attempt.spec.digest:
            # It may have been published all the same, so the text has a number of its own.
            text = text_of(attempt, started_by(attempt, state))
            with suppress(StoreError):  # it has its turn for a TTL
                attempt.store.give_back(attempt.spec, state.ticket, text)
        return FIRST_RETRY
    return None


def _revoke_expired(attempt: Attempt) -> float | None:
    """Publish an expired message without its ticket: the worker that receives it stores REVOKED. It leaves the line."""
    delay = _publish_message(attempt, attempt.retry_state._replace(ticket=""))
    if delay is None:
        leave(attempt)
    return delay


def _fail(attempt: Attempt, failure: Exception) -> None:
    """Store FAILURE for a message that nobody would publish any more."""
    ending.store_failure(attempt, failure)
    try:
        if attempt.spec.digest:
            leave(attempt)
    except StoreError as error:
        attempt.context.outages.log(attempt.log(), "could not leave the line: %s", error)


def publish_again(attempt: Attempt, delay: float) -> None:
    """Publish a copy again, which this worker may not keep any longer. Its number is higher, so the former one counts no more."""
    state = attempt.retry_state
    copy_of(attempt, delay, state._replace(copy=state.copy + 1 + random.random())).apply_async()
