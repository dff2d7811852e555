"""Every private name of Celery that this library touches: each is there in Celery 5.3 to 5.7.

`tests/unit/test_celery_internals.py` says which one is gone, and what it was for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery._state import get_current_task

__all__ = ["get_current_task"]


def protect(request: Any) -> None:
    """Have further calls of the task run its body alone, as `celery.app.trace._install_stack_protection` does."""
    request._protected = 1


def sends_events(request: Any) -> bool:
    """Tell whether the worker that has received a message (`celery.worker.request.Request`) sends events of its task."""
    eventer = request._eventer
    return bool(eventer and eventer.enabled and request.task.send_events)


def context_of_request(request: Any) -> Any:
    """Return what a task sees as its request, in the main process."""
    return request._context


def is_running(request: Any) -> bool:
    """Tell whether the pool still waits for the end. It waits no more once Celery has reported a time limit."""
    reference = getattr(request, "_apply_result", None)  # is set once a pool has the task
    if reference is None:
        return True
    result = reference()
    return result is not None and not result.ready()


class OwnReason:
    """Lets a request class choose the reason with which Celery stores that a task was terminated, and announces that."""

    def reason(self, reason: str) -> str:
        """Return the reason, given that of Celery."""
        return reason

    def _announce_revoked(self, reason: str, *how: Any) -> None:
        super()._announce_revoked(self.reason(reason), *how)  # type: ignore[misc]


def call_on_decode_error(consumer: Any, call: Callable[[Any, Any], object]) -> None:
    """Have `call(consumer, message)` called after each message that this consumer cannot decode.

    Celery sends no signal for it: it calls `Consumer.on_decode_error`, for which an attribute of the consumer stands.
    """
    original = consumer.on_decode_error

    def on_decode_error(message: Any, error: Exception) -> None:
        original(message, error)
        call(consumer, message)

    consumer.on_decode_error = on_decode_error
