"""A lock with a `lock_limit`: so many bodies at once over all workers, and never one more."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from typing import Any

import pytest
from celery.result import AsyncResult

from celery_singleton_lock.line.joining import LONGEST_COPY_DELAY
from tests.in_time import in_time
from tests.integration.environment import SOON, WorkerEnvironment
from tests.integration.nodes import WorkerSpec
from tests.overlap.test_line import HOLDS, HOLDS_BRIEFLY, in_line, order
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
    """Of twelve tasks with one lock key three run at once, never four, and all run."""
    acts = [*["hold_own"] * 3, "sleep"]
    results = [
        env.job("limit").apply_async((env.tag, acts, 0.2), queue=queues[pools[number % len(pools)]])
        for number in range(12)
    ]
    env.wait_for("start", count=3)
    key = env.key("limit")
    until(lambda: 9 == len({one["task_id"] for one in env.lock_signals(key, "duplicate")}), "nine meet them")
    env.let_go()
    assert [*["held"] * 3, *["slept"] * 9] == sorted(env.get(result) for result in results)
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
    until(lambda: env.get(job.apply_async((env.tag,), queue=queues["threads"])) == "done", "a slot is free")


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
    sent = time.monotonic()
    waiting = enqueue(env, "limit_wait_long", 10, own, "sleep", 0.3)
    assert 3 == len(env.starts())
    env.let_go()
    assert ["slept"] * 10 == [env.get(one) for one in waiting]
    assert env.starts()[-1]["at"] < sent + LONGEST_COPY_DELAY
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
    third = job.apply_async((env.tag, "hold_own"), queue=queues["prefork"])
    env.wait_for("start", count=3)
    waiting = enqueue(env, "limit_wait_long", 5, list(queues.values()))
    env.let_go(third.id)
    assert ["done"] * 5 == [env.get(one) for one in waiting]
    assert_in_order(env, waiting)
    assert 3 == most_at_once(env)


def test_killed_holder_and_line(env: WorkerEnvironment, queues: dict[str, str]) -> None:
    """After a holder's child was killed, the messages in line run in order when the copy of the first comes."""
    for pool in ("prefork", "threads", "threads"):
        env.hold("limit_wait", acts="hold", queue=queues[pool], **HOLDS)
    waiting = enqueue(env, "limit_wait", 4, list(queues.values()))
    os.kill(env.starts()[0]["pid"], signal.SIGKILL)
    assert ["done"] * 4 == [env.get(one) for one in waiting]
    assert_in_order(env, waiting)


@pytest.mark.parametrize("pool", POOLS)
def test_own_retry_in_line(env: WorkerEnvironment, queues: dict[str, str], pool: str) -> None:
    """A task's own retry that finds all slots held waits in line behind the others, and runs."""
    job, options = env.job("limit_wait"), {"queue": queues[pool], **HOLDS}

    def attempt(seconds: float) -> tuple[str, AsyncResult] | None:
        tag = env.other_tag(f"{seconds:g}")
        for _ in range(2):
            env.hold("limit_wait", tag, "hold", **{**options, "queue": queues["threads"]})
        acts, sent = ["", "", "retry", "hold", "return"], time.monotonic()
        retried = job.apply_async((tag, acts, seconds), **options)
        env.wait_for("end", tag)
        job.apply_async((tag, "hold"), **options)
        fourth = env.wait_for("start", tag, 4)  # of the retry, if this took too long
        if fourth["at"] < sent + seconds:
            return tag, retried
        env.let_go(tag)
        return None

    tag, retried = in_time(attempt)
    until(lambda: in_line(env, "limit_wait", tag) == 1, "the retry waits")
    last = job.apply_async((tag,), queue=queues[pool])
    until(lambda: in_line(env, "limit_wait", tag) == 2, "the last one waits")
    env.let_go(tag)
    assert ["done", "done"] == [env.get(retried), env.get(last)]
    assert [0, 1] == [start["retries"] for start in env.starts(tag) if start["id"] == retried.id]
    assert most_at_once(env, tag) <= 3


def test_store_that_lost_its_data_while_ten_wait(env: WorkerEnvironment, queues: dict[str, str]) -> None:
    """After the store lost slots and line, the holders have their slots again, and all messages run, three at once."""
    # The holders have their slots again in a third of this time; the copies of those that wait come after all of it.
    options = HOLDS_BRIEFLY
    holders = [env.hold("limit_wait", acts="hold", queue=queues[pool], **options) for pool in ("prefork", *POOLS)]
    waiting = enqueue(env, "limit_wait", 10, list(queues.values()), "sleep", 0.1, **options)
    key = env.key("limit_wait")
    client: Any = env.store()
    client.delete(*client.keys(f"{key.partition(':lock:')[0]}*"))
    until(lambda: client.exists(key, f"{key}:1", f"{key}:2") == 3, "the slots are reacquired")
    client.close()
    env.let_go()
    assert ["held"] * 3 == [env.get(one) for one in holders]
    assert ["slept"] * 10 == [env.get(one) for one in waiting]
    assert (3, 13) == (most_at_once(env), len(env.starts()))


def test_one_more_once_all_slots_are_held(env: WorkerEnvironment, queues: dict[str, str]) -> None:
    """Under "run_once_more" two run at once; one duplicate of both waits, and runs as soon as one of them has ended."""
    own = list(queues.values())
    env.hold("limit_once_more", acts="hold", queue=own[0])
    second = env.job("limit_once_more").apply_async((env.tag, "hold_own"), queue=own[1])
    env.wait_for("start", count=2)
    (pending,) = enqueue(env, "limit_once_more", 1, own)
    job = env.job("limit_once_more")
    assert [None] * 4 == [env.get(job.apply_async((env.tag,), queue=own[number % 2])) for number in range(4)]
    env.let_go(second.id)
    assert "done" == env.get(pending)
    assert (3, pending.id) == (len(env.starts()), order(env)[2])


# -- publish and starts --------------------------------------------------------------------------


def test_published_up_to_the_limit(env: WorkerEnvironment, queues: dict[str, str]) -> None:
    """Two messages have a slot each from their publish on; until one ends, a third call returns the result of the oldest."""
    job, pools = env.job("limit_publish"), list(queues.values())

    def attempt(seconds: float) -> tuple[str, AsyncResult] | None:
        tag, sent = env.other_tag(f"{seconds:g}"), time.monotonic()
        first = job.apply_async((tag,), queue=env.other_tag("nobody"), expires=seconds)
        second = env.hold("limit_publish", tag, "hold", queue=pools[0])
        third = job.apply_async((tag,), queue=pools[1])
        if time.monotonic() > sent + seconds:
            return None
        assert (None, None) == (first.duplicate, second.duplicate)
        assert (first.id, first.id, "queued") == (third.id, third.duplicate.task_id, third.duplicate.state)
        assert f"{env.key('limit_publish', tag)}:1" == env.starts(tag)[0]["key"]
        return tag, second

    tag, second = in_time(attempt, 3.0)
    free = until(
        lambda: (call := job.apply_async((tag,), queue=pools[1])).duplicate is None and call,
        "the reservation has expired",
    )
    assert "done" == env.get(free)
    fourth = job.apply_async((tag, "hold"), queue=pools[1])
    assert (None, second.id) == (fourth.duplicate, job.apply_async((tag,), queue=pools[1]).id)
    env.let_go(tag)
    assert ["held", "held"] == [env.get(second), env.get(fourth)]
    until(lambda: job.lock_holder(tag) is None, "both slots are free")  # type: ignore[attr-defined]


@pytest.mark.parametrize("pool", POOLS)
def test_slot_of_a_published_retry(env: WorkerEnvironment, queues: dict[str, str], pool: str) -> None:
    """While a published task waits for its own retry, it keeps its slot, and runs in it again."""
    job, queue = env.job("limit_publish"), queues[pool]

    def attempt(seconds: float) -> tuple[str, AsyncResult] | None:
        tag = env.other_tag(f"{seconds:g}")
        holder, sent = env.hold("limit_publish", tag, "hold", queue=queue), time.monotonic()
        retried = job.apply_async((tag, ["", "retry", "return"], seconds), queue=queue)
        env.wait_for("end", tag)
        until(lambda: job.apply_async((tag,), queue=queue).duplicate or len(env.starts(tag)) > 2, "both slots are held")
        again = job.apply_async((tag,), queue=queue)
        if time.monotonic() > sent + seconds:
            return None
        assert holder.id == again.id
        return tag, retried

    tag, retried = in_time(attempt)
    assert "done" == env.get(retried)
    slots = [start["key"] for start in env.starts(tag) if start["id"] == retried.id]
    assert [f"{env.key('limit_publish', tag)}:1"] * 2 == slots
    assert 3 == len(env.starts(tag))
    until(lambda: job.apply_async((tag,), queue=queue).duplicate is None, "the slot is free")


def test_revoked_message_frees_its_slot(env: WorkerEnvironment, queues: dict[str, str]) -> None:
    """A published message that is revoked before its start frees its own slot when its worker drops it."""
    job, queue, node = env.job("limit_publish"), queues["prefork"], env.worker_of("prefork").hostname()

    def attempt(seconds: float) -> tuple[str, AsyncResult] | None:
        tag = env.other_tag(f"{seconds:g}")
        env.hold("limit_publish", tag, "hold", queue=queue)
        sent = time.monotonic()
        revoked = job.apply_async((tag,), countdown=seconds, queue=queue)
        env.app.control.revoke(revoked.id, destination=[node], reply=True, timeout=SOON)
        return (tag, revoked) if time.monotonic() < sent + seconds else None

    tag, revoked = in_time(attempt)
    env.wait_for_state(revoked, "REVOKED")
    until(lambda: job.apply_async((tag,), queue=queue).duplicate is None, "the slot is free")
    assert revoked.id not in [start["id"] for start in env.starts(tag)]


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
        return type(result.get(timeout=SOON, propagate=False)).__name__ == "TooManyStarts"

    until(is_refused, "the crashed start counts")
    env.let_go()
    assert "held" == env.get(holders[0])


# -- a recipe ------------------------------------------------------------------------------------


def test_three_exports_of_a_customer(env: WorkerEnvironment, queues: dict[str, str]) -> None:
    """Exports of two tasks in one group with a limit of 3: for a customer never more than three run at once, and all run."""
    results, acts = [], [*["hold_own"] * 3, "sleep"]
    for number in range(12):
        task, queue = ("exports.orders", "exports.invoices")[number % 2], queues[POOLS[number // 2 % 2]]
        results.append(env.job(task).apply_async((env.tag, env.tag, acts, 0.2), queue=queue))
    env.wait_for("start", count=3)
    other = env.other_tag("customer")
    env.job("exports.orders").apply_async((other, other, "hold"), queue=queues["threads"])
    env.wait_for("start", other)
    env.let_go()
    assert [*["held"] * 3, *["slept"] * 9] == sorted(env.get(one) for one in results)
    assert (3, 12) == (most_at_once(env), len(env.starts()))
