"""A lease that is renewed is no sign of life: every screen tells when the process of the body last renewed it."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from click.testing import CliRunner

from celery_singleton_lock import locks
from celery_singleton_lock.cli import singleton
from celery_singleton_lock.cli.output import LOCK_HEAD
from celery_singleton_lock.holder import Holder
from tests.integration.conftest import POOLS
from tests.integration.environment import WorkerEnvironment
from tests.integration.nodes import WorkerSpec
from tests.servers import until

TTL = 6
OPTIONS = {"lock_options": {"lock_ttl": TTL}}


@pytest.fixture(scope="module")
def worker_specs() -> Sequence[WorkerSpec]:
    return tuple(WorkerSpec(pool, concurrency=1 if pool == "solo" else 2) for pool in POOLS)


def command(env: WorkerEnvironment, *words: str) -> str:
    return CliRunner().invoke(singleton, words, obj=SimpleNamespace(app=env.app)).output


def holder(env: WorkerEnvironment, tag: str | None = None) -> Holder:
    (lock,) = locks.show(env.app, env.key("skip", tag))
    assert lock.holder.renewed is not None
    return lock.holder


def row(env: WorkerEnvironment, key: str) -> dict[str, str]:
    """Return a line of `list`."""
    (line,) = [line for line in command(env, "list", "--task", "job.skip").splitlines() if line.endswith(key)]
    return dict(zip(LOCK_HEAD, line.split(), strict=True))


def test_stopped_child(env: WorkerEnvironment) -> None:
    """A child that is stopped is shown as "hung?", though its lease is renewed; one that works beside it is not."""
    queue, healthy, stopped = env.worker_of("prefork").worker_queue, env.tag, env.other_tag("stopped")
    results = [env.hold("skip", tag, queue=queue, **OPTIONS) for tag in (healthy, stopped)]
    child = psutil.Process(env.starts(stopped)[0]["pid"])
    child.send_signal(signal.SIGSTOP)
    try:
        until(lambda: (holder(env, stopped).hung, holder(env, healthy).hung) == (True, False), "one hangs")
        found = holder(env, stopped)
        assert found.renewed is not None
        assert found.renewed > TTL > found.remaining > 0
        shown = {tag: row(env, env.key("skip", tag)) for tag in (stopped, healthy)}
        assert ("hung?", "running") == (shown[stopped]["STATE"], shown[healthy]["STATE"])
        assert "hung? its process has not renewed it for " in command(env, "show", env.key("skip", stopped))
        (told,) = json.loads(command(env, "show", env.key("skip", stopped), "--json"))
        assert (True, "running", True) == (
            told["holder"]["hung"],
            told["holder"]["state"],
            told["holder"]["renewed"] > TTL,
        )
        of_task = env.job("skip").lock_holder(stopped)  # type: ignore[attr-defined]
        assert of_task.hung
        assert "hung? its process has not renewed it for " in str(locks.release(env.app, env.key("skip", stopped)))
    finally:
        child.send_signal(signal.SIGCONT)
    until(lambda: not holder(env, stopped).hung, "it renews again")
    env.let_all_go()
    assert ["held"] * 2 == [env.get(result) for result in results]


@pytest.mark.parametrize("pool_name", POOLS)
def test_working_body(env: WorkerEnvironment, pool_name: str) -> None:
    """In every pool, the process of a body that works renews: the time since then is told, and starts anew."""
    result = env.hold("skip", queue=env.worker_of(pool_name).worker_queue, **OPTIONS)

    def renewed() -> Any:
        found = holder(env)
        return found.renewed is not None and found.renewed < found.age and found

    found = until(renewed, "its process renews")
    shown = command(env, "show", env.key("skip"))
    assert (True, False) == (" renewed " in shown, "hung?" in shown or found.hung)
    env.let_go()
    assert "held" == env.get(result)
