"""``Celery(task_cls=SingletonTask)``: every task of the app is locked, Celery's own are not."""

from __future__ import annotations

from typing import Any

import pytest
from celery import chord

from tests.integration.environment import WorkerEnvironment


@pytest.fixture(scope="module")
def extra_conf() -> dict[str, Any]:
    return {"test_task_cls": True}


def test_tasks_of_the_app_are_locked(env: WorkerEnvironment) -> None:
    """A task without ``base`` is a singleton task, with all its arguments in the lock key."""
    job = env.job("of_app")
    held = job.delay(env.tag, "hold")
    env.wait_for("start")
    assert env.get(job.delay(env.tag, "hold")) is None
    assert "done" == env.get(job.delay(env.tag, "return"))
    env.let_go()
    assert "held" == env.get(held)


def test_celerys_own_tasks_are_plain(env: WorkerEnvironment) -> None:
    """celery.chord_unlock, celery.backend_cleanup and the others stay plain tasks."""
    own = [task for name, task in env.app.tasks.items() if name.startswith("celery.")]
    assert own
    assert [] == [task.name for task in own if getattr(task, "singleton", False)]
    results = [env.app.tasks["celery.backend_cleanup"].delay() for _ in range(3)]
    assert [None] * 3 == [env.get(result) for result in results]
    header = [env.job("of_app").s(env.other_tag(str(number))) for number in range(3)]
    body = env.app.tasks["collect"].s(env.other_tag("collected"))
    assert ["done"] * 3 == env.get(chord(header)(body))


def test_explicit_task_is_plain_if_asked(env: WorkerEnvironment) -> None:
    """A task with ``singleton=False`` is a plain task."""
    results = [env.hold("plain", acts="hold") for _ in range(2)]
    env.let_go()
    assert ["held", "held"] == [env.get(result) for result in results]
