"""The core of the promise, in every pool and with both brokers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import celery
import pytest
from celery import chain, chord, states

from celery_singleton_lock import DuplicateTask
from tests.integration.environment import SOON, WorkerEnvironment
from tests.integration.nodes import LocalWorkerNode, WorkerSpec
from tests.servers import until

pytestmark = pytest.mark.long

SETTINGS = [
    *((pool, "redis") for pool in ("prefork", "threads", "gevent", "eventlet", "solo")),
    *((pool, "rabbitmq") for pool in ("prefork", "threads", "gevent")),
]

#: Pools that can terminate a body; gevent's can since Celery 5.5.
TERMINATES = {"prefork", "eventlet"} | ({"gevent"} if celery.VERSION >= (5, 5) else set())


@pytest.fixture(scope="module", params=SETTINGS, ids="-".join)
def setting(request: pytest.FixtureRequest) -> tuple[str, str]:
    """Return the pool and the broker."""
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def pool(setting: tuple[str, str]) -> str:
    return setting[0]


@pytest.fixture(scope="module")
def broker_kind(setting: tuple[str, str]) -> str:
    return setting[1]


@pytest.fixture(scope="module")
def worker_specs(pool: str) -> Sequence[WorkerSpec]:
    """Return the pool's worker, and a second one that competes with it."""
    here = WorkerSpec(pool, concurrency=1 if pool == "solo" else 4)
    return [here, WorkerSpec("threads", copy=1)]


@pytest.fixture
def there(env: WorkerEnvironment) -> str:
    """Return the queue of the other worker."""
    node: LocalWorkerNode = env.setup.worker_cluster[1]
    return node.worker_queue


def collect(env: WorkerEnvironment) -> Any:
    return env.app.tasks["collect"].s(env.other_tag("collected"))


def test_holder_there_duplicate_here(env: WorkerEnvironment, there: str) -> None:
    """A duplicate in this pool is skipped under skip, and fails under raise."""
    holder = env.hold("skip_value", queue=there)
    assert "already" == env.get(env.job("skip_value").delay(env.tag))
    assert [holder.id] == [start["id"] for start in env.starts()]
    tag = env.other_tag("raising")
    env.hold("raising", tag, queue=there)
    assert isinstance(env.error(env.job("raising").delay(tag)), DuplicateTask)


def test_holder_here_duplicate_there(env: WorkerEnvironment, there: str) -> None:
    """A run in this pool holds the lock against other workers."""
    holder = env.hold("skip_value")
    duplicate = env.job("skip_value").apply_async((env.tag,), queue=there)
    assert "already" == env.get(duplicate)
    env.let_go()
    assert "held" == env.get(holder)
    again = env.job("skip_value").apply_async((env.tag, "return"), queue=there)
    assert "done" == env.get(again)


def test_postponed_here(env: WorkerEnvironment, there: str) -> None:
    """A duplicate in this pool is postponed, and runs after the holder has ended."""
    env.hold("retry", queue=there)
    duplicate = env.job("retry").delay(env.tag)
    env.wait_for_state(duplicate, states.RETRY)
    env.let_go()
    assert "done" == env.get(duplicate)


def test_chain_and_chord(env: WorkerEnvironment, there: str) -> None:
    """Duplicates in a chain or a chord end as their policy says in this pool."""
    env.hold("retry", queue=there)
    duplicate = env.job("retry").si(env.tag)
    other = env.job("skip").si(env.other_tag("other"))
    joined = chord([duplicate, other])(collect(env))
    last = chain(duplicate, env.app.tasks["then"].si(env.other_tag("a")))()
    env.wait_for_state(last.parent, states.RETRY)
    env.wait_for_state(joined.parent.results[0], states.RETRY)
    env.let_go()
    assert ["done", "done"] == env.get(joined)
    assert env.get(last).startswith("then")


def test_skip_in_a_chain(env: WorkerEnvironment, there: str) -> None:
    """Waiting for a chain that was skipped ends."""
    env.hold("skip", queue=there)
    then = env.app.tasks["then"].si(env.other_tag("a"))
    last = chain(env.job("skip").si(env.tag), then)()
    assert "TaskRevokedError" == type(env.error(last)).__name__
    assert [] == env.events("then", env.other_tag("a"))


def test_result_means_free(env: WorkerEnvironment) -> None:
    """A ``delay()`` right after ``get()`` is always granted."""
    for _ in range(25):
        assert "done" == env.get(env.job("raising").delay(env.tag))


@pytest.mark.parametrize("act", ["return", "raise", "ignore", "reject", "retry"])
def test_end_of_the_body(env: WorkerEnvironment, act: str) -> None:
    """Success, failure, Ignore, Reject and retry release the lock at once."""
    env.job("long").delay(env.tag, [act, "return"], 90)
    env.wait_for("end")
    until(lambda: not env.is_locked("long"), "the lock is free")
    assert "done" == env.get(env.job("long").delay(env.tag))


def test_system_exit(env: WorkerEnvironment, pool: str) -> None:
    """SystemExit releases the lock; the worker itself continues."""
    if pool == "solo":
        pytest.skip("there it ends the worker")
    env.job("long").delay(env.tag, ["exit", "return"])
    env.wait_for("end")
    until(lambda: not env.is_locked("long"), "the lock is free")
    assert "done" == env.get(env.job("long").delay(env.tag))


def test_terminated(env: WorkerEnvironment, pool: str) -> None:
    """revoke(terminate=True) releases the lock, where the pool can terminate a body."""
    if pool not in TERMINATES:
        pytest.skip("this pool has no way to end a body")
    result = env.hold("long")
    env.revoke(result, terminate=True)
    until(lambda: not env.is_locked("long"), "the lock is free")
    assert "done" == env.get(env.job("long").delay(env.tag))


def test_hard_limit(env: WorkerEnvironment, pool: str) -> None:
    """A hard time limit releases the lock, where the pool has one."""
    if pool not in ("prefork", "gevent"):
        pytest.skip("this pool ignores time limits")
    result = env.job("hard_limit").delay(env.tag, ["sleep", "return"], 30)
    assert "TimeLimitExceeded" in type(env.error(result)).__name__
    until(lambda: not env.is_locked("hard_limit"), "the lock is free")
    assert "done" == env.get(env.job("hard_limit").apply_async((env.tag,), time_limit=SOON))


def test_same_task_id_twice(env: WorkerEnvironment, pool: str) -> None:
    """A message that is delivered twice concurrently runs once, and its redelivery stores nothing."""
    if pool == "solo":
        pytest.skip("one body at a time: the second delivery is read after the first one's end")
    with env.captured_messages() as messages:
        result = env.hold("skip")
    env.redeliver(messages[0])
    until(lambda: env.signals(result.id, "task_postrun"), "a second attempt has met the first")
    assert states.STARTED == result.state
    env.let_go()
    assert "held" == env.get(result)
    env.finish(result.id)
    assert 1 == len(env.starts())
    assert "held" == result.result
