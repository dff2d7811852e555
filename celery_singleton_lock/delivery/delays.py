"""How long a message may be delayed that is published again: brokers bear unacknowledged messages for a time."""

from __future__ import annotations

import math
from typing import Any

#: Longest delay in seconds of a message that is published again. RabbitMQ closes the channel of a worker that keeps a message for
#: longer than its `consumer_timeout`, 30 minutes by default. Redis and SQS deliver it again after 60 and 30 minutes by default.
LONGEST_DELAY = 600.0
#: Seconds until a broker of this kind delivers an unacknowledged message again, unless a setting says otherwise.
_VISIBILITY_TIMEOUTS = {
    **dict.fromkeys(("redis", "rediss", "redis+socket", "sentinel"), 3600.0),
    **dict.fromkeys(("sqs", "slmq", "pgmq"), 1800.0),
}


def shortened(app: Any, delay: float) -> float:
    """Return a delay in seconds as the broker can keep it.

    The worker keeps a delayed message without an acknowledgement, and brokers do not bear that for ever. A message that comes too
    early is published again. RabbitMQ delays messages of quorum queues by whole seconds, at least one.
    """
    delay = min(delay, longest_delay(app.conf))
    return float(math.ceil(delay)) if has_quorum_queues(app) else delay


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


def has_quorum_queues(app: Any) -> bool:
    """Tell whether Celery delays messages natively (`celery.utils.quorum_queues`, 5.5)."""
    return any((queue.queue_arguments or {}).get("x-queue-type") == "quorum" for queue in app.amqp.queues.values())
