"""A task's own retry is never dropped: it waits while another delivery holds its signature."""

from __future__ import annotations

from typing import Any

import pytest
from celery import chain, states

from tests.integration.environment import WorkerEnvironment
from tests.servers import until


def retried(env: WorkerEnvironment, name: str, act: str) -> Any:
    """Return a signature whose first run ends in its own retry in 2 s, and whose next run succeeds."""
    return env.job(name).si(env.tag, [act, "return"], 2.0)


def hold_meanwhile(env: WorkerEnvironment, name: str) -> str:
    """Hold the lock once the first run has ended; return the holder's id."""
    env.wait_for("end")
    return env.hold(name, acts="hold").id


@pytest.mark.parametrize(("name", "act"), [("skip", "retry"), ("auto_own", "raise")], ids=["retry", "autoretry_for"])
def test_own_retry_waits(env: WorkerEnvironment, name: str, act: str) -> None:
    """Under skip an own retry that meets a holder is postponed and runs after it; `get()` and the chain get its result."""
    then = env.app.tasks["then"].si(env.other_tag("after"))
    last = chain(retried(env, name, act), then)()
    first = last.parent
    holder = hold_meanwhile(env, name)
    (met,) = until(lambda: env.lock_signals(env.key(name), "duplicate"), "the own retry meets the holder")
    assert (first.id, holder) == (met["task_id"], met["holder"])
    env.wait_for_state(first, states.RETRY)
    env.let_go()
    assert "done" == env.get(first)
    assert states.SUCCESS == first.state
    assert env.get(last).startswith("then")
    assert [(first.id, 0), (holder, 0), (first.id, 1)] == [(start["id"], start["retries"]) for start in env.starts()]


def test_own_retry_is_skipped_if_asked(env: WorkerEnvironment) -> None:
    """Under Skip(own_retries=True) an own retry that meets a holder is skipped."""
    first = retried(env, "own_retries", "retry").apply_async()
    holder = hold_meanwhile(env, "own_retries")
    assert "already" == env.get(first)
    assert [first.id, holder] == [start["id"] for start in env.starts()]


def test_first_delivery_is_skipped(env: WorkerEnvironment) -> None:
    """A first delivery is skipped as before."""
    env.hold("skip")
    assert env.get(env.job("skip").delay(env.tag)) is None
