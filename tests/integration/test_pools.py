"""The core of the promise in every pool, and with both brokers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import celery
import pytest
from celery import chain, chord, states

from celery_singleton_lock import DuplicateTask
from tests.integration.bench import Bench
from tests.integration.nodes import LocalWorkerNode, WorkerSpec
from tests.servers import until

SETTINGS = [
    *((pool, "redis") for pool in ("prefork", "threads", "gevent", "eventlet", "solo")),
    *((pool, "rabbitmq") for pool in ("prefork", "threads", "gevent")),
]

#: Pools that can end a body; gevent's can since Celery 5.5.
TERMINATES = {"prefork", "eventlet"} | ({"gevent"} if celery.VERSION >= (5, 5) else set())


@pytest.fixture(scope="module", params=SETTINGS, ids="-".join)
def setting(request: pytest.FixtureRequest) -> tuple[str, str]:
    """Pool and broker."""
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def pool(setting: tuple[str, str]) -> str:
    return setting[0]


@pytest.fixture(scope="module")
def broker_kind(setting: tuple[str, str]) -> str:
    return setting[1]


@pytest.fixture(scope="module")
def worker_specs(pool: str) -> Sequence[WorkerSpec]:
    """The pool's worker, and another one that it competes with."""
    here = WorkerSpec(pool, concurrency=1 if pool == "solo" else 4)
    return [here, WorkerSpec("threads", copy=1)]


@pytest.fixture
def there(bench: Bench) -> str:
    """The queue of the other worker."""
    node: LocalWorkerNode = bench.setup.worker_cluster[1]
    return node.worker_queue


def collect(bench: Bench) -> Any:
    return bench.app.tasks["collect"].s(bench.other_tag("collected"))


def test_holder_there_duplicate_here(bench: Bench, there: str) -> None:
    """A duplicate in this pool is skipped, and fails under raise."""
    holder = bench.hold("skip_value", queue=there)
    assert "already" == bench.get(bench.job("skip_value").delay(bench.tag))
    assert [holder.id] == [start["id"] for start in bench.starts()]
    tag = bench.other_tag("raising")
    bench.hold("raising", tag, queue=there)
    assert isinstance(bench.error(bench.job("raising").delay(tag)), DuplicateTask)


def test_holder_here_duplicate_there(bench: Bench, there: str) -> None:
    """A run in this pool holds the lock against other workers."""
    holder = bench.hold("skip_value")
    duplicate = bench.job("skip_value").apply_async((bench.tag,), queue=there)
    assert "already" == bench.get(duplicate)
    bench.let_go()
    assert "held" == bench.get(holder)
    again = bench.job("skip_value").apply_async((bench.tag, "return"), queue=there)
    assert "done" == bench.get(again)


def test_postponed_here(bench: Bench, there: str) -> None:
    """A duplicate in this pool is postponed, and runs once the holder is done."""
    bench.hold("retry", queue=there)
    duplicate = bench.job("retry").delay(bench.tag)
    bench.wait_for_state(duplicate, states.RETRY)
    bench.let_go()
    assert "done" == bench.get(duplicate)


def test_chain_and_chord(bench: Bench, there: str) -> None:
    """Duplicates in a chain and a chord of this pool."""
    bench.hold("retry", queue=there)
    duplicate = bench.job("retry").si(bench.tag)
    other = bench.job("skip").si(bench.other_tag("other"))
    joined = chord([duplicate, other])(collect(bench))
    last = chain(duplicate, bench.app.tasks["then"].si(bench.other_tag("a")))()
    bench.wait_for_state(last.parent, states.RETRY)
    bench.wait_for_state(joined.parent.results[0], states.RETRY)
    bench.let_go()
    assert ["done", "done"] == bench.get(joined)
    assert bench.get(last).startswith("then")


def test_skip_in_a_chain(bench: Bench, there: str) -> None:
    """Waiting for a chain that was skipped ends."""
    bench.hold("skip", queue=there)
    then = bench.app.tasks["then"].si(bench.other_tag("a"))
    last = chain(bench.job("skip").si(bench.tag), then)()
    assert "TaskRevokedError" == type(bench.error(last)).__name__
    assert [] == bench.events("then", bench.other_tag("a"))


def test_result_means_free(bench: Bench) -> None:
    """get() and at once delay(): always granted."""
    for _ in range(25):
        assert "done" == bench.get(bench.job("raising").delay(bench.tag))


@pytest.mark.parametrize("act", ["return", "raise", "ignore", "reject", "retry"])
def test_end_of_the_body(bench: Bench, act: str) -> None:
    """Success, failure, Ignore, Reject and retry free the lock at once."""
    bench.job("long").delay(bench.tag, [act, "return"], 90)
    bench.wait_for("end")
    until(lambda: not bench.is_locked("long"), "the lock is free", 3)
    assert "done" == bench.get(bench.job("long").delay(bench.tag))


def test_system_exit(bench: Bench, pool: str) -> None:
    """SystemExit frees the lock; the worker itself goes on."""
    if pool == "solo":
        pytest.skip("there it ends the worker")
    bench.job("long").delay(bench.tag, ["exit", "return"])
    bench.wait_for("end")
    until(lambda: not bench.is_locked("long"), "the lock is free", 3)
    assert "done" == bench.get(bench.job("long").delay(bench.tag))


def test_terminated(bench: Bench, pool: str) -> None:
    """revoke(terminate=True) frees the lock, where the pool can terminate a body."""
    if pool not in TERMINATES:
        pytest.skip("this pool has no way to end a body")
    result = bench.hold("long")
    bench.app.control.revoke(result.id, terminate=True)
    until(lambda: not bench.is_locked("long"), "the lock is free", 6)
    assert "done" == bench.get(bench.job("long").delay(bench.tag))


def test_hard_limit(bench: Bench, pool: str) -> None:
    """A hard time limit frees the lock, where the pool has one."""
    if pool not in ("prefork", "gevent"):
        pytest.skip("this pool ignores time limits")
    bench.job("hard_limit").delay(bench.tag, ["sleep", "return"], 30)
    bench.wait_for("start")
    until(lambda: not bench.is_locked("hard_limit"), "the lock is free", 7)
    assert "done" == bench.get(bench.job("hard_limit").delay(bench.tag))


def test_same_task_id_twice(bench: Bench, pool: str) -> None:
    """A message delivered twice at once runs once, and nobody sees the second delivery."""
    if pool == "solo":
        pytest.skip("one body at a time: the second delivery is read after the first one's end")
    with bench.captured_messages() as messages:
        result = bench.hold("skip")
    bench.redeliver(messages[0])
    until(lambda: bench.signals(result.id, "task_postrun"), "a second attempt has met the first")
    assert states.STARTED == result.state
    bench.let_go()
    assert "held" == bench.get(result)
    bench.settle(result.id)
    assert 1 == len(bench.starts())
    assert "held" == result.result


def test_lost_in_a_finalizer(bench: Bench) -> None:
    """Under raise, LockLost ends a body that spends its time in finalizers, where Python swallows exceptions."""
    result = bench.job("told").delay(bench.tag, "drop_slow", 30.0)
    bench.wait_for("start")
    assert bench.job("told").force_unlock(bench.tag).task_id == result.id
    assert "LockLost" == type(bench.error(result)).__name__
    assert "LockLost" == bench.events("error")[0]["error"]
    assert bench.events("end")[0]["at"] - bench.starts()[0]["at"] < 5
