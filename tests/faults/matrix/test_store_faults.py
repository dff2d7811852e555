"""Faults 16 to 26: the store, or the network to it, fails while leases are held."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import redis

from celery_singleton_lock.store.protocol import AcquireStatus
from celery_singleton_lock.store.redis import RedisStore, connector
from celery_singleton_lock.store.requests import LeaseSpec
from tests.faults.harness import WorkerEnvironment, now, since
from tests.faults.ledger import Event
from tests.faults.matrix import LATE
from tests.faults.probes import digests
from tests.faults.tasks import BRIEF, LINGER
from tests.servers import until

TTL = 6.0
#: Seconds that the other run takes: it ends before the holder's next renewal, or still runs then.
RUNS = {"short": BRIEF, "long": TTL * 0.75}
POOLS = ["prefork", "threads", "gevent"]
#: Which processes renew, as values of ``own``: the body's process (True) and its main process (False).
RENEWERS = {"prefork": (True, False), "threads": (True,), "gevent": (True,)}


@contextlib.contextmanager
def _holding(
    pool: str = "prefork", ttl: float = TTL, proxied: bool = False, store: tuple[str, ...] = (), second: float = 0.15
) -> Iterator[WorkerEnvironment]:
    """Yield an environment where body ``a`` holds its lease and a duplicate waits for it in a second worker.

    Args:
        second: seconds that the body of the duplicate takes.
    """
    with WorkerEnvironment(ttl=ttl, proxied=proxied, store=store) as env:
        first = env.start(pool)
        env.worker("threads", options=("-Q", "two"))
        first.ready(env.app)
        env.send("retry", "a", ["hold"], expect="one attempt")
        env.body("a")
        env.send("retry", "a", ["sleep", second], expect="once", queue="two")
        env.wait("duplicate")
        yield env
        env.go("a")
        env.finish()


def _first(env: WorkerEnvironment) -> Event:
    return env.ledger.events("start")[0]


def _untouched(env: WorkerEnvironment, seconds: float) -> None:
    """Check for ``seconds`` that the lease is held and no other body runs."""
    env.stay_held(seconds, _first(env))
    assert 1 == len(env.ledger.events("start", tag="a"))
    assert not env.ledger.events("lost")


@pytest.mark.parametrize("pool", POOLS)
def test_restarted_empty(pool: str) -> None:
    """The holder reacquires its lease. A duplicate may run before, within a third of the TTL plus the timeout."""
    with _holding(pool, second=TTL) as env:
        with env.schedule.during("empty") as fault:
            env.store.stop()
            env.store.start()
        until(lambda: len(env.ledger.events("start")) > 1 or _back(env, fault.until), "somebody has it", TTL)
        starts = env.ledger.events("start")
        if len(starts) > 1:
            late = starts[1]["at"] - fault.until
            env.measured(f"16 store lost its data, {pool}: last new run", env.limits.heal, max(0.0, late))
            env.wait("lost", run=starts[0]["run"])
        else:
            env.measured(
                f"16 store lost its data, {pool}: reacquired", env.limits.heal, _back(env, fault.until) - fault.until
            )
            assert not env.ledger.events("lost")


@pytest.mark.parametrize("pool", POOLS)
def test_restarted_empty_and_alone(pool: str) -> None:
    """Without a duplicate the holder reacquires its lease and has not lost it."""
    with WorkerEnvironment(ttl=TTL) as env:
        env.worker(pool)
        env.send("retry", "a", ["hold"], expect="once")
        body = env.body("a")
        env.wait("key")
        with env.schedule.during("empty") as fault:
            env.store.stop()
            env.store.start()
        until(lambda: env.held(body) and _back(env, fault.until), "re-taken", TTL)
        env.measured(
            f"16 store lost its data, alone, {pool}: reacquired",
            env.limits.heal,
            _back(env, fault.until) - fault.until,
        )
        _waited_for(env, body, TTL)
        assert not env.ledger.events("lost")
        env.finish()


def _waited_for(env: WorkerEnvironment, body: Event, seconds: float) -> None:
    """Check that a duplicate waits for this body for ``seconds``, then let the body end."""
    again = env.send("retry", "a", ["sleep"], expect="once")
    env.stay_held(seconds, body)
    env.go("a")
    again.get(timeout=LATE)


def _renewed(env: WorkerEnvironment, *by: bool) -> None:
    """Wait until each of these processes (see ``RENEWERS``) has sent a new renewal of the first body's lease."""
    begin, run = now(), _first(env)["run"]

    def fresh(own: bool) -> bool:
        sent = env.ledger.events("store", verb="renew", run=run, own=own, sent=True)
        return any(event["at"] > begin for event in sent)

    for own in by:
        until(lambda own=own: fresh(own), "renewed: the next time is a while off", TTL)  # type: ignore[misc]


def _back(env: WorkerEnvironment, after: float) -> float:
    """Return when the store first changed the first body's lease after this time (MONITOR may miss an acquire)."""
    done = [event["at"] for event in env.ledger.events("store", run=_first(env)["run"]) if event["does"]]
    return float(next((at for at in done if at > after), 0.0))


def _second(env: WorkerEnvironment) -> float:
    """Return when the second body began, or 0."""
    starts = env.ledger.events("start")
    return float(starts[1]["at"]) if len(starts) > 1 else 0.0


@pytest.mark.parametrize("run", ["short", "long"])
@pytest.mark.parametrize("pool", POOLS)
def test_restarted_empty_and_a_run(pool: str, run: str) -> None:
    """A holder whose lost lock another run acquired is notified.

    It reacquires the lock after that run, and the next duplicate waits for it.
    """
    with _holding(pool, second=RUNS[run]) as env:
        first = _first(env)
        _renewed(env, *RENEWERS[pool])
        with env.schedule.during("empty") as fault:
            env.store.stop()
            env.store.start()
        second = env.body("a", 2)
        lost = env.wait("lost", run=first["run"])
        over = env.end(second)
        told = lost["at"] - fault.until
        env.measured(f"16 store lost its data, a {run} run, {pool}: notified", env.limits.heal, told)
        until(lambda: env.held(first) and _back(env, over["at"]), "re-taken", TTL)
        if run == "long":
            assert lost["at"] < over["at"]
            late = _back(env, over["at"]) - over["at"]
            env.measured(f"16 store lost its data, {pool}: reacquired after a long run", TTL / 12 + 1.0, late)
        _waited_for(env, first, TTL)


@pytest.mark.parametrize("pool", POOLS)
def test_lease_of_nobody(pool: str) -> None:
    """A lease whose acquirer timed out counts as another holder's; the holder reacquires its lock after its release."""
    with WorkerEnvironment(ttl=TTL) as env:
        env.worker(pool)
        env.send("retry", "a", ["hold"], expect="once")
        body = env.body("a")
        env.wait("key")
        base, _, digest = body["key"].rpartition(":lock:")
        nobody = LeaseSpec(base, digest, "0" * 32, 60.0, "nobody")
        store = RedisStore(connector(env.store.url(), {}))
        _renewed(env, *RENEWERS[pool])
        with env.schedule.during("empty"):
            env.store.stop()
            env.store.start()
        with contextlib.closing(env.client()) as client:
            until(lambda: any(one["cmd"] == "monitor" for one in client.client_list()), "the probe is back")
        assert AcquireStatus.GRANTED is store.acquire(nobody).status
        env.wait("lost", run=body["run"])
        given_back = now()
        store.release(nobody, success=False)
        store.close()
        until(lambda: env.held(body) and _back(env, given_back), "re-taken", TTL)  # two different probes report these
        late = _back(env, given_back) - given_back
        env.measured(f"16 met a lease of nobody, {pool}: reacquired", TTL / 12 + 1.0, late)
        _waited_for(env, body, TTL)
        env.finish()


def test_restarted_empty_and_the_body_over() -> None:
    """No lease is reacquired for a body that has ended, although its task has not."""
    with WorkerEnvironment(ttl=TTL) as env:
        env.worker(concurrency=1)
        env.worker("threads", options=("-Q", "two"))
        env.send("lingering", "a", ["sleep", 1.0], expect="once")
        body = env.body("a")
        env.gone(body)
        with env.schedule.during("empty"):
            env.store.stop()
            env.store.start()
        env.last(env.limits.heal)
        env.send("lingering", "a", ["sleep"], expect="once", queue="two")
        assert env.body("a", 2)["at"] < env.end(body)["at"] + LINGER
        env.last(LINGER, env.end(body)["at"])
        env.finish()


def test_restarted_with_data(tmp_path: Path) -> None:
    """A store that restarts with its data keeps the lease: renewal continues and no loss is reported."""
    with _holding(store=("--appendonly", "yes", "--appendfsync", "always", "--dir", str(tmp_path))) as env:
        with env.schedule.during("restart"):
            env.store.stop()
            env.store.start()
        _untouched(env, 2 * TTL)


@pytest.mark.parametrize("pool", POOLS)
def test_stopped_for_half_a_ttl(pool: str) -> None:
    """A store that is stopped for half a TTL costs no lease."""
    with _holding(pool) as env:
        with env.schedule.during("pause"):
            env.store.pause()
            env.last(TTL / 2)
            env.store.resume()
        _untouched(env, TTL)


@pytest.mark.parametrize("pool", POOLS)
def test_stopped_for_three_ttl(pool: str) -> None:
    """The loss is reported during the outage; afterwards either the holder or the duplicate has the lease, not both."""
    with _holding(pool, ttl=4.0) as env:
        with env.schedule.during("outage") as fault:
            env.store.pause()
            lost = env.wait("lost", 8.0)
            env.measured(f"24 store away, {pool}: loss notified", 4.0 + 1.0, since(fault, lost["at"]), at_least=2.3)
            env.last(12, fault.at)
            env.store.resume()
        had = until(lambda: _back(env, fault.until) or _second(env), "somebody has it", LATE)
        env.measured(f"24 store away, {pool}: one of the two has it again", env.limits.heal, had - fault.until)
        assert 1 == len(env.ledger.events("lost"))


def test_stopped_for_three_ttl_alone() -> None:
    """Without a duplicate the lost lease is reacquired after the outage, so that no later duplicate runs."""
    with WorkerEnvironment(ttl=4.0) as env:
        env.worker()
        env.send("retry", "a", ["hold"], expect="once")
        body = env.body("a")
        with env.schedule.during("outage") as fault:
            env.store.pause()
            env.last(12)
            env.store.resume()
        until(lambda: env.held(body) and _back(env, fault.until), "re-taken", LATE)
        env.measured("24 store away, alone: reacquired", env.limits.heal, _back(env, fault.until) - fault.until)
        _waited_for(env, body, 4)
        assert 1 == len(env.ledger.events("lost"))
        env.finish()


@contextlib.contextmanager
def _stopped_child(ttl: float) -> Iterator[tuple[WorkerEnvironment, Event]]:
    """Yield an environment where the child of body ``a`` is stopped within the block and continues after it."""
    with WorkerEnvironment(ttl=ttl) as env:
        env.worker(concurrency=1)
        env.worker("threads", options=("-Q", "two"))
        env.send("retry", "a", ["hold"])
        body = env.body("a")
        env.wait("key")
        with env.child_stopped(body["pid"]):
            yield env, body
        env.finish()


def test_restarted_empty_beside_a_stopped_child() -> None:
    """The lease of a stopped child is not reacquired. When the child continues, it is notified and reacquires its lease."""
    with _stopped_child(TTL) as (env, body):
        with env.schedule.during("empty"):
            env.store.stop()
            env.store.start()
        env.send("retry", "a", ["sleep", BRIEF], expect="once", queue="two")
        env.end(env.body("a", 2))
        env.last(TTL)
        assert not env.held(body)
        woken = now()
        os.kill(body["pid"], signal.SIGCONT)
        lost = env.wait("lost", run=body["run"])
        env.measured("18 store lost its data beside a stopped child: notified after waking", 1.5, lost["at"] - woken)
        until(lambda: env.held(body) and _back(env, woken), "re-taken", TTL)
        env.go("a")


def test_unlocked_beside_a_stopped_child() -> None:
    """A lock that an operator revoked from a stopped child is not reacquired; the child is notified when it continues."""
    with _stopped_child(2) as (env, body):
        with env.schedule.during("unlock"):
            holder = env.app.tasks["retry"].force_unlock("a")
        assert holder is not None
        assert body["task_id"] == holder.task_id
        env.last(10)
        assert not env.held(body)
        woken = now()
        os.kill(body["pid"], signal.SIGCONT)
        env.measured("19 unlocked beside a stopped child: notified after waking", 1.5, env.wait("lost")["at"] - woken)
        env.last(5)
        assert not env.held(body)
        env.go("a")


@pytest.mark.parametrize("command", ["SCRIPT FLUSH", "CLIENT KILL TYPE normal"])
@pytest.mark.parametrize("pool", POOLS)
def test_nothing_lost(pool: str, command: str) -> None:
    """Flushed scripts and closed connections, repeatedly, cost no lease."""
    with _holding(pool, ttl=3.0) as env:
        kills = []
        for _ in range(12):
            begin = now()
            with contextlib.closing(env.client()) as client, contextlib.suppress(redis.ConnectionError):
                client.execute_command(*command.split())
            kills.append((begin, now() + 0.1))
            _untouched(env, 0.5)
        errors = [event["at"] for event in env.ledger.events("store error")]
        # A call repeats once on a closed connection, so it fails only if the new connection is closed at the same time.
        explained = [at for at in errors if any(begin <= at <= end for begin, end in kills)]
        assert errors == ([] if command == "SCRIPT FLUSH" else explained)


def test_read_only() -> None:
    """The lease survives while its server is a replica and refuses renewals."""
    with _holding() as env, contextlib.closing(env.client()) as client:
        with env.schedule.during("refusal"):
            client.execute_command("REPLICAOF", "127.0.0.1", "1")  # no server listens there, so the data stay
            assert "read only" in env.wait("store error", task_id=_first(env)["task_id"])["error"]
            env.last(TTL / 3)
            client.execute_command("REPLICAOF", "NO", "ONE")
        _untouched(env, TTL)


def test_out_of_memory() -> None:
    """A full store refuses new leases, and their tasks are retried later; a held lease is kept."""
    with _holding(store=("--maxmemory-policy", "noeviction")) as env, contextlib.closing(env.client()) as client:
        with env.schedule.during("refusal"):
            client.config_set("maxmemory", "1")
            other = env.send("skip", "b", ["sleep"], expect="once")
            assert "maxmemory" in env.wait("store error", task_id=other.id)["error"]
            _untouched(env, TTL / 2)
            client.config_set("maxmemory", "0")
        _untouched(env, TTL)
        assert "slept" == other.get(timeout=LATE)


@pytest.mark.parametrize("pool", POOLS)
def test_slow_store(pool: str) -> None:
    """Replies after 3 s exceed every timeout and count as failures; a slow phase below the TTL costs no lease."""
    with _holding(pool, ttl=9.0, proxied=True) as env:
        with env.schedule.during("slow"):
            env.proxy.delay = 3.0
            env.wait("store error", task_id=_first(env)["task_id"])  # of a renewal
            env.last(0.5)
            env.proxy.delay = 0.0
        _untouched(env, 9.0)


@pytest.mark.parametrize("pool", POOLS)
def test_half_open(pool: str) -> None:
    """The library closes connections that never reply in time, and renews over new ones."""
    with _holding(pool, proxied=True) as env:
        with env.schedule.during("half-open"):
            env.proxy.hanging.set()
            env.wait("store error", task_id=_first(env)["task_id"])
            env.last(0.5)
            env.proxy.silence()  # the open connections never reply again
            env.proxy.hanging.clear()
        _untouched(env, TTL)


@pytest.mark.parametrize("pool", POOLS)
def test_body_ends_while_the_store_is_away(pool: str) -> None:
    """A pending release is done within 4 s of the store's return, not after a long TTL."""
    with WorkerEnvironment(ttl=40, proxied=True) as env:
        env.worker(pool, concurrency=2)
        result = env.send("skip", "a", ["hold"], expect="once")
        body = env.body("a")
        with env.schedule.during("pause") as fault:
            env.proxy.hanging.set()
            env.go("a")
            assert "held" == result.get(timeout=LATE)
            env.wait("store error", task_id=body["task_id"])
            env.last(2)
            assert env.held(body)
            env.proxy.hanging.clear()
        env.measured(f"25 ended while the store was away, {pool}: freed", 4.0, env.gone(body) - fault.until)
        assert "slept" == env.send("skip", "a", ["sleep"], expect="once").get(timeout=LATE)
        env.finish()


@pytest.mark.parametrize("after", [0, 5])
@pytest.mark.parametrize("pool", POOLS)
def test_reply_lost(pool: str, after: int) -> None:
    """A call whose reply is lost neither loses a run, nor causes a second one, nor leaves a lock."""
    with WorkerEnvironment(ttl=TTL, proxied=True) as env:
        env.worker(pool, concurrency=1)
        env.send("skip", "warm", ["sleep"], expect="once").get(timeout=LATE)
        env.know_scripts()  # so that the lost reply is not NOSCRIPT
        for number, (verb, seconds) in enumerate(
            {"acquire": 0.5, "renew": TTL, "release": 0.5, "reacquire": TTL * 0.75}.items()
        ):
            tag = f"a{number}"
            env.proxy.drop_reply(digests(verb), after)
            result = env.send("skip", tag, ["sleep", seconds], expect="once")
            sent = now()
            body = env.body(tag)
            # A gevent worker whose only greenlet was busy polls for messages every 2 s (`celery.worker.loops.synloop`, 5.7).
            env.measured(f"26 reply to {verb} lost, {pool}: started", 3.0, body["at"] - sent)
            if verb == "reacquire":
                _mark_lost(env, body)
            assert "slept" == result.get(timeout=LATE)
            gone = env.gone(body) if verb != "reacquire" else _freed(env, body)
            env.measured(f"26 reply to {verb} lost, {pool}: freed", 1.0, since(env.end(body), gone))
        assert 4 == env.proxy.dropped
        assert not env.ledger.events("lost")
        env.finish()


def _freed(env: WorkerEnvironment, body: Event) -> float:
    """Return when a body's lease was released."""
    store = partial(env.ledger.events, "store", verb="release", run=body["run"])
    return float(until(lambda: [event for event in store() if event["does"]], "freed")[0]["at"])


def _mark_lost(env: WorkerEnvironment, body: Event) -> None:
    """Delete a lease from the store, and wait until it is reacquired."""
    until(lambda: env.held(body), "its lease is seen")
    with env.schedule.during("empty") as fault, contextlib.closing(env.client()) as client:
        assert client.delete(body["key"])
    env.gone(body)

    def taken() -> bool:
        done = env.ledger.events("store", verb="reacquire", run=body["run"])
        return any(event["does"] and event["at"] > fault.at for event in done)

    until(taken, "re-taken", TTL)


def test_renewal_answered_late() -> None:
    """A deadline counts from before the renewal was sent, so a body never trusts its lease longer than the store keeps it."""
    with WorkerEnvironment(ttl=TTL, proxied=True) as env:
        env.worker(concurrency=1)
        env.send("retry", "a", ["watch"], expect="run")
        env.body("a")
        env.know_scripts()
        before = len(_renewals(env))
        with env.schedule.during("outage"):
            env.proxy.delay = 0.6  # of a store_timeout of 1 s
            until(lambda: len(_renewals(env)) >= before + 2, "renewed twice", 3 * TTL)
            env.last(1.2)  # the reply has arrived
            env.proxy.hanging.set()
            ended = env.wait("not held", 2 * TTL)
            last = _renewals(env)[-1]
            env.measured("24 last renewal answered late: not held any more", TTL + 0.3, since(last, ended["at"]))
            env.wait("lost")
            env.proxy.hanging.clear()
        env.proxy.delay = 0.0
        env.go("a")
        env.finish()


def _renewals(env: WorkerEnvironment) -> list[Event]:
    """Return the renewals that the body's own process has sent."""
    return env.ledger.events("store", verb="renew", own=True)
