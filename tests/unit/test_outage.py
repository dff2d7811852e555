"""An outage of the store is a few lines in the log of a process, whatever the load."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from celery_singleton_lock import StoreError, StoreUnavailable
from celery_singleton_lock.config.options import Settings
from celery_singleton_lock.context import ProcessContext
from celery_singleton_lock.lease import LeaseState
from celery_singleton_lock.log import about, logger
from celery_singleton_lock.reports.outage import OUTAGE_BEGAN, OUTAGE_ENDED, Limit, Outages
from celery_singleton_lock.store.access import Access
from celery_singleton_lock.store.protocol import GracePeriod
from celery_singleton_lock.store.requests import LeaseSpec
from celery_singleton_lock.worker.failures import FailureChannel
from tests.servers import until
from tests.unit.conftest import Clock

AWAY = StoreUnavailable("away")


class Store:
    """A store that can be away, and when it is asked next."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.error: StoreError | None = AWAY
        self.due: list[float] = []

    def write(self) -> None:
        if self.error:
            raise self.error


@pytest.fixture
def store(clock: Clock) -> Store:
    return Store(clock)


@pytest.fixture
def outages(store: Store, clock: Clock) -> Outages:
    made = Outages("redis://store:6379/0", store.write, lambda callback: callback(), clock)
    made.wake = store.due.append
    return made


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[int], list[str]]:
    """Return a function that returns the lines of a level and above."""
    caplog.set_level(logging.DEBUG, logger=logger.name)
    return lambda level: [one.getMessage() for one in caplog.records if one.levelno >= level]


def watch(outages: Outages, clock: Clock, seconds: float) -> None:
    """Let the thread that asks the store run for a time, as long as it wants to."""
    end = clock() + seconds
    while (due := outages.look()) <= end:
        clock.time = due
    clock.time = end


def lease(number: int) -> LeaseState:
    return LeaseState(LeaseSpec("b:{x}", f"d{number}", f"token-{number}", 30.0, f"id-{number}"), "x")


def test_outage_under_load(outages: Outages, store: Store, clock: Clock, lines: Any) -> None:
    """A minute's outage with thousands of failed calls is one WARNING at its begin and one at its end; the rest is DEBUG."""
    for number in range(3000):
        outages.log(about("x", f"id-{number}"), "could not acquire its lock: %s", AWAY)
        outages.count("postponed" if number % 3 else "without")
    assert [store.clock() + 1.0] == store.due
    watch(outages, clock, 60.0)
    store.error = None
    watch(outages, clock, 10.0)
    begin, end = lines(logging.WARNING)
    assert begin == (
        "The store of locks is unreachable at redis://store:6379/0: away. "
        "Until it answers, lines about single tasks have level DEBUG"
    )
    assert end == (
        "The store of locks answers again after 60.0 s; tasks postponed: 2000, tasks that went on without a lock: 1000, "
        "leases lost: 0"
    )
    assert 3002 == len(lines(logging.DEBUG))


def test_login_is_not_shown(lines: Any) -> None:
    """The line names the store of the settings, without a login."""
    context = ProcessContext(Settings("redis://:s3cret@127.0.0.1:1/0"))
    context.outages.failed(AWAY, lambda callback: callback())
    context.end()
    assert "The store of locks is unreachable at redis://127.0.0.1:1/0: away." in lines(logging.WARNING)[0]


def test_refusal_is_no_outage(outages: Outages, store: Store, lines: Any) -> None:
    """A store that refuses a call does not get better by waiting: each such call is a WARNING."""
    for _ in range(2):
        outages.log(about("x", "id-1"), "could not acquire its lock: %s", StoreError("NOPERM"))
    assert ["Task x[id-1] could not acquire its lock: NOPERM"] * 2 == lines(logging.WARNING)
    assert [] == store.due


def test_refusal_that_is_heard_of_late(clock: Clock) -> None:
    """A refusal that a thread hears of after another one was accepted is not reported again; one that lasts for a minute is."""
    told: list[StoreError] = []
    access = Access(told.append, clock)
    access.accepted()
    errors = [access.refused("before")]
    access.accepted()
    errors.append(access.refused("late"))
    access.accepted()
    clock.time += 60
    errors += [access.refused("new"), access.refused("goes on")]
    assert [errors[0], errors[2]] == told
    clock.time += 30
    access.accepted()
    errors += [access.refused("soon after")]
    clock.time += 30
    errors += [access.refused("and it lasts")]
    assert [errors[0], errors[2], errors[5]] == told
    assert [StoreUnavailable] * 6 == [type(error) for error in errors]


def test_grace_is_no_outage(outages: Outages, store: Store, clock: Clock, lines: Any) -> None:
    """A grace period is one WARNING, however many tasks wait for its end, and no outage begins."""
    for left in (3.0, 2.0, 0.5):
        outages.log(about("x", "id-1"), "could not acquire its lock: %s", GracePeriod(left))
        clock.time += 1.0
    assert [
        "Tasks wait as singleton_lock_grace says: the store may have lost locks, and grants no new one for 3.0 s"
    ] == lines(logging.WARNING)
    assert [] == store.due
    clock.time += 10.0
    outages.log(about("x", "id-1"), "could not acquire its lock: %s", GracePeriod(3.0))
    assert 2 == len(lines(logging.WARNING))


def test_lost_leases(outages: Outages, store: Store, clock: Clock, lines: Any) -> None:
    """The line at the end names leases that were lost, and whether another task had their lock."""
    outages.failed(AWAY)
    leases = [lease(number) for number in range(3)]
    for one in leases:
        outages.lost(one)
    store.error = None
    watch(outages, clock, 1.0)
    outages.found(leases[0], was_alone=True)
    outages.found(leases[1], was_alone=False)
    outages.found(leases[1], was_alone=True)  # acquired again later
    outages.found(lease(7), was_alone=True)  # was not lost
    watch(outages, clock, 10.0)
    end = lines(logging.WARNING)[-1]
    assert end.endswith(
        "leases lost: 3, of x[id-0] (nobody else had its lock), x[id-1] (another task had its lock meanwhile), "
        "x[id-2] (its body has ended)"
    )


def test_many_lost_leases(outages: Outages, store: Store, clock: Clock, lines: Any) -> None:
    """Of many leases, the first five are named."""
    outages.failed(AWAY)
    for number in range(1000):
        outages.lost(lease(number))
        outages.found(lease(number), was_alone=True)
    store.error = None
    watch(outages, clock, 10.0)
    end = lines(logging.WARNING)[-1]
    assert "leases lost: 1000, of x[id-0]" in end
    assert end.endswith("x[id-4] (nobody else had its lock) and 995 others")


def test_store_that_comes_and_goes(outages: Outages, store: Store, clock: Clock, lines: Any) -> None:
    """A store that answers every other second for ten minutes is a few lines a minute."""
    for second in range(600):
        store.error = AWAY if second % 2 else None
        if store.error:
            outages.log(about("x", "id-1"), "could not acquire its lock: %s", AWAY)
        outages.look()
        clock.advance(1.0)
    store.error = None
    watch(outages, clock, 30.0)
    assert len(lines(logging.WARNING)) <= 2 * 10


def test_full_store(outages: Outages, store: Store, clock: Clock, lines: Any) -> None:
    """While writes fail, the outage goes on, also if a call in between succeeds."""
    outages.failed(AWAY)
    watch(outages, clock, 30.0)
    store.error = None
    watch(outages, clock, 0.5)
    outages.failed(AWAY)
    watch(outages, clock, 0.5)
    assert 1 == len(lines(logging.WARNING))
    store.error = StoreError("NOPERM")  # it answers
    watch(outages, clock, 5.0)
    assert 2 == len(lines(logging.WARNING))


def test_outage_after_another(outages: Outages, store: Store, clock: Clock, lines: Any) -> None:
    """Each outage counts anew."""
    for _ in range(2):
        store.error = AWAY
        outages.failed(AWAY)
        outages.count("postponed")
        store.error = None
        watch(outages, clock, 100.0)
    assert 2 == len([line for line in lines(logging.WARNING) if "; tasks postponed: 1, " in line])


def test_status_and_events(outages: Outages, store: Store, clock: Clock) -> None:
    """The status counts calls since the process began, and the rest in the outage of now. Others are told of both ends."""
    told: list[Any] = []
    outages.tell = lambda what, fields: told.append((what, fields))
    outages.count("acquire", StoreError("NOPERM"))  # a refusal
    outages.count("postponed")
    assert {"errors": {"acquire": 1, "release": 0, "renew": 0}, "outage": None} == outages.status()
    outages.failed(AWAY)
    outages.count("acquire", AWAY)
    outages.count("renew", AWAY)
    outages.count("postponed")
    outages.count("without")
    outages.lost(lease(1))
    clock.advance(60.0)
    status, numbers = outages.status(), {"store_errors": 2, "postponed": 1, "without_lock": 1, "lost": 1}
    assert {"acquire": 2, "release": 0, "renew": 1} == status["errors"]
    assert 60.0 == pytest.approx(time.time() - status["outage"].pop("since"), abs=5)
    assert {"error": "away", **numbers} == status["outage"]
    assert [(OUTAGE_BEGAN, {"error": "away"})] == told
    store.error = None
    watch(outages, clock, 30.0)
    assert (OUTAGE_ENDED, {"seconds": 60.0, **numbers}) == told[-1]
    assert (2, None) == (len(told), outages.status()["outage"])
    assert 2 == outages.status()["errors"]["acquire"]


def test_outage_of_children(outages: Outages, store: Store, clock: Clock, lines: Any) -> None:
    """What children tell is counted, and told to others; the log has no lines of it, as children write theirs."""
    told: list[Any] = []
    outages.tell = lambda what, fields: told.append((what, fields))
    outages.heard("acquire", AWAY)
    outages.heard("postponed", None)
    outages.heard("acquire", StoreError("NOPERM"))
    assert (2, 1) == (outages.status()["outage"]["store_errors"], outages.status()["outage"]["postponed"])
    store.error = None
    watch(outages, clock, 30.0)
    outages.heard("acquire", StoreError("NOPERM"))
    assert ([OUTAGE_BEGAN, OUTAGE_ENDED], []) == ([what for what, _ in told], lines(logging.DEBUG))
    store.error = AWAY
    outages.failed(AWAY)
    assert 1 == len(lines(logging.WARNING))


def test_channel(outages: Outages) -> None:
    """Children tell of errors, however long these are, and are never kept waiting; a closed channel ends its thread.

    A child that is forked after that must not write to what has the number of the closed file by then.
    """
    context: Any = SimpleNamespace(outages=outages, children_forward=None)
    channel = FailureChannel(context)
    assert context.children_forward == channel.send
    told = [("acquire", StoreUnavailable("no\nanswer")), ("renew", StoreError("ö" * 1000)), ("postponed", None)]
    for name, error in told:
        channel.send(name, error)
    for _ in range(10_000):  # more than a pipe takes, and nobody reads
        channel.send("without", None)
    heard: list[Any] = []
    outages.heard = lambda name, error: heard.append((name, error))  # type: ignore[method-assign]
    channel.listen()
    until(lambda: ("postponed", None) in heard, "the thread reads")
    assert ("acquire", StoreUnavailable, "no answer") == (heard[0][0], type(heard[0][1]), str(heard[0][1]))
    assert ("renew", StoreError, "ö" * 150) == (heard[1][0], type(heard[1][1]), str(heard[1][1]))
    outlet, pipe = channel._outlet, os.fstat(channel._outlet)
    channel.end()
    assert context.children_forward is None
    until(lambda: not is_open(outlet, pipe), "the channel is closed")


def is_open(descriptor: int, file: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), file)
    except OSError:
        return False


def test_limit(clock: Clock) -> None:
    """A few lines a minute are allowed."""
    limit = Limit(2, clock=clock)
    assert [True, True, False] == [limit.allows() for _ in range(3)]
    clock.advance(60.0)
    assert limit.allows()
