"""A debounce with real workers: a run starts when no other call has come for a while."""

from __future__ import annotations

import time

from celery_singleton_lock.clock import now
from tests.integration.environment import WorkerEnvironment
from tests.integration.tasks import QUIET
from tests.servers import until


def test_one_call(env: WorkerEnvironment) -> None:
    """A call alone runs once the quiet time is over."""
    published = now()
    assert "done" == env.get(env.job("debounce").delay(env.tag))
    assert env.starts()[0]["at"] - published >= QUIET


def test_calls_in_a_row(env: WorkerEnvironment) -> None:
    """Of calls that follow each other quickly the first one runs, after the last has come; the others end as skipped."""
    results = []
    for _ in range(6):
        last = now()
        results.append(env.job("debounce").delay(env.tag))
        until(lambda: env.tickets("debounce") and (results[1:] == [] or results[-1].ready()), "it waits, or is skipped")
    assert ["done", *[None] * 5] == [env.get(result) for result in results]
    (start,) = env.starts()
    assert results[0].id == start["id"]
    assert start["at"] - last >= QUIET


def test_not_for_ever(env: WorkerEnvironment) -> None:
    """Calls that never stop do not postpone the run beyond `max_quiet`."""
    begun, results = now(), []
    while not env.starts() and now() < begun + 10 * QUIET:
        results.append(env.job("debounce").delay(env.tag))
        time.sleep(0.2)
    assert QUIET <= env.starts()[0]["at"] - begun
    assert {"done", None} == {env.get(result) for result in results}


def test_latest_call(env: WorkerEnvironment) -> None:
    """With ``keep="latest"`` the last call runs, with its own arguments."""
    results = []
    for number in range(4):
        before = env.tickets("debounce_latest")
        results.append(env.job("debounce_latest").apply_async((env.tag, "sleep"), {"seconds": number / 100}))
        until(lambda: env.tickets("debounce_latest") != before, "it waits")  # noqa: B023
    assert [None, None, None, "slept"] == [env.get(result) for result in results]
    assert [results[-1].id] == [start["id"] for start in env.starts()]


def test_calls_while_a_body_runs(env: WorkerEnvironment) -> None:
    """A call during a run starts after its end, once no other call came for the quiet time."""
    first = env.hold("debounce")
    called = now()
    others = [env.job("debounce").delay(env.tag) for _ in range(2)]
    until(lambda: any(result.ready() for result in others), "one of them is skipped")  # the one that comes second
    env.let_go()
    assert ["held", "done", None] == [env.get(first), *sorted(map(env.get, others), key=str, reverse=True)]
    assert env.starts()[1]["at"] > env.events("end")[0]["at"]
    assert env.starts()[1]["at"] - called >= QUIET


def test_own_retry(env: WorkerEnvironment) -> None:
    """A task's own retry does not wait for another quiet time."""
    result = env.job("debounce").apply_async((env.tag,), {"acts": ["retry", "return"], "seconds": 0.0})
    assert "done" == env.get(result)
    assert 2 == len(env.starts())
    assert 1 == len(env.worker.lines(result.id, "without another call"))
