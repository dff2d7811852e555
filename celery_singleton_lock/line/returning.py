"""Returns a message whose turn has come to the broker if no process of this worker is free: another worker may have one.

Celery fetches messages ahead (`worker_prefetch_multiplier`), also while all its processes are busy. There, a message of the line
would wait behind bodies that have nothing to do with its lock. So a worker returns it, a few times in half a second: the worker
whose process the holder has left may need a moment to ask for messages again. After that it keeps the message, as any
other: where no worker has a free process, a message that always returns would never run.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from celery.worker import state as worker_state

from celery_singleton_lock.clock import now
from celery_singleton_lock.line.kombu_internals import restore
from celery_singleton_lock.log import about, logger

#: Seconds for which a worker keeps a message before it returns it, each time that it comes. Without an event loop: at once, once.
KEPT = 0.0, 0.02, 0.1, 0.3
#: Seconds after which the worker looks again whether a process is free for a message that it keeps.
LOOK_INTERVAL = 0.01
#: How many messages a worker remembers, so that it does not return them again and again.
_REMEMBERED = 1000
#: A quorum queue of RabbitMQ counts deliveries here, and drops a message after some. So it gets each back once, whoever has it.
_DELIVERIES = "x-delivery-count"


class Returns:
    """How often each message was returned by one worker."""

    def __init__(self) -> None:
        self._returned: OrderedDict[tuple[str, float], int] = OrderedDict()

    def take(self, message: Any, state: Mapping[str, Any], consumer: Any, start: Callable[[], Any]) -> Any:
        """Start a message, or return it if it has its turn, and no process is free. Called in the thread of the consumer's loop.

        Arguments:
            state: what the message carries of its `RetryState`.
        """
        key = state.get("ticket", ""), state.get("copy", 0.0)
        times = self._returned.get(key, 0)
        may_return = key[0] and times < len(KEPT if consumer.hub else KEPT[:1]) and _can_return(message, consumer)
        if not (may_return and _is_full(consumer.pool)):
            return start()
        self._returned[key] = times + 1
        if len(self._returned) > _REMEMBERED:
            self._returned.popitem(last=False)
        end = now() + KEPT[times]

        def look() -> None:
            if is_lost(message, consumer):
                return
            is_full = _is_full(consumer.pool)
            if is_full and now() < end:
                consumer.timer.call_after(LOOK_INTERVAL, look)
            elif not (is_full and _return(message, consumer)):
                self._returned[key] = len(KEPT)
                consumer.task_consumer.on_message(message)  # where Celery expects the errors of a start

        return look()


def is_lost(message: Any, consumer: Any) -> bool:
    """Tell whether the connection of a message is closed, so that the broker delivers it again."""
    tasks = consumer.task_consumer
    return tasks is None or tasks.channel is not message.channel


def _can_return(message: Any, consumer: Any) -> bool:
    """Tell whether this broker puts a returned message where it was in its queue."""
    if message.channel is None:  # it was handed over by a process of this worker
        return False
    return consumer.connection.transport.driver_type in ("amqp", "redis") and not message.headers.get(_DELIVERIES)


def _return(message: Any, consumer: Any) -> bool:
    """Return a message to the broker; tell whether that is done."""
    log = about(message.headers["task"], message.headers["id"])
    if consumer.connection.transport.driver_type == "redis":
        try:
            restore(message)
        except Exception as error:  # it starts here; should it have been returned all the same, one of the two runs
            log.warning("could not be returned to the broker: %r", error)
            return False
    else:
        message.reject_log_error(logger, consumer.connection_errors, requeue=True)
    log.debug("returned to the broker, as no process is free here")
    return True


def _is_full(pool: Any) -> bool:
    """Tell whether each process of the pool has a task, or soon will."""
    # Before Celery 5.7, gevent's pool says here how many greenlets run.
    processes = pool.limit if getattr(pool, "is_green", False) else pool.num_processes
    return len(worker_state.reserved_requests) >= int(processes)
