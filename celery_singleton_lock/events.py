"""What is told of a lease: one log line and one signal for each thing that happens."""

from __future__ import annotations

from functools import partial
from typing import Any

from celery_singleton_lock import signals
from celery_singleton_lock.errors import StoreError
from celery_singleton_lock.lease import Lease
from celery_singleton_lock.log import logger
from celery_singleton_lock.native import CallbackRunner


class EventLogger:
    """Listens to a `Renewer`.

    Arguments:
        hub: where users are told of each renewal, if anyone listens.
    """

    def __init__(self, hub: CallbackRunner) -> None:
        self._hub = hub

    def renewed(self, lease: Lease) -> None:
        if signals.lock_renewed.receivers:
            self._hub.call(partial(send, signals.lock_renewed, lease.task, lease=lease))

    def lost(self, lease: Lease) -> None:
        logger.warning("Task %s[%s] on %s (pid %d) lost its lock %s and is still running", *_who(lease))
        send(signals.lock_lost, lease.task, lease=lease)

    def reacquired(self, lease: Lease) -> None:
        logger.warning("Task %s[%s] on %s (pid %d) took its lock %s again, which was gone from the store", *_who(lease))

    def unreachable(self, lease: Lease, error: StoreError) -> None:
        logger.warning("Task %s[%s] on %s (pid %d): its lock %s could not be renewed for now: %s", *_who(lease), error)
        send(signals.store_error, lease.task, key=lease.key, task_id=_who(lease)[1], error=error)


def _who(lease: Lease) -> tuple[str, str, str, int, str]:
    """The task that has, or had, this lease, and where it runs."""
    assert lease.claim is not None
    return lease.task.name, lease.claim.task_id, lease.claim.node, lease.claim.pid, lease.key


def send(signal: Any, task: Any, **named: Any) -> None:
    """Send a signal where anyone listens; Celery logs the errors of receivers and goes on."""
    if signal.receivers:
        signal.send(sender=task, **named)
