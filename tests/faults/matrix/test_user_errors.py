"""Fault 30: user code fails around a body. The lease is released, and the error is the same as without a lock."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator

import pytest
from celery.result import AsyncResult

from tests.faults.harness import Worker, WorkerEnvironment, since
from tests.faults.ledger import Event
from tests.faults.matrix import LATE
from tests.faults.tasks import Boom
from tests.servers import until

SOON = 1.0
POOLS = ["prefork", "threads", "gevent"]
AROUND = ["task_prerun", "lock_acquired", "lock_released", "task_postrun"]


def _ended(result: AsyncResult) -> tuple[str, type]:
    """Wait for the end of a task, and return its state and the type of its result or error."""
    state = until(lambda: result.state in ("SUCCESS", "FAILURE") and result.state, "an end")
    return state, type(result.result)


def _met(worker: Worker, *signals: str, before: str = "") -> None:
    """Check that the failing receivers of these signals were called and that Celery logged their errors."""

    def missing() -> list[str]:
        said = worker.process.output()[len(before) :]
        lines = [line for line in said.splitlines() if "Signal handler" in line]
        return [name for name in signals if not any(f"a receiver of {name} that fails" in line for line in lines)]

    until(lambda: not missing(), f"failing receivers of {signals} are met in {worker.name}", LATE)


@pytest.fixture(scope="module")
def env() -> Iterator[WorkerEnvironment]:
    """Yield an environment whose workers have failing receivers of every signal."""
    with WorkerEnvironment(ttl=40, faults_receivers=True) as env:
        for pool in POOLS:
            env.start(pool, options=("-Q", pool))
        for worker in env.workers:
            worker.ready(env.app)
        yield env
        env.finish()


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize(
    ("act", "state"),
    [("sleep", "SUCCESS"), ("boom", "FAILURE"), ("odd-result", "FAILURE"), ("memory", "FAILURE")],
)
def test_failing(env: WorkerEnvironment, pool: str, act: str, state: str) -> None:
    """The lease is released with the body, the task ends as without a lock, and the next body runs."""
    if pool == "prefork" and act == "memory":
        pytest.skip("Celery ends the worker's child, and raises in its main process: fault 7")
    tag, worker = f"{pool}-{act}", env.workers[POOLS.index(pool)]
    before = worker.process.output()
    result = env.send("skip", tag, [act], queue=pool)
    body = env.body(tag)
    freed = since(env.end(body), env.gone(body))
    env.measured(f"30 {act}, failing receivers, {pool}: freed after the body", SOON, freed)
    _met(worker, *AROUND, before=before)
    twin = env.send("plain", tag, [act], queue=pool)
    assert _ended(twin) == _ended(result)
    assert state == result.state
    assert "slept" == env.send("skip", tag, ["sleep"], expect="once", queue=pool).get(timeout=LATE)


@pytest.mark.parametrize("pool", POOLS)
def test_duplicates(env: WorkerEnvironment, pool: str) -> None:
    """A failing receiver of ``duplicate`` does not change how a duplicate ends."""
    tag = f"{pool}-duplicate"
    first = env.send("skip", tag, ["hold"], queue=pool, expect="once")
    env.body(tag)
    assert env.send("skip", tag, expect="none", queue=pool).get(timeout=LATE) is None
    _met(env.workers[POOLS.index(pool)], "duplicate")
    env.go(tag)
    assert "held" == first.get(timeout=LATE)


@pytest.mark.parametrize("pool", POOLS)
def test_failing_key(env: WorkerEnvironment, pool: str) -> None:
    """A ``lock_key`` that raises fails the task with its own error; no body runs and no lease is acquired."""
    result = env.send("nameless", f"{pool}-key", queue=pool, expect="none")
    with pytest.raises(Boom, match="no key"):
        result.get(timeout=LATE)


def test_failing_receivers_of_a_renewal() -> None:
    """Failing receivers of a renewal, an outage and a loss do not stop renewal, reacquiring or release."""
    with WorkerEnvironment(ttl=3, faults_receivers=True) as env:
        for pool in POOLS:
            env.start(pool, options=("-Q", pool))
        for worker in env.workers:
            worker.ready(env.app)
        results = [env.send("skip", pool, ["hold"], expect="once", queue=pool) for pool in POOLS]
        bodies = [env.body(pool) for pool in POOLS]
        for worker in env.workers:
            _met(worker, "lock_renewed")
        with env.schedule.during("outage") as fault:
            env.store.pause()
            for worker in env.workers:
                _met(worker, "store_error", "lock_lost")
            env.store.resume()
        until(lambda: all(_takes(env, body, fault.until) for body in bodies), "all are taken again")
        late = max(_takes(env, body, fault.until)[0]["at"] for body in bodies) - fault.until
        env.measured("30 failing receivers, store away: all reacquired", env.limits.heal, late)
        env.last(0.2)  # the probe polls every 30 ms
        env.stay_held(3.5, *bodies)
        for pool, result in zip(POOLS, results, strict=True):
            env.go(pool)
            assert "held" == result.get(timeout=LATE)
        for body in bodies:
            until(lambda body=body: not env.held(body), "its lease is gone", SOON)  # type: ignore[misc]
        assert 3 == len(env.ledger.events("lost"))
        env.finish()


def _takes(env: WorkerEnvironment, body: Event, after: float) -> list[Event]:
    """Return the calls that acquired or renewed a body's lease after this time."""
    done = env.ledger.events("store", run=body["run"])
    return [event for event in done if event["does"] in (["take"], ["renew"]) and event["at"] > after]


@pytest.mark.parametrize("pool", POOLS)
def test_base_exception(pool: str) -> None:
    """A BaseException releases the lease; the task ends as without a lock, and the next body runs.

    Celery (5.7) ends a prefork child; a thread or a greenlet continues, and Celery never reports the task's end.
    """
    with WorkerEnvironment(ttl=40) as env:
        env.worker(pool)
        result = env.send("skip", "a", ["bang"])
        body = env.body("a")
        freed = since(env.end(body), env.gone(body))
        env.measured(f"30 BaseException, {pool}: freed after the body", SOON, freed)
        twin = env.send("plain", "b", ["bang"])
        env.end(env.body("b"))
        if pool == "prefork":
            assert _ended(twin) == _ended(result)
            assert "FAILURE" == result.state
        assert "slept" == env.send("skip", "a", ["sleep"], expect="once").get(timeout=LATE)
        assert twin.state == result.state
        env.finish()


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_failing_backend(pool: str) -> None:
    """A result that cannot be stored: the lease is released before Celery tries, and Celery logs the same as without a lock."""
    with WorkerEnvironment(ttl=40, result_backend_transport_options={"retry_policy": {"max_retries": 0}}) as env:
        for name in ("skip", "plain"):
            env.start(pool, options=("-Q", name), result_backend="redis://127.0.0.1:1/0", task_track_started=False)
        for worker in env.workers:
            worker.ready(env.app)
        results = [env.send(name, name, ["sleep", 0.5], expect="run", queue=name) for name in ("skip", "plain")]
        body = env.body("skip")
        freed = since(env.end(body), env.gone(body))
        env.measured(f"30 failing result backend, {pool}: freed after the body", SOON, freed)
        env.end(env.body("plain"))
        ours, celerys = [_complaints(worker) for worker in env.workers]
        assert bool(celerys) == (pool == "prefork"), celerys  # a thread's future swallows an error in the tracer (5.7)
        assert celerys == ours
        assert ["PENDING"] * 2 == [result.state for result in results]
        env.finish()


def _complaints(worker: Worker) -> list[str]:
    """Stop a worker, and return its log lines of level WARNING and above, without task names and ids."""
    worker.process.signal(signal.SIGTERM)
    assert worker.exit_code(LATE) is not None, "the worker does not end"
    said = re.findall(r"^\[[^]]*: (?:WARNING|ERROR|CRITICAL)/[^]]*\] (.*)", worker.process.output(), re.MULTILINE)
    return [re.sub(r"\w+\[[-0-9a-f]{36}\]", "a task", line) for line in said]
