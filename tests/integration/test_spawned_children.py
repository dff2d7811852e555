"""Spawned instead of forked children of a prefork worker, which share no memory with their main process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from celery.app.defaults import NAMESPACES

from tests.integration.environment import WorkerEnvironment
from tests.integration.nodes import WorkerSpec
from tests.integration.test_long_bodies import until_put_off
from tests.servers import until

pytestmark = pytest.mark.skipif(
    "pool_start_method" not in NAMESPACES["worker"], reason="this Celery has no such setting"
)


#: Seconds, short enough to see renewals.
TTL = 12


@pytest.fixture(scope="module")
def extra_conf() -> dict[str, Any]:
    return {"worker_pool_start_method": "spawn", "singleton_lock_ttl": TTL}


@pytest.fixture(scope="module")
def worker_specs() -> Sequence[WorkerSpec]:
    return [WorkerSpec("prefork")]


def test_kept_gil(env: WorkerEnvironment) -> None:
    """The main process renews for a child that keeps the GIL for longer than its TTL; a duplicate is skipped."""
    env.job("shared").delay(env.tag, ["keep_gil", "return"], 100.0)
    start = env.wait_for("start")
    until_put_off(env, "shared", 2)
    assert env.get(env.job("shared").delay(env.tag)) is None
    assert [] == env.events("end")
    assert 1 == len(env.starts())
    env.kill_body(start)


def test_killed(env: WorkerEnvironment) -> None:
    """The main process releases the lock of a killed child before it could expire."""
    env.hold("shared", lock_options={"lock_ttl": 600})
    env.kill_body(env.starts()[0])
    until(lambda: not env.is_locked("shared"), "the lease is freed")


def test_copied_request(env: WorkerEnvironment) -> None:
    """A copy or pickle of its request by a body in a spawned child does not contain the token."""
    assert "copied" == env.get(env.job("shared").delay(env.tag, "copy_request"))
