"""What Flower shows of a task that was skipped; docs/operate/monitoring.md has a picture of it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.integration.environment import SOON, WorkerEnvironment
from tests.integration.nodes import WorkerSpec
from tests.operate.browser import DIRECT
from tests.servers import Process, free_port, is_listening, until

pytestmark = pytest.mark.skipif(find_spec("flower") is None, reason="run by `tox -e flower`")

Get = Callable[[str], str]


@pytest.fixture(scope="module")
def worker_specs() -> Sequence[WorkerSpec]:
    return [WorkerSpec("threads", options=("-E",))]


@pytest.fixture
def flower(env: WorkerEnvironment, tmp_path: Path) -> Iterator[Get]:
    """Start Flower, which knows the broker alone; return what gets a page once it has received events."""
    port, program = free_port(), [sys.executable, "-m", "celery", "-b", env.app.conf.broker_url, "flower"]
    variables = {**os.environ, "FLOWER_UNAUTHENTICATED_API": "true"}
    process = Process([*program, "--address=127.0.0.1", f"--port={port}"], tmp_path / "flower.log", variables)

    def get(path: str) -> str:
        with DIRECT.open(f"http://127.0.0.1:{port}{path}", timeout=SOON) as reply:
            return str(reply.read(), "utf-8")

    process.start()
    try:
        until(lambda: is_listening(port), "Flower listens")
        until(lambda: "flower_worker_online{" in get("/metrics"), "Flower receives events")
        yield get
    finally:
        process.stop()


def test_skipped(env: WorkerEnvironment, flower: Get) -> None:
    """A skipped task has a state of its own, and Flower counts the events without being told of them."""
    holder = env.hold()
    skipped = env.job("skip").delay(env.tag)
    counted = f'task="job.skip",type="task-singleton-skipped",worker="{env.worker.hostname()}"'
    until(lambda: f"flower_events_total{{{counted}}} 1.0\n" in flower("/metrics"), "Flower counts it")
    assert "SINGLETON-SKIPPED" == json.loads(flower(f"/api/task/info/{skipped.id}"))["state"]
    env.let_go()
    assert "held" == env.get(holder)
    until(lambda: "SUCCESS" == json.loads(flower(f"/api/task/info/{holder.id}"))["state"], "the holder's end is shown")


def test_copies(env: WorkerEnvironment, flower: Get) -> None:
    """The copies of a message that waits in line are no tasks there, which would look as if they ran for ever."""
    env.hold("wait_brief", lock_options={"lock_ttl": 600})
    waiting = env.job("wait_brief").delay(env.tag)

    def copies() -> list[str]:
        tasks = json.loads(flower("/api/tasks?taskname=job.wait_brief"))
        return [one["state"] for one in tasks.values() if one["uuid"] != one["root_id"] == waiting.id]

    env.worker.wait_for_lines(waiting.id, "waits in line")
    env.let_go()
    assert "done" == env.get(waiting)
    until(lambda: "SUCCESS" == json.loads(flower(f"/api/task/info/{waiting.id}"))["state"], "its end is shown")
    assert [] == copies()
