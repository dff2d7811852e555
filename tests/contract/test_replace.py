"""The promises of every store about messages that replace a holder."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from celery_singleton_lock.store.keys import LINE_TOKEN, queued_token
from celery_singleton_lock.store.protocol import AcquireResult, AcquireStatus, LockStore, Released, RenewResult
from celery_singleton_lock.store.requests import AfterRelease, LeaseSpec, Place
from tests.contract.conftest import Backing

MakeRequest = Callable[..., LeaseSpec]
GRANTED, REFUSED = AcquireStatus.GRANTED, AcquireStatus.REFUSED
SUPERSEDED, REPLACED = AcquireStatus.SUPERSEDED, AcquireStatus.REPLACED


class Deliveries:
    """Deliveries of messages with one lock key, whose policy is to replace the holder."""

    def __init__(self, store: LockStore, lease_request: MakeRequest) -> None:
        self.store = store
        self._make = lease_request

    def request(self, name: str, place: Place | None = None, **more: object) -> LeaseSpec:
        place = place or Place(stop=True)
        return self._make(task_id=name, place=place, **{"ttl": 20.0, "stoppable": True, **more})

    def acquire(self, name: str, **more: object) -> tuple[LeaseSpec, AcquireResult]:
        spec = self.request(name, **more)  # type: ignore[arg-type]
        return spec, self.store.acquire(spec)

    def held(self, name: str = "holder", **more: object) -> LeaseSpec:
        spec, result = self.acquire(name, **more)
        assert result.status is GRANTED
        return spec

    def join(self, name: str, copy: float = 0.0, token: str = "") -> AcquireResult:
        """Let a message wait; its ticket is its name."""
        place = Place(f"ticket {name}", copy, 1, True, copy + 1.5, 40.0, f"message {name}", stop=True, gives_way=True)
        return self.store.acquire(self.request(name, place, token=token, queued=token == LINE_TOKEN))

    def reserve(self, name: str, ttl: float = 100.0) -> LeaseSpec:
        spec = self._make(task_id=name, token=queued_token(name), ttl=ttl, queued=True)
        assert self.store.acquire(spec).status is GRANTED
        return spec


@pytest.fixture
def deliveries(store: LockStore, lease_request: MakeRequest) -> Deliveries:
    return Deliveries(store, lease_request)


def renewed(deliveries: Deliveries, *leases: LeaseSpec) -> list[RenewResult]:
    return deliveries.store.renew(leases)


def test_who_is_told_of_it(deliveries: Deliveries, backing: Backing) -> None:
    """Only a call that may replace the holder is told for how long that is asked to stop."""
    deliveries.held()
    begun = time.monotonic()
    deliveries.join("a")
    backing.wait(5)
    told = [deliveries.acquire(name, place=Place(stop=name == "b"))[1].asked for name in ("b", "c")]
    assert 4.99 < told[0] < 5.01 + time.monotonic() - begun
    assert 0 == told[1]


@pytest.mark.parametrize("starts_from", ["its own reservation", "its turn"])
def test_lease_after_one_that_was_asked_to_stop(deliveries: Deliveries, starts_from: str) -> None:
    """A new lease is not asked to stop because its token's former one was: an acquire may be executed after the release."""
    holder = deliveries.held()
    deliveries.join("a")
    kept = AfterRelease("queued", 100.0, queued_token("holder")) if starts_from == "its own reservation" else None
    deliveries.store.release(holder, False, None, kept)
    place = Place("ticket holder", 0.5, stop=True)
    again = deliveries.request("holder", place, token=holder.token)
    assert deliveries.store.acquire(again).status is GRANTED
    assert 0 == deliveries.acquire("b")[1].asked
    assert [RenewResult.RENEWED] == renewed(deliveries, again)


def test_holder_is_asked_to_stop(deliveries: Deliveries, backing: Backing) -> None:
    """Once a message has joined to replace the holder, each renewal of the holder says so, and extends the lease as before."""
    holder = deliveries.held()
    _, newcomer = deliveries.acquire("a")
    assert (REFUSED, [RenewResult.RENEWED]) == (newcomer.status, renewed(deliveries, holder))
    assert deliveries.join("a").is_waiting
    backing.wait(15)
    assert [RenewResult.STOP] == renewed(deliveries, holder)
    backing.wait(15)
    assert [RenewResult.STOP] == renewed(deliveries, holder)
    assert "message a" == deliveries.store.release(holder, success=False).message


def test_next_holder_is_not_asked(deliveries: Deliveries) -> None:
    """The message that replaced the holder is not asked to stop itself, until another one comes."""
    holder = deliveries.held()
    deliveries.join("a")
    deliveries.store.release(holder, success=True)
    started = deliveries.held("a", place=Place("ticket a", 0.5, stop=True))
    assert [RenewResult.RENEWED] == renewed(deliveries, started)
    deliveries.join("b")
    assert [RenewResult.STOP] == renewed(deliveries, started)


def test_only_stoppable_leases_are_told(deliveries: Deliveries, lease_request: MakeRequest) -> None:
    """A lease that does not look is renewed as ever, also in one call with others."""
    holder = deliveries.held(stoppable=False)
    other = lease_request(digest="other", place=Place(stop=True), stoppable=True)
    deliveries.store.acquire(other)
    deliveries.join("a")
    assert [RenewResult.RENEWED] * 2 == renewed(deliveries, holder, other)
    assert [RenewResult.RENEWED] * 2 == renewed(deliveries, other, holder)
    holder.stoppable = True
    assert [RenewResult.RENEWED, RenewResult.STOP] == renewed(deliveries, other, holder)


def test_how_long_the_holder_is_asked(deliveries: Deliveries, backing: Backing) -> None:
    """A message is told for how long the holder is asked to stop, whoever asked first."""
    holder = deliveries.held()
    assert 0.0 == deliveries.acquire("a")[1].asked
    begun = time.monotonic()
    deliveries.join("a")
    backing.wait(6)
    asked = deliveries.acquire("b")[1].asked
    assert 5.99 < asked < 6.01 + time.monotonic() - begun
    deliveries.join("b")
    backing.wait(6)
    asked = deliveries.join("b", copy=1.5).asked
    assert 11.99 < asked < 12.01 + time.monotonic() - begun
    deliveries.store.release(holder, success=True)
    started = deliveries.held("b", place=Place("ticket b", 1.0, stop=True))
    assert 0.0 == deliveries.acquire("c")[1].asked
    assert [RenewResult.RENEWED] == renewed(deliveries, started)


def test_latest_newcomer_waits(deliveries: Deliveries) -> None:
    """Of several messages that would replace the holder, the latest waits; the others are told that they do not run."""
    holder = deliveries.held()
    deliveries.join("a")
    deliveries.join("b")
    copied = deliveries.acquire("a", place=Place("ticket a", 1.5, stop=True))[1]
    assert (SUPERSEDED, "b") == (copied.status, copied.head)
    assert "message b" == deliveries.store.release(holder, success=True).message


def test_holder_that_has_just_ended(deliveries: Deliveries) -> None:
    """A message that joins just when the holder has ended gets the lock at once."""
    deliveries.store.release(deliveries.held(), success=True)
    assert GRANTED is deliveries.join("a").status


def test_cooldown_is_not_replaced(deliveries: Deliveries, backing: Backing) -> None:
    """During a cooldown nobody runs; the message waits for its end."""
    deliveries.store.release(deliveries.held(), success=True, kept=AfterRelease("cooldown", 30.0))
    assert deliveries.join("a").is_waiting
    found = deliveries.store.holder(deliveries.request("a").lock)
    assert found is not None
    assert "cooldown" == found.state
    backing.wait(31)
    assert GRANTED is deliveries.acquire("a", place=Place("ticket a", 1.5, stop=True))[1].status


@pytest.mark.parametrize("token", ["", LINE_TOKEN], ids=["message", "copy"])
def test_reservation_is_replaced(deliveries: Deliveries, backing: Backing, token: str) -> None:
    """A message takes the place of one that has the lock and has not started; that one is told so when it arrives."""
    deliveries.reserve("queued", ttl=5000.0)
    assert REFUSED is deliveries.acquire("a")[1].status
    assert GRANTED is deliveries.join("a", token=token).status
    found = deliveries.store.holder(deliveries.request("a").lock)
    assert found is not None
    assert ("a", "queued" if token else "running") == (found.task_id, found.state)
    backing.wait(4900)
    assert SUPERSEDED is deliveries.acquire("queued")[1].status


def test_replacement_has_a_higher_fence(deliveries: Deliveries) -> None:
    """The message that takes the place of a reservation gets a fence of its own."""
    spec = deliveries.reserve("queued")
    found = deliveries.store.holder(spec.lock)
    assert found is not None
    assert deliveries.join("a").fence > found.fence


def test_own_reservation_is_kept(deliveries: Deliveries) -> None:
    """A message that has the lock itself starts, also if it joined before it knew."""
    deliveries.reserve("a")
    assert GRANTED is deliveries.join("a").status


def test_head_in_its_turn_is_replaced(deliveries: Deliveries) -> None:
    """A message takes the place of one that was named and has not started."""
    holder = deliveries.held()
    deliveries.join("a")
    deliveries.store.release(holder, success=True)
    assert GRANTED is deliveries.join("b").status
    assert SUPERSEDED is deliveries.acquire("a", place=Place("ticket a", 0.5, stop=True))[1].status


def test_redelivery_of_a_replaced_message(deliveries: Deliveries, backing: Backing) -> None:
    """A message that was replaced while it ran does not run again, however that run ended; not so a new one of the same id."""
    deliveries.held()
    deliveries.join("a")
    second = deliveries.acquire("holder", redelivered=True)[1]
    assert (REFUSED, "holder") == (second.status, second.holder.task_id if second.holder else "")
    backing.wait(30)
    assert REPLACED is deliveries.acquire("holder", redelivered=True)[1].status
    started = deliveries.held("a", place=Place("ticket a", 1.5, stop=True))
    assert REPLACED is deliveries.acquire("holder", redelivered=True)[1].status
    deliveries.store.release(started, success=True)
    assert REPLACED is deliveries.acquire("holder", redelivered=True)[1].status
    assert GRANTED is deliveries.acquire("holder")[1].status


def test_success_of_a_replaced_message(deliveries: Deliveries) -> None:
    """A redelivery that waited while a replaced message succeeded is told of the success."""
    holder = deliveries.held()
    deliveries.join("a")
    deliveries.acquire("holder", redelivered=True)
    assert deliveries.store.release(holder, success=True) == Released(redelivery_waits=True, message="message a")
    deliveries.store.record_outcome(holder, success=True)
    assert AcquireStatus.COMPLETED is deliveries.acquire("holder", redelivered=True)[1].status


def test_other_policies_do_not_look(deliveries: Deliveries) -> None:
    """A message without the policy, such as a task's own retry, is not told that it was replaced."""
    deliveries.reserve("queued")
    assert GRANTED is deliveries.join("a").status
    assert REFUSED is deliveries.acquire("queued", place=Place("ticket", 1.0))[1].status


def test_data_that_was_lost(deliveries: Deliveries, backing: Backing) -> None:
    """After a loss of data the next copy asks again."""
    holder = deliveries.held()
    deliveries.join("a")
    backing.lose()
    deliveries.store.reacquire(holder, 1)
    assert [RenewResult.RENEWED] == renewed(deliveries, holder)
    assert deliveries.join("a", copy=1.5).is_waiting
    assert [RenewResult.STOP] == renewed(deliveries, holder)


def test_nothing_is_left(deliveries: Deliveries, backing: Backing) -> None:
    """Every key expires."""
    holder = deliveries.held()
    deliveries.join("a")
    deliveries.store.release(holder, success=False)
    deliveries.store.release(deliveries.held("a", place=Place("ticket a", 0.5, stop=True)), success=True)
    deliveries.reserve("queued")
    deliveries.join("b")
    kept = [name for name in backing.keys() if ":fence" not in name]  # noqa: SIM118
    assert any("replaced" in name for name in kept)
    assert all(backing.lives(name) <= 3600 for name in kept)
