"""Running a task as a worker's process does, without a worker."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any
from uuid import uuid4

from celery._state import pop_current_task, push_current_task
from celery.app.task import Context
from celery.app.trace import build_tracer, task_has_custom
from celery.exceptions import Ignore
from celery.signals import task_postrun

from celery_singleton_lock.delivery.properties import PROPERTY, new_token


def request_of(task: Any, args: Sequence[Any], supervised: bool = False) -> dict[str, Any]:
    """What a worker hands to the tracer with a message.

    Arguments:
        task, args: the call.
        supervised: the main process of a prefork worker has named the delivery; else the library makes its token.
    """
    task_id = str(uuid4())
    named = {PROPERTY: (new_token(), None, False, True)} if supervised else {}
    return {
        "id": task_id,
        "root_id": task_id,
        "task": task.name,
        "args": args,
        "kwargs": {},
        "hostname": "bench@local",
        "properties": {"correlation_id": task_id, "delivery_tag": task_id, **named},
        "delivery_info": {"exchange": "", "routing_key": "bench", "redelivered": False},
        "headers": None,
        "retries": 0,
    }


def traced_request(task: Any, args: Sequence[Any], supervised: bool = False) -> Context:
    """A request as the tracer makes it."""
    return Context(request_of(task, args, supervised), args=args, called_directly=False, kwargs={})


def around_body(task: Any, args: Sequence[Any], supervised: bool = False) -> float:
    """Seconds from the tracer's call of a task to that call's end; the body should do nothing.

    The request is made and pushed, and what is called is chosen, as `celery.app.trace.build_tracer` (5.7) does; that
    is not measured. Nor is its signal of the end.
    """
    call = task if task_has_custom(task, "__call__") else task.run
    push_current_task(task)
    task.request_stack.push(traced_request(task, args, supervised))
    begin = perf_counter()
    try:
        call(*args)
    except Ignore:  # a duplicate
        pass
    finally:
        took = perf_counter() - begin
        task_postrun.send(sender=task, task_id=task.request.id, task=task, state="SUCCESS")
        task.request_stack.pop()
        pop_current_task()
    return took


class Tracer:
    """Runs one task through Celery's tracer.

    Arguments:
        task: the task.
    """

    def __init__(self, task: Any) -> None:
        self._task = task
        self._trace = build_tracer(task.name, task, app=task.app)

    def __call__(self, args: Sequence[Any]) -> float:
        """Seconds that the tracer needs for a delivery with these arguments."""
        request = request_of(self._task, args)
        begin = perf_counter()
        self._trace(request["id"], args, {}, request)
        return perf_counter() - begin
