"""A message of the line: what starts it, as the store keeps it and a worker publishes it."""

from __future__ import annotations

from base64 import b64encode
from typing import Any, NamedTuple

from kombu.serialization import dumps
from kombu.utils import json

from celery_singleton_lock.context import context_of
from celery_singleton_lock.delivery.attempt import Attempt
from celery_singleton_lock.delivery.retry_state import RETRY_STATE_HEADER
from celery_singleton_lock.log import TaskLog, about
from celery_singleton_lock.store.keys import LINE_TOKEN
from celery_singleton_lock.store.requests import LeaseSpec, Place

_json: Any = json  # untyped in Kombu
_dumps: Any = dumps  # as that

#: What is added to the number of a message that is published again: the first publication may have arrived all the same.
NEXT_NUMBER = 0.001


class LineMessage(NamedTuple):
    """All that is needed to start a message that waits. Its text is JSON."""

    body: Any  # JSON, or Base64 text if the options have a `content_type`
    queue: str | None  # to be declared
    options: dict[str, Any]  # of `kombu.Producer.publish`
    base: str  # of the keys of its lock
    digest: str
    limit: int
    ttl: float

    @classmethod
    def of(cls, text: str) -> LineMessage:
        """Return the message of a text."""
        return cls(*_json.loads(text))

    @property
    def text(self) -> str:
        """The message as the store keeps it."""
        return str(_json.dumps(tuple(self)))

    @property
    def task_id(self) -> str:
        """The task id of the message."""
        return str(self.options["headers"]["id"])

    @property
    def place(self) -> Place:
        """Its ticket, its number among the copies of its message, and its identity."""
        state = self.options["headers"][RETRY_STATE_HEADER]
        return Place(state["ticket"], state["copy"], identity=state.get("identity", ""))

    @property
    def log(self) -> TaskLog:
        """The log of this message."""
        headers = self.options["headers"]
        return about(headers["task"], headers["id"])

    def again(self) -> LineMessage:
        """Return the message with a number of its own: of two publications, one runs."""
        state = self.options["headers"][RETRY_STATE_HEADER]
        headers = {**self.options["headers"], RETRY_STATE_HEADER: {**state, "copy": state["copy"] + NEXT_NUMBER}}
        return self._replace(options={**self.options, "headers": headers})

    def spec(self) -> LeaseSpec:
        """Return the spec of a delayed copy of the message, with the lowest number: only a copy keeps its place."""
        spec = LeaseSpec(self.base, self.digest, LINE_TOKEN, self.ttl, self.task_id, queued=True, limit=self.limit)
        spec.place = self.place._replace(copy=-1.0)
        return spec


def task_id_of(text: str) -> str:
    """Return the task id of a message of the line; "" if there is none."""
    return LineMessage.of(text).task_id if text else ""


class _Recorder:
    """A producer that publishes nothing, and notes what it was to publish."""

    def __init__(self, producer: Any) -> None:
        self._producer = producer
        self.noted: list[tuple[Any, dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._producer, name)

    def publish(self, body: Any, **options: Any) -> None:
        self.noted.append((body, options))


def text_of(attempt: Attempt, signature: Any) -> str:
    """Return the message of a signature as JSON: its body, its queue, and the options of `kombu.Producer.publish`.

    The body of another serializer travels as its bytes. Return nothing if the text is long: then its copy starts it.
    """
    app, spec, log = attempt.task.app, attempt.spec, attempt.log()
    try:
        with app.producer_or_acquire() as producer:
            recorder = _Recorder(producer)
            signature.apply_async(producer=recorder)
        body, options = recorder.noted[0]  # Celery may also send an event with it
        declared, exchange = options.pop("declare") or [None], options["exchange"]
        options["exchange"] = getattr(exchange, "name", exchange)
        options.pop("expiration", None)  # counts from the publish; workers look at the header `expires`
        if options["serializer"] != "json":
            body = _as_bytes(body, options)
        queue = getattr(declared[0], "name", None)
        text = LineMessage(body, queue, options, spec.base, spec.digest, spec.limit, spec.ttl).text
    except Exception as failure:  # such as a header that JSON cannot express, or an error of a receiver of signals
        log.warning("waits in line, and only a delayed copy can start it: %r", failure)
        return ""
    longest = context_of(app).settings.max_message
    if len(text) <= longest:
        return text
    if not attempt.retry_state.ticket:  # it comes for the first time
        log.warning(
            "waits in line, and only a delayed copy can start it: its message has %d bytes, more than "
            "singleton_lock_max_message=%d", len(text), longest,
        )  # fmt: skip
    return ""


def _as_bytes(body: Any, options: dict[str, Any]) -> str:
    """Return the body of a message as Base64 text, and have the options say what its bytes are."""
    content_type, encoding, data = _dumps(body, options.pop("serializer"))
    options.update(content_type=content_type, content_encoding=encoding)
    return b64encode(data.encode(encoding) if isinstance(data, str) else data).decode()
