"""Publishes the message of a delivery again, and ends the delivery."""

from __future__ import annotations

import logging
import time
from typing import Any, NoReturn

import celery
from celery.exceptions import Ignore, Reject, Retry
from celery.states import SUCCESS
from kombu.exceptions import OperationalError

from celery_singleton_lock.config.options import Options
from celery_singleton_lock.delivery.delays import shortened
from celery_singleton_lock.delivery.republish import (
    RetryState,
    ignores_result,
    is_redelivered,
    retry_state_of,
    signature_of,
)
from celery_singleton_lock.errors import DuplicateTask, StoreError
from celery_singleton_lock.log import TaskLog, about
from celery_singleton_lock.policies import RetryLater
from celery_singleton_lock.store.requests import LeaseRequest

FIRST_REDELIVERY_CHECK = 0.2  # seconds


def retry_policy_of(options: Options) -> RetryLater:
    """Return the policy that says how long a message is postponed."""
    return options.on_duplicate if isinstance(options.on_duplicate, RetryLater) else RetryLater()


def run_later(task: Any, request: Any, delay: float, error: Exception, wanted: LeaseRequest) -> NoReturn:
    """Publish the message again and raise `Retry`. Raise `Reject` or the given error if that fails."""
    delay, state = shortened(task.app, delay), retry_state_of(request)
    ticket, copy = (wanted.place.ticket, wanted.place.copy) if wanted.place else ("", 0.0)
    signature = signature_of(
        task,
        request,
        delay,
        RetryState(
            state.times + 1,
            state.waited + delay,
            # The new message is not called redelivered, but how another delivery of this one has ended still counts.
            redelivery_checks=int(isinstance(error, StoreError) and is_redelivered(request)),
            ticket=ticket,
            copy=copy,
            is_unfinished=state.is_unfinished,
        ),
    )
    log = about(task, request.id, wanted.lock, getattr(error, "holder", None))
    is_stored = _mark_as_retry(task, request, error, log)
    publish_or_reject(task, signature, error)
    if is_stored:
        request.ignore_result = True  # keeps the tracer from storing RETRY once more
    # An outage has one line, see `outage.py`.
    log.log(logging.DEBUG if isinstance(error, StoreError) else logging.INFO, "waits %.1f s: %s", delay, error)
    raise Retry(f"Retry in {delay:.1f} s", error, delay, sig=signature)


def publish_or_reject(task: Any, signature: Any, error: Exception) -> None:
    """Publish a message again. Raise `Reject` or the given error if that fails."""
    try:
        signature.apply_async()
    except Exception as failure:
        # The broker is unreachable. After any other failure the message would come back for ever.
        if task.acks_late and isinstance(failure, (OperationalError, OSError)):
            raise Reject(failure, requeue=True) from failure
        raise error from failure


def _mark_as_retry(task: Any, request: Any, error: Exception, log: TaskLog) -> bool:
    """Store the state RETRY before the message is published; tell whether that is done.

    Celery's tracer stores it afterwards, which could overwrite the FAILURE or REVOKED of a message that comes back quickly. The
    tracer does not store it for a request that ignores its result (5.7).
    """
    if celery.VERSION < (5, 7) or ignores_result(task, request) or task.store_errors_even_if_ignored:
        return False
    try:
        task.backend.mark_as_retry(request.id, error, request=request)
    except Exception as failure:  # publishing the message matters more
        log.warning("could not store its state RETRY: %s", failure)
        return False
    return True


def check_redelivery_later(task: Any, request: Any, options: Options, error: DuplicateTask) -> NoReturn:
    """Publish a redelivered message again while its other delivery runs, store nothing, and raise `Ignore` or `Reject`."""
    state = retry_state_of(request)
    delay = FIRST_REDELIVERY_CHECK * 2 ** min(state.redelivery_checks, 64)
    delay = min(delay, max(retry_policy_of(options).delay, FIRST_REDELIVERY_CHECK))
    if error.holder.state == "cooldown":
        if stored_state(task, request) == SUCCESS:
            about(task, request.id, error.key, error.holder).info(
                "dropped: another delivery of it succeeded: %s", error
            )
            raise Ignore("another delivery of this task succeeded")
        delay = max(delay, error.holder.remaining)
    delay = shortened(task.app, delay)
    about(task, request.id, error.key, error.holder).info("redelivered while another delivery of it runs: %s", error)
    try:
        checked = state._replace(redelivery_checks=state.redelivery_checks + 1)
        signature_of(task, request, delay, checked).apply_async()
    except Exception as failure:
        if task.acks_late:
            time.sleep(FIRST_REDELIVERY_CHECK)  # the broker delivers it again at once
            raise Reject(failure, requeue=True) from failure
        about(task, request.id, error.key, error.holder).error("lost this redelivery: %s", failure)
    raise Ignore("another delivery of this task is running")


def stored_state(task: Any, request: Any) -> str:
    """Return the state that another delivery has stored. Its worker may have died between its release and that."""
    try:
        return str(task.backend.get_state(request.id))
    except Exception as failure:  # there may be no backend, or none that a worker can ask
        about(task, request.id).debug("has a state that is not known: %s", failure)
        return ""
