"""The stacks that the report of a test shows when it timed out."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from tests.integration.conftest import POOLS
from tests.integration.environment import WorkerEnvironment
from tests.integration.nodes import LocalWorkerNode, WorkerSpec
from tests.servers import until
from tests.stacks import END, stacks_of


@pytest.fixture(scope="module", params=POOLS)
def pool(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_waiting_body(env: WorkerEnvironment) -> None:
    """The stacks name the function in which a body waits, in a child, thread or greenlet."""
    env.hold()
    found = stacks_of(env.worker.container.process)
    assert "wait_for_flag" in found
    assert found.count("== process") == found.count(END)
    env.let_go()


@pytest.mark.parametrize("pool", ["gevent", "eventlet"], indirect=True)
def test_blocked_loop(env: WorkerEnvironment) -> None:
    """A body that never yields is named, and so are those that wait for it."""
    env.hold(tag=env.other_tag("waiting"))
    busy = env.job("skip").delay(env.tag, "spin", 4.0)
    env.wait_for("start")
    found = stacks_of(env.worker.container.process)
    assert "_spin" in found
    assert "wait_for_flag" in found
    assert "spun" == env.get(busy)


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent", "eventlet"], indirect=True)
def test_kept_gil(env: WorkerEnvironment) -> None:
    """A body that keeps the GIL is named."""
    busy = env.job("skip").delay(env.tag, "keep_gil", 4.0)
    env.wait_for("start")
    assert "_keep_gil" in stacks_of(env.worker.container.process, timeout=0.5)
    assert "kept" == env.get(busy)


@pytest.mark.parametrize("pool", ["solo"], indirect=True)
def test_ended(fresh_worker: Callable[..., LocalWorkerNode]) -> None:
    """A worker that has ended is no error; a stopped one is called so."""
    process = fresh_worker(WorkerSpec("solo", 1)).container.process
    process.signal(signal.SIGSTOP)
    until(lambda: "stopped" in stacks_of(process, timeout=0.1), "it is stopped")
    process.kill()
    assert "has ended" in stacks_of(process)
