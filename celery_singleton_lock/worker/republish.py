"""Publishes the message of a delivery again: to where it came from, and with all that it carried."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from copy import copy
from datetime import datetime
from decimal import Decimal
from typing import Any, NamedTuple

from celery.app.task import Context
from kombu.serialization import registry

from celery_singleton_lock.worker.delivery import PROPERTY, delivery_of

#: Header of a message that we published again: its `RetryState`.
POSTPONED = "singleton_postponed"

#: Seconds until a broker of this kind delivers an unacknowledged message again, where no setting says otherwise.
_VISIBILITY_TIMEOUTS = {**dict.fromkeys(("redis", "rediss", "redis+socket", "sentinel"), 3600.0), "sqs": 1800.0}
#: The exchange from which RabbitMQ delivers delayed messages (`kombu.transport.native_delayed_delivery`), whose routing keys
#: begin with the delay in bits.
_DELAYED = "celery_delayed_delivery"
_DELAY_BITS = re.compile(r"^(?:[01]\.){28}")
#: What a header can be made of; a receiver of `task_prerun` may have put anything else on the request.
_SENDABLE = (str, int, float, Decimal, bytes, datetime, list, dict, type(None))
#: Headers by which RabbitMQ finds cycles of dead letters; it would drop the message.
_DEAD_LETTER = re.compile(r"x-(death$|first-death-|last-death-)")
#: Properties that Celery and Kombu give to each message anew.
_OWN_PROPERTIES = {
    *("correlation_id", "reply_to", "priority", "expiration", "delivery_info", "delivery_tag", "body_encoding"),
    *("content_type", "content_encoding", "application_headers", "headers", PROPERTY),
}


class RetryState(NamedTuple):
    """How often a message was published again so far; it travels in a header of the message.

    Arguments:
        times: as a duplicate, or because the store was unreachable.
        waited: seconds of delay in all of these.
        looks: since then, to see how another delivery of the same message ends.
    """

    times: int = 0
    waited: float = 0.0
    looks: int = 0


def retry_state_of(request: Any) -> RetryState:
    """Return how often the message of a request was published again."""
    # Not `request.headers`: Datadog and older Sentry nest a dict of their own in the headers, and that is all it has then.
    found = request.get(POSTPONED) or {}
    return RetryState(int(found.get("times", 0)), float(found.get("waited", 0)), int(found.get("looks", 0)))


def forget_retry_state(request: Any) -> None:
    """Take our header out of the request, so that the task's own retries do not carry it on."""
    if request.headers and POSTPONED in request.headers:
        request.headers = {name: value for name, value in request.headers.items() if name != POSTPONED}


def is_redelivered(request: Any) -> bool:
    """Tell whether an earlier delivery of the same message may be running, or has run."""
    return bool((request.delivery_info or {}).get("redelivered")) or retry_state_of(request).looks > 0


def goes_to_several_queues(app: Any, request: Any) -> bool:
    """Tell whether the message was put into several queues: then each publish makes as many copies of it."""
    types = [exchange.type for _, exchange, _ in _sources(app, request)]
    return len(types) > 1 or "fanout" in types


def shortened(app: Any, delay: float) -> float:
    """Return a delay in seconds as the broker can keep it.

    A message that waits longer than the visibility timeout is delivered to a second worker meanwhile. RabbitMQ delays messages of
    quorum queues by whole seconds, of which there must be at least one.
    """
    delay = min(delay, longest_delay(app.conf))
    return float(math.ceil(delay)) if _has_quorum_queues(app) else delay


def longest_delay(conf: Any) -> float:
    """Return the longest delay in seconds that is safe with the broker's visibility timeout: half of that."""
    return visibility_timeout(conf) / 2


def visibility_timeout(conf: Any) -> float:
    """Return the seconds after which the broker delivers an unacknowledged message again; infinity where it never does."""
    given = (conf.get("broker_transport_options") or {}).get("visibility_timeout")
    url = conf.broker_url[0] if isinstance(conf.broker_url, (list, tuple)) else conf.broker_url
    return float(given or _VISIBILITY_TIMEOUTS.get(str(url).partition("://")[0], math.inf))


def signature_of(task: Any, request: Any, delay: float, postponements: RetryState) -> Any:
    """Return the signature that publishes a message again, with what `Task.signature_from_request` (5.7) leaves out.

    Arguments:
        task: the task.
        request: its request.
        delay: seconds until the message is delivered.
        postponements: what to note in the message.
    """
    options = {
        **_properties(request),
        "countdown": delay,
        "retries": request.retries,
        "headers": {**_headers(request), POSTPONED: postponements._asdict()},
        "ignore_result": ignores_result(task, request),
        "argsrepr": request.get("argsrepr"),
        "kwargsrepr": request.get("kwargsrepr"),
        "serializer": _serializer_of(delivery_of(request).content_type) or task.serializer,
        "add_to_parent": False,
        **_destination(task.app, request),
    }
    if request.get("compression"):
        options["compression"] = request.get("compression")
    signature = task.signature_from_request(request, **options)
    signature.options.pop("redelivered", None)  # came with `delivery_info`
    return signature


def ignores_result(task: Any, request: Any) -> bool:
    """As `celery.app.task.get_actual_ignore_result` (5.7): the request's class has a default that says nothing."""
    asked = request.__dict__.get("ignore_result")
    return bool(task.ignore_result if asked is None else asked)


def _headers(request: Any) -> dict[str, Any]:
    """Return the headers that are not Celery's, nested ones where they were nested.

    ``parent_id`` is Celery's, but of a task without a parent `send_task` would make it the task's own id.
    """
    plain = {name: value for name, value in vars(request).items() if name != "headers" and isinstance(value, _SENDABLE)}
    own, seen = _without_dead_letters(Context(plain).headers), _without_dead_letters(request.headers)
    if own != seen:
        own["headers"] = seen
    return {**own, "parent_id": request.parent_id}


def _without_dead_letters(headers: dict[str, Any] | None) -> dict[str, Any]:
    return {name: value for name, value in (headers or {}).items() if not _DEAD_LETTER.match(name)}


def _properties(request: Any) -> dict[str, Any]:
    """Return the properties that the publisher added, and those that Celery made of the publisher's options."""
    return {name: value for name, value in (request.properties or {}).items() if name not in _OWN_PROPERTIES}


def _serializer_of(content_type: str | None) -> str:
    """Return Kombu's name of the serializer that wrote a body of this type; empty where there is none."""
    return str(registry.type_to_name.get(content_type, ""))


def _destination(app: Any, request: Any) -> dict[str, Any]:
    """Return queue, exchange and routing key, as options of `apply_async`; nothing where Celery's own will do.

    A message names its exchange without a type. Redis would take a topic exchange for a direct one, and lose the message, so the
    queue goes with it and declares its exchange.
    """
    source = next(_sources(app, request), None)
    if source is None:
        return {}
    queue, exchange, key = source
    if _has_quorum_queues(app):
        # There `Celery.send_task` (5.7) takes the routing key of the queue, which may be a pattern.
        queue = copy(queue)
        queue.exchange, queue.routing_key = exchange, key
    return {"queue": queue, "exchange": exchange.name, "routing_key": key}


def _sources(app: Any, request: Any) -> Iterator[tuple[Any, Any, str]]:
    """Yield queue, exchange and routing key of each way that the message may have come; none where it names its queue itself."""
    info = request.delivery_info or {}
    name, key = info.get("exchange") or "", info.get("routing_key") or ""
    is_delayed = name.endswith(_DELAYED)
    if is_delayed:
        key = _DELAY_BITS.sub("", key)
    for queue in app.amqp.queues.values() if name else ():
        for binding in queue.bindings or (queue,):
            exchange = binding.exchange
            is_source = exchange.type == "topic" if is_delayed else exchange.name == name
            if is_source and _fits(exchange.type, binding.routing_key, key):
                yield queue, exchange, key
                break


def _fits(kind: str, pattern: str, key: str) -> bool:
    """Tell whether an exchange of this type puts a message with this routing key into a queue that is bound by this pattern."""
    if kind == "topic":
        from kombu.transport.virtual.exchange import TopicExchange  # which a publisher should not have to import

        topics: Any = TopicExchange  # untyped in Kombu
        return re.match(topics(None).key_to_pattern(pattern), key) is not None
    return kind == "fanout" or pattern == key


def _has_quorum_queues(app: Any) -> bool:
    """Tell whether Celery delays messages natively (`celery.utils.quorum_queues`, 5.5)."""
    return any((queue.queue_arguments or {}).get("x-queue-type") == "quorum" for queue in app.amqp.queues.values())
