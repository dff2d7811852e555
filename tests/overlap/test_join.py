"""Duplicates that end with the result of their holder."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from celery import chain, chord, states
from celery.exceptions import TaskRevokedError
from celery.result import AsyncResult

from celery_singleton_lock import DuplicateTask
from tests.in_time import in_time
from tests.integration.environment import WorkerEnvironment
from tests.integration.nodes import LocalWorkerNode, WorkerSpec
from tests.integration.tasks import Boom
from tests.servers import until


@pytest.fixture(scope="module", params=["prefork", "threads"])
def pool(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def prefork(pool: str) -> None:
    """Skip a test that kills a body in other pools."""
    if pool != "prefork":
        pytest.skip("a thread cannot be killed")


def joiner(env: WorkerEnvironment, name: str = "join", **options: Any) -> AsyncResult:
    """Send a duplicate of a job whose lock is held, and return once it follows the holder."""
    result = env.job(name).apply_async((env.tag,), **options)
    until_duplicate(env, name, result)
    return result


def until_duplicate(env: WorkerEnvironment, name: str, result: AsyncResult) -> None:
    until(lambda: duplicates(env, name, result), f"{result.id} is a duplicate")


def duplicates(env: WorkerEnvironment, name: str, result: AsyncResult) -> list[Any]:
    """Return the signals that tell that a message is a duplicate."""
    found = env.lock_signals(env.key(name), "duplicate")
    return [event for event in found if event["task_id"] == result.id]


def order(env: WorkerEnvironment) -> list[str]:
    """Return the task ids of the bodies that started, in order."""
    return [start["id"] for start in env.starts()]


def assert_one_at_a_time(env: WorkerEnvironment) -> None:
    """Check that each body ended before the next one started."""
    bodies = [event["what"] for event in env.events() if event["what"] in ("start", "end")]
    assert ["start", "end"] * (len(bodies) // 2) == bodies


@pytest.mark.timed
def test_result_comes_soon(env: WorkerEnvironment) -> None:
    """The result comes within a quarter of the time waited; and some 50 ms for each message on the way."""
    began = time.monotonic()
    first = env.job("join").apply_async((env.tag, "sleep", 4.0))
    env.wait_for("start")
    second = joiner(env)
    assert "slept" == env.get(first)
    ended = time.monotonic()
    assert "slept" == env.get(second)
    assert time.monotonic() - ended < (ended - began) / 4 + 0.8


def test_result(env: WorkerEnvironment) -> None:
    """Twenty duplicates end with the holder's value; one body runs, and each of them is told of once."""
    first = env.hold("join")
    others = [env.job("join").delay(env.tag) for _ in range(20)]
    for other in others:
        until_duplicate(env, "join", other)
    time.sleep(1)  # they look again meanwhile
    assert all(other.state in (states.PENDING, states.STARTED) for other in others)
    env.let_go()
    assert ["held"] * 21 == [env.get(result) for result in (first, *others)]
    assert [first.id] == order(env)
    assert [1] * 20 == [len(duplicates(env, "join", other)) for other in others]


def test_error(env: WorkerEnvironment) -> None:
    """A duplicate of a holder that fails ends with the same error, and is not retried for it."""
    first = env.hold("join_auto", acts="hold_raise", retries=3)  # Celery's default maximum
    other = joiner(env, "join_auto")
    env.let_go()
    assert [Boom.__name__] * 2 == [type(env.error(result)).__name__ for result in (first, other)]
    assert [first.id] == order(env)


def test_revoked_holder(env: WorkerEnvironment, prefork: None) -> None:
    """A duplicate of a holder that is revoked ends with `TaskRevokedError`."""
    first = env.hold("join")
    other = joiner(env)
    env.app.control.revoke(first.id, terminate=True, destination=[env.worker.hostname()])
    assert isinstance(env.error(other), TaskRevokedError)
    assert [first.id] == order(env)


def test_own_retries_of_the_holder(env: WorkerEnvironment) -> None:
    """A duplicate follows its holder through retries, during whose countdown the lock is free."""
    first = env.hold("join", acts=("hold_retry", "return"))
    other = joiner(env)
    env.let_go()
    assert ["done", "done"] == [env.get(first), env.get(other)]
    assert [first.id, first.id] == order(env)


def test_own_retry_meets_another(env: WorkerEnvironment) -> None:
    """A task's own retry does not join: it runs once the lock is free."""

    def attempt(seconds: float) -> tuple[str, AsyncResult, AsyncResult] | None:
        tag, job, sent = env.other_tag(f"{seconds:g}"), env.job("join"), time.monotonic()
        first = job.apply_async((tag,), {"acts": ("retry", "hold", "return"), "seconds": seconds})
        env.wait_for("end", tag)
        second = job.apply_async((tag, "hold"))
        start = env.wait_for("start", tag, 2)  # of the retry, if this took too long
        return (tag, first, second) if start["at"] < sent + seconds else None

    tag, first, second = in_time(attempt)
    until(
        lambda: first.id in [one["task_id"] for one in env.lock_signals(env.key("join", tag), "duplicate")], "it meets"
    )
    env.let_go(tag)
    assert ["held", "done"] == [env.get(second), env.get(first)]
    assert [first.id, second.id, first.id] == [start["id"] for start in env.starts(tag)]


def test_killed_holder(env: WorkerEnvironment, prefork: None) -> None:
    """If the holder's process is killed, one of its duplicates runs, and those that meet it end with its result."""
    first = env.hold("join")
    others = [joiner(env, kwargs={"acts": "hold"}) for _ in range(3)]
    env.kill_body(env.starts()[0])
    until(lambda: env.starts()[1:] or any(other.ready() for other in others), "one of them goes on")
    assert [] == [env.get(other) for other in others if other.ready()]
    runner = env.starts()[1]["id"]
    received = {other.id: len(env.worker.lines("received", other.id)) for other in others if other.id != runner}
    for other, count in received.items():  # the last but one of these deliveries has met it
        env.worker.wait_for_lines("received", other, count=count + 2)
    env.let_go()
    assert ["held"] * 3 == [env.get(other) for other in others]
    assert 2 == len(order(env))
    assert order(env)[0] == first.id
    assert order(env)[1] in [other.id for other in others]


def test_killed_worker(env: WorkerEnvironment, prefork: None, fresh_worker: Callable[..., LocalWorkerNode]) -> None:
    """So it is if its whole worker is killed."""
    node = fresh_worker(WorkerSpec("prefork", 1))
    env.hold("join_late", queue=node.worker_queue)
    other = joiner(env, "join_late")
    node.kill()
    assert "done" == env.get(other)
    assert 2 == len(order(env))


def test_holder_without_a_result(env: WorkerEnvironment) -> None:
    """If the holder ignores its result, one of its duplicates runs after it, once it has found the lock free for a second."""
    first = env.hold("join_silent")
    other = joiner(env, "join_silent")
    env.let_go()
    until(lambda: [first.id, other.id] == order(env), "both have run")
    assert_one_at_a_time(env)
    assert env.starts()[1]["at"] - env.events("end")[0]["at"] > 0.9


def look_again(env: WorkerEnvironment, *results: AsyncResult) -> None:
    """Wait until each of these duplicates has come three times more: the second time it would run if the lock was free."""
    for result in results:
        env.worker.wait_for_lines(result.id, "received", count=3 + len(env.worker.lines(result.id, "received")))


@pytest.mark.parametrize(("act", "end"), [("hold_replace", "held"), ("hold_replace_chain", "then {}")])
def test_replaced_holder(env: WorkerEnvironment, act: str, end: str) -> None:
    """If the holder ends with `self.replace()`, its duplicates end with the result of the replacement, and none of them runs.

    The lock is free meanwhile: the holder's own work is over.
    """
    stage = env.other_tag("stage")
    first = env.hold("join", acts=act)
    others = [joiner(env) for _ in range(3)]
    env.let_go()
    env.wait_for("start", stage)
    until(lambda: not env.is_locked("join"), "the lock is free")
    look_again(env, *others)
    env.let_go(stage)
    assert [end.format(env.tag)] * 4 == [env.get(result) for result in (first, *others)]
    assert [first.id] == order(env)
    assert 1 == len(env.starts(stage))


def test_replacement_that_fails(env: WorkerEnvironment) -> None:
    """If the replacement fails, the duplicates of the replaced task end with its error."""
    stage = env.other_tag("stage")
    first = env.hold("join", acts="hold_replace_raise")
    other = joiner(env)
    env.let_go()
    env.wait_for("start", stage)
    look_again(env, other)
    env.let_go(stage)
    assert [Boom.__name__] * 2 == [type(env.error(result)).__name__ for result in (first, other)]
    assert [first.id] == order(env)


def test_task_that_replaces_itself(env: WorkerEnvironment) -> None:
    """A replacement may be the same task: it acquires the lock anew, and the duplicates end with its result."""
    first = env.hold("join", acts="hold_replace_self")
    other = joiner(env)
    env.let_go()
    assert ["slept", "slept"] == [env.get(first), env.get(other)]
    assert [first.id, first.id] == order(env)


def test_call_after_a_replaced_task(env: WorkerEnvironment) -> None:
    """A replaced task has ended: a call that comes while the replacement works is no duplicate."""
    stage = env.other_tag("stage")
    first = env.hold("join", acts=("hold_replace", "return"))
    env.let_go()
    env.wait_for("start", stage)
    until(lambda: not env.is_locked("join"), "the lock is free")
    assert "done" == env.get(env.job("join").delay(env.tag))
    env.let_go(stage)
    assert "held" == env.get(first)


def test_canvas(env: WorkerEnvironment) -> None:
    """The next step of a chain and the body of a chord get the holder's value."""
    first = env.hold("join")
    follower = env.app.tasks["collect"]
    one = chain(env.job("join").s(env.tag), follower.s(env.tag)).delay()
    until_duplicate(env, "join", one.parent)
    two = chord([env.job("join").s(env.tag), env.job("join").s(env.tag)], follower.s(env.tag)).delay()
    for member in two.parent:
        until_duplicate(env, "join", member)
    env.let_go()
    assert ["held", "held", ["held", "held"]] == [env.get(first), env.get(one), env.get(two)]
    assert [first.id] == order(env)


def test_descendant(env: WorkerEnvironment) -> None:
    """A duplicate that its holder has sent fails at once, as the holder may be waiting for it."""
    first = env.hold("join", acts="publish_and_hold")
    other = AsyncResult(env.wait_for("published")["id"], app=env.app)
    assert isinstance(env.error(other), DuplicateTask)
    env.let_go()
    assert "held" == env.get(first)


def test_too_long(env: WorkerEnvironment) -> None:
    """A duplicate that has followed for `max_wait` fails with `DuplicateTask`."""
    first = env.hold("join_impatient")
    error = env.error(joiner(env, "join_impatient"))
    assert isinstance(error, DuplicateTask)
    assert first.id == error.holder.task_id
    env.let_go()


def test_during_a_cooldown(env: WorkerEnvironment) -> None:
    """During `lock_at_least` a duplicate ends at once with the last result."""
    assert "done" == env.get(env.job("join_throttled").delay(env.tag))
    other = env.job("join_throttled").apply_async((env.tag, "sleep"))
    assert "done" == env.get(other)
    assert env.is_locked("join_throttled")
    assert 1 == len(order(env))


def test_publish(env: WorkerEnvironment) -> None:
    """With `lock_from="publish"` a duplicate is sent, and follows the message that has the lock, from before its start."""
    with env.captured_messages() as messages:
        first = env.job("join_publish").apply_async((env.tag,), queue=env.other_tag("nobody"))
    other = env.job("join_publish").delay(env.tag)
    assert first.id == other.duplicate.task_id
    assert other.id != first.id
    until_duplicate(env, "join_publish", other)
    env.redeliver({**messages[0], "routing_key": env.worker.worker_queue})
    assert ["done", "done"] == [env.get(first), env.get(other)]
    assert [first.id] == order(env)


def test_redelivered_duplicate(env: WorkerEnvironment) -> None:
    """A duplicate that is delivered twice ends with the holder's value."""
    first = env.hold("join")
    with env.captured_messages() as messages:
        other = joiner(env)
    env.redeliver(messages[0])
    until(lambda: 2 == len(duplicates(env, "join", other)), "both follow")
    env.let_go()
    assert ["held", "held"] == [env.get(first), env.get(other)]
    env.finish(other.id)
    assert "held" == env.get(other)
    assert [first.id] == order(env)


def test_revoked_duplicate(env: WorkerEnvironment) -> None:
    """A duplicate that is revoked while it follows ends as revoked."""
    first = env.hold("join")
    other = joiner(env)
    env.app.control.revoke(other.id, destination=[env.worker.hostname()])
    env.wait_for_state(other, states.REVOKED)
    env.let_go()
    assert "held" == env.get(first)


def test_duplicate_that_cannot_be_published(env: WorkerEnvironment) -> None:
    """If its message cannot be published again, a duplicate fails; it goes back to the broker if it acknowledges late."""
    first = env.hold("join")
    env.allow_publishing(False)
    other = env.job("join").delay(env.tag)
    assert isinstance(env.error(other), DuplicateTask)
    env.let_go()
    assert "held" == env.get(first)
    env.allow_publishing(True)
