"""A task's own retry is never dropped: it waits while another delivery holds its lock."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import pytest
from celery import chain, states

from tests.in_time import in_time
from tests.integration.environment import WorkerEnvironment
from tests.servers import until

#: Seconds after which the job's automatic retry comes.
AUTORETRY = 10.0


def meet(env: WorkerEnvironment, name: str, act: str, seconds: float) -> tuple[str, Any, str] | None:
    """Let another message hold the lock once a task has ended in its own retry, which comes after so many seconds.

    Return the tag, the result of a chain of that task and another step, and the holder's id; None if the retry may be earlier.
    """
    tag, job = env.other_tag(f"{seconds:g}"), env.job(name)
    then = env.app.tasks["then"].si(env.other_tag("after"))
    step = job.si(tag, [act, "return"], seconds)
    sent = time.monotonic()
    last = chain(step, then)()
    env.wait_for("end", tag)
    holder = job.apply_async((tag, "hold"))
    second = env.wait_for("start", tag, 2)
    return (tag, last, holder.id) if second["at"] < sent + (seconds if act == "retry" else AUTORETRY) else None


@pytest.mark.parametrize(("name", "act"), [("skip", "retry"), ("auto_own", "raise")], ids=["retry", "autoretry_for"])
def test_own_retry_waits(env: WorkerEnvironment, name: str, act: str) -> None:
    """Under skip an own retry that meets a holder is postponed and runs after it; `get()` and the chain get its result."""
    tag, last, holder = in_time(partial(meet, env, name, act))
    first = last.parent
    (met,) = until(lambda: env.lock_signals(env.key(name, tag), "duplicate"), "the own retry meets the holder")
    assert (first.id, holder) == (met["task_id"], met["holder"])
    env.wait_for_state(first, states.RETRY)
    env.let_go(tag)
    assert "done" == env.get(first)
    assert states.SUCCESS == first.state
    assert env.get(last).startswith("then")
    assert [(first.id, 0), (holder, 0), (first.id, 1)] == [(start["id"], start["retries"]) for start in env.starts(tag)]


def test_own_retry_is_skipped_if_asked(env: WorkerEnvironment) -> None:
    """Under Skip(own_retries=True) an own retry that meets a holder is skipped."""
    tag, last, holder = in_time(partial(meet, env, "own_retries", "retry"))
    assert "already" == env.get(last.parent)
    assert [last.parent.id, holder] == [start["id"] for start in env.starts(tag)]


def test_first_delivery_is_skipped(env: WorkerEnvironment) -> None:
    """A first delivery is skipped as before."""
    env.hold("skip")
    assert env.get(env.job("skip").delay(env.tag)) is None
