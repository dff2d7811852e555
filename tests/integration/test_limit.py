"""A signature with a `lock_limit`: so many bodies at once over all workers, and never one more."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

import pytest

from tests.integration.environment import WorkerEnvironment
from tests.integration.nodes import WorkerSpec
from tests.servers import until

POOLS = ("prefork", "threads")


@pytest.fixture(scope="module")
def worker_specs() -> Sequence[WorkerSpec]:
    """One worker of each pool, with more room together than the limit."""
    return [WorkerSpec(pool, concurrency=4) for pool in POOLS]


@pytest.fixture
def queues(env: WorkerEnvironment) -> dict[str, str]:
    """Return the queue of each pool's worker."""
    return {pool: env.worker_of(pool).worker_queue for pool in POOLS}


def most_at_once(env: WorkerEnvironment) -> int:
    """Return how many bodies of the test's tag ran at once."""
    steps = sorted((event["at"], {"start": 1, "end": -1}[event["what"]]) for event in env.events()
                   if event["what"] in ("start", "end"))  # fmt: skip
    running, most = 0, 0
    for _, step in steps:
        running += step
        most = max(most, running)
    return most


@pytest.mark.parametrize("pools", [("prefork",), ("threads",), POOLS], ids="+".join)
def test_three_at_once(env: WorkerEnvironment, queues: dict[str, str], pools: Sequence[str]) -> None:
    """Of twelve tasks of one signature three run at once, never four, and all run."""
    results = [
        env.job("limit").apply_async((env.tag, "sleep", 0.5), queue=queues[pools[number % len(pools)]])
        for number in range(12)
    ]
    assert ["slept"] * 12 == [env.get(result, 60) for result in results]
    assert (3, 12) == (most_at_once(env), len(env.starts()))
    until(lambda: not env.is_locked("limit"), "the lock is free")


@pytest.mark.parametrize("pool", POOLS)
def test_a_duplicate_beyond_the_limit(env: WorkerEnvironment, queues: dict[str, str], pool: str) -> None:
    """The tasks up to the limit run, the next one is skipped and names the oldest; an end makes room for one."""
    holders = [env.hold("limit_skip", queue=queues[one], acts="hold") for one in POOLS]
    assert env.get(env.job("limit_skip").apply_async((env.tag,), queue=queues[pool])) is None
    (met,) = env.lock_signals(env.key("limit_skip"), "duplicate")
    assert holders[0].id == met["holder"] == env.job("limit_skip").lock_holder(env.tag).task_id  # type: ignore[attr-defined]
    env.let_go()
    assert ["held", "held"] == [env.get(one) for one in holders]
    assert "done" == env.get(env.job("limit_skip").apply_async((env.tag,), queue=queues[pool]))


def test_killed_child_frees_its_slot(env: WorkerEnvironment, queues: dict[str, str]) -> None:
    """The worker of a killed child releases the child's slot, whatever its number, long before its TTL."""
    for _ in range(2):
        env.hold("limit_skip", queue=queues["prefork"], acts="hold")
    second = env.starts()[1]
    assert f"{env.key('limit_skip')}:1" == second["key"]
    os.kill(second["pid"], signal.SIGKILL)
    job = env.job("limit_skip")
    until(lambda: env.get(job.apply_async((env.tag,), queue=queues["threads"])) == "done", "a slot is free", 6)


def test_each_customer_has_a_limit(env: WorkerEnvironment, queues: dict[str, str]) -> None:
    """A callable limit is asked for each call: one at a time for a free plan, two for a paid one."""
    free, paid = env.other_tag("free"), env.other_tag("paid")
    for tag, number in ((free, 1), (paid, 2)):
        for count in range(number):
            env.hold("limit_by_plan", tag, queue=queues[POOLS[count]], acts="hold")
        for queue in queues.values():
            assert env.get(env.job("limit_by_plan").apply_async((tag,), queue=queue)) is None
    assert [1, 2] == [len(env.starts(tag)) for tag in (free, paid)]
