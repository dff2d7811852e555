"""Faults 8 to 10: shutdowns in every pool, and pools whose children are replaced, added or removed."""

from __future__ import annotations

import re
import signal

import celery
import pytest

from tests.faults.harness import WorkerEnvironment, now, since
from tests.faults.ledger import Event
from tests.faults.matrix import LATE
from tests.servers import until

POOLS = ["prefork", "threads", "gevent", "eventlet", "solo"]
SOON = 1.0
#: Pools in which Celery ends a body that is too long; in the others the body ends first. Observed with 5.7.
ENDED_BY = {"cold": {"prefork", "gevent", "eventlet", "solo"}, "soft": {"prefork"}}
#: The first line of `celery.apps.worker.on_cold_shutdown` in 5.5 to 5.7; the only line in older versions.
COLD = re.compile(r"worker: (Hitting Ctrl\+C again will terminate all running tasks!|Cold shutdown)")


@pytest.mark.parametrize("pool", POOLS)
def test_warm(pool: str) -> None:
    """The lease is renewed for three TTLs during a warm shutdown, until the body ends, and is then released."""
    with WorkerEnvironment(ttl=2) as env:
        worker = env.start(pool)
        env.worker("threads", options=("-Q", "two"))
        worker.ready(env.app)
        env.send("retry", "a", ["sleep", 6], expect="once")
        body = env.body("a")
        worker.process.signal(signal.SIGTERM)
        env.send("retry", "a", ["sleep"], expect="once", queue="two")
        freed = since(env.end(body), env.gone(body))
        env.measured(f"8 warm shutdown, {pool}: freed after the body", SOON, freed)
        assert worker.exit_code(LATE) is not None, "the worker does not end"
        env.body("a", 2)
        env.finish()


@pytest.mark.parametrize("kind", ["cold", "soft"])
@pytest.mark.parametrize("pool", POOLS)
def test_cold_and_soft(pool: str, kind: str) -> None:
    """The lease is released with the body, whether the pool terminates the body or lets it finish."""
    new = tuple(map(int, celery.__version__.split(".")[:2])) >= (5, 5)
    if kind == "soft" and not new:
        pytest.skip("this Celery has no soft shutdown")
    with WorkerEnvironment(ttl=40, **({"worker_soft_shutdown_timeout": 2.0} if kind == "soft" else {})) as env:
        worker = env.start(pool)
        env.worker("threads", options=("-Q", "two"))
        worker.ready(env.app)
        env.send("skip", "a", ["sleep", 8])
        body = env.body("a")
        if pool == "prefork":  # the main process ignores a body whose start it has not seen yet
            until(lambda: any((env.app.control.inspect([worker.node]).active() or {}).values()), "it is known")
        quit_at = now()
        worker.process.signal(signal.SIGQUIT)
        end = env.end(body)
        env.measured(f"8 {kind} shutdown, {pool}: freed after the body", SOON, since(end, env.gone(body)))
        if new and (kind, pool) != ("soft", "solo"):  # there the outcome depends on the time of the signal
            cut = pool in ENDED_BY[kind]
            assert cut == (end.get("how", "died") != "return"), f"Celery's part has changed: {end}"
            if cut:
                assert end["at"] - quit_at < (2.0 if kind == "soft" else 0.0) + 3.0, "the body was not ended"
        assert worker.exit_code(LATE) is not None, "the worker does not end"
        assert COLD.search(worker.process.output()), "the worker says nothing of its shutdown"
        if kind == "soft":
            # `celery.worker.worker.WorkController.wait_for_soft_shutdown`, 5.5 to 5.7
            assert "Initiating Soft Shutdown, terminating in 2.0 seconds" in worker.process.output()
        assert "slept" == env.send("skip", "a", ["sleep"], expect="once", queue="two").get(timeout=LATE)
        env.finish()


@pytest.mark.parametrize("option", ["--max-tasks-per-child=1", "--max-memory-per-child=1000"])
def test_children_are_replaced(option: str) -> None:
    """Each run has its own child process, and its lease is released with the body, with a TTL of 40 s."""
    with WorkerEnvironment(ttl=40) as env:
        env.worker(concurrency=2, options=(option,))
        for number in range(5):
            acts = ["eat", 5] if "memory" in option else ["sleep", 0.1]
            env.send("skip", "a", acts, expect="once").get(timeout=LATE)
            body = env.body("a", number + 1)
            env.measured(f"9 {option}, run {number + 1}: freed after", SOON, since(env.end(body), env.gone(body)))
        assert 5 == len({e["pid"] for e in env.ledger.events("start")})
        env.finish()


def test_pool_restart() -> None:
    """The lease of a body is released within 6 s of its end, however a pool restart by remote control treats the body."""
    with WorkerEnvironment(ttl=40, worker_pool_restarts=True) as env:
        worker = env.worker(concurrency=2)
        env.send("skip", "a", ["sleep", 5])
        body = env.body("a")
        children = worker.all_pids() - {worker.process.pid}
        assert body["pid"] in children
        replies = env.app.control.pool_restart(destination=[worker.node], reply=True, timeout=LATE)
        assert [{worker.node: {"ok": "reload started"}}] == replies
        end = env.end(body)
        env.measured("9 pool restart: freed after the body", 6.0, since(end, env.gone(body)))
        until(lambda: env.app.control.ping(destination=[worker.node], timeout=1), "the worker answers", LATE)
        until(lambda: len(worker.all_pids() - children) == 3, "a main process and two new children", LATE)
        assert "slept" == env.send("skip", "a", ["sleep"], expect="once").get(timeout=LATE)
        env.finish()


def _added_child(env: WorkerEnvironment, first: Event, tag: str, what: str) -> None:
    """Check that the worker releases the lease of a killed child that was added later, and no other lease."""
    env.send("skip", tag, ["hold"])
    added = env.body(tag)
    env.stay_held(4, first, added)
    fault = env.kill_child(added["pid"])
    env.measured(f"10 child added by {what} and killed: freed", 6.0, since(fault, env.gone(added)))
    assert env.held(first)


def test_pool_grows_and_shrinks() -> None:
    """Added and removed children do not change a running body's lease; the worker also supervises a new child."""
    with WorkerEnvironment(ttl=3) as env:
        worker = env.worker(concurrency=1)
        env.send("skip", "a", ["hold"], expect="once")
        first = env.body("a")
        env.app.control.pool_grow(1, destination=[worker.node])
        _added_child(env, first, "b", "remote control")
        assert "slept" == env.send("skip", "c", expect="once").get(
            timeout=LATE
        )  # in the child that replaced the killed one
        until(lambda: _shrinks(env, worker.node), "the pool shrinks", LATE)  # busy until it has seen the end
        until(lambda: worker.all_pids() == {worker.process.pid, first["pid"]}, "the idle child is gone", LATE)
        env.stay_held(3.5, first)
        env.go("a")
        env.end(first)
        assert "slept" == env.send("skip", "a", ["sleep"], expect="once").get(timeout=LATE)
        env.finish()


def _shrinks(env: WorkerEnvironment, node: str) -> bool:
    replies = env.app.control.pool_shrink(1, destination=[node], reply=True, timeout=LATE)
    return bool([{node: {"ok": "pool will shrink"}}] == replies)


def test_autoscale() -> None:
    """The same holds where the worker scales itself and gets new bounds by remote control."""
    with WorkerEnvironment(ttl=3) as env:
        worker = env.worker(options=("--autoscale=2,1",), env={"AUTOSCALE_KEEPALIVE": "1"})
        env.send("skip", "a", ["hold"], expect="once")
        first = env.body("a")
        env.send("skip", "b", ["hold"], expect="once")
        second = env.body("b")
        assert first["pid"] != second["pid"]
        env.stay_held(4, first, second)
        env.go("b")
        env.measured("10 autoscale: freed after the body", SOON, since(env.end(second), env.gone(second)))
        env.wait("death", 30, of=second["pid"])
        env.app.control.autoscale(3, 2, destination=[worker.node])
        _added_child(env, first, "c", "autoscale")
        env.go("a")
        env.end(first)
        assert "slept" == env.send("skip", "a", ["sleep"], expect="once").get(timeout=LATE)
        env.finish()
