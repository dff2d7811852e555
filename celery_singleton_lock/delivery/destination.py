"""Where a message goes that is published again, whether it may be, and the delays that its broker keeps."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from copy import copy
from typing import Any

#: Longest delay in seconds of a message that is published again. RabbitMQ closes the channel of a worker that keeps a message for
#: longer than its `consumer_timeout`, 30 minutes by default. Redis and SQS deliver it again after 60 and 30 minutes by default.
LONGEST_DELAY = 600.0
#: Seconds until a broker of this kind delivers an unacknowledged message again, unless a setting says otherwise.
_VISIBILITY_TIMEOUTS = {
    **dict.fromkeys(("redis", "rediss", "redis+socket", "sentinel"), 3600.0),
    **dict.fromkeys(("sqs", "slmq", "pgmq"), 1800.0),
}
#: The exchange from which RabbitMQ delivers delayed messages (`kombu.transport.native_delayed_delivery`). Its routing keys
#: begin with the delay in bits.
_DELAYED = "celery_delayed_delivery"
_DELAY_BITS = re.compile(r"^(?:[01]\.){28}")


def destination(app: Any, request: Any) -> dict[str, Any]:
    """Return queue, exchange and routing key as options of `apply_async`, or nothing where Celery's own are right.

    A message names its exchange without a type. Redis would treat a topic exchange as a direct one and lose the message. So the
    options name the queue, which declares its exchange.
    """
    source = next(_sources(app, request), None)
    if source is None:
        return {}
    queue, exchange, key = source
    if _has_quorum_queues(app):
        # There `Celery.send_task` (5.7) uses the routing key of the queue, which may be a pattern.
        queue = copy(queue)
        queue.exchange, queue.routing_key = exchange, key
    return {"queue": queue, "exchange": exchange.name, "routing_key": key}


def goes_to_several_queues(app: Any, request: Any) -> bool:
    """Tell whether the exchange put this message into several queues, so that publishing it again would multiply it."""
    types = [exchange.type for _, exchange, _ in _sources(app, request)]
    return len(types) > 1 or "fanout" in types


def shortened(app: Any, delay: float) -> float:
    """Return a delay in seconds as the broker can keep it.

    The worker keeps a delayed message without an acknowledgement, and brokers do not bear that for ever. A message that comes too
    early is published again. RabbitMQ delays messages of quorum queues by whole seconds, at least one.
    """
    delay = min(delay, longest_delay(app.conf))
    return float(math.ceil(delay)) if _has_quorum_queues(app) else delay


def longest_delay(conf: Any) -> float:
    """Return the longest delay in seconds: one that each broker keeps, and at most half of the visibility timeout."""
    return min(LONGEST_DELAY, visibility_timeout(conf) / 2)


def visibility_timeout(conf: Any) -> float:
    """Return the seconds after which the broker delivers an unacknowledged message again; infinity if it never does.

    A `visibility_timeout` that is set does not count for a broker that has none, such as RabbitMQ.
    """
    url = conf.broker_read_url  # the broker from which a worker receives
    url = url[0] if isinstance(url, (list, tuple)) else url
    transport = str(url or "").partition("://")[0].lower()
    default = _VISIBILITY_TIMEOUTS.get(transport, math.inf)
    is_named_class = ":" in transport or "." in transport  # a user's own transport, as Kombu takes it
    if default == math.inf and not is_named_class:
        return math.inf
    return float((conf.get("broker_transport_options") or {}).get("visibility_timeout") or default)


def _sources(app: Any, request: Any) -> Iterator[tuple[Any, Any, str]]:
    """Yield queue, exchange and routing key of each way that the message may have come; none for Celery's default exchange."""
    info = request.delivery_info or {}
    name, key = info.get("exchange") or "", info.get("routing_key") or ""
    is_delayed = name.endswith(_DELAYED)
    if is_delayed:
        key = _DELAY_BITS.sub("", key)
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


def _has_quorum_queues(app: Any) -> bool:
    """Tell whether Celery delays messages natively (`celery.utils.quorum_queues`, 5.5)."""
    return any((queue.queue_arguments or {}).get("x-queue-type") == "quorum" for queue in app.amqp.queues.values())
