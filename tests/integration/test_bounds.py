"""`lock_at_least`, `lock_at_most` and `max_starts` with real workers."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence

import pytest
from celery import states

from celery_singleton_lock.delivery.retry_state import RETRY_STATE_HEADER
from tests.integration.environment import SOON, WorkerEnvironment
from tests.integration.nodes import LocalWorkerNode, WorkerSpec, wait_for_end
from tests.servers import until

POOLS = ("prefork", "threads")
#: Seconds of the jobs' options; those of the jobs that a test is not to wait for are ten minutes.
AT_LEAST, AT_MOST, LONG = 3.0, 3.0, 600.0


@pytest.fixture(scope="module")
def worker_specs() -> Sequence[WorkerSpec]:
    return [WorkerSpec(pool) for pool in POOLS]


@pytest.fixture(params=POOLS)
def queue(request: pytest.FixtureRequest, env: WorkerEnvironment) -> str:
    return str(env.worker_of(request.param).worker_queue)


def until_free(env: WorkerEnvironment, name: str) -> None:
    until(lambda: not env.is_locked(name), f"the lock of {name} is free")


class TestAtLeast:
    def test_success_holds(self, env: WorkerEnvironment, queue: str) -> None:
        """After a success the lock stays held until `lock_at_least` after the start."""
        job, sent = env.job("throttled"), time.monotonic()
        assert "done" == env.get(job.apply_async((env.tag,), queue=queue))
        holder = job.lock_holder(env.tag)  # type: ignore[attr-defined]
        assert "cooldown" == holder.state
        assert LONG - (time.monotonic() - sent) <= holder.remaining <= LONG
        assert env.get(job.apply_async((env.tag,), queue=queue)) is None
        assert 1 == len(env.starts())

    def test_cooldown_ends(self, env: WorkerEnvironment, queue: str) -> None:
        """At the end of the cooldown the lock is free by itself, and not before."""
        job, sent = env.job("throttled_briefly"), time.monotonic()
        assert "done" == env.get(job.apply_async((env.tag,), queue=queue))
        until_free(env, "throttled_briefly")
        assert "done" == env.get(job.apply_async((env.tag,), queue=queue))
        assert sent + AT_LEAST < env.starts()[1]["at"]
        assert 2 == len(env.lock_signals(env.key("throttled_briefly"), "lock_released"))

    @pytest.mark.parametrize("act", ["raise", "retry"])
    def test_no_success_frees(self, env: WorkerEnvironment, queue: str, act: str) -> None:
        """After a failure, or during the countdown of a retry, the next run starts at once."""
        job = env.job("throttled")
        first = job.apply_async((env.tag, [act, "return"], LONG), queue=queue)
        env.wait_for_state(first, states.FAILURE, states.RETRY)
        assert "done" == env.get(job.apply_async((env.tag,), queue=queue))
        env.revoke(first)

    def test_killed_child_leaves_no_hold(self, env: WorkerEnvironment) -> None:
        """The lock of a killed child is released."""
        env.hold("throttled")
        env.kill_body(env.starts()[0])
        until_free(env, "throttled")

    def test_unlocked(self, env: WorkerEnvironment, queue: str) -> None:
        """`force_unlock` ends a cooldown."""
        job = env.job("throttled")
        env.get(job.apply_async((env.tag,), queue=queue))
        assert "cooldown" == job.force_unlock(env.tag).state  # type: ignore[attr-defined]
        assert "done" == env.get(job.apply_async((env.tag,), queue=queue))

    def test_retry_comes_back_once(self, env: WorkerEnvironment, queue: str) -> None:
        """A postponed duplicate comes back for the end of the cooldown, not again and again before."""
        job, sent = env.job("throttled_retry"), time.monotonic()
        env.get(job.apply_async((env.tag,), queue=queue))
        assert "done" == env.get(job.apply_async((env.tag,), queue=queue))
        assert sent + AT_LEAST < env.starts()[1]["at"]
        assert len(env.lock_signals(env.key("throttled_retry"), "duplicate")) <= 2

    @pytest.mark.parametrize("waits", [True, False], ids=["waited", "came later"])
    def test_redelivery(self, env: WorkerEnvironment, waits: bool) -> None:
        """A redelivery is dropped after the success of its first delivery, whether it came before or during the cooldown."""
        name = (
            "throttled_briefly" if waits else "throttled"
        )  # the one that waits may look again when the cooldown has ended
        with env.captured_messages() as messages:
            result = env.hold(name)
        (message,) = messages
        if waits:
            env.redeliver(message)
            env.worker.wait_for_lines(result.id, "redelivered while another delivery of it runs")
        env.let_go()
        assert "held" == env.get(result)
        if not waits:  # marked as one, as this broker does not mark what a test publishes
            headers = {**message["headers"], RETRY_STATE_HEADER: {"redelivery_checks": 1}}
            env.redeliver({**message, "headers": headers})
        env.worker.wait_for_lines(result.id, "dropped: another delivery of it")
        env.finish(result.id)
        assert ("held", states.SUCCESS) == (result.result, result.state)
        assert 1 == len(env.starts())


class TestAtMost:
    def test_hung_body_loses_its_lease(self, env: WorkerEnvironment, queue: str) -> None:
        """The lease is lost at `lock_at_most`; the lock expires within `lock_ttl`, though the body goes on."""
        job, sent = env.job("capped"), time.monotonic()
        options = {"lock_options": {"lock_ttl": 9}}  # it outlives a moment of slowness before the cap
        first = job.apply_async((env.tag, ["hold_watching", "return"]), queue=queue, **options)
        assert sent + AT_MOST < env.wait_for("not-held")["at"]
        until_free(env, "capped")
        signals = [one["what"] for one in env.lock_signals(env.key("capped"))]
        assert (0, 1) == (signals.count("lock_released"), signals.count("lock_lost"))
        assert "done" == env.get(job.apply_async((env.tag,), queue=queue))
        assert first.id not in [end["id"] for end in env.events("end")]

    def test_raise(self, env: WorkerEnvironment, queue: str) -> None:
        """Under raise the body is interrupted, and the lock is released with its end."""
        job = env.job("capped_told")
        result = job.apply_async((env.tag, ["sleep", "return"], 30.0), queue=queue)
        if queue == env.worker_of("threads").worker_queue:  # LockLost comes at the next bytecode
            result = job.apply_async((env.other_tag("wakes"), ["hold_watching"], 30.0), queue=queue)
        assert "LockLost" == type(env.error(result)).__name__

    def test_main_process_stops_renewing(self, env: WorkerEnvironment) -> None:
        """The lock of a child that keeps the GIL expires as well, while the body goes on."""
        env.job("capped").delay(env.tag, ["keep_gil", "return"], 100.0)
        start = env.wait_for("start")
        until_free(env, "capped")
        assert [] == env.events("end")
        env.kill_body(start)


class TestMaxStarts:
    def test_poison(self, env: WorkerEnvironment) -> None:
        """A message that kills its children, and comes back each time, fails at its third start, and is gone."""
        result = env.job("poison").delay(env.tag, "die")
        error = env.error(result)
        assert "TooManyStarts" == type(error).__name__
        assert env.key("poison") in str(error)
        env.finish(result.id)
        assert states.FAILURE == result.state
        assert [result.id] * 2 == [start["id"] for start in env.starts()]
        assert 1 == len(env.worker.wait_for_lines("WARNING", result.id, "2 crashed starts"))
        assert not env.is_locked("poison")
        assert "TooManyStarts" == type(env.error(env.job("poison").delay(env.tag))).__name__

    def test_killed_workers(self, env: WorkerEnvironment, fresh_worker: Callable[..., LocalWorkerNode]) -> None:
        """The starts of killed workers count, once their leases have expired."""
        for number in (1, 2):
            worker = fresh_worker(WorkerSpec("threads", concurrency=1))
            env.job("poison").apply_async((env.tag, "die"), queue=worker.worker_queue)
            env.wait_for("start", count=number)
            assert wait_for_end(worker.container, SOON) is not None
            until_free(env, "poison")
        threads = env.worker_of("threads").worker_queue
        error = env.error(env.job("poison").apply_async((env.tag,), queue=threads))
        assert "TooManyStarts" == type(error).__name__

    @pytest.mark.parametrize("end", ["killed", "revoked"])
    def test_killed_child_counts(self, env: WorkerEnvironment, end: str) -> None:
        """The start of a child that SIGKILL ended counts, also if a revocation sent it."""
        result = env.hold("once")
        if end == "killed":
            env.kill_body(env.starts()[0])
        else:
            env.revoke(result, terminate=True, signal="SIGKILL")
        until_free(env, "once")
        assert "TooManyStarts" == type(env.error(env.job("once").delay(env.tag))).__name__

    @pytest.mark.parametrize("end", ["revoked", "limited", "raise", "exit", "shutdown"])
    def test_seen_ends(self, env: WorkerEnvironment, fresh_worker: Callable[..., LocalWorkerNode], end: str) -> None:
        """A revocation, a hard time limit, a failure, SystemExit and a cold shutdown are no crashes."""
        name = "once_limited" if end == "limited" else "once"
        if end in ("raise", "exit"):
            env.job(name).delay(env.tag, [end, "return"])
            env.wait_for("end")
        elif end == "limited":
            assert (
                "TimeLimitExceeded" in type(env.error(env.job(name).delay(env.tag, ["sleep", "return"], 30))).__name__
            )
        elif end == "revoked":
            env.revoke(env.hold(name), terminate=True)
        else:
            worker = fresh_worker(WorkerSpec(concurrency=1))
            env.hold(name, queue=worker.worker_queue)
            worker.container.process.signal(signal.SIGQUIT)
            assert wait_for_end(worker.container, SOON) is not None
        until_free(env, name)
        assert "done" == env.get(env.job(name).apply_async((env.tag,), time_limit=SOON))

    def test_unsuccessful(self, env: WorkerEnvironment, queue: str) -> None:
        """Failures since the last success count; autoretry does not take the refusal for an error of the body."""
        job, acts = env.job("tried"), ["raise", "return", "raise", "raise", "return"]
        ends = []
        for _ in range(5):
            result = job.apply_async((env.tag, acts), queue=queue)
            ends.append(result.get(timeout=SOON, propagate=False))
        assert ["Boom", "str", "Boom", "Boom", "TooManyStarts"] == [type(one).__name__ for one in ends]
        assert 4 == len(env.starts())
