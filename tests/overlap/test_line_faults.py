"""What the line bears: failed publications, calls with other policies, one id used twice, too many starts."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from celery_singleton_lock import Policy, Replace, RunOnceMore
from tests.integration.environment import WorkerEnvironment
from tests.integration.nodes import LocalWorkerNode, WorkerSpec
from tests.overlap.test_line import BEFORE_A_COPY, HOLDS, assert_one_at_a_time, enqueue, order
from tests.servers import until

pytestmark = pytest.mark.long

StartWorker = Callable[..., LocalWorkerNode]


def test_publication_that_fails(env: WorkerEnvironment) -> None:
    """The turn of a message that could not be published is given back at once. It is published as soon as that is possible."""
    first = env.hold("wait_late", **HOLDS)
    (waiting,) = enqueue(env, "wait_late", 1, **HOLDS)
    env.allow_publishing(False)
    try:
        env.let_go()
        assert "held" == env.get(first)
        env.worker.wait_for_lines(f"Task job.wait_late[{waiting.id}] could not be published in its turn")
        until(lambda: not env.is_locked("wait_late"), "its turn is given back")
    finally:
        env.allow_publishing(True)
    assert "done" == env.get(waiting, BEFORE_A_COPY)
    assert [first.id, waiting.id] == order(env)


def test_newcomer_that_finds_the_lock_free(env: WorkerEnvironment, fresh_worker: StartWorker) -> None:
    """If the holder's worker dies, the next call has the first of those that wait published, before a copy comes."""
    node = fresh_worker(WorkerSpec("prefork", 1))
    env.hold("wait_long", queue=node.worker_queue, lock_options={"lock_ttl": 2})
    waiting = enqueue(env, "wait_long", 3)
    node.kill()
    until(lambda: not env.is_locked("wait_long"), "the lease has expired")
    newcomer = env.job("wait_long").delay(env.tag)
    results = [*waiting, newcomer]
    assert ["done"] * 4 == [env.get(result, BEFORE_A_COPY) for result in results]
    assert [result.id for result in results] == order(env)[1:]


@pytest.mark.parametrize("policy", [RunOnceMore(keep="latest"), Replace(grace=600)], ids=repr)
def test_calls_with_another_policy(env: WorkerEnvironment, policy: Policy) -> None:
    """A call that takes the place of others under its own policy takes that of no message that waits under "wait"."""
    first = env.hold("wait_long")
    waiting = enqueue(env, "wait_long", 2)
    (replaced,) = enqueue(env, "wait_long", 1, lock_options={"on_duplicate": policy})
    line = env.tickets("wait_long")
    latest = env.job("wait_long").apply_async((env.tag,), lock_options={"on_duplicate": policy})
    until(lambda: env.tickets("wait_long") != line, "it is in line")
    env.let_go()
    assert ["done", "done", "done"] == [env.get(result) for result in (*waiting, latest)]
    assert [first.id, *(result.id for result in waiting), latest.id] == order(env)
    assert replaced.id not in order(env)


def test_two_messages_with_one_id(env: WorkerEnvironment) -> None:
    """Two messages in one line with the same task id, and other arguments, both run: copies of the second come meanwhile."""
    first = env.hold("wait_short_ttl", **HOLDS)
    (waiting,) = enqueue(env, "wait_short_ttl", 1, kwargs={"acts": ["sleep"], "seconds": 2.5}, **HOLDS)
    enqueue(env, "wait_short_ttl", 1, kwargs={"acts": ["return", "return"]}, task_id=waiting.id)
    env.let_go()
    until(lambda: len(env.events("end")) == 3, "all have run")
    assert [first.id, waiting.id, waiting.id] == order(env)
    assert_one_at_a_time(env)


def test_message_with_the_task_id_of_the_holder(env: WorkerEnvironment) -> None:
    """A message with the task id of the holder, and other arguments, comes again until that has ended, and then runs."""
    first = env.hold("wait_long")
    env.job("wait_long").apply_async((env.tag,), {"acts": ["return", "return"]}, task_id=first.id)
    env.worker.wait_for_lines(f"[{first.id}] comes again, as another message with its task id runs", count=3)
    assert [] == env.tickets("wait_long")
    assert "STARTED" == first.state
    env.let_go()
    until(lambda: len(env.events("end")) == 2, "both have run", BEFORE_A_COPY)
    assert_one_at_a_time(env)


def test_own_retry_beside_another_message_with_its_id(env: WorkerEnvironment) -> None:
    """A task that retries itself, and meets another message with its id, is not taken for that one: all three bodies run."""
    first = env.hold("wait_long", acts=["hold_own"])
    (one,) = enqueue(env, "wait_long", 1, kwargs={"acts": ["hold", "hold_retry", "return"]})
    enqueue(env, "wait_long", 1, kwargs={"acts": ["return", "return", "hold"]}, task_id=one.id)
    env.let_go(first.id)
    env.let_go(one.id)
    env.wait_for("start", count=3)
    env.worker.wait_for_lines(f"[{one.id}] comes again, as another message with its task id runs")
    env.let_go()
    until(lambda: len(env.events("end")) == 4, "all have run")
    assert_one_at_a_time(env)


def test_redelivery_whose_arguments_change(env: WorkerEnvironment) -> None:
    """A redelivery that is published again counts as one with other arguments, too: these are of the user's `apply_async`."""
    with env.captured_messages() as messages:
        first = env.hold("wait_changing")
    env.redeliver(messages[0])
    env.worker.wait_for_lines(f"[{first.id}] redelivered while another delivery of it runs", count=2)
    assert [] == env.tickets("wait_changing")
    env.let_go()
    env.finish(first.id)
    assert [first.id] == order(env)


def test_redelivery_beside_an_own_retry(env: WorkerEnvironment) -> None:
    """An own retry has another body, and counts as the message that published it: a redelivery of that one does not run."""
    with env.captured_messages() as messages:
        first = env.job("wait_changing").apply_async((env.tag,), {"acts": ["retry", "hold"]})
    env.wait_for("start", count=2)
    env.redeliver(messages[0])
    env.worker.wait_for_lines(f"[{first.id}] redelivered while another delivery of it runs")
    assert [] == env.tickets("wait_changing")
    env.let_go()
    assert "held" == env.get(first)
    env.finish(first.id)
    assert [first.id] * 2 == order(env)


def test_head_that_was_started_too_often(env: WorkerEnvironment, fresh_worker: StartWorker) -> None:
    """If the first in line may not start, the next one starts at once."""
    node = fresh_worker(WorkerSpec("prefork", 2))
    queue = node.worker_queue
    env.hold("wait_once", queue=queue)
    (refused,) = enqueue(env, "wait_once", 1, queue=queue)
    (other,) = enqueue(env, "wait_again", 1, queue=queue)
    env.kill_body(env.starts()[0])
    assert "TooManyStarts" == type(env.error(refused)).__name__
    assert "done" == env.get(other, BEFORE_A_COPY)
    assert refused.id not in order(env)
