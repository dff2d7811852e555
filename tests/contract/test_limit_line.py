"""The promises of every store where messages wait in line for one of several slots."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from celery_singleton_lock.store.keys import LINE_TOKEN, queued_token
from celery_singleton_lock.store.protocol import AcquireResult, AcquireStatus, LockStore, Released, RenewResult
from celery_singleton_lock.store.requests import AfterRelease, LeaseSpec, Place
from tests.contract.conftest import Backing
from tests.contract.test_stores import left

MakeRequest = Callable[..., LeaseSpec]
GRANTED, REFUSED, DROPPED, SUPERSEDED = (
    AcquireStatus.GRANTED,
    AcquireStatus.REFUSED,
    AcquireStatus.DROPPED,
    AcquireStatus.SUPERSEDED,
)


class Deliveries:
    """Deliveries of messages with one lock key, of which three may run at once unless a test says otherwise."""

    def __init__(self, backing: Backing, lease_request: MakeRequest) -> None:
        self.store: LockStore = backing.store
        self._make = lease_request

    def request(self, name: str, place: Place | None = None, **more: object) -> LeaseSpec:
        return self._make(task_id=name, place=place, **{"ttl": 20.0, "limit": 3, **more})

    def acquire(self, name: str, ticket: str = "", copy: float = 0.0, **more: object) -> AcquireResult:
        """Deliver a copy of a message that asks the line."""
        return self.store.acquire(self.request(name, Place(ticket, copy), **more))

    def copy(self, name: str, copy: float = 1.5) -> AcquireResult:
        """Deliver a delayed copy, which runs no body."""
        return self.acquire(name, f"ticket {name}", copy, token=LINE_TOKEN, queued=True)

    def join(self, name: str, copy: float = 0.0, due: float = 40.0, limit: int = 3, **more: object) -> AcquireResult:
        """Let a message wait; its ticket is its name, and its text what starts it."""
        place = Place(f"ticket {name}", copy, 9, False, copy + 1.5, due, f"message {name}", gives_way=True)
        return self.store.acquire(self.request(name, place._replace(**more), limit=limit))

    def start(self, name: str, ticket: str = "", copy: float = 0.0, **more: object) -> LeaseSpec:
        """Deliver a message that is to be granted a slot."""
        spec = self.request(name, Place(ticket, copy), **more)
        return self.granted(spec)

    def granted(self, spec: LeaseSpec) -> LeaseSpec:
        result = self.store.acquire(spec)
        assert result.status is GRANTED
        spec.use_slot(result.slot)
        return spec

    def fill(self, count: int = 3, **more: object) -> list[LeaseSpec]:
        return [self.start(f"holder {number}", **more) for number in range(count)]


@pytest.fixture
def deliveries(backing: Backing, lease_request: MakeRequest) -> Deliveries:
    return Deliveries(backing, lease_request)


# -- turns -------------------------------------------------------------------------------------


def test_as_many_as_slots_are_free(deliveries: Deliveries) -> None:
    """Each end names the next in line, also before those named earlier have started; they start, and nobody else."""
    store, holders = deliveries.store, deliveries.fill()
    for name in "abcd":
        assert deliveries.join(name).is_waiting
    for holder, name in zip(holders[:2], "ab", strict=True):
        assert f"message {name}" == store.release(holder, success=True).message
        assert "" == store.release(holder, success=True).message
    assert REFUSED is deliveries.acquire("newcomer").status
    assert REFUSED is deliveries.copy("c").status
    second = deliveries.start("b", "ticket b", 0.5)
    first = deliveries.start("a", "ticket a", 0.5)
    assert {holders[0].lock, holders[1].lock} == {first.lock, second.lock}
    result = deliveries.acquire("newcomer")
    assert (REFUSED, "holder 2", 2, "c") == (
        result.status,
        result.holder and result.holder.task_id,
        result.waiting,
        result.head,
    )
    assert "message c" == store.release(first, success=True).message


def test_newcomers_come_behind_all_that_wait(deliveries: Deliveries) -> None:
    """Without any reservation a newcomer waits while no more slots are free than messages wait; else it starts."""
    store, holders = deliveries.store, deliveries.fill()
    deliveries.join("a")
    store.release(holders[0], success=True)
    result = deliveries.acquire("newcomer")
    assert (REFUSED, "a", "queued") == (
        result.status,
        result.holder and result.holder.task_id,
        result.holder and result.holder.state,
    )
    store.release(holders[1], success=True)
    assert GRANTED is deliveries.acquire("newcomer").status
    assert REFUSED is deliveries.acquire("next").status
    assert GRANTED is deliveries.acquire("a", "ticket a", 0.5).status


def test_joining_when_a_slot_became_free(deliveries: Deliveries) -> None:
    """A message that joins just when a slot became free is granted it; its copies are dropped."""
    deliveries.fill(2)
    assert GRANTED is deliveries.join("a").status
    assert DROPPED is deliveries.copy("a").status
    assert deliveries.join("b").is_waiting


def test_copy_in_its_turn(deliveries: Deliveries) -> None:
    """A copy takes no slot in its turn; its message keeps the place and starts; no end names it a second time."""
    store, holders = deliveries.store, deliveries.fill()
    for name in "ab":
        deliveries.join(name)
    assert REFUSED is deliveries.copy("a").status
    store.release(holders[0], success=True)
    assert GRANTED is deliveries.copy("a").status
    assert REFUSED is deliveries.acquire("newcomer").status
    assert REFUSED is deliveries.copy("b").status
    assert "message b" == store.release(holders[1], success=True).message
    deliveries.start("a", "ticket a", 2.0)
    assert DROPPED is deliveries.acquire("a", "ticket a", 0.5).status


def test_end_that_names_nobody(deliveries: Deliveries) -> None:
    """If the worker of a holder dies after the release, the copies of as many messages as slots are free start them."""
    store, holders = deliveries.store, deliveries.fill()
    for name in "abc":
        deliveries.join(name)
    for holder in holders[:2]:
        store.release(holder, success=True)
    assert [GRANTED, GRANTED, REFUSED] == [deliveries.copy(name).status for name in "bac"]


def test_late_places_among_the_first(backing: Backing, deliveries: Deliveries) -> None:
    """Messages whose next copy is late lose their places wherever they are among the first; those behind them start."""
    holders = deliveries.fill(ttl=200.0)
    for name, due in (("a", 100.0), ("b", 10.0), ("c", 10.0), ("d", 100.0), ("e", 100.0)):
        deliveries.join(name, due=due)
    backing.wait(11)
    for holder in holders[:2]:
        deliveries.store.release(holder, success=True)
    assert REFUSED is deliveries.copy("e").status
    assert GRANTED is deliveries.acquire("d", "ticket d", 1.5).status
    assert REFUSED is deliveries.copy("b").status
    assert GRANTED is deliveries.acquire("a", "ticket a", 1.5).status


def test_late_places_are_named(backing: Backing, deliveries: Deliveries) -> None:
    """An end names the first message whose text is there, however late its copy is."""
    holders = deliveries.fill(ttl=200.0)
    for name, due in (("a", 10.0), ("b", 10.0), ("c", 100.0)):
        deliveries.join(name, due=due)
    backing.wait(11)
    assert "message a" == deliveries.store.release(holders[0], success=True).message


def test_named_message_that_does_not_start(backing: Backing, deliveries: Deliveries) -> None:
    """A message that was named and does not start within the TTL loses its turn to the next one; it still finds a free slot."""
    holders = deliveries.fill(ttl=200.0)
    for name in "ab":
        deliveries.join(name, due=100.0)
    holders[0].ttl = 20.0
    assert "message a" == deliveries.store.release(holders[0], success=True).message
    backing.wait(21)
    assert GRANTED is deliveries.copy("b").status
    deliveries.start("a", "ticket a", 0.5)
    assert REFUSED is deliveries.acquire("b", "ticket b", 2.0).status


def test_delivery_that_does_not_ask_the_line(deliveries: Deliveries) -> None:
    """It may overtake; the message that comes in vain is dropped and started by its copy."""
    store, holders = deliveries.store, deliveries.fill()
    deliveries.join("a")
    assert "message a" == store.release(holders[0], success=True).message
    outsider = deliveries.granted(deliveries.request("outsider"))
    assert DROPPED is deliveries.acquire("a", "ticket a", 0.5).status
    assert REFUSED is deliveries.copy("a").status
    assert deliveries.join("a", copy=1.5).is_waiting
    assert "message a" == store.release(outsider, success=True).message


def test_lower_limit_of_a_message(deliveries: Deliveries) -> None:
    """A message that is named although its own limit is lower waits until fewer run."""
    store, holders = deliveries.store, deliveries.fill()
    deliveries.join("a")
    assert ["message a", ""] == [store.release(holder, success=True).message for holder in holders[:2]]
    assert REFUSED is deliveries.acquire("a", "ticket a", 1.5, limit=1).status
    store.release(holders[2], success=True)
    assert GRANTED is deliveries.acquire("a", "ticket a", 1.5, limit=1).status


def test_message_without_text(deliveries: Deliveries) -> None:
    """A message that only its copy can start is not named, and keeps its turn; another one in its turn is named."""
    store, holders = deliveries.store, deliveries.fill()
    deliveries.join("a", message="")
    deliveries.join("b")
    assert "" == store.release(holders[0], success=True).message
    assert REFUSED is deliveries.copy("b").status
    assert "message b" == store.release(holders[1], success=True).message
    assert GRANTED is deliveries.copy("a").status


def test_quiet_time(backing: Backing, deliveries: Deliveries) -> None:
    """During a quiet time free slots are nobody's, and no end names a message; after it the copy starts its message."""
    holder = deliveries.start("holder")
    quiet = Place(quiet=10.0, max_quiet=60.0)
    assert REFUSED is deliveries.store.acquire(deliveries.request("a", quiet)).status
    assert deliveries.join("a", quiet=10.0, max_quiet=60.0).is_waiting
    assert "" == deliveries.store.release(holder, success=True).message
    asked = quiet._replace(ticket="ticket a", copy=1.5)
    request = deliveries.request("a", asked, token=LINE_TOKEN, queued=True)
    assert REFUSED is deliveries.store.acquire(request).status
    backing.wait(11)
    assert GRANTED is deliveries.store.acquire(request).status


def test_late_copy_in_a_quiet_time(backing: Backing, deliveries: Deliveries) -> None:
    """An end within a quiet time takes no message out of the line, though its copy is late."""
    holder = deliveries.start("holder")
    quiet = {"quiet": 10.0, "max_quiet": 60.0}
    assert deliveries.join("a", due=5.0, message="", **quiet).is_waiting
    backing.wait(6)
    assert "" == deliveries.store.release(holder, success=True).message
    asked = Place("ticket a", 1.5, **quiet)
    assert deliveries.store.acquire(deliveries.request("a", asked, token=LINE_TOKEN, queued=True)).is_waiting


def test_replacing(deliveries: Deliveries) -> None:
    """A message that replaces those that wait starts once a slot is free; the others are told so."""
    store, holders = deliveries.store, deliveries.fill()
    deliveries.join("a", room=1)
    assert (1, "b") == ((result := deliveries.join("b", room=1, replace=True)).waiting, result.head)
    assert SUPERSEDED is deliveries.copy("a").status
    assert "message b" == store.release(holders[0], success=True).message
    assert GRANTED is deliveries.join("c", room=1, replace=True).status
    assert SUPERSEDED is deliveries.acquire("b", "ticket b", 0.5).status


# -- ends --------------------------------------------------------------------------------------


def test_release_for_a_dead_child(deliveries: Deliveries, lease_request: MakeRequest) -> None:
    """The supervisor, which knows the token alone, frees the slot; it is the first in line's."""
    (first, *_) = deliveries.fill(supervised=True)
    deliveries.join("a")
    known = lease_request(digest="", token=first.token, task_id=first.task_id, limit=1)
    assert "message a" == deliveries.store.release(known, success=False).message
    assert REFUSED is deliveries.acquire("newcomer").status
    deliveries.start("a", "ticket a", 1.5)


def test_end_of_reacquired_slots(backing: Backing, deliveries: Deliveries) -> None:
    """Bodies that have reacquired their slots after a loss of data name the messages that have joined since."""
    store, holders = deliveries.store, deliveries.fill()
    fences = [store.acquire(one).fence for one in holders]
    backing.lose()
    for one, fence in zip(holders, fences, strict=True):
        assert (RenewResult.RENEWED, True) == store.reacquire(one, fence)
    for name in "ab":
        deliveries.join(name)
    assert ["message a", "message b"] == [store.release(one, success=True).message for one in holders[:2]]


def test_reservation_of_a_worker_without_a_limit(deliveries: Deliveries) -> None:
    """During a deploy from 1 to N, the head of the line starts though an old worker has reserved the lock for it."""
    store, holder = deliveries.store, deliveries.start("holder", limit=0)
    deliveries.start("another")
    for name in "ab":
        deliveries.join(name, limit=0)
    assert "message a" == store.release(holder, success=True).message
    first = deliveries.start("a", "ticket a", 0.5)
    assert holder.lock == first.lock
    deliveries.start("b", "ticket b", 1.5)


def test_nothing_is_left(backing: Backing, deliveries: Deliveries) -> None:
    """Once all have run, no message and no slot is left."""
    store, holders = deliveries.store, deliveries.fill()
    deliveries.join("a")
    for holder in holders:
        store.release(holder, success=True)
    store.release(deliveries.start("a", "ticket a", 0.5), success=True)
    assert not [key for key in left(backing) if ":line:" in key or ":waiting:" in key or ":lock:" in key]


# -- reservations ------------------------------------------------------------------------------


@pytest.fixture
def reserve(deliveries: Deliveries) -> Callable[..., LeaseSpec]:
    """Return a function that reserves a slot for the message of a task id, as a publisher does."""

    def make(name: str, ttl: float = 3600.0, **more: object) -> LeaseSpec:
        spec = deliveries.request(name, token=queued_token(name), ttl=ttl, queued=True, node="", pid=0, **more)
        assert deliveries.store.acquire(spec).status is GRANTED
        return spec

    return make


def test_reserved_slots(backing: Backing, deliveries: Deliveries, reserve: MakeRequest) -> None:
    """Each reservation takes a slot; its message starts in that slot, in any order; others are refused."""
    for name in "abc":
        reserve(name)
    refused = deliveries.acquire("d")
    assert (REFUSED, "a", "queued") == (
        refused.status,
        refused.holder and refused.holder.task_id,
        refused.holder and refused.holder.state,
    )
    locks = {name: deliveries.start(name).lock for name in "cab"}
    assert [f"{locks['a']}:1", f"{locks['a']}:2"] == [locks["b"], locks["c"]]
    holder = deliveries.store.holder(locks["c"])
    assert holder is not None
    assert ("c", "running") == (holder.task_id, holder.state)
    backing.wait(21)
    assert GRANTED is deliveries.acquire("d").status


def test_reservation_that_is_freed(deliveries: Deliveries, reserve: MakeRequest) -> None:
    """A message that will not start frees its own slot, whichever process says so, and no other; twice is once."""
    for name in "abc":
        reserve(name)
    for _ in range(2):
        spec = deliveries.request("b", token=queued_token("b"), ttl=30.0, queued=True)
        deliveries.store.release(spec, success=False)
    started = deliveries.start("d")
    assert f"{spec.slot_lock(0)}:1" == started.lock
    assert REFUSED is deliveries.acquire("e").status
    deliveries.store.release(deliveries.request("d", token=queued_token("d"), queued=True), success=False)
    assert REFUSED is deliveries.acquire("e").status


def test_reservation_ends_with_its_own_ttl(backing: Backing, deliveries: Deliveries, reserve: MakeRequest) -> None:
    """A reservation outlives leases in other slots, and frees its slot when it expires."""
    reserve("a")
    reserve("b", ttl=100.0)
    deliveries.start("c")
    backing.wait(50)
    assert GRANTED is deliveries.acquire("d", ttl=200.0).status
    assert REFUSED is deliveries.acquire("e").status
    backing.wait(51)
    assert GRANTED is deliveries.acquire("e").status


def test_own_retry_keeps_its_slot(backing: Backing, deliveries: Deliveries) -> None:
    """A lease that becomes a reservation stays in its slot, longer than the leases of others, and names nobody."""
    holders = deliveries.fill()
    deliveries.join("a")
    kept = AfterRelease("queued", 1000.0, queued_token("holder 2"))
    assert deliveries.store.release(holders[2], False, None, kept) == Released()
    for holder in holders[:2]:
        deliveries.store.release(holder, success=True)
    backing.wait(100)
    again = deliveries.start("holder 2")
    assert holders[2].lock == again.lock
    assert deliveries.store.release(again, False, None, kept) == Released()
    freed = deliveries.request("holder 2", token=queued_token("holder 2"), queued=True)
    deliveries.store.release(freed, success=False)
    assert deliveries.store.holder(again.slot_lock(0), again.slots) is None


def test_reservation_asks_the_line(deliveries: Deliveries, reserve: MakeRequest) -> None:
    """A message that is published while others wait reserves no slot, though one is free; its own reservation comes first."""
    reserve("early")
    holders = deliveries.fill(2)
    deliveries.join("a")
    deliveries.store.release(holders[0], success=True)
    spec = deliveries.request("late", Place(), token=queued_token("late"), queued=True)
    assert REFUSED is deliveries.store.acquire(spec).status
    deliveries.start("early")
    deliveries.start("a", "ticket a", 0.5)


def test_own_reservation_comes_before_the_line(deliveries: Deliveries, reserve: MakeRequest) -> None:
    """Also without a limit, a message with a reservation starts though others wait in line."""
    reserve("early", limit=0)
    assert deliveries.join("a", limit=0).is_waiting
    assert GRANTED is deliveries.acquire("early", limit=0).status


# -- interleavings -----------------------------------------------------------------------------


@dataclass
class Play:
    """Messages whose deliveries come in a random order, while some ends name nobody."""

    deliveries: Deliveries
    chance: random.Random
    new: list[str]
    named: list[tuple[str, float]] = field(default_factory=list)
    copies: dict[str, float] = field(default_factory=dict)  # name -> number of its delayed copy
    running: dict[str, LeaseSpec] = field(default_factory=dict)
    joined: list[str] = field(default_factory=list)
    started: list[str] = field(default_factory=list)

    def run(self) -> None:
        """Take steps until all messages have run."""
        for _ in range(2000):
            steps = [step for step in ("new", "named", "copies", "running") if getattr(self, step)]
            if not steps:
                return
            getattr(self, f"_next_{self.chance.choice(steps)}")()
        raise AssertionError("never ends")

    def _next_new(self) -> None:
        name = self.new.pop(0)
        if self._deliver(name, "", 0.0) is REFUSED:
            self._join(name, 0.0)

    def _next_named(self) -> None:
        name, copy = self.named.pop(self.chance.randrange(len(self.named)))
        if self._deliver(name, f"ticket {name}", copy) is REFUSED:
            self._join(name, copy)

    def _next_copies(self) -> None:
        name = self.chance.choice(list(self.copies))
        copy = self.copies.pop(name)
        status = self.deliveries.copy(name, copy).status
        if status is GRANTED:
            self.named.append((name, copy + 0.5))
        elif status is REFUSED:
            self._join(name, copy)

    def _next_running(self) -> None:
        spec = self.running.pop(self.chance.choice(list(self.running)))
        text = self.deliveries.store.release(spec, success=True).message
        if text and self.chance.random() < 0.7:
            self.named.append((text.split()[1], float(text.split()[2])))

    def _deliver(self, name: str, ticket: str, copy: float) -> AcquireStatus:
        spec = self.deliveries.request(name, Place(ticket, copy), ttl=3000.0)
        result = self.deliveries.store.acquire(spec)
        if result.status is GRANTED:
            spec.use_slot(result.slot)
            self.running[name] = spec
            before = self.joined[: self.joined.index(name)] if name in self.joined else self.joined
            overtaken = [one for one in before if one not in self.started]
            self.started.append(name)
            assert len(overtaken) + len(self.running) <= 3, f"{name} overtakes {overtaken}"
        return result.status

    def _join(self, name: str, copy: float) -> None:
        result = self.deliveries.join(name, copy, due=3000.0, message=f"message {name} {copy + 0.5}")
        assert (REFUSED, True) == (result.status, result.is_waiting)
        self.copies[name] = copy + 1.5
        if name not in self.joined:
            self.joined.append(name)


@pytest.mark.parametrize("seed", range(25))
def test_any_order_of_deliveries(deliveries: Deliveries, seed: int) -> None:
    """At most N at once; nobody starts in the turn of one that has waited longer; each message starts exactly once."""
    names = [f"m{number}" for number in range(12)]
    play = Play(deliveries, random.Random(seed), list(names))
    play.run()
    assert sorted(names) == sorted(play.started)
