"""Publishes the next message in line. If that fails, gives its turn back, and tries again after a moment."""

from __future__ import annotations

import math
from base64 import b64decode
from functools import partial
from typing import Any, Protocol

from celery_singleton_lock.clock import now
from celery_singleton_lock.context import ProcessContext, context_of
from celery_singleton_lock.errors import StoreError
from celery_singleton_lock.line.message import LineMessage
from celery_singleton_lock.renewal.loop import BackgroundLoop
from celery_singleton_lock.store.protocol import AcquireStatus

#: Attribute of an app: its `Channel`, which processes of a pool inherit.
HAND_OVER = "_celery_singleton_lock_handover"
#: Attribute of a `ProcessContext`: its `Retries`.
_RETRIES = "line_retries"
#: Seconds until a publication that failed is tried again, and the longest such time, as it doubles.
FIRST_RETRY, LONGEST_RETRY = 1.0, 16.0


class Channel(Protocol):
    """A way to the main process of a worker."""

    def offer(self, text: str) -> bool:
        """Hand over a message of the line; return whether that is done."""


def publish_next(app: Any, text: str) -> None:
    """Publish the message of the next in line, if there is one, or hand it over to this worker's main process.

    Arguments:
        text: what the store has named.
    """
    channel: Channel | None = app.__dict__.get(HAND_OVER)
    if text and not (channel and channel.offer(text)):
        publish(app, text)


def publish(app: Any, text: str) -> None:
    """Publish a message of the line, as the store has named it. If that fails, give its turn back, and try again soon."""
    message = LineMessage.of(text)
    try:
        _send(app, message)
    except Exception as error:  # of the broker, say, or a queue that this app does not know
        message.log.warning("could not be published in its turn, and is tried again soon: %r", error)
        _retries_of(app).add(message)


def _send(app: Any, message: LineMessage) -> None:
    declare = [app.amqp.queues[message.queue]] if message.queue else None
    body = b64decode(message.body) if "content_type" in message.options else message.body
    with app.producer_or_acquire() as producer:
        producer.publish(body, declare=declare, **message.options)


def _retries_of(app: Any) -> Retries:
    context = context_of(app)
    found: Retries | None = context.__dict__.get(_RETRIES)
    return found or context.__dict__.setdefault(_RETRIES, Retries(app, context))


class Retries:
    """Messages whose publication failed in this process. Each is tried again until it is published, or its turn is over.

    Its turn is given back at once, so whatever else starts messages of the line may start it: a copy of any of those that
    wait, in any worker. So a process that dies delays it, and loses nothing.
    """

    def __init__(self, app: Any, context: ProcessContext) -> None:
        self._app = app
        self._context = context
        self._waiting: dict[str, tuple[float, float, LineMessage]] = {}  # by ticket: when it is due, the delay, it
        self._loop = BackgroundLoop(self._look, context.events.loop_failed)
        context.loops.append(self._loop)

    def add(self, message: LineMessage, delay: float = FIRST_RETRY) -> None:
        """Give back the turn of a message, and try again after this delay: under another number than what is given back."""
        spec, message = message.spec(), message.again()
        try:
            self._context.store.give_back(spec, message.place.ticket, message.text)
        except StoreError as error:
            self._context.outages.log(message.log, "could not give its turn back: %s", error)
        due = now() + delay
        self._waiting[message.place.ticket] = due, delay, message.again()
        self._loop.wake(due)

    def _look(self) -> float:
        """Have those that are due tried again, where logging and publishing are allowed; return when to look again."""
        for ticket, (due, delay, message) in list(self._waiting.items()):
            if due <= now():
                del self._waiting[ticket]
                self._context.callbacks.call(partial(self._try_again, message, min(2 * delay, LONGEST_RETRY)))
        return min((due for due, _, _ in list(self._waiting.values())), default=math.inf)

    def _try_again(self, message: LineMessage, delay: float) -> None:
        """Do as a delayed copy of the message does: publish it if it is its turn."""
        try:
            result = self._context.store.acquire(message.spec())
            publish_next(self._app, result.message)
            if result.status is AcquireStatus.GRANTED:
                _send(self._app, message)
        except StoreError as error:
            self._context.outages.log(message.log, "could not ask for its turn: %s", error)
            self.add(message, delay)
        except Exception as error:
            message.log.info("could not be published again: %r", error)
            self.add(message, delay)
