"""Row 10: what a store, and the way to it, can do to those who hold a lease there."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import redis

from celery_singleton_lock.stores import Answer, Claim
from celery_singleton_lock.stores.redis import RedisStore, connector
from tests.faults.harness import Bench, now, since
from tests.faults.ledger import Event
from tests.faults.tasks import BRIEF, LINGER
from tests.servers import until

TTL = 6.0
#: Seconds of another's run: over before a holder renews, or met by it.
RUNS = {"short": BRIEF, "long": TTL * 0.75}
POOLS = ["prefork", "threads", "gevent"]
#: Who renews: the body's own process, and its main process.
RENEWERS = {"prefork": (True, False), "threads": (True,), "gevent": (True,)}


@contextlib.contextmanager
def _holding(
    pool: str = "prefork", ttl: float = TTL, proxied: bool = False, store: tuple[str, ...] = (), second: float = 0.15
) -> Iterator[Bench]:
    """Give a bench on which body ``a`` holds, and a duplicate of so many seconds waits for it in a second worker."""
    with Bench(ttl=ttl, proxied=proxied, store=store) as bench:
        first = bench.start(pool)
        bench.worker("threads", options=("-Q", "two"))
        first.ready(bench.app)
        bench.send("retry", "a", ["hold"], expect="one attempt")
        bench.body("a")
        bench.send("retry", "a", ["sleep", second], expect="once", queue="two")
        bench.wait("duplicate")
        yield bench
        bench.go("a")
        bench.settle()


def _first(bench: Bench) -> Event:
    return bench.ledger.events("start")[0]


def _untouched(bench: Bench, seconds: float) -> None:
    """See to it that the lease is held and nobody else runs for so many seconds."""
    bench.stay_held(seconds, _first(bench))
    assert 1 == len(bench.ledger.events("start", tag="a"))
    assert not bench.ledger.events("lost")


@pytest.mark.parametrize("pool", POOLS)
def test_restarted_empty(pool: str) -> None:
    """The lease is taken again by its holder. Until then a duplicate may run: no later than a third of a TTL and the timeout."""
    with _holding(pool, second=TTL) as bench:
        with bench.schedule.during("empty") as fault:
            bench.store.stop()
            bench.store.start()
        until(lambda: len(bench.ledger.events("start")) > 1 or _back(bench, fault.until), "somebody has it", TTL)
        starts = bench.ledger.events("start")
        if len(starts) > 1:
            late = starts[1]["at"] - fault.until
            bench.measured(f"10 store lost its data, {pool}: last new run", bench.limits.heal, max(0.0, late))
            bench.wait("lost", run=starts[0]["run"])
        else:
            bench.measured(
                f"10 store lost its data, {pool}: re-taken", bench.limits.heal, _back(bench, fault.until) - fault.until
            )
            assert not bench.ledger.events("lost")


@pytest.mark.parametrize("pool", POOLS)
def test_restarted_empty_and_alone(pool: str) -> None:
    """Where nobody else wants it, the holder takes its lease again and has not lost it."""
    with Bench(ttl=TTL) as bench:
        bench.worker(pool)
        bench.send("retry", "a", ["hold"], expect="once")
        body = bench.body("a")
        bench.wait("key")
        with bench.schedule.during("empty") as fault:
            bench.store.stop()
            bench.store.start()
        until(lambda: bench.held(body) and _back(bench, fault.until), "re-taken", TTL)
        bench.measured(
            f"10 store lost its data, alone, {pool}: re-taken",
            bench.limits.heal,
            _back(bench, fault.until) - fault.until,
        )
        _waited_for(bench, body, TTL)
        assert not bench.ledger.events("lost")
        bench.settle()


def _waited_for(bench: Bench, body: Event, seconds: float) -> None:
    """See to it that a duplicate waits for this body: for so many seconds, then it is let go."""
    again = bench.send("retry", "a", ["sleep"], expect="once")
    bench.stay_held(seconds, body)
    bench.go("a")
    again.get(timeout=10)


def _renewed(bench: Bench, *by: bool) -> None:
    """Wait until the first body's lease is renewed anew: by its own process (true), by that's main process (false)."""
    begin, run = now(), _first(bench)["run"]

    def fresh(own: bool) -> bool:
        sent = bench.ledger.events("store", verb="renew", run=run, own=own, sent=True)
        return any(event["at"] > begin for event in sent)

    for own in by:
        until(lambda own=own: fresh(own), "renewed: the next time is a while off", TTL)  # type: ignore[misc]


def _back(bench: Bench, after: float) -> float:
    """When something was first done for the first body's lease after this time (its very acquire may be missed)."""
    done = [event["at"] for event in bench.ledger.events("store", run=_first(bench)["run"]) if event["does"]]
    return float(next((at for at in done if at > after), 0.0))


def _second(bench: Bench) -> float:
    """When the second body began, if it has."""
    starts = bench.ledger.events("start")
    return float(starts[1]["at"]) if len(starts) > 1 else 0.0


@pytest.mark.parametrize("run", ["short", "long"])
@pytest.mark.parametrize("pool", POOLS)
def test_restarted_empty_and_a_run(pool: str, run: str) -> None:
    """Whoever was not alone meanwhile is told, and has its lease again once the other is over; the next one waits for it."""
    with _holding(pool, second=RUNS[run]) as bench:
        first = _first(bench)
        _renewed(bench, *RENEWERS[pool])
        with bench.schedule.during("empty") as fault:
            bench.store.stop()
            bench.store.start()
        second = bench.body("a", 2)
        lost = bench.wait("lost", run=first["run"])
        over = bench.end(second)
        told = lost["at"] - fault.until
        bench.measured(f"10 store lost its data, a {run} run, {pool}: told", bench.limits.heal, told)
        until(lambda: bench.held(first) and _back(bench, over["at"]), "re-taken", TTL)
        if run == "long":
            assert lost["at"] < over["at"]
            late = _back(bench, over["at"]) - over["at"]
            bench.measured(f"10 store lost its data, {pool}: taken again after a long run", TTL / 12 + 1.0, late)
        _waited_for(bench, first, TTL)


@pytest.mark.parametrize("pool", POOLS)
def test_lease_of_nobody(pool: str) -> None:
    """A claim granted after its sender gave up looks like another's lease; once it is given back its holder has its own again."""
    with Bench(ttl=TTL) as bench:
        bench.worker(pool)
        bench.send("retry", "a", ["hold"], expect="once")
        body = bench.body("a")
        bench.wait("key")
        base, _, digest = body["key"].rpartition(":lock:")
        nobody = Claim(base, digest, "0" * 32, 60.0, "nobody")
        store = RedisStore(connector(bench.store.url(), {}))
        _renewed(bench, *RENEWERS[pool])
        with bench.schedule.during("empty"):
            bench.store.stop()
            bench.store.start()
        with contextlib.closing(bench.client()) as client:
            until(lambda: any(one["cmd"] == "monitor" for one in client.client_list()), "the probe is back")
        assert Answer.GRANTED is store.acquire(nobody).answer
        bench.wait("lost", run=body["run"])
        given_back = now()
        store.release(nobody, success=False)
        store.close()
        until(lambda: bench.held(body) and _back(bench, given_back), "re-taken", TTL)  # each is another probe's
        late = _back(bench, given_back) - given_back
        bench.measured(f"10 met a lease of nobody, {pool}: taken again", TTL / 12 + 1.0, late)
        _waited_for(bench, body, TTL)
        bench.settle()


def test_restarted_empty_and_the_body_over() -> None:
    """For a body that is over nothing is taken, though its task's end is still to come."""
    with Bench(ttl=TTL) as bench:
        bench.worker(concurrency=1)
        bench.worker("threads", options=("-Q", "two"))
        bench.send("lingering", "a", ["sleep", 1.0], expect="once")
        body = bench.body("a")
        bench.gone(body)
        with bench.schedule.during("empty"):
            bench.store.stop()
            bench.store.start()
        bench.last(bench.limits.heal)
        bench.send("lingering", "a", ["sleep"], expect="once", queue="two")
        assert bench.body("a", 2)["at"] < bench.end(body)["at"] + LINGER
        bench.last(LINGER, bench.end(body)["at"])
        bench.settle()


def test_restarted_with_data(tmp_path: Path) -> None:
    """The lease is still there, is renewed further, and nobody is told of a loss."""
    with _holding(store=("--appendonly", "yes", "--appendfsync", "always", "--dir", str(tmp_path))) as bench:
        with bench.schedule.during("restart"):
            bench.store.stop()
            bench.store.start()
        _untouched(bench, 2 * TTL)


@pytest.mark.parametrize("pool", POOLS)
def test_stopped_for_half_a_ttl(pool: str) -> None:
    """Nothing is lost."""
    with _holding(pool) as bench:
        with bench.schedule.during("pause"):
            bench.store.pause()
            bench.last(TTL / 2)
            bench.store.resume()
        _untouched(bench, TTL)


@pytest.mark.parametrize("pool", POOLS)
def test_stopped_for_three_ttl(pool: str) -> None:
    """The loss is told while the store is away; afterwards one of the two has the lease, and the other does not run with it."""
    with _holding(pool, ttl=4.0) as bench:
        with bench.schedule.during("outage") as fault:
            bench.store.pause()
            lost = bench.wait("lost", 8.0)
            bench.measured(f"10 store away, {pool}: loss told", 4.0 + 1.0, since(fault, lost["at"]), at_least=2.3)
            bench.last(12, fault.at)
            bench.store.resume()
        had = until(lambda: _back(bench, fault.until) or _second(bench), "somebody has it", 10)
        bench.measured(f"10 store away, {pool}: one of the two has it again", bench.limits.heal, had - fault.until)
        assert 1 == len(bench.ledger.events("lost"))


def test_stopped_for_three_ttl_alone() -> None:
    """Where nobody else wants it, the lost lease is taken again, so that no duplicate runs from then on."""
    with Bench(ttl=4.0) as bench:
        bench.worker()
        bench.send("retry", "a", ["hold"], expect="once")
        body = bench.body("a")
        with bench.schedule.during("outage") as fault:
            bench.store.pause()
            bench.last(12)
            bench.store.resume()
        until(lambda: bench.held(body) and _back(bench, fault.until), "re-taken", 5)
        bench.measured("10 store away, alone: re-taken", bench.limits.heal, _back(bench, fault.until) - fault.until)
        _waited_for(bench, body, 4)
        assert 1 == len(bench.ledger.events("lost"))
        bench.settle()


@contextlib.contextmanager
def _stopped_child(ttl: float) -> Iterator[tuple[Bench, Event]]:
    """Give a bench on which body ``a`` holds in a child that is stopped within the block, and goes on and ends after it."""
    with Bench(ttl=ttl) as bench:
        bench.worker(concurrency=1)
        bench.worker("threads", options=("-Q", "two"))
        bench.send("retry", "a", ["hold"])
        body = bench.body("a")
        bench.wait("key")
        with bench.child_stopped(body["pid"]):
            yield bench, body
        bench.settle()


def test_restarted_empty_beside_a_stopped_child() -> None:
    """Nobody takes the lease again for a child that is stopped; it is told when it goes on, and has its lease again."""
    with _stopped_child(TTL) as (bench, body):
        with bench.schedule.during("empty"):
            bench.store.stop()
            bench.store.start()
        bench.send("retry", "a", ["sleep", BRIEF], expect="once", queue="two")
        bench.end(bench.body("a", 2))
        bench.last(TTL)
        assert not bench.held(body)
        woken = now()
        os.kill(body["pid"], signal.SIGCONT)
        lost = bench.wait("lost", run=body["run"])
        bench.measured("10 store lost its data beside a stopped child: told after waking", 1.5, lost["at"] - woken)
        until(lambda: bench.held(body) and _back(bench, woken), "re-taken", TTL)
        bench.go("a")


def test_unlocked_beside_a_stopped_child() -> None:
    """What an operator took from a body that hangs is not taken again for it; it is told when it goes on."""
    with _stopped_child(2) as (bench, body):
        with bench.schedule.during("unlock"):
            holder = bench.app.tasks["retry"].force_unlock("a")
        assert holder is not None
        assert body["task_id"] == holder.task_id
        bench.last(10)
        assert not bench.held(body)
        woken = now()
        os.kill(body["pid"], signal.SIGCONT)
        bench.measured("10 unlocked beside a stopped child: told after waking", 1.5, bench.wait("lost")["at"] - woken)
        bench.last(5)
        assert not bench.held(body)
        bench.go("a")


@pytest.mark.parametrize("command", ["SCRIPT FLUSH", "CLIENT KILL TYPE normal"])
@pytest.mark.parametrize("pool", POOLS)
def test_nothing_lost(pool: str, command: str) -> None:
    """Scripts that are gone and connections that are closed, again and again, are no error."""
    with _holding(pool, ttl=3.0) as bench:
        kills = []
        for _ in range(12):
            begin = now()
            with contextlib.closing(bench.client()) as client, contextlib.suppress(redis.ConnectionError):
                client.execute_command(*command.split())
            kills.append((begin, now() + 0.1))
            _untouched(bench, 0.5)
        errors = [event["at"] for event in bench.ledger.events("store error")]
        # A call meets a connection that was closed before; it may do so once more only where the fresh one is closed just then.
        explained = [at for at in errors if any(begin <= at <= end for begin, end in kills)]
        assert errors == ([] if command == "SCRIPT FLUSH" else explained)


def test_read_only() -> None:
    """A server that has become a replica refuses to renew; once it is a master again, all goes on."""
    with _holding() as bench, contextlib.closing(bench.client()) as client:
        with bench.schedule.during("refusal"):
            client.execute_command("REPLICAOF", "127.0.0.1", "1")  # nobody is there: the data stay
            assert "read only" in bench.wait("store error", task_id=_first(bench)["task_id"])["error"]
            bench.last(TTL / 3)
            client.execute_command("REPLICAOF", "NO", "ONE")
        _untouched(bench, TTL)


def test_out_of_memory() -> None:
    """A full store takes no new lease (the task is tried again later); the lease that is held is kept."""
    with _holding(store=("--maxmemory-policy", "noeviction")) as bench, contextlib.closing(bench.client()) as client:
        with bench.schedule.during("refusal"):
            client.config_set("maxmemory", "1")
            other = bench.send("skip", "b", ["sleep"], expect="once")
            assert "maxmemory" in bench.wait("store error", task_id=other.id)["error"]
            _untouched(bench, TTL / 2)
            client.config_set("maxmemory", "0")
        _untouched(bench, TTL)
        assert "slept" == other.get(timeout=15)


@pytest.mark.parametrize("pool", POOLS)
def test_slow_store(pool: str) -> None:
    """Replies that come after 3 s, beyond every bound, are as good as none; shorter than the TTL they lose nothing."""
    with _holding(pool, ttl=9.0, proxied=True) as bench:
        with bench.schedule.during("slow"):
            bench.proxy.delay = 3.0
            bench.wait("store error", 4.5, task_id=_first(bench)["task_id"])  # of a renewal
            bench.last(0.5)
            bench.proxy.delay = 0.0
        _untouched(bench, 9.0)


@pytest.mark.parametrize("pool", POOLS)
def test_half_open(pool: str) -> None:
    """Connections that stay open and say nothing are given up in time, and renewal goes on over new ones."""
    with _holding(pool, proxied=True) as bench:
        with bench.schedule.during("half-open"):
            bench.proxy.hanging.set()
            bench.wait("store error", 3.5, task_id=_first(bench)["task_id"])
            bench.last(0.5)
            bench.proxy.silence()  # those of now never speak again
            bench.proxy.hanging.clear()
        _untouched(bench, TTL)


@pytest.mark.parametrize("pool", POOLS)
def test_body_ends_while_the_store_is_away(pool: str) -> None:
    """What could not be released is released soon after the store's return, and not after a long TTL."""
    with Bench(ttl=40, proxied=True) as bench:
        bench.worker(pool, concurrency=2)
        result = bench.send("skip", "a", ["hold"], expect="once")
        body = bench.body("a")
        with bench.schedule.during("pause") as fault:
            bench.proxy.hanging.set()
            bench.go("a")
            assert "held" == result.get(timeout=10)
            bench.wait("store error", task_id=body["task_id"])
            bench.last(2)
            assert bench.held(body)
            bench.proxy.hanging.clear()
        bench.measured(f"10 ended while the store was away, {pool}: freed", 4.0, bench.gone(body) - fault.until)
        assert "slept" == bench.send("skip", "a", ["sleep"], expect="once").get(timeout=20)
        bench.settle()


@pytest.mark.parametrize("after", [0, 5])
@pytest.mark.parametrize("pool", POOLS)
def test_reply_lost(pool: str, after: int) -> None:
    """The store did what it was asked, the reply did not come: no run is lost by that, none runs twice, none is left locked."""
    with Bench(ttl=TTL, proxied=True) as bench:
        bench.worker(pool, concurrency=1)
        bench.send("skip", "warm", ["sleep"], expect="once").get(timeout=10)
        bench.know_scripts()  # a reply that is lost is then none that asks for the script
        for number, (verb, seconds) in enumerate(
            {"acquire": 0.5, "renew": TTL, "release": 0.5, "retake": TTL * 0.75}.items()
        ):
            tag = f"a{number}"
            bench.proxy.drop_reply(_digest(verb), after)
            result = bench.send("skip", tag, ["sleep", seconds], expect="once")
            sent = now()
            body = bench.body(tag)
            # A gevent worker whose only greenlet was busy looks for messages every 2 s (`celery.worker.loops.synloop`, 5.7).
            bench.measured(f"10 reply to {verb} lost, {pool}: started", 3.0, body["at"] - sent)
            if verb == "retake":
                _lose(bench, body)
            assert "slept" == result.get(timeout=20)
            gone = bench.gone(body) if verb != "retake" else _freed(bench, body)
            bench.measured(f"10 reply to {verb} lost, {pool}: freed", 1.0, since(bench.end(body), gone))
        assert 4 == bench.proxy.dropped
        assert not bench.ledger.events("lost")
        bench.settle()


def _freed(bench: Bench, body: Event) -> float:
    """When a body's lease was released."""
    store = partial(bench.ledger.events, "store", verb="release", run=body["run"])
    return float(until(lambda: [event for event in store() if event["does"]], "freed")[0]["at"])


def _lose(bench: Bench, body: Event) -> None:
    """Let the store lose a lease, and wait until it was taken again."""
    until(lambda: bench.held(body), "its lease is seen")
    with bench.schedule.during("empty") as fault, contextlib.closing(bench.client()) as client:
        assert client.delete(body["key"])
    bench.gone(body)

    def taken() -> bool:
        done = bench.ledger.events("store", verb="retake", run=body["run"])
        return any(event["does"] and event["at"] > fault.at for event in done)

    until(taken, "re-taken", TTL)


def test_renewal_answered_late() -> None:
    """A lease's deadline counts from before the renewal was sent: it is not believed in for longer than the store keeps it."""
    with Bench(ttl=TTL, proxied=True) as bench:
        bench.worker(concurrency=1)
        bench.send("retry", "a", ["watch"], expect="run")
        bench.body("a")
        bench.know_scripts()
        before = len(_renewals(bench))
        with bench.schedule.during("outage"):
            bench.proxy.delay = 0.9
            until(lambda: len(_renewals(bench)) >= before + 2, "renewed twice", 3 * TTL)
            bench.last(1.2)  # the answer is there
            bench.proxy.hanging.set()
            ended = bench.wait("not held", 2 * TTL)
            last = _renewals(bench)[-1]
            bench.measured("10 last renewal answered late: not held any more", TTL + 0.3, since(last, ended["at"]))
            bench.wait("lost")
            bench.proxy.hanging.clear()
        bench.proxy.delay = 0.0
        bench.go("a")
        bench.settle()


def _renewals(bench: Bench) -> list[Event]:
    """Return the renewals that the body's own process has sent."""
    return bench.ledger.events("store", verb="renew", own=True)


def _digest(verb: str) -> bytes:
    from tests.faults.probes import _verbs

    return next(digest for digest, name in _verbs().items() if name == verb).encode()
