"""Keeps the delayed copies of messages in line that a worker receives, and handles each when it is due, beside the worker's loop.

A copy never becomes a request: it needs no place in the pool, has no time limit, and dies with no process of the pool. It is
acknowledged once what follows it is safe: the message or the next copy at the broker, or a stored end. Until then, the broker
delivers it again if the worker dies. A copy whose message goes on waiting stays here, for as long as the broker bears it.

Each worker has one thread for that; under gevent and eventlet it is a greenlet, as it publishes and logs like a body.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

from celery.app.task import Context
from celery.exceptions import InvalidTaskError
from celery.utils.time import maybe_iso8601, maybe_make_aware

from celery_singleton_lock.clock import now
from celery_singleton_lock.config.call_options import LOCK_OPTIONS_HEADER
from celery_singleton_lock.config.task_config import config_of_call
from celery_singleton_lock.context import context_of
from celery_singleton_lock.delivery.attempt import Attempt
from celery_singleton_lock.delivery.delays import longest_delay
from celery_singleton_lock.delivery.properties import PROPERTY, Delivery
from celery_singleton_lock.delivery.retry_state import RETRY_STATE_HEADER, retry_state_of
from celery_singleton_lock.errors import StoreUnavailable
from celery_singleton_lock.line.dispatch import FIRST_RETRY
from celery_singleton_lock.line.joining import LONGEST_COPY_DELAY
from celery_singleton_lock.line.returning import Returns, is_lost
from celery_singleton_lock.line.waiting import handle_copy, publish_again
from celery_singleton_lock.log import about, logger
from celery_singleton_lock.store.protocol import LockStore

#: Attribute of an app: its `Copies`.
_COPIES = "_celery_singleton_lock_copies"
#: Seconds until the store is asked again that was unreachable; until a copy is handled again that met another error.
STORE_RETRY, ERROR_RETRY = 1.0, 30.0


@dataclass
class Copy:
    """A delayed copy that this worker has received, and has not acknowledged."""

    attempt: Attempt  # of its message, for which it stands
    message: Any  # Kombu's
    consumer: Any
    received: float = field(default_factory=now)
    due: float = 0.0  # when the store is asked

    @property
    def is_lost(self) -> bool:
        """Whether the broker delivers it again."""
        return is_lost(self.message, self.consumer)


class Copies:
    """The delayed copies of one worker."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._due: list[tuple[float, int, Copy]] = []
        self._order = count()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._ended = False
        self._store: LockStore | None = None
        self._unavailable_until = 0.0  # the store
        self._received: list[Any] = []  # consumers whose prefetch limit has grown
        self._handled: deque[Copy] = deque()  # to be acknowledged
        self._returns = Returns()

    def handler(self, task: Any, consumer: Any, other: Callable[..., Any]) -> Callable[..., Any]:
        """Return what a consumer calls for each message of a task: copies are kept here, the rest goes to `other`."""

        def on_message(message: Any, body: Any, ack: Any, *more: Any, **options: Any) -> Any:
            state = (message.headers or {}).get(RETRY_STATE_HEADER)
            if not isinstance(state, Mapping):
                return other(message, body, ack, *more, **options)
            if not state.get("original_id"):
                return self._returns.take(
                    message, state, consumer, partial(other, message, body, ack, *more, **options)
                )
            try:
                attempt = Attempt(task, request_of(message, consumer.hostname))
                self.add(Copy(attempt, message, consumer))
            except (TypeError, ValueError) as error:
                raise InvalidTaskError(f"a delayed copy that is not valid: {error}") from error

        return on_message

    def add(self, copy: Copy) -> None:
        """Keep a copy until it is due. It does not count for the prefetch limit, as Celery's messages with an ETA."""
        left = max(_seconds_until(copy.message.headers.get("eta")), copy.attempt.retry_state.due - time.time())
        copy.due = copy.received + left
        copy.consumer.qos.increment_eventually()
        self._received.append(copy.consumer)
        self._keep(copy, min(copy.due, self._bound(copy)))

    def _bound(self, copy: Copy) -> float:
        """Return until when the broker bears it that a copy is not acknowledged."""
        return copy.received + longest_delay(self._app.conf)

    def _keep(self, copy: Copy, due: float) -> None:
        with self._changed:
            heapq.heappush(self._due, (due, next(self._order), copy))
            if self._thread is None and not self._ended:
                self._thread = threading.Thread(target=self._run, name="singleton copies", daemon=True)
                self._thread.start()
            self._changed.notify()

    def end(self) -> None:
        """Handle no more copies; the broker delivers them to another worker."""
        with self._changed:
            self._ended = True
            self._changed.notify()

    def _run(self) -> None:
        while (copy := self._next()) is not None:
            try:
                do = self.handle if copy.due <= now() else self._pass_on
                delay = None if copy.is_lost else do(copy)
            except Exception:
                logger.exception("A delayed copy met an error, and is handled again later")
                delay = ERROR_RETRY
            if delay is not None:
                self._keep(copy, now() + delay)

    def _next(self) -> Copy | None:
        """Wait for the next copy that is due; return None at the end."""
        with self._changed:
            while not self._ended:
                while self._received:
                    # Wakes its loop (Kombu 5.7), which has the broker send the next one: half the time of a storm.
                    self._received.pop().call_soon(_do_nothing)
                left = self._due[0][0] - now() if self._due else None
                if left is not None and left <= 0:
                    return heapq.heappop(self._due)[2]
                self._changed.wait(left)
        return None

    def handle(self, copy: Copy) -> float | None:
        """Handle a copy that is due; return after how many seconds it is due again, None if it is acknowledged."""
        delay = self._decide(copy)
        if delay is None:
            self.acknowledge(copy)
            return None
        copy.due = now() + delay
        return delay if copy.due <= self._bound(copy) else self._pass_on(copy)

    def _pass_on(self, copy: Copy) -> float | None:
        """Publish a copy again that may not stay until it is due; return when to try again, in seconds, None if that is done."""
        try:
            publish_again(copy.attempt, copy.due - now())
        except Exception as error:
            about(copy.attempt.task, copy.attempt.request.id).warning(
                "its delayed copy could not be published: %r", error
            )
            return FIRST_RETRY
        self.acknowledge(copy)
        return None

    def acknowledge(self, copy: Copy) -> None:
        """Acknowledge a copy in the thread of its consumer's loop. In a warm shutdown, that may be at the very end."""
        self._handled.append(copy)
        copy.consumer.call_soon(self._acknowledge_all)

    def _acknowledge_all(self) -> None:
        """Lower the prefetch limit, and acknowledge after that: else a busy worker would fetch a message for each copy.

        If the limit cannot be lowered, the loop meets the same error, and the broker delivers the copies again.
        """
        handled = [self._handled.popleft() for _ in range(len(self._handled))]
        living = [copy for copy in handled if not copy.is_lost]
        if not living:
            return
        consumer = living[0].consumer
        consumer.qos.decrement_eventually(len(living))
        with suppress(*consumer.connection_errors):
            consumer.qos.update()
            for copy in living:
                copy.message.ack_log_error(logger, consumer.connection_errors)

    def _decide(self, copy: Copy) -> float | None:
        """Return after how many seconds a copy is due again, None if it need not come again."""
        if (left := self._unavailable_until - now()) > 0:
            return left
        attempt = copy.attempt
        attempt.context = context_of(self._app)
        attempt.store = self._store = self._store or attempt.context.store.clone()
        attempt.use(config_of_call(attempt.task, attempt.request.get(LOCK_OPTIONS_HEADER)))
        try:
            return handle_copy(attempt)
        except StoreUnavailable:
            self._unavailable_until = now() + STORE_RETRY  # each call may take a second
            return min(attempt.options.lock_ttl / 4, LONGEST_COPY_DELAY)


def _do_nothing() -> None: ...


def copies_of(app: Any) -> Copies:
    """Return the copies of the worker with this app."""
    found: Copies | None = app.__dict__.get(_COPIES)
    return found or app.__dict__.setdefault(_COPIES, Copies(app))


def end_copies(app: Any) -> None:
    """Called when the worker stops."""
    if found := app.__dict__.pop(_COPIES, None):
        found.end()


def request_of(message: Any, hostname: str = "") -> Any:
    """Return the request of the message for which a copy stands, as Celery makes one of a message (`Request`, 5.7)."""
    args, kwargs, embed = message.payload
    info, properties = message.delivery_info or {}, message.properties or {}
    delivery_info = {name: info.get(name) for name in ("exchange", "routing_key")}
    request = Context(
        message.headers,
        args=args,
        kwargs=kwargs,
        hostname=hostname,
        is_eager=False,
        properties={**properties, PROPERTY: tuple(Delivery(content_type=message.content_type))},
        reply_to=properties.get("reply_to"),
        correlation_id=properties.get("correlation_id"),
        delivery_info={**delivery_info, "priority": properties.get("priority"), "redelivered": False},
        **(embed or {}),
    )
    state = retry_state_of(request)
    request.id, request.ignore_result, request.expires = state.original_id, state.ignore_result, state.expires
    return request


def _seconds_until(eta: Any) -> float:
    due = maybe_iso8601(eta) if eta else None
    return maybe_make_aware(due).timestamp() - time.time() if due else 0.0
