"""Returns a message whose turn has come to the broker if no process of this worker is free: another worker may have one.

Celery fetches messages ahead (`worker_prefetch_multiplier`), also while all its processes are busy. There, a message of the line
would wait behind bodies that have nothing to do with its lock. So a worker returns it, a few times in half a second: the worker
whose process the holder has left may need a moment to ask for messages again. After that it keeps the message, as each
other one: where no worker has a free process, a message that always returns would never run.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from celery.worker import state as worker_state

from celery_singleton_lock.log import about, logger

#: Seconds for which a worker keeps a message before it returns it, each time that it comes.
KEPT = 0.0, 0.02, 0.1, 0.3
#: How many messages a worker remembers, so that it does not return them again and again.
_REMEMBERED = 1000
#: A quorum queue of RabbitMQ drops a message after 20 deliveries, which it counts in this header. Half of them are for faults.
_DELIVERIES, _MOST_DELIVERIES = "x-delivery-count", 10


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
        # What has no channel was handed over by a process of this worker.
        may_return = key[0] and message.channel is not None and times < len(KEPT)
        if not (may_return and _is_full(consumer) and message.headers.get(_DELIVERIES, 0) < _MOST_DELIVERIES):
            return start()
        self._returned[key] = times + 1
        if len(self._returned) > _REMEMBERED:
            self._returned.popitem(last=False)
        if not KEPT[times]:
            _return(message, consumer)
            return None

        def decide() -> None:
            if is_lost(message, consumer):
                return
            if _is_full(consumer):
                _return(message, consumer)
            else:
                start()

        # Without an event loop, timers have a thread or a greenlet of their own, and the loop looks up to 2 s later.
        call = decide if consumer.hub else partial(consumer.call_soon, decide)
        return consumer.timer.call_after(KEPT[times], call)


def is_lost(message: Any, consumer: Any) -> bool:
    """Tell whether the connection of a message is closed, so that the broker delivers it again."""
    tasks = consumer.task_consumer
    return tasks is None or tasks.channel is not message.channel


def _return(message: Any, consumer: Any) -> None:
    about(message.headers["task"], message.headers["id"]).debug("returned to the broker, as no process is free here")
    message.reject_log_error(logger, consumer.connection_errors, requeue=True)


def _is_full(consumer: Any) -> bool:
    """Tell whether each process of the pool has a task, or soon will."""
    return len(worker_state.reserved_requests) >= int(consumer.pool.num_processes)
