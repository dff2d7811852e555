"""Newcomers that replace the holder: it is asked to stop, and they run once it has ended, never before."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
from celery import chain, chord, states
from celery.exceptions import TaskRevokedError
from celery.result import AsyncResult

from celery_singleton_lock import DuplicateTask, Replace
from celery_singleton_lock.delivery.retry_state import RETRY_STATE_HEADER
from celery_singleton_lock.line.joining import LONGEST_COPY_DELAY
from tests.in_time import in_time
from tests.integration.environment import SOON, WorkerEnvironment
from tests.integration.nodes import LocalWorkerNode, WorkerSpec
from tests.integration.test_pools import TERMINATES
from tests.overlap.test_line import HOLDS
from tests.servers import until

pytestmark = pytest.mark.long


@pytest.fixture(scope="module", params=["prefork", "threads"])
def pool(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def prefork(pool: str) -> None:
    """Skip a test about child processes in other pools."""
    if pool != "prefork":
        pytest.skip("other pools cannot terminate a task")


def newcomer(env: WorkerEnvironment, name: str, **options: Any) -> AsyncResult:
    """Send a duplicate of a job whose lock is held, and return once it waits."""
    result = env.job(name).apply_async((env.tag,), options.pop("kwargs", None), **options)
    until(lambda: waiting(env, name) == result.id, "the newcomer waits")
    return result


def waiting(env: WorkerEnvironment, name: str) -> str:
    """Return the task id of the message that waits for the lock of a job."""
    key = env.key(name)
    client: Any = env.store()
    try:
        for ticket in client.zrange(key.replace(":lock:", ":line:"), 0, 0):
            return str((client.hget(key.replace(":lock:", ":waiting:"), ticket + b":task") or b"").decode())
        return ""
    finally:
        client.close()


def order(env: WorkerEnvironment, tag: str | None = None) -> list[str]:
    """Return the task ids of the bodies that started, in order."""
    return [start["id"] for start in env.starts(tag)]


def assert_one_at_a_time(env: WorkerEnvironment) -> None:
    """Check that each body ended before the next one started."""
    bodies = [event["what"] for event in env.events() if event["what"] in ("start", "end")]
    assert ["start", "end"] * (len(bodies) // 2) == bodies


def reason(env: WorkerEnvironment, result: AsyncResult) -> str:
    """Wait until a task is stored as REVOKED, and return why."""
    env.wait_for_state(result, states.REVOKED)
    return str(env.error(result))


def test_cooperative_body(env: WorkerEnvironment) -> None:
    """A body that sees that its lease is not held any more returns its value; the newcomer runs after it."""
    first = env.hold("replace", acts="obey", **HOLDS)
    sent = time.monotonic()
    second = env.job("replace").delay(env.tag)
    assert ["obeyed", "done"] == [env.get(first), env.get(second)]
    assert env.starts()[1]["at"] < sent + LONGEST_COPY_DELAY
    assert [first.id, second.id] == order(env)
    assert_one_at_a_time(env)
    assert 1 == len(until(lambda: env.lock_signals(env.key("replace"), "lock_lost"), "lock_lost"))
    until(lambda: 2 == len(env.lock_signals(env.key("replace"), "lock_released")), "lock_released")
    assert 1 == len(env.worker.wait_for_lines("WARNING", first.id, "is to stop"))
    until(lambda: not env.is_locked("replace"), "the lock is free")


def test_lock_is_kept_until_the_end(env: WorkerEnvironment) -> None:
    """A body that goes on after it was asked keeps its lock, and nobody runs until it has ended."""
    first = env.hold("replace", acts="obey_later")
    second = newcomer(env, "replace")
    env.wait_for("not-held")
    held = env.job("replace").lock_holder(env.tag)  # type: ignore[attr-defined]
    assert (first.id, "running") == (held.task_id, held.state)
    env.let_go()
    assert ["obeyed", "done"] == [env.get(first), env.get(second)]
    assert_one_at_a_time(env)


@pytest.mark.parametrize(("name", "act"), [("replace_told", "hold"), ("replace", "ensure")])
def test_stopped_body(env: WorkerEnvironment, name: str, act: str) -> None:
    """A body that ends with `LockLost` because it is replaced is stored as REVOKED, naming the replacement."""
    first = env.hold(name, acts=act)
    second = env.job(name).delay(env.tag)
    assert f"replaced by task {second.id}" == reason(env, first)
    assert "done" == env.get(second)
    assert [first.id, second.id] == order(env)
    assert_one_at_a_time(env)


def test_body_that_ends_by_itself(env: WorkerEnvironment) -> None:
    """A body that ends in the moment in which it is asked ends as it ends, and the newcomer runs once."""
    for number in range(20):
        tag = env.other_tag(f"moment-{number}")
        job = env.job("replace_told")
        first = job.apply_async((tag, "sleep", 0.02 * number))
        env.wait_for("start", tag)  # of two messages, either may be begun first
        second = job.apply_async((tag,))
        assert "done" == env.get(second)
        env.wait_for_state(first, states.SUCCESS, states.REVOKED)
        assert {first.id: 1, second.id: 1} == {one: order(env, tag).count(one) for one in (first.id, second.id)}


def test_failure_of_its_own(env: WorkerEnvironment) -> None:
    """A body that was asked to stop and fails is stored as a failure."""
    first = env.hold("replace", acts="hold_raise")
    second = newcomer(env, "replace")
    env.let_go()
    assert "Boom" == type(env.error(first)).__name__
    assert "done" == env.get(second)


def test_latest_of_several(env: WorkerEnvironment) -> None:
    """Of three newcomers the last one runs; the others end as skipped."""
    first = env.hold("replace")
    skipped = [newcomer(env, "replace") for _ in range(2)]
    last = newcomer(env, "replace")
    env.let_go()
    assert ["held", "done"] == [env.get(first), env.get(last)]
    assert [first.id, last.id] == order(env)
    assert not {result.id for result in skipped} & set(order(env))


def test_skipped_newcomer(env: WorkerEnvironment) -> None:
    """A newcomer that was superseded ends as skipped when its copy comes."""
    first = env.hold("replace_impatient", acts="hold", **HOLDS)
    skipped, last = newcomer(env, "replace_impatient"), newcomer(env, "replace_impatient")
    assert env.get(skipped) is None
    assert isinstance(env.error(last), DuplicateTask)
    env.let_go()
    assert "held" == env.get(first)
    assert [first.id] == order(env)


def test_stubborn_body_is_terminated(env: WorkerEnvironment, prefork: None) -> None:
    """A body that goes on for longer than `grace` is terminated and stored as REVOKED; the newcomer runs at once."""
    first = env.hold("replace_hard")
    begun = time.monotonic()
    second = env.job("replace_hard").delay(env.tag)
    env.wait_for_state(first, states.REVOKED)
    assert 1.5 < time.monotonic() - begun < LONGEST_COPY_DELAY
    assert "done" == env.get(second)
    assert [first.id, second.id] == order(env)
    assert 1 == len(env.worker.wait_for_lines("WARNING", second.id, "terminated"))


def test_holder_whose_worker_does_not_answer(
    env: WorkerEnvironment, prefork: None, fresh_worker: Callable[..., LocalWorkerNode]
) -> None:
    """A main process that asks in vain to have a holder terminated forks children that work.

    In a forked process, Kombu closes the pooled connections of its parent, and there waits for the answer to the parent's poll.
    """
    frozen, worker = fresh_worker(WorkerSpec("prefork", 1)), fresh_worker(WorkerSpec("prefork", 2))
    first = env.hold("replace_hard", queue=frozen.worker_queue)
    os.kill(frozen.container.process.pid, signal.SIGSTOP)
    try:
        second = env.job("replace_hard").apply_async((env.tag,), queue=worker.worker_queue)
        worker.wait_for_lines(second.id, "did not answer", "MainProcess")
        for number in range(4):
            tag = env.other_tag(str(number))
            env.hold("skip", tag, queue=worker.worker_queue)
            env.kill_body(env.starts(tag)[0])
    finally:
        os.kill(frozen.container.process.pid, signal.SIGCONT)
    env.wait_for_state(first, states.REVOKED)
    assert "done" == env.get(second)


@pytest.mark.parametrize("greenlets", sorted(TERMINATES - {"prefork"}))
def test_greenlet_is_terminated(
    env: WorkerEnvironment, prefork: None, fresh_worker: Callable[..., LocalWorkerNode], greenlets: str
) -> None:
    """So is a greenlet."""
    queue = fresh_worker(WorkerSpec(greenlets, 4)).worker_queue
    first = env.hold("replace_hard", queue=queue)
    second = env.job("replace_hard").apply_async((env.tag,), queue=queue)
    env.wait_for_state(first, states.REVOKED)
    assert "done" == env.get(second)
    assert_one_at_a_time(env)


def test_stream_of_newcomers(env: WorkerEnvironment, prefork: None) -> None:
    """The time of grace begins with the first newcomer, so a stream of them does not protect a stubborn body."""
    first = env.hold("replace_hard")
    sent = []

    def is_over() -> bool:
        before = env.tickets("replace_hard")
        sent.append(env.job("replace_hard").delay(env.tag))
        until(lambda: env.tickets("replace_hard") != before or sent[-1].ready(), "it waits, or has run")
        time.sleep(0.3)
        return bool(first.state == states.REVOKED)

    until(is_over, "terminated")
    assert "done" == env.get(sent[-1])
    assert first.id == env.starts()[0]["id"]


def test_body_that_cannot_be_terminated(env: WorkerEnvironment, pool: str) -> None:
    """Where the pool cannot terminate a task, the newcomer waits for its end, and Celery logs no error."""
    if pool == "prefork":
        pytest.skip("prefork can")
    first = env.hold("replace_hard")
    second = newcomer(env, "replace_hard")
    env.worker.wait_for_lines("WARNING", second.id, "cannot terminate")
    env.let_go()
    assert ["held", "done"] == [env.get(first), env.get(second)]
    assert [] == env.worker.lines("NotImplementedError")


@pytest.mark.parametrize(
    ("name", "options"),
    [("skip", {"lock_options": {"on_duplicate": Replace(grace=1.5)}}), ("replace_chosen", {})],
    ids=["options of a call", "callable"],
)
def test_holder_that_does_not_look(env: WorkerEnvironment, pool: str, name: str, options: dict[str, Any]) -> None:
    """A holder with another policy, or with a callable, does not look, but it is terminated after `grace`."""
    first = env.hold(name)
    second = env.job(name).apply_async((env.tag,), **options)
    if pool == "prefork":
        env.wait_for_state(first, states.REVOKED)
    else:
        env.worker.wait_for_lines("WARNING", second.id, "cannot terminate")
        env.let_go()
    assert "done" == env.get(second)
    assert order(env) == [first.id, second.id]


def test_canvas(env: WorkerEnvironment) -> None:
    """A chord with a replaced member fails, and the rest of a replaced task's chain ends as REVOKED."""
    job, app = env.job("replace_told"), env.app
    other = env.other_tag("chord")
    last = chain(job.si(env.tag, "hold"), app.tasks["then"].si(env.other_tag("then")))()
    body = chord([job.si(other, "hold")])(app.tasks["collect"].s(env.other_tag("collected")))
    env.wait_for("start")
    env.wait_for("start", other)
    replacements = [job.delay(tag) for tag in (env.tag, other)]
    assert f"replaced by task {replacements[0].id}" == reason(env, last.parent)
    assert isinstance(app.AsyncResult(last.id).get(timeout=SOON, propagate=False), TaskRevokedError)
    assert env.chord_failed(body)
    assert ["done", "done"] == [env.get(one) for one in replacements]
    assert [] == env.events("then", env.other_tag("then"))


def assert_canvas_of_terminated(env: WorkerEnvironment, queue: str | None = None) -> None:
    """Terminate a task in a chain, one in a chord's header and one with a callback, and check all ids that were promised."""
    job, app = env.job("replace_hard"), env.app
    tags = [env.tag, env.other_tag("chord"), env.other_tag("linked")]
    then = app.tasks["then"].si(env.other_tag("then")).set(queue=queue)
    members = [job.si(tag, "hold").set(queue=queue) for tag in tags]
    last = chain(members[0], then.clone())()
    body = chord([members[1]])(app.tasks["collect"].s(env.other_tag("collected")).set(queue=queue))
    callback = then.clone()
    callback_id = callback.freeze().id
    linked = members[2].apply_async(link=callback)
    for tag in tags:
        env.wait_for("start", tag)
    replacements = [job.apply_async((tag,), queue=queue) for tag in tags]
    assert f"replaced by task {replacements[0].id}" == reason(env, last.parent)
    assert f"replaced by task {replacements[2].id}" == reason(env, linked)
    for task_id in (last.id, callback_id):
        assert isinstance(app.AsyncResult(task_id).get(timeout=SOON, propagate=False), TaskRevokedError)
    assert env.chord_failed(body)
    assert ["done"] * 3 == [env.get(one) for one in replacements]
    assert [] == env.events("then", env.other_tag("then"))


def test_canvas_of_a_terminated_task(env: WorkerEnvironment, prefork: None) -> None:
    """What would have followed a terminated task ends as REVOKED, so nobody waits for it for ever."""
    assert_canvas_of_terminated(env)


@pytest.mark.parametrize("greenlets", sorted(TERMINATES - {"prefork"}))
def test_canvas_of_a_terminated_greenlet(
    env: WorkerEnvironment, prefork: None, fresh_worker: Callable[..., LocalWorkerNode], greenlets: str
) -> None:
    """So it does in a greenlet."""
    assert_canvas_of_terminated(env, fresh_worker(WorkerSpec(greenlets, 8)).worker_queue)


def test_success_of_a_terminated_task(env: WorkerEnvironment, prefork: None) -> None:
    """If the body of a terminated task swallows that and returns, its chain goes on: nothing of it is revoked."""
    job = env.job("replace_hard")
    last = chain(job.si(env.tag, ["sleep_swallowing", "return"]), env.app.tasks["then"].si(env.tag))()
    env.wait_for("start")
    second = job.delay(env.tag)
    env.wait_for("swallowed")
    # Celery reads the state and then stores REVOKED, in place of a SUCCESS that was stored between.
    env.wait_for_state(env.app.AsyncResult(last.parent.id), states.REVOKED)
    env.let_go()
    # Without its parent, which is REVOKED at first.
    assert f"then {env.tag}" == env.get(env.app.AsyncResult(last.id))
    assert "done" == env.get(second)
    env.wait_for_state(last.parent, states.SUCCESS)


@pytest.mark.parametrize("name", ["skip", "replace_hard"])
def test_task_that_a_user_terminates(env: WorkerEnvironment, prefork: None, name: str) -> None:
    """`revoke(terminate=True)` by a user does what Celery does: it names no replacement, and revokes nothing else."""
    last = chain(env.job(name).si(env.tag, "hold"), env.app.tasks["then"].si(env.tag))()
    env.wait_for("start")
    env.revoke(last.parent, terminate=True)
    assert reason(env, last.parent) in ("terminated", "revoked")  # Celery 5.6 stores the one after the other
    until(lambda: not env.is_locked(name), "its body has ended")
    env.finish(last.parent.id)
    assert states.PENDING == last.state


def test_autoretry(env: WorkerEnvironment) -> None:
    """`autoretry_for` does not bring back a task that was replaced."""
    first = env.hold("replace_auto")
    second = env.job("replace_auto").delay(env.tag)
    assert f"replaced by task {second.id}" == reason(env, first)
    assert "done" == env.get(second)
    env.finish(first.id)
    assert [first.id, second.id] == order(env)


def test_own_retry(env: WorkerEnvironment) -> None:
    """A task's own retry does not replace the task that runs meanwhile: it runs after it."""
    job = env.job("replace")

    def attempt(seconds: float) -> tuple[str, AsyncResult, AsyncResult] | None:
        tag, sent = env.other_tag(f"{seconds:g}"), time.monotonic()
        first = job.apply_async((tag, ["retry", "hold", "return"], seconds))
        env.wait_for("end", tag)
        second = job.apply_async((tag, "hold"))
        start = env.wait_for("start", tag, 2)  # of the retry, if this took too long
        return (tag, first, second) if start["at"] < sent + seconds else None

    tag, first, second = in_time(attempt)
    env.worker.wait_for_lines(first.id, "waits")
    assert [] == env.lock_signals(env.key("replace", tag), "lock_lost")
    env.let_go(tag)
    assert ["held", "done"] == [env.get(second), env.get(first)]


def test_cooldown(env: WorkerEnvironment) -> None:
    """During `lock_at_least` nobody is asked to stop; the newcomer runs after it."""
    sent = time.monotonic()
    first = env.job("replace_throttled").delay(env.tag)
    env.get(first)
    second = env.job("replace_throttled").delay(env.tag)
    assert "done" == env.get(second)
    assert env.starts()[1]["at"] > sent + 4.0
    assert [] == env.lock_signals(env.key("replace_throttled"), "lock_lost")


def test_redelivery_after_the_end(env: WorkerEnvironment) -> None:
    """A redelivery of a replaced message does not run, and the message stays REVOKED, though Celery has stored STARTED for it."""
    with env.captured_messages() as messages:
        first = env.hold("replace_told")
    second = env.job("replace_told").delay(env.tag)
    reason(env, first)
    env.get(second)
    (message,) = messages
    message = {**message, "headers": {**message["headers"], RETRY_STATE_HEADER: {"redelivery_checks": 1}}}
    env.redeliver(message)
    env.worker.wait_for_lines(first.id, "replaced", "INFO", count=2)
    env.finish(first.id)
    assert reason(env, env.app.AsyncResult(first.id)).startswith("replaced")
    assert [first.id, second.id] == order(env)


def test_killed_while_asked_to_stop(env: WorkerEnvironment, prefork: None) -> None:
    """A message whose child is killed after it was asked to stop is stored as REVOKED when it is delivered again."""
    first = env.hold("replace_late")
    second = newcomer(env, "replace_late")
    env.kill_body(env.starts()[0])
    assert reason(env, first).startswith("replaced")
    assert "done" == env.get(second)
    assert [first.id, second.id] == order(env)


def test_replaced_reservation(env: WorkerEnvironment) -> None:
    """A newcomer takes the place of a message that has the lock and waits; that one ends as skipped when it arrives."""
    job = env.job("replace_publish")
    with env.captured_messages() as messages:
        first = job.apply_async((env.tag,), queue=env.other_tag("nobody"))
    second = job.delay(env.tag)
    assert (first.id, "queued") == (second.duplicate.task_id, second.duplicate.state)
    assert "done" == env.get(second)
    env.redeliver({**messages[0], "routing_key": env.worker.worker_queue})
    assert env.get(first) is None
    assert [second.id] == order(env)


def test_running_message_with_a_lock_from_its_publish(env: WorkerEnvironment) -> None:
    """A running task that had its lock from its publish on is replaced as any other."""
    first = env.hold("replace_publish")
    second = env.job("replace_publish").delay(env.tag)
    assert f"replaced by task {second.id}" == reason(env, first)
    assert "done" == env.get(second)
    assert_one_at_a_time(env)
