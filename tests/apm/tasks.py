"""Tasks that note what an integration gives them."""

from __future__ import annotations

from typing import Any

from celery import Celery, Task

from celery_singleton_lock import RetryLater, SingletonTask
from tests.apm.integrations import installed
from tests.integration.tasks import SOON, perform, recorder_of

#: Gives up after postponements of 0.2, 0.4 and 0.3 s.
GROWING = RetryLater(delay=0.2, backoff=2.0, jitter=0.0, max_wait=0.9)

#: Name of a task -> its options.
TRACED: dict[str, dict[str, Any]] = {
    "traced.plain": {"singleton": False},
    "traced.skip": {"on_duplicate": "skip"},
    "traced.raise": {"on_duplicate": "raise"},
    "traced.retry": {"on_duplicate": SOON},
    "traced.growing": {"on_duplicate": GROWING},
}


def add_tasks(app: Celery) -> None:
    """Add them to an app."""
    for name, options in TRACED.items():
        _add_task(app, name, options)


def _add_task(app: Celery, name: str, options: dict[str, Any]) -> None:
    @app.task(shared=False, name=name, bind=True, base=SingletonTask, unique_on=["tag"], **options)
    def traced(self: Task, tag: str, acts: Any = "return", seconds: float = 0.0) -> str:
        request = self.request
        # Where a message has a header `headers`, Celery takes those for the caller's, and the others for attributes.
        own = {"header": (request.headers or {}).get("x-own"), "attribute": request.get("x-own")}
        recorder_of(app).note(tag, "traced", id=request.id, own=own, trace=installed().trace_id())
        return perform(self, tag, acts, seconds)
