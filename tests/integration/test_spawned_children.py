"""Children of a prefork worker that are started anew instead of forked: they share no memory with their main process."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
from celery.app.defaults import NAMESPACES

from tests.integration.bench import Bench
from tests.integration.nodes import WorkerSpec
from tests.servers import until

pytestmark = pytest.mark.skipif(
    "pool_start_method" not in NAMESPACES["worker"], reason="this Celery has no such setting"
)


#: Seconds: a body of one and a half of them takes not too long, and a lease that expires goes later than one that is freed.
TTL = 6


@pytest.fixture(scope="module")
def extra_conf() -> dict[str, Any]:
    return {"worker_pool_start_method": "spawn", "singleton_lock_ttl": TTL}


@pytest.fixture(scope="module")
def worker_specs() -> Sequence[WorkerSpec]:
    return [WorkerSpec("prefork")]


def test_kept_gil(bench: Bench) -> None:
    """The main process renews for a child that keeps the GIL for longer than its lease lives; a duplicate is skipped."""
    holder = bench.job("shared").delay(bench.tag, ["keep_gil", "return"], 1.5 * TTL)
    began = bench.wait_for("start")["at"]
    while time.monotonic() - began < 1.5 * TTL - 1:
        assert bench.is_locked("shared")
        time.sleep(0.1)
    assert bench.get(bench.job("shared").delay(bench.tag)) is None
    bench.get(holder)
    assert 1 == len(bench.starts())


def test_killed(bench: Bench) -> None:
    """What a killed child held is freed by its main process, before it could expire."""
    bench.hold("shared")
    bench.kill_body(bench.starts()[0])
    until(lambda: not bench.is_locked("shared"), "the lease is freed", TTL / 3)


def test_copied_request(bench: Bench) -> None:
    """Nor does a body in such a child show its token when it copies or pickles its request."""
    assert "copied" == bench.get(bench.job("shared").delay(bench.tag, "copy_request"))
