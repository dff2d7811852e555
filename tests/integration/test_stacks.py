"""The stacks that the report of a test shows when it timed out."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.conftest import POOLS
from tests.integration.environment import WorkerEnvironment
from tests.integration.nodes import LocalWorkerNode, WorkerSpec
from tests.servers import until
from tests.stacks import END, last_minute, stacks_of

pytestmark = pytest.mark.harness

ROOT = Path(__file__).parents[1]


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
    until(lambda: "_keep_gil" in stacks_of(env.worker.container.process, timeout=0.5), "it is named")
    assert "kept" == env.get(busy)


@pytest.mark.parametrize("pool", ["solo"], indirect=True)
def test_ended(fresh_worker: Callable[..., LocalWorkerNode]) -> None:
    """A worker that has ended is no error; a stopped one is called so."""
    process = fresh_worker(WorkerSpec("solo", 1)).container.process
    process.signal(signal.SIGSTOP)
    until(lambda: "stopped" in stacks_of(process, timeout=0.1), "it is stopped")
    process.kill()
    assert "has ended" in stacks_of(process)


HANGS = """
import pytest
from tests.integration.conftest import *

def test_it(env):
    env.hold()
    env.wait_for("never", timeout=0.1)
"""


def test_report(tmp_path: Path) -> None:
    """When a test has waited in vain, its report shows the stacks of its workers and what they logged last."""
    (tmp_path / "test_it.py").write_text(HANGS)
    (tmp_path / "tests").symlink_to(ROOT)
    (tmp_path / "conftest.py").symlink_to(ROOT / "conftest.py")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "test_it.py"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    said = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False).stdout
    assert "NotInTime: not within 0.1 s: " in said
    stacks, logged = said.split("- stacks of prefork-")[1].split("- last minute of prefork-")
    assert "wait_for_flag" in stacks
    assert "job.skip" in logged


def test_last_minute() -> None:
    """Of a log, the lines of the 60 s before its last one are shown, with those that belong to them."""
    times = ("10:00:00", "10:00:30", "10:01:10")
    log = [f"[2026-01-01 {time},000: INFO/Main] begins\n  and goes on\n" for time in times]
    assert "".join(log[1:]) == last_minute("".join(log))
    assert "no time\n" == last_minute("no time\n")
