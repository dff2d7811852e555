"""The promises of every store about the quiet time before the head of a line may start."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from celery_singleton_lock.store.keys import LINE_TOKEN
from celery_singleton_lock.store.protocol import AcquireResult, AcquireStatus, Released
from celery_singleton_lock.store.requests import LeaseSpec, Place
from tests.contract.conftest import Backing

GRANTED, REFUSED, SUPERSEDED = AcquireStatus.GRANTED, AcquireStatus.REFUSED, AcquireStatus.SUPERSEDED


class Calls:
    """Deliveries with one lock key whose head starts after 100 s without another call, and after 250 s in any case."""

    def __init__(self, backing: Backing, lease_request: Callable[..., LeaseSpec]) -> None:
        self.store = backing.store
        self._make = lease_request

    def request(self, name: str, ticket: str = "", **place: object) -> LeaseSpec:
        """Return the request of a message, by default a new one."""
        return self._make(task_id=name, ttl=200.0, place=Place(ticket, quiet=100.0, max_quiet=250.0)._replace(**place))

    def newcomer(self, name: str) -> AcquireResult:
        """Deliver a message that has not waited."""
        return self.store.acquire(self.request(name))

    def join(self, name: str, **place: object) -> AcquireResult:
        """Deliver a message, and let it wait."""
        assert self.newcomer(name).status is REFUSED
        more = {"room": 1, "next_copy": 1.5, "due": 600.0, "message": f"message {name}", "gives_way": True, **place}
        return self.store.acquire(self.request(name, f"ticket {name}", **more))

    def copy(self, name: str) -> AcquireResult:
        """Deliver the delayed copy of a message that waits; if it is its turn, the lock is reserved for the message."""
        spec = self.request(name, f"ticket {name}", copy=1.5)
        spec.token, spec.queued = LINE_TOKEN, True
        return self.store.acquire(spec)

    def start(self, name: str) -> tuple[LeaseSpec, AcquireResult]:
        """Deliver the message that its copy has published."""
        spec = self.request(name, f"ticket {name}", copy=2.0)
        return spec, self.store.acquire(spec)


@pytest.fixture
def calls(backing: Backing, lease_request: Callable[..., LeaseSpec]) -> Calls:
    return Calls(backing, lease_request)


def test_first_call_waits(backing: Backing, calls: Calls) -> None:
    """A free lock is granted to the first call after the quiet time, and not before."""
    joined = calls.join("a")
    assert (REFUSED, 1, True) == (joined.status, joined.waiting, joined.is_waiting)
    assert joined.quiet == pytest.approx(100, abs=5)
    backing.wait(90)
    early = calls.copy("a")
    assert REFUSED is early.status
    assert early.quiet == pytest.approx(10, abs=5)
    backing.wait(15)
    assert GRANTED is calls.copy("a").status
    assert GRANTED is calls.start("a")[1].status


def test_newcomers_prolong_it(backing: Backing, calls: Calls) -> None:
    """Each newcomer begins the quiet time anew; copies of the message that waits do not."""
    calls.join("a")
    backing.wait(60)
    newcomer = calls.newcomer("b")
    assert (REFUSED, 1, "a", False) == (newcomer.status, newcomer.waiting, newcomer.head, newcomer.is_waiting)
    backing.wait(60)
    early = calls.copy("a")
    assert REFUSED is early.status
    assert early.quiet == pytest.approx(40, abs=5)
    backing.wait(45)
    assert GRANTED is calls.copy("a").status


def test_not_for_ever(backing: Backing, calls: Calls) -> None:
    """However many newcomers come, the head may start `max_quiet` after the first call."""
    calls.join("a")
    for number in range(3):
        backing.wait(80)
        assert REFUSED is calls.newcomer(f"b{number}").status
    assert REFUSED is calls.copy("a").status
    backing.wait(15)
    assert GRANTED is calls.copy("a").status


def test_each_wait_has_its_own_end(backing: Backing, calls: Calls) -> None:
    """After a run, the next first call waits for its own quiet time."""
    calls.join("a")
    backing.wait(110)
    calls.copy("a")
    started, _ = calls.start("a")
    assert calls.store.release(started, success=True) == Released()
    backing.wait(300)
    assert calls.join("b").quiet == pytest.approx(100, abs=5)
    assert REFUSED is calls.copy("b").status


def test_newcomers_after_the_end_of_the_holder(backing: Backing, calls: Calls) -> None:
    """Newcomers prolong the quiet time also when the holder has ended within it; once it is over, they do not."""
    calls.join("a")
    backing.wait(110)
    calls.copy("a")
    holder, _ = calls.start("a")
    calls.join("b")
    assert calls.store.release(holder, success=True) == Released()
    backing.wait(60)
    assert calls.newcomer("c").quiet == pytest.approx(100, abs=5)
    backing.wait(60)
    assert REFUSED is calls.copy("b").status
    backing.wait(45)
    assert GRANTED is calls.copy("b").status
    assert 0 == calls.newcomer("d").quiet
    assert GRANTED is calls.start("b")[1].status


def test_end_of_the_holder(backing: Backing, calls: Calls) -> None:
    """The holder's end starts the head only if the quiet time is over; until then the lock is nobody's."""
    calls.join("a")
    backing.wait(110)
    calls.copy("a")
    holder, _ = calls.start("a")
    calls.join("b")
    backing.wait(50)
    assert calls.store.release(holder, success=True) == Released()
    assert calls.store.holder(holder.lock) is None
    assert REFUSED is calls.copy("b").status
    backing.wait(55)
    assert GRANTED is calls.copy("b").status
    holder, _ = calls.start("b")
    calls.join("c")
    backing.wait(110)
    assert calls.store.release(holder, success=True).message == "message c"


def test_latest_call(backing: Backing, calls: Calls) -> None:
    """A call that takes the place of the one that waits begins the quiet time anew, within the bound of the first call."""
    calls.join("a")
    for number in range(3):
        backing.wait(80)
        assert calls.join(f"b{number}", replace=True).waiting == 1
    assert SUPERSEDED is calls.copy("a").status
    assert REFUSED is calls.copy("b2").status
    backing.wait(15)
    assert GRANTED is calls.copy("b2").status


def test_message_that_was_gone_for_hours(backing: Backing, calls: Calls) -> None:
    """A call that joins hours after a quiet time whose message never came begins another."""
    calls.join("a")
    backing.wait(7200)
    more = {"room": 1, "next_copy": 2.5, "due": 600.0, "copy": 1.5}
    again = calls.store.acquire(calls.request("a", "ticket a", **more))
    assert (REFUSED, True) == (again.status, again.is_waiting)
    assert again.quiet == pytest.approx(100, abs=5)


def test_newcomer_keeps_those_that_wait(backing: Backing, calls: Calls) -> None:
    """While a newcomer prolongs the quiet time, the messages that wait for its end are kept, and their places too."""
    calls.join("a", due=10.0)
    backing.wait(20)
    assert 1 == calls.newcomer("b").waiting
    backing.wait(3700)  # longer than a line lives that nobody asks
    assert (1, "a") == ((asked := calls.newcomer("c")).waiting, asked.head)


def test_who_is_told_of_it(calls: Calls, lease_request: Callable[..., LeaseSpec]) -> None:
    """Only a call that has a quiet time itself is told how long it lasts; a reservation is not."""
    calls.join("a")
    assert 0 == calls.store.acquire(lease_request(task_id="b", place=Place())).quiet
    assert 0 < calls.newcomer("b").quiet


def test_lost_data(backing: Backing, calls: Calls) -> None:
    """If the store has lost the quiet time, the copy of the message that waits starts it."""
    assert GRANTED is calls.copy("a").status


def test_two_newcomers_once_it_is_over(backing: Backing, calls: Calls) -> None:
    """Of two newcomers that meet after `max_quiet`, one runs at once, and the other one waits for a quiet time of its own."""
    calls.join("a", replace=True)
    backing.wait(260)
    assert [REFUSED, REFUSED] == [calls.newcomer(name).status for name in ("b", "c")]
    more = {"room": 1, "replace": True, "next_copy": 1.5, "due": 600.0}
    first = calls.request("b", "ticket b", **more)
    assert GRANTED is calls.store.acquire(first).status
    calls.store.release(first, success=True)
    assert REFUSED is calls.store.acquire(calls.request("c", "ticket c", **more)).status
