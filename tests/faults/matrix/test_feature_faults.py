"""Faults 33 to 36 and 44 to 47: holders of all features, and what meets them, side by side, through the same faults."""

from __future__ import annotations

import contextlib
import signal

import pytest

from tests.faults.features import AtPublish, Newest, holding
from tests.faults.harness import CHILD_BOUND, now
from tests.faults.matrix import LATE
from tests.faults.probes import digests

TTL = 4.0
#: A message in line that nobody publishes is started by its copy, which comes after each TTL.
COPY = TTL + 1.5
#: Replies that get lost: to some of the acquires of what waits, and to the releases of holders.
LOST = 10


@pytest.mark.parametrize(("what", "pool"), [("child", "prefork"), ("worker", "prefork"), ("worker", "threads")])
def test_features_killed(what: str, pool: str) -> None:
    """After the death of the child, its worker starts what waits; after that of the worker, a copy does."""
    with holding(TTL, pool) as row:
        begin = now()
        if what == "child":
            for body in row.bodies:
                row.env.kill_child(body["pid"])
        else:
            row.env.kill(row.victim)
        bound = CHILD_BOUND + 1.5 if what == "child" else TTL + COPY
        row.env.measured(
            f"33 holder's {what} killed, {pool}: all that wait have started", bound, row.next_starts(begin)
        )


def test_features_stopped_worker() -> None:
    """Messages that wait start when the lease of a stopped worker has expired. The holders are notified when they wake up."""
    with holding(TTL) as row:
        with row.env.stopped(row.victim) as fault:
            late = row.next_starts(fault.at)
            row.env.measured("34 holder's worker stopped: all that wait have started", TTL + COPY, late)
            row.env.last(2.5 * TTL, fault.at)
        for feature in row.features:
            if not isinstance(feature, (AtPublish, Newest)):  # nobody took its lock; it knows that it is to stop
                row.env.wait("lost", run=feature.bodies[0]["run"])


def test_features_stopped_children() -> None:
    """Children that are stopped for two TTLs keep their leases, and nothing starts beside them."""
    with holding(TTL) as row:
        with contextlib.ExitStack() as stops:
            for body in row.bodies:
                stops.enter_context(row.env.child_stopped(body["pid"]))
            row.waits(2 * TTL)
        assert not row.env.ledger.events("lost")


@pytest.mark.parametrize("fault", ["short pause", "scripts and connections"])
def test_features_and_store_trouble(fault: str) -> None:
    """A store that is away for half a TTL, flushed scripts and closed connections start nothing beside the holders."""
    with holding(TTL) as row:
        if fault == "short pause":
            with row.env.schedule.during("pause"):
                row.env.store.pause()
                row.env.last(TTL / 2)
                row.env.store.resume()
        else:
            for words in (("SCRIPT", "FLUSH"), ("CLIENT", "KILL", "TYPE", "normal")) * 2:
                with row.env.client() as client:
                    client.execute_command(*words)
                row.waits(0.5)
        row.waits(TTL)
        assert not row.env.ledger.events("lost")


def test_features_and_store_away() -> None:
    """After an outage of two and a half TTLs all messages that waited run, with the holders' notice or after their end."""
    with holding(TTL) as row, row.env.schedule.during("outage"):
        row.env.store.pause()
        row.env.last(2.5 * TTL)
        row.env.store.resume()


def test_features_and_lost_data() -> None:
    """After a loss of data all messages that waited run, once their copies have come."""
    with holding(TTL) as row, row.env.schedule.during("empty"):
        row.env.store.stop()
        row.env.store.start()


def test_features_revoked() -> None:
    """After ``revoke(terminate=True)`` of the holders, what waits starts."""
    with holding(TTL) as row:
        begin = now()
        for body in row.bodies:
            row.env.app.control.revoke(body["task_id"], terminate=True, destination=[row.victim.node])
        row.env.measured("36 holder revoked: all that wait have started", COPY + 1, row.next_starts(begin))


def test_features_time_limit() -> None:
    """After a hard time limit has ended the holders, what waits starts."""
    with holding(TTL, time_limit=8) as row:
        row.env.measured("36 hard time limit: all that wait have started", COPY + 1, row.next_after_ends())


@pytest.mark.parametrize("kind", ["warm", "cold"])
def test_features_shutdown(kind: str) -> None:
    """In a warm shutdown the holders go on, and their end starts what waits; in a cold one they end."""
    with holding(TTL) as row:
        begin = now()
        row.victim.process.signal(signal.SIGTERM if kind == "warm" else signal.SIGQUIT)
        bound = 2.0
        if kind == "warm":
            row.waits(TTL)
            begin = now()
            row.go()
        else:  # the worker may end just before it publishes the next one: as if it had not read the reply
            row.env.schedule.add("reply")
            bound = COPY + 6
        row.env.measured(f"36 {kind} shutdown: all that wait have started", bound, row.next_starts(begin))
        assert row.victim.exit_code(LATE) is not None, "the worker does not end"


def test_features_and_lost_replies() -> None:
    """Replies that get lost and connections that turn half-open start nothing beside the holders, and lose no message."""
    with holding(TTL, lost_replies=LOST) as row:
        assert LOST == row.env.proxy.dropped
        row.env.proxy.silence()
        row.waits(TTL)
        assert not row.env.ledger.events("lost")
        row.env.schedule.add("reply")
        row.env.proxy.drop_reply(digests("release"), times=LOST)
        begin = now()
        row.go()
        late = row.next_starts(begin)
        row.env.measured("44 replies to release lost: all that wait have started", TTL + COPY, late)
        assert row.env.proxy.dropped > LOST


@pytest.mark.parametrize("what", ["child killed", "body ended"])
def test_features_end_in_an_outage(what: str) -> None:
    """What waits starts after the return of a store that was away when the holders were killed, or ended."""
    with holding(TTL) as row:
        with row.env.schedule.during("pause" if what == "body ended" else "outage") as fault:
            row.env.store.pause()
            if what == "body ended":
                row.env.schedule.add("reply")  # to the releases, which the store executes when it goes on
                row.go()
            for body in row.bodies:
                row.env.end(body) if what == "body ended" else row.env.kill_child(body["pid"])
            row.env.last(TTL / 2, fault.at)
            row.env.store.resume()
        late = row.next_starts(fault.until)
        row.env.measured(f"45 {what} in an outage: all that wait have started after it", CHILD_BOUND + COPY, late)


def test_features_exit() -> None:
    """After SystemExit in the holders' bodies, what waits starts."""
    with holding(TTL, act="hold-exit") as row:
        begin = now()
        row.go()
        row.env.measured("46 SystemExit: all that wait have started", COPY + 1, row.next_starts(begin))
