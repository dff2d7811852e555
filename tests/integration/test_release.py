"""The lock is free as soon as the work is over, in whatever way it ends, and never before."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import pytest
from celery import chain, states

from tests.integration.bench import Bench
from tests.integration.monitor import Monitor
from tests.integration.nodes import LocalWorkerNode, WorkerSpec, wait_for_end
from tests.servers import RedisServer, until

#: Seconds within which a lock whose child was killed must be free, as promised.
KILLED = 6.0


def wait_until_free(bench: Bench, name: str, timeout: float = 3.0) -> None:
    """Wait until the lock key is gone; it has a TTL that is far longer than the wait."""
    until(lambda: not bench.is_locked(name), f"the lock of {name} is free", timeout)


class TestOrder:
    def test_whoever_has_the_result_can_start_the_next_run(self, bench: Bench) -> None:
        """get() and at once delay(): always granted."""
        for _ in range(50):
            assert "done" == bench.get(bench.job("raising").delay(bench.tag))

    def test_a_chain_never_meets_itself(self, bench: Bench) -> None:
        """A chain whose steps are all the same work: each step finds the lock free."""
        last = chain(*[bench.job("raising").si(bench.tag) for _ in range(20)])()
        assert "done" == bench.get(last)
        assert 20 == len(bench.starts())

    def test_after_a_failure(self, bench: Bench) -> None:
        """A failed result too means that the lock is free."""
        for _ in range(10):
            error = bench.error(bench.job("raising").delay(bench.tag, "raise"))
            assert "Boom" == type(error).__name__

    def test_release_is_sent_first(self, bench: Bench, redis_server: RedisServer) -> None:
        """Release goes out before the next step is published and before the result is stored."""
        then = bench.app.tasks["then"].si(bench.other_tag("then"))
        # Broker, result backend and store are one server here, so MONITOR shows the true order.
        with Monitor(redis_server.url()) as monitor:
            last = chain(bench.job("skip").si(bench.tag), then)()
            bench.get(last)
        first, key = last.parent.id, bench.key("skip")
        acquired, released = monitor.where(key)
        (published,) = monitor.where("LPUSH", bench.worker.worker_queue, last.id)
        (stored,) = monitor.where(f"celery-task-meta-{first}", "SUCCESS", "SET")
        assert acquired < released < published
        assert released < stored


class TestEnds:
    @pytest.mark.parametrize("act", ["return", "raise", "ignore", "reject", "exit"])
    def test_body(self, bench: Bench, act: str) -> None:
        """Success, failure, Ignore, Reject, SystemExit."""
        bench.job("long").delay(bench.tag, [act, "return"])
        bench.wait_for("end")
        wait_until_free(bench, "long")
        assert "done" == bench.get(bench.job("long").delay(bench.tag))

    @pytest.mark.parametrize(("name", "act"), [("long", "retry"), ("auto_later", "raise")])
    def test_retry(self, bench: Bench, name: str, act: str) -> None:
        """retry() and autoretry: the lock is free during the countdown."""
        first = bench.job(name).delay(bench.tag, [act, "return"], 60)
        bench.wait_for_state(first, states.RETRY)
        wait_until_free(bench, name)
        assert "done" == bench.get(bench.job(name).delay(bench.tag))
        first.revoke()

    @pytest.mark.parametrize("name", ["soft_limit", "hard_limit"])
    def test_time_limit(self, bench: Bench, name: str) -> None:
        """Soft and hard limit."""
        result = bench.job(name).delay(bench.tag, ["sleep", "return"], 30)
        bench.wait_for("start")
        assert "TimeLimitExceeded" in type(bench.error(result)).__name__
        wait_until_free(bench, name, KILLED)
        assert "done" == bench.get(bench.job(name).delay(bench.tag))

    @pytest.mark.parametrize("signal_name", ["SIGTERM", "SIGKILL"])
    def test_revoke_terminate(self, bench: Bench, signal_name: str) -> None:
        """A revoked task that is ended by a signal."""
        result = bench.hold("long")
        bench.app.control.revoke(result.id, terminate=True, signal=signal_name)
        wait_until_free(bench, "long", KILLED)
        assert "done" == bench.get(bench.job("long").delay(bench.tag))

    def test_revoked_body_that_goes_on_keeps_its_lock(self, bench: Bench) -> None:
        """REVOKED is no end: a body that swallows the wish to end holds on until it is over."""
        result = bench.job("long").delay(bench.tag, ["sleep_swallowing", "return"], 2.5)
        bench.wait_for("start")
        bench.app.control.revoke(result.id, terminate=True)
        bench.wait_for("swallowed")
        while not bench.events("end"):
            assert bench.is_locked("long") or bench.events("end")
            time.sleep(0.05)
        wait_until_free(bench, "long")

    def test_killed_child(self, bench: Bench) -> None:
        """SIGKILL of the child, as the kernel does it when memory runs out."""
        bench.hold("long")
        killed = time.monotonic()
        bench.kill_body(bench.starts()[0])
        wait_until_free(bench, "long", KILLED)
        assert time.monotonic() - killed < KILLED
        assert "done" == bench.get(bench.job("long").delay(bench.tag))

    def test_child_that_kills_itself(self, bench: Bench) -> None:
        """The same from within."""
        bench.job("long").delay(bench.tag, ["die", "return"])
        bench.wait_for("start")
        wait_until_free(bench, "long", KILLED)
        assert "done" == bench.get(bench.job("long").delay(bench.tag))


class TestShutdown:
    def test_warm(self, bench: Bench, fresh_worker: Callable[..., LocalWorkerNode]) -> None:
        """The body ends in its own time with the lock held, and then the lock is free."""
        worker = fresh_worker(WorkerSpec(concurrency=1))
        result = bench.hold("long", queue=worker.worker_queue)
        worker.kill("SIGTERM")
        worker.wait_for_lines("Warm shutdown")
        time.sleep(0.5)
        assert bench.is_locked("long")
        bench.let_go()
        assert 0 == wait_for_end(worker.container, 15)
        assert "held" == bench.get(result)
        assert not bench.is_locked("long")

    def test_cold(self, bench: Bench, fresh_worker: Callable[..., LocalWorkerNode]) -> None:
        """The body is ended with the worker, and the lock is free."""
        worker = fresh_worker(WorkerSpec(concurrency=1))
        bench.hold("long", queue=worker.worker_queue)
        worker.container.process.signal(signal.SIGQUIT)
        assert wait_for_end(worker.container, 15) is not None
        wait_until_free(bench, "long", KILLED)

    def test_max_tasks_per_child(self, bench: Bench, fresh_worker: Callable[..., LocalWorkerNode]) -> None:
        """A child that is replaced after each task leaves no lock behind."""
        worker = fresh_worker(WorkerSpec(concurrency=1, options=("--max-tasks-per-child", "1")))
        queue = worker.worker_queue
        for _ in range(2):
            assert "done" == bench.get(bench.job("long").apply_async((bench.tag,), queue=queue))
            assert not bench.is_locked("long")

    def test_killed_worker(self, bench: Bench, fresh_worker: Callable[..., LocalWorkerNode]) -> None:
        """Nobody is left to release: the lock ends lock_ttl after the last renewal."""
        worker = fresh_worker(WorkerSpec(concurrency=1))
        bench.hold("skip_short", queue=worker.worker_queue)
        time.sleep(2.5)
        assert bench.is_locked("skip_short")
        worker.kill()
        killed = time.monotonic()
        wait_until_free(bench, "skip_short", 3.0)
        assert time.monotonic() - killed <= 2.5
        assert "done" == bench.get(bench.job("skip_short").delay(bench.tag))
