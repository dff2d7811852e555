"""Notes on a delivery for the records: see `store.records.RunRecord`."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from celery.exceptions import Retry, TaskPredicate

from celery_singleton_lock import signals
from celery_singleton_lock.context import context_of
from celery_singleton_lock.delivery.attempt import Attempt
from celery_singleton_lock.errors import StoreError
from celery_singleton_lock.policies import name_of
from celery_singleton_lock.reports.events import send
from celery_singleton_lock.store.records import LONGEST_ERROR, SEPARATOR, RunRecord
from celery_singleton_lock.store.requests import LeaseSpec


def record_acquire(attempt: Attempt) -> None:
    """Have the next call count the message as a duplicate, if it is one and comes for the first time."""
    policy = name_of(attempt.options.on_duplicate) if attempt.retry_state.is_first else ""
    attempt.spec.record = RunRecord(policy, attempt.retry_state.waited)


def record_failure(task: Any, spec: LeaseSpec, verb: str, error: StoreError) -> None:
    """Count a call that failed, and send the signal for it."""
    context = context_of(task.app)
    context.outages.count(verb, error)
    context.tally.count(spec.base, f"store_errors:{verb}")
    send(signals.store_error, task, key=spec.lock, task_id=spec.task_id, error=error)


def record_end(spec: LeaseSpec, error: BaseException | None, stopped: bool = False) -> None:
    """Have the release say how the body ended; `stopped`: because a newer message replaces it."""
    outcome, text = ("other", "") if stopped else _outcome(error)
    spec.record = RunRecord(outcome=outcome, error=text)


def _outcome(error: BaseException | None) -> tuple[str, str]:
    if error is None or isinstance(error, Retry):
        return "success" if error is None else "retry", ""
    if isinstance(error, TaskPredicate):  # Ignore, Reject
        return "other", ""
    text = type(error).__name__
    with suppress(Exception):
        text += f": {error}" if str(error) else ""
    text = " ".join(text.replace(SEPARATOR, " ").split())[:LONGEST_ERROR]
    text = text.encode("utf-8", "backslashreplace").decode()  # as names of files may not be valid text
    return "failure" if isinstance(error, Exception) else "other", text
