"""A signature with a `lock_limit`: so many bodies at once over all workers, and never one more."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from typing import Any

import pytest
from celery.result import AsyncResult

from tests.integration.environment import WorkerEnvironment
from tests.integration.nodes import WorkerSpec
from tests.overlap.test_line import in_line, order
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


def most_at_once(env: WorkerEnvironment, tag: str | None = None) -> int:
    """Return how many bodies of a tag ran at once."""
    steps = sorted((event["at"], {"start": 1, "end": -1}[event["what"]]) for event in env.events(tag=tag)
                   if event["what"] in ("start", "end"))  # fmt: skip
    running, most = 0, 0
    for _, step in steps:
        running += step
        most = max(most, running)
    return most


def enqueue(
    env: WorkerEnvironment, name: str, count: int, queues: Sequence[str], *args: Any, **options: Any
) -> list[AsyncResult]:
    """Send duplicates of a job to these queues in turn, each once the one before waits in line."""
    results = []
    for number in range(count):
        before, queue = in_line(env, name), queues[number % len(queues)]
        results.append(env.job(name).apply_async((env.tag, *args), queue=queue, **options))
        until(lambda: in_line(env, name) > before, f"number {number} waits")  # noqa: B023
    return results


def assert_in_order(env: WorkerEnvironment, results: Sequence[AsyncResult], limit: int = 1) -> None:
    """Check that these messages started once each in this order, but for those that were in turn together."""
    expected = [result.id for result in results]
    found = [task_id for task_id in order(env) if task_id in expected]
    assert sorted(expected) == sorted(found)
    for number, task_id in enumerate(found):
        overtaken = [one for one in expected[: expected.index(task_id)] if one in found[number:]]
        assert len(overtaken) < limit, f"{found} instead of {expected}"


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


# -- the line ------------------------------------------------------------------------------------


@pytest.mark.parametrize("pools", [("prefork",), ("threads",), POOLS], ids="+".join)
def test_line_in_order(env: WorkerEnvironment, queues: dict[str, str], pools: Sequence[str]) -> None:
    """Ten messages that wait start in order as soon as others end, three at once."""
    own = [queues[pool] for pool in pools]
    holders = [env.hold("limit_wait_long", acts="hold", queue=own[number % len(own)]) for number in range(3)]
    waiting = enqueue(env, "limit_wait_long", 10, own, "sleep", 0.3)
    assert 3 == len(env.starts())
    env.let_go()
    begun = time.monotonic()
    assert ["slept"] * 10 == [env.get(one) for one in waiting]
    assert time.monotonic() < begun + 15  # their copies come after a minute
    assert ["held"] * 3 == [env.get(one) for one in holders]
    assert 3 == most_at_once(env)
    assert_in_order(env, waiting, 3)
    until(lambda: not env.is_locked("limit_wait_long"), "the lock is free")
    assert 0 == in_line(env, "limit_wait_long")


def test_each_end_starts_one(env: WorkerEnvironment, queues: dict[str, str]) -> None:
    """While two bodies go on, the messages in line run one after the other, each at once after the one before."""
    for _ in range(2):
        env.hold("limit_wait_long", acts="hold", queue=queues["threads"])
    job = env.job("limit_wait_long")
    job.apply_async((env.tag, "sleep", 2.0), queue=queues["prefork"])
    env.wait_for("start", count=3)
    waiting = enqueue(env, "limit_wait_long", 5, list(queues.values()))
    assert ["done"] * 5 == [env.get(one) for one in waiting]
    assert_in_order(env, waiting)
    assert 3 == most_at_once(env)


def test_killed_holder_and_line(env: WorkerEnvironment, queues: dict[str, str]) -> None:
    """After a holder's child was killed, the messages in line run in order when the copy of the first comes."""
    for pool in ("prefork", "threads", "threads"):
        env.hold("limit_wait", acts="hold", queue=queues[pool])
    waiting = enqueue(env, "limit_wait", 4, list(queues.values()))
    os.kill(env.starts()[0]["pid"], signal.SIGKILL)
    assert ["done"] * 4 == [env.get(one, 40) for one in waiting]
    assert_in_order(env, waiting)


@pytest.mark.parametrize("pool", POOLS)
def test_own_retry_in_line(env: WorkerEnvironment, queues: dict[str, str], pool: str) -> None:
    """A task's own retry that finds all slots held waits in line behind the others, and runs."""
    for _ in range(2):
        env.hold("limit_wait", acts="hold", queue=queues["threads"])
    acts = ["", "", "retry", "hold", "return"]
    retried = env.job("limit_wait").apply_async((env.tag, acts, 1.0), queue=queues[pool])
    env.wait_for("end")
    env.hold("limit_wait", acts="hold", queue=queues[pool])
    until(lambda: in_line(env, "limit_wait") == 1, "the retry waits")
    (last,) = enqueue(env, "limit_wait", 1, [queues[pool]])
    env.let_go()
    assert ["done", "done"] == [env.get(retried), env.get(last)]
    assert [0, 1] == [start["retries"] for start in env.starts() if start["id"] == retried.id]
    assert most_at_once(env) <= 3


def test_store_that_lost_its_data_while_ten_wait(env: WorkerEnvironment, queues: dict[str, str]) -> None:
    """After the store lost slots and line, the holders have their slots again, and all messages run, three at once."""
    holders = [env.hold("limit_wait", acts="hold", queue=queues[pool]) for pool in ("prefork", *POOLS)]
    waiting = enqueue(env, "limit_wait", 10, list(queues.values()), "sleep", 0.1)
    key = env.key("limit_wait")
    client: Any = env.store()
    client.delete(*client.keys(f"{key.partition(':lock:')[0]}*"))
    until(lambda: client.exists(key, f"{key}:1", f"{key}:2") == 3, "the slots are reacquired", 10)
    client.close()
    env.let_go()
    assert ["held"] * 3 == [env.get(one) for one in holders]
    assert ["slept"] * 10 == [env.get(one, 60) for one in waiting]
    assert (3, 13) == (most_at_once(env), len(env.starts()))


def test_one_more_once_all_slots_are_held(env: WorkerEnvironment, queues: dict[str, str]) -> None:
    """Under "run_once_more" two run at once; one duplicate of both waits, and runs as soon as one of them has ended."""
    own = list(queues.values())
    env.hold("limit_once_more", acts="hold", queue=own[0])
    env.job("limit_once_more").apply_async((env.tag, "sleep", 3.0), queue=own[1])
    env.wait_for("start", count=2)
    (pending,) = enqueue(env, "limit_once_more", 1, own)
    job = env.job("limit_once_more")
    assert [None] * 4 == [env.get(job.apply_async((env.tag,), queue=own[number % 2])) for number in range(4)]
    assert "done" == env.get(pending)
    assert (3, pending.id) == (len(env.starts()), order(env)[2])


# -- publish and starts --------------------------------------------------------------------------


def test_published_up_to_the_limit(env: WorkerEnvironment, queues: dict[str, str]) -> None:
    """Two messages have a slot each from their publish on; until one ends, a third call returns the result of the oldest."""
    job, pools = env.job("limit_publish"), list(queues.values())
    nowhere = f"nowhere-{env.tag}"
    first = job.apply_async((env.tag,), queue=nowhere, expires=3.0)
    second = env.hold("limit_publish", acts="hold", queue=pools[0])
    assert (None, None) == (first.duplicate, second.duplicate)
    third = job.apply_async((env.tag,), queue=pools[1])
    assert (first.id, first.id, "queued") == (third.id, third.duplicate.task_id, third.duplicate.state)
    assert f"{env.key('limit_publish')}:1" == env.starts()[0]["key"]
    free = until(
        lambda: (call := job.apply_async((env.tag,), queue=pools[1])).duplicate is None and call,
        "the reservation has expired",
        10,
    )
    assert "done" == env.get(free)
    fourth = job.apply_async((env.tag, "sleep", 1.0), queue=pools[1])
    assert (None, second.id) == (fourth.duplicate, job.apply_async((env.tag,), queue=pools[1]).id)
    env.let_go()
    assert ["held", "slept"] == [env.get(second), env.get(fourth)]
    until(lambda: job.lock_holder(env.tag) is None, "both slots are free")  # type: ignore[attr-defined]


@pytest.mark.parametrize("pool", POOLS)
def test_slot_of_a_published_retry(env: WorkerEnvironment, queues: dict[str, str], pool: str) -> None:
    """While a published task waits for its own retry, it keeps its slot, and runs in it again."""
    job = env.job("limit_publish")
    holder = env.hold("limit_publish", acts="hold", queue=queues[pool])
    retried = job.apply_async((env.tag, ["", "retry", "return"], 2.0), queue=queues[pool])
    env.wait_for("end")
    until(lambda: job.apply_async((env.tag,), queue=queues[pool]).duplicate, "both slots are held")
    assert holder.id == job.apply_async((env.tag,), queue=queues[pool]).id
    assert "done" == env.get(retried)
    slots = [start["key"] for start in env.starts() if start["id"] == retried.id]
    assert [f"{env.key('limit_publish')}:1"] * 2 == slots
    assert 3 == len(env.starts())
    until(lambda: job.apply_async((env.tag,), queue=queues[pool]).duplicate is None, "the slot is free")


def test_revoked_message_frees_its_slot(env: WorkerEnvironment, queues: dict[str, str]) -> None:
    """A published message that is revoked before its start frees its own slot when its worker drops it."""
    job = env.job("limit_publish")
    env.hold("limit_publish", acts="hold", queue=queues["prefork"])
    revoked = job.apply_async((env.tag,), countdown=2, queue=queues["prefork"])
    env.worker.wait_for_lines(revoked.id, "received")
    env.app.control.revoke(revoked.id, destination=[env.worker_of("prefork").hostname()])
    env.wait_for_state(revoked, "REVOKED")
    until(lambda: job.apply_async((env.tag,), queue=queues["prefork"]).duplicate is None, "the slot is free")
    assert revoked.id not in order(env)


def test_published_messages_in_line(env: WorkerEnvironment, queues: dict[str, str]) -> None:
    """Under "wait" a call beyond the limit is published, waits in line, and runs before calls that come later."""
    holders = [env.hold("limit_publish_wait", acts="hold", queue=queue) for queue in queues.values()]
    waiting = enqueue(env, "limit_publish_wait", 4, list(queues.values()))
    assert [holders[0].id] * 4 == [one.duplicate.task_id for one in waiting]
    env.let_go()
    assert ["done"] * 4 == [env.get(one) for one in waiting]
    assert_in_order(env, waiting, 2)
    assert 2 == most_at_once(env)


def test_crashed_starts(env: WorkerEnvironment, queues: dict[str, str]) -> None:
    """Starts that run do not count as crashed; after a crash no further start is allowed, while the others go on."""
    job = env.job("limit_starts")
    holders = [env.hold("limit_starts", acts="hold", queue=queues[pool]) for pool in ("threads", "prefork")]
    assert "done" == env.get(job.apply_async((env.tag,), queue=queues["threads"]))
    os.kill(env.starts()[1]["pid"], signal.SIGKILL)

    def is_refused() -> bool:
        result = job.apply_async((env.tag,), queue=queues["threads"])
        return type(result.get(timeout=20, propagate=False)).__name__ == "TooManyStarts"

    until(is_refused, "the crashed start counts", 10)
    env.let_go()
    assert "held" == env.get(holders[0])


# -- a recipe ------------------------------------------------------------------------------------


def test_three_exports_of_a_customer(env: WorkerEnvironment, queues: dict[str, str]) -> None:
    """Exports of two tasks in one group with a limit of 3: for a customer never more than three run at once, and all run."""
    results = []
    for number in range(12):
        task, queue = ("exports.orders", "exports.invoices")[number % 2], queues[POOLS[number // 2 % 2]]
        results.append(env.job(task).apply_async((env.tag, env.tag, "sleep", 0.3), queue=queue))
    other = env.other_tag("customer")
    env.job("exports.orders").apply_async((other, other, "hold"), queue=queues["threads"])
    env.wait_for("start", other)
    assert ["slept"] * 12 == [env.get(one, 60) for one in results]
    assert (3, 12) == (most_at_once(env), len(env.starts()))
