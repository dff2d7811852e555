"""Logs what happens to leases, sends the signals for it, and names the events: the site has a table made from their comments."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from celery_singleton_lock import signals
from celery_singleton_lock.errors import StoreError, StoreUnavailable
from celery_singleton_lock.lease import Lease, LeaseState
from celery_singleton_lock.log import TaskLog, about, logger
from celery_singleton_lock.native import CallbackRunner
from celery_singleton_lock.reports.outage import Limit, Outages
from celery_singleton_lock.reports.tally import Tally
from celery_singleton_lock.store.records import task_of
from celery_singleton_lock.store.requests import LeaseSpec

#: A message that found its lock held does not run, as under `Skip`. Has `name`, `key` and `holder` (the fields of `Holder`, or
#: None if a newer message took its place in line), and `pending` if a message in line runs in its place: the task id of that one.
TASK_SKIPPED = "task-singleton-skipped"

#: A lease was lost while its body still ran. Has `name`, `key` and `reason`: `expired`, `not_owner`, `released_by_operator` or
#: `lock_at_most`.
TASK_LOST = "task-singleton-lost"


def send(signal: Any, task: Any, **named: Any) -> None:
    """Send a signal if it has receivers; Celery logs their errors."""
    if signal.receivers:
        signal.send(sender=task, **named)


_WHERE = "on %s (pid %d)"


class EventLogger:
    """Reports renewal, and counts it. Log handlers and receivers run apart from the renewal thread, so they cannot delay it.

    Of the WARNINGs about single leases, a few are written in a minute. Others have level DEBUG.
    """

    def __init__(
        self,
        callbacks: CallbackRunner,
        tally: Tally | None = None,
        outages: Outages | None = None,
    ) -> None:
        self._callbacks = callbacks
        self._tally = tally or Tally()
        self.outages = outages or Outages("memory://", lambda: None, callbacks.call)
        self._limit = Limit()

    def renewed(self, state: LeaseState) -> None:
        self._tally.count(state.spec.base, "renewals")
        if signals.lock_renewed.receivers:
            self._report(_send_for, signals.lock_renewed, state)

    def not_renewed(self, leases: Sequence[LeaseState], error: StoreError) -> None:
        if isinstance(error, StoreUnavailable):
            self.outages.failed(error)
        self.outages.count("renew", error)
        self._tally.count(leases[0].spec.base, "store_errors:renew")
        for state in leases:
            self._tally.count(state.spec.base, "renewal_failures")

    def lost(self, state: LeaseState, reason: str = "expired") -> None:
        self._tally.count(state.spec.base, f"lost:{reason}")
        self.outages.lost(state)
        self._report(self._log, state, "lost its lock and is still running (%s)", reason)
        self._report(_send_for, signals.lock_lost, state)
        if state.sends_events:
            self._report(_send_event, state, reason)

    def learned(self, state: LeaseState, was_alone: bool) -> None:
        """Note whether another task had the lock of a lease that was lost, as far as the store has told."""
        self.outages.found(state, was_alone)

    def replaced(self, state: LeaseState) -> None:
        self._report(self._log, state, "is to stop, as a newer message replaces it; it keeps its lock until it ends")
        self._report(_send_for, signals.lock_lost, state)

    def reacquired(self, state: LeaseState) -> None:
        self._report(self._log, state, "reacquired its lock, which was missing from the store")

    def unreachable(self, state: LeaseState, error: StoreError) -> None:
        text = f"{_WHERE} could not renew its lock: %s"
        self._report(self.outages.log, _about(state), text, error, state.spec.node, state.spec.pid)
        self._report(
            send, signals.store_error, state.task, key=state.spec.lock, task_id=state.spec.task_id, error=error
        )

    def refused(self, error: StoreError) -> None:
        """Called when a store begins to refuse this process, which it has accepted before; at most once a minute."""
        text = "The store of locks refuses this process now, so locks wait until it accepts it again: %s"
        self._report(logger.error, text, error)

    def loop_failed(self, error: BaseException, spec: LeaseSpec | None = None) -> None:
        if spec is None:
            self._report(logger.error, "A background thread of locks met an error and goes on", exc_info=error)
        else:
            log = about(task_of(spec.base), spec.task_id, spec.lock)
            self._report(log.error, "could not release its lock, and leaves it to expire: %s", error)

    def _log(self, state: LeaseState, text: str, *more: object) -> None:
        level = logging.WARNING if self._limit.allows() else logging.DEBUG
        _about(state).log(level, f"{_WHERE} {text}", state.spec.node, state.spec.pid, *more)

    def _report(self, call: Callable[..., object], *args: Any, **named: Any) -> None:
        with suppress(Exception):
            self._callbacks.call(partial(call, *args, **named))


def _send_for(signal: Any, state: LeaseState) -> None:
    send(signal, state.task, lease=Lease(state.spec.lock, state))


def _send_event(state: LeaseState, reason: str) -> None:
    spec = state.spec
    with state.task.app.events.default_dispatcher(hostname=spec.node) as dispatcher:  # as `Task.send_event` does
        fields = {"uuid": spec.task_id, "name": state.task.name, "key": spec.lock, "reason": reason}
        dispatcher.send(TASK_LOST, **fields)


def _about(state: LeaseState) -> TaskLog:
    return about(state.task, state.spec.task_id, state.spec.lock)
