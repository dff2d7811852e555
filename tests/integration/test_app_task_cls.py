"""``Celery(task_cls=SingletonTask)``: every task of the app is locked, Celery's own are not."""

from __future__ import annotations

from typing import Any

import pytest
from celery import chord

from tests.integration.bench import Bench


@pytest.fixture(scope="module")
def extra_conf() -> dict[str, Any]:
    return {"test_task_cls": True}


def test_tasks_of_the_app_are_locked(bench: Bench) -> None:
    """A task that names no base is a singleton task, with all its arguments as signature."""
    job = bench.job("of_app")
    held = job.delay(bench.tag, "hold")
    bench.wait_for("start")
    assert bench.get(job.delay(bench.tag, "hold")) is None
    assert "done" == bench.get(job.delay(bench.tag, "return"))
    bench.let_go()
    assert "held" == bench.get(held)


def test_celerys_own_tasks_are_plain(bench: Bench) -> None:
    """celery.chord_unlock, celery.backend_cleanup and the others stay plain tasks."""
    own = [task for name, task in bench.app.tasks.items() if name.startswith("celery.")]
    assert own
    assert [] == [task.name for task in own if getattr(task, "singleton", False)]
    results = [bench.app.tasks["celery.backend_cleanup"].delay() for _ in range(3)]
    assert [None] * 3 == [bench.get(result) for result in results]
    header = [bench.job("of_app").s(bench.other_tag(str(number))) for number in range(3)]
    body = bench.app.tasks["collect"].s(bench.other_tag("collected"))
    assert ["done"] * 3 == bench.get(chord(header)(body))


def test_explicit_task_is_plain_if_asked(bench: Bench) -> None:
    """``singleton=False`` makes a plain task of it."""
    results = [bench.hold("plain", acts="hold") for _ in range(2)]
    bench.let_go()
    assert ["held", "held"] == [bench.get(result) for result in results]
