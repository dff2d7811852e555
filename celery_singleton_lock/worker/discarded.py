"""Frees the reservations of messages that no worker will run: Celery discards them, or they were revoked while they wait."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from celery import signals
from celery.utils.functional import maybe_list

from celery_singleton_lock.clock import now
from celery_singleton_lock.context import context_of
from celery_singleton_lock.line.dispatch import publish_next
from celery_singleton_lock.log import logger
from celery_singleton_lock.renewal.loop import BackgroundLoop
from celery_singleton_lock.reservation import RESERVATION_HEADER, free_reservation, reservation_of
from celery_singleton_lock.worker.celery_internals import call_on_decode_error

#: Attribute of an app: its `WaitingMessages`.
WAITING = "_celery_singleton_lock_waiting"
#: Seconds between two looks at which messages were revoked.
_LOOK_INTERVAL = 1.0


def watch(consumer: Any) -> None:
    """Free the reservations of messages that this consumer discards, from now on."""
    signals.task_unknown.connect(_discarded, weak=False, dispatch_uid=__package__)
    signals.task_rejected.connect(_discarded, weak=False, dispatch_uid=__package__)
    call_on_decode_error(consumer, _discarded)


def _discarded(sender: Any, message: Any, **_: Any) -> None:
    try:
        if RESERVATION_HEADER not in (message.headers or {}):  # the app may not use this library
            return
        if spec := reservation_of(message.headers, context_of(sender.app).settings.prefix):
            free_reservation(sender.app, spec, _publish_later(sender.app))
    except Exception as error:  # whatever the message's headers are; its lock expires
        logger.warning("A discarded message keeps its reservation: %s", error)


def _publish_later(app: Any) -> Callable[[str], None]:
    """Return what has the next in line published by another thread than the one that releases."""
    return lambda message: context_of(app).callbacks.call(partial(publish_next, app, message))


class WaitingMessages:
    """Messages that a worker keeps until they are due, or until a process is free.

    Only then does Celery look whether they were revoked, which may take hours.
    """

    def __init__(self, on_error: Callable[..., object]) -> None:
        self._requests: WeakValueDictionary[int, Any] = WeakValueDictionary()
        self._loop = BackgroundLoop(self.look, on_error)

    def add(self, request: Any) -> None:
        """Free the reservation of this message should it be revoked before it starts."""
        self._requests[id(request)] = request
        self._loop.wake(now() + _LOOK_INTERVAL)

    def look(self) -> float:
        """Free the reservations of those that were revoked; return when to look again."""
        from celery.worker import state  # which a publisher need not import

        if state.revoked or state.revoked_stamps:
            for found in self._requests.valuerefs():  # a copy, made at once: other threads add requests
                request = found()
                if request is not None and _is_revoked(request, state):
                    self._requests.pop(id(request), None)
                    request.free_reservation()
        return now() + _LOOK_INTERVAL if self._requests else math.inf

    def end(self) -> None:
        """Look no more."""
        self._loop.end()


def _is_revoked(request: Any, state: Any) -> bool:
    """Tell whether Celery will find this message revoked when it is due, as `Request.revoked` does (5.7)."""
    if request.time_start is not None:  # it runs
        return False
    return request.id in state.revoked or any(
        set(maybe_list(request.stamps.get(name)) or ()) & set(maybe_list(state.revoked_stamps.get(name)) or ())
        for name in request.stamped_headers or ()
    )
