"""Where a message goes that is published again, and whether it may be."""

from __future__ import annotations

import re
from collections.abc import Iterator
from copy import copy
from typing import Any

from celery_singleton_lock.delivery.delays import has_quorum_queues

#: The exchange from which RabbitMQ delivers delayed messages (`kombu.transport.native_delayed_delivery`). Its routing keys
#: begin with the delay in bits.
_DELAYED = "celery_delayed_delivery"
_DELAY_BITS = r"^(?:[01]\.){28}"


def destination(app: Any, request: Any) -> dict[str, Any]:
    """Return queue, exchange and routing key as options of `apply_async`, or nothing where Celery's own are right.

    A message names its exchange without a type. Redis would treat a topic exchange as a direct one and lose the message. So the
    options name the queue, which declares its exchange.
    """
    source = next(_sources(app, request), None)
    if source is None:
        return {}
    queue, exchange, key = source
    if has_quorum_queues(app):
        # There `Celery.send_task` (5.7) uses the routing key of the queue, which may be a pattern.
        queue = copy(queue)
        queue.exchange, queue.routing_key = exchange, key
    return {"queue": queue, "exchange": exchange.name, "routing_key": key}


def goes_to_several_queues(app: Any, request: Any) -> bool:
    """Tell whether the exchange put this message into several queues, so that publishing it again would multiply it."""
    types = [exchange.type for _, exchange, _ in _sources(app, request)]
    return len(types) > 1 or "fanout" in types


def _sources(app: Any, request: Any) -> Iterator[tuple[Any, Any, str]]:
    """Yield queue, exchange and routing key of each way that the message may have come; none for Celery's default exchange."""
    info = request.delivery_info or {}
    name, key = info.get("exchange") or "", info.get("routing_key") or ""
    is_delayed = name.endswith(_DELAYED)
    if is_delayed:
        key = re.sub(_DELAY_BITS, "", key)
    for queue in app.amqp.queues.values() if name else ():
        for binding in queue.bindings or (queue,):
            exchange = binding.exchange
            is_source = exchange.type == "topic" if is_delayed else exchange.name == name
            if is_source and _routes(exchange.type, binding.routing_key, key):
                yield queue, exchange, key
                break


def _routes(kind: str, pattern: str, key: str) -> bool:
    """Tell whether an exchange of this type puts a message with this routing key into a queue bound by this pattern."""
    if kind == "topic":
        from kombu.transport.virtual.exchange import TopicExchange  # a publisher should not have to import it

        topics: Any = TopicExchange  # untyped in Kombu
        return re.match(topics(None).key_to_pattern(pattern), key) is not None
    return kind == "fanout" or pattern == key
