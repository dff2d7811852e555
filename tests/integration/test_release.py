"""The lock is released as soon as the work has ended, in any way, and never before."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable

import pytest
from celery import chain, states

from tests.integration.environment import SOON, WorkerEnvironment
from tests.integration.monitor import Monitor
from tests.integration.nodes import LocalWorkerNode, WorkerSpec, wait_for_end
from tests.servers import RedisServer, until

#: Seconds within which the lock of a killed child is released, as promised.
KILLED = 6.0


def wait_until_free(env: WorkerEnvironment, name: str) -> None:
    """Wait until the lock key has disappeared. Its TTL of ten minutes is far longer than the wait."""
    until(lambda: not env.is_locked(name), f"the lock of {name} is free")


class TestOrder:
    def test_whoever_has_the_result_can_start_the_next_run(self, env: WorkerEnvironment) -> None:
        """A ``delay()`` right after ``get()`` is always granted."""
        for _ in range(50):
            assert "done" == env.get(env.job("raising").delay(env.tag))

    def test_a_chain_never_meets_itself(self, env: WorkerEnvironment) -> None:
        """Each step of a chain whose steps are the same work finds the lock free."""
        last = chain(*[env.job("raising").si(env.tag) for _ in range(20)])()
        assert "done" == env.get(last)
        assert 20 == len(env.starts())

    def test_after_a_failure(self, env: WorkerEnvironment) -> None:
        """The lock is free as soon as a failed result can be read."""
        for _ in range(10):
            error = env.error(env.job("raising").delay(env.tag, "raise"))
            assert "Boom" == type(error).__name__

    def test_release_is_sent_first(self, env: WorkerEnvironment, redis_server: RedisServer) -> None:
        """The release is sent before the next step is published and before the result is stored."""
        then = env.app.tasks["then"].si(env.other_tag("then"))
        # Broker, result backend and store are one server here, so MONITOR shows the real order.
        with Monitor(redis_server.url()) as monitor:
            last = chain(env.job("long").si(env.tag), then)()
            env.get(last)
        first, key = last.parent.id, env.key("long")
        acquired, released = monitor.where(key)
        (published,) = monitor.where("LPUSH", env.worker.worker_queue, last.id)
        (stored,) = monitor.where(f"celery-task-meta-{first}", "SUCCESS", "SET")
        assert acquired < released < published
        assert released < stored


class TestEnds:
    @pytest.mark.parametrize("act", ["return", "raise", "ignore", "reject", "exit"])
    def test_body(self, env: WorkerEnvironment, act: str) -> None:
        """Success, failure, Ignore, Reject and SystemExit release the lock."""
        env.job("long").delay(env.tag, [act, "return"])
        env.wait_for("end")
        wait_until_free(env, "long")
        assert "done" == env.get(env.job("long").delay(env.tag))

    @pytest.mark.parametrize(("name", "act"), [("long", "retry"), ("auto_later", "raise")])
    def test_retry(self, env: WorkerEnvironment, name: str, act: str) -> None:
        """The lock is free during the countdown of retry() and autoretry."""
        first = env.job(name).delay(env.tag, [act, "return"], 600)
        env.wait_for_state(first, states.RETRY)
        wait_until_free(env, name)
        assert "done" == env.get(env.job(name).delay(env.tag))
        env.revoke(first)

    @pytest.mark.parametrize("name", ["soft_limit", "hard_limit"])
    def test_time_limit(self, env: WorkerEnvironment, name: str) -> None:
        """Soft and hard time limits release the lock."""
        result = env.job(name).delay(env.tag, ["sleep", "return"], 30)
        assert "TimeLimitExceeded" in type(env.error(result)).__name__
        wait_until_free(env, name)
        unlimited = {"time_limit": SOON, "soft_time_limit": SOON}
        assert "done" == env.get(env.job(name).apply_async((env.tag,), **unlimited))

    @pytest.mark.parametrize("signal_name", ["SIGTERM", "SIGKILL"])
    def test_revoke_terminate(self, env: WorkerEnvironment, signal_name: str) -> None:
        """A revoked task that a signal terminates releases its lock."""
        result = env.hold("long")
        env.revoke(result, terminate=True, signal=signal_name)
        wait_until_free(env, "long")
        assert "done" == env.get(env.job("long").delay(env.tag))

    def test_revoked_body_that_goes_on_keeps_its_lock(self, env: WorkerEnvironment) -> None:
        """A REVOKED body that swallows the exception keeps its lock until it ends."""
        result = env.hold("long", acts=["sleep_swallowing", "return"])
        env.revoke(result, terminate=True)
        env.wait_for("swallowed")
        looks = iter(range(20))  # what would release it does so within a moment
        until(lambda: not env.is_locked("long") or next(looks, None) is None, "it is looked at often", every=0.05)
        assert env.is_locked("long")
        env.let_go()
        wait_until_free(env, "long")

    @pytest.mark.timed
    def test_killed_child(self, env: WorkerEnvironment) -> None:
        """The lock is released after a SIGKILL of the child, as sent by the kernel when memory runs out."""
        env.hold("long")
        killed = time.monotonic()
        env.kill_body(env.starts()[0])
        wait_until_free(env, "long")
        assert time.monotonic() - killed < KILLED
        assert "done" == env.get(env.job("long").delay(env.tag))

    def test_child_that_kills_itself(self, env: WorkerEnvironment) -> None:
        """The lock is released when the child kills itself."""
        env.job("long").delay(env.tag, ["die", "return"])
        env.wait_for("start")
        wait_until_free(env, "long")
        assert "done" == env.get(env.job("long").delay(env.tag))


class TestShutdown:
    def test_warm(self, env: WorkerEnvironment, fresh_worker: Callable[..., LocalWorkerNode]) -> None:
        """In a warm shutdown the body keeps its lock until it ends, and then the lock is released."""
        worker = fresh_worker(WorkerSpec(concurrency=1))
        result = env.hold("long", queue=worker.worker_queue)
        worker.kill("SIGTERM")
        worker.wait_for_lines("Warm shutdown")
        time.sleep(0.5)
        assert env.is_locked("long")
        env.let_go()
        assert 0 == wait_for_end(worker.container, SOON)
        assert "held" == env.get(result)
        assert not env.is_locked("long")

    def test_cold(self, env: WorkerEnvironment, fresh_worker: Callable[..., LocalWorkerNode]) -> None:
        """In a cold shutdown the body ends with the worker, and the lock is released."""
        worker = fresh_worker(WorkerSpec(concurrency=1))
        env.hold("long", queue=worker.worker_queue)
        worker.container.process.signal(signal.SIGQUIT)
        assert wait_for_end(worker.container, SOON) is not None
        wait_until_free(env, "long")

    def test_max_tasks_per_child(self, env: WorkerEnvironment, fresh_worker: Callable[..., LocalWorkerNode]) -> None:
        """A child that is replaced after each task leaves no lock behind."""
        worker = fresh_worker(WorkerSpec(concurrency=1, options=("--max-tasks-per-child", "1")))
        queue = worker.worker_queue
        for _ in range(2):
            assert "done" == env.get(env.job("long").apply_async((env.tag,), queue=queue))
            assert not env.is_locked("long")

    def test_killed_worker(self, env: WorkerEnvironment, fresh_worker: Callable[..., LocalWorkerNode]) -> None:
        """The lock of a killed worker expires lock_ttl after its last renewal."""
        worker = fresh_worker(WorkerSpec(concurrency=1))
        env.hold("skip_short", queue=worker.worker_queue)
        until(lambda: env.lock_signals(env.key("skip_short"), "lock_renewed")[2:], "it is held by renewal")
        worker.kill()
        with contextlib.closing(env.store()) as store:
            seen = [2000]  # milliseconds: its lock_ttl
            until(lambda: seen.append(store.pttl(env.key("skip_short"))) or seen[-1] < 0, "it has expired")
        assert sorted(seen, reverse=True) == seen, "nobody puts its expiry off"
        assert "done" == env.get(env.job("skip_short").delay(env.tag))
