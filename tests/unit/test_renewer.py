"""Renewal, with a clock that stands still until the test moves it, and a store that does as the test says."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest

from celery_singleton_lock import LockLost, StoreError, StoreUnavailable
from celery_singleton_lock import lease as lease_module
from celery_singleton_lock.lease import Lease, LeaseState
from celery_singleton_lock.renewal.body import BodyRenewal
from celery_singleton_lock.renewal.loop import BackgroundLoop
from celery_singleton_lock.renewal.pending import PendingRelease
from celery_singleton_lock.renewal.renewer import Renewer
from celery_singleton_lock.store.memory import MemoryStore
from celery_singleton_lock.store.protocol import AcquireResult, AcquireStatus, LeaseRequest, RenewResult
from tests.servers import until
from tests.unit.conftest import Clock

TTL = 12.0


class Store(MemoryStore):
    """A store in memory that notes its calls, takes time, and can be away."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.clock = clock
        self.away: Exception | None = None
        self.renewals: list[tuple[float, int, float]] = []  # when, how many, allowed time
        self.acquired: list[str] = []
        self.released: list[tuple[float, str]] = []
        self.takes_to_release = 0.0
        self.takes: Callable[[float], float] = lambda allowed: 0.0
        self.meanwhile: Callable[[], object] = lambda: None

    def renew(self, claims: Sequence[LeaseRequest], timeout: float | None = None) -> list[RenewResult]:
        assert timeout is not None
        self.renewals.append((self.clock(), len(claims), timeout))
        answers = [] if self.away else super().renew(claims, timeout)
        self.meanwhile()
        self.clock.advance(self.takes(timeout))
        if self.away:
            raise self.away
        return answers

    def acquire(self, claim: LeaseRequest, timeout: float | None = None) -> AcquireResult:
        self.acquired.append(claim.token)
        if self.away:
            raise self.away
        return super().acquire(claim, timeout)

    def release(self, claim: LeaseRequest, success: bool, timeout: float | None = None) -> bool:
        self.released.append((self.clock(), claim.token))
        self.clock.advance(min(self.takes_to_release, timeout or math.inf))
        if self.away:
            raise self.away
        return super().release(claim, success)

    def lose(self) -> None:
        """Forget all, as a store without persistence that was restarted."""
        self._records.clear()


class Events:
    """Notes what is reported."""

    def __init__(self) -> None:
        self.reported: list[tuple[str, str]] = []
        self.failing: Exception | None = None

    def _report(self, what: str, lease: LeaseState) -> None:
        self.reported.append((what, lease.request.token))

    def renewed(self, lease: LeaseState) -> None:
        self._report("renewed", lease)

    def lost(self, lease: LeaseState) -> None:
        self._report("lost", lease)

    def reacquired(self, lease: LeaseState) -> None:
        self._report("reacquired", lease)

    def unreachable(self, lease: LeaseState, error: StoreError) -> None:
        self._report("unreachable", lease)

    def of(self, what: str) -> list[str]:
        return [token for said, token in self.reported if said == what]


class Quiet(BackgroundLoop):
    """The renewal thread's loop without the thread: tests call `renew_due` themselves."""

    def wake(self, at: float) -> None:
        pass


def ignore(error: BaseException) -> None:
    """Report nothing."""


class Held(LeaseState):
    """A lease, with what its body sees of it."""

    @property
    def key(self) -> str:
        return self.request.lock

    @property
    def remaining(self) -> float:
        return Lease(self.key, self).remaining

    def ensure(self) -> None:
        Lease(self.key, self).ensure()


def end(renewer: Renewer[LeaseState], lease: LeaseState) -> None:
    """End a lease's body."""
    lease.ended = True
    renewer.remove(lease)


def release_later(renewer: Renewer[LeaseState], request: LeaseRequest, success: bool | None = None) -> None:
    """Leave a release pending: of a body that ended so, or None: of an acquire without an answer."""
    renewer.release_later(PendingRelease(request, bool(success), bool(success)), unanswered=success is None)


class Fired:
    """Counts how often a body would have been interrupted."""

    def __init__(self) -> None:
        self.times = 0

    def fire(self) -> None:
        self.times += 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(lease_module, "now", clock)
    return clock


@pytest.fixture
def store(clock: Clock) -> Store:
    return Store(clock)


@pytest.fixture
def events() -> Events:
    return Events()


@pytest.fixture
def handler(store: Store, events: Any, clock: Clock) -> BodyRenewal:
    return BodyRenewal(store, store, events, clock)


@pytest.fixture
def renewer(store: Store, handler: BodyRenewal, clock: Clock) -> Renewer[LeaseState]:
    made = Renewer(store, handler, ignore, clock)
    made._loop = Quiet(made.renew_due, ignore, clock)
    return made


@pytest.fixture
def held(renewer: Renewer[LeaseState], handler: BodyRenewal, store: Store, clock: Clock) -> Callable[..., Held]:
    """Makes leases that are held and renewed."""

    def make(token: str = "t", ttl: float = TTL, supervised: bool = False) -> Held:
        claim = LeaseRequest("b:{x}", f"digest-{token}", token, ttl, f"task-{token}", "n", os.getpid(), supervised)
        verdict = store.acquire(claim)
        assert verdict.status is AcquireStatus.GRANTED
        lease = Held(claim)
        lease.granted(clock(), verdict.fence, handler.verify)
        lease.interrupt = Fired()
        renewer.add(lease)
        return lease

    return make


def go_on(renewer: Renewer[LeaseState], clock: Clock, until: float) -> None:
    """Let the thread's work be done, whenever it is due, up to that time."""
    while True:
        at = max(renewer.renew_due(), clock())
        if at > until:
            clock.time = until
            return
        clock.time = at if at > clock.time else clock.time + 0.001


def test_renewed_each_third_of_the_ttl(
    renewer: Renewer[LeaseState], store: Store, clock: Clock, held: Any, events: Events
) -> None:
    """A lease is renewed each third of its TTL, and so lives as long as its work."""
    lease = held()
    go_on(renewer, clock, clock() + 100 * TTL)
    times = [when for when, _, _ in store.renewals]
    assert {round(TTL / 3, 2)} == {round(later - earlier, 2) for earlier, later in pairwise(times)}
    assert lease.held
    assert {"renewed"} == {what for what, _ in events.reported}


def test_nothing_is_asked_before_it_is_due(renewer: Renewer[LeaseState], store: Store, held: Any, clock: Clock) -> None:
    """A sweep that finds nothing due calls nobody, and says when to come back."""
    lease = held()
    assert lease.due == renewer.renew_due()
    assert [] == store.renewals


def test_idle_without_leases(renewer: Renewer[LeaseState], clock: Clock, held: Any) -> None:
    """Without leases, or once the last plan has passed, the thread sleeps until it is woken."""
    assert math.inf == renewer.renew_due()
    lease = held()
    end(renewer, lease)
    clock.advance(TTL)
    assert math.inf == renewer.renew_due()


def test_due_together_one_call_per_hundred(renewer: Renewer[LeaseState], store: Store, clock: Clock, held: Any) -> None:
    """Leases due together, or nearly so, are renewed by one call for up to 100 of them."""
    for number in range(230):
        held(str(number))
        clock.advance(0.001)
    clock.advance(TTL / 3 - 0.2)
    renewer.renew_due()
    assert [100, 100, 30] == [count for _, count, _ in store.renewals]


def test_call_may_take_a_sixth_of_the_ttl(renewer: Renewer[LeaseState], store: Store, clock: Clock, held: Any) -> None:
    """A renewal is given a sixth of the shortest TTL, and never more than is left."""
    held("a", ttl=60.0)
    held("b", ttl=TTL)
    clock.advance(TTL)
    renewer.renew_due()
    assert store.renewals
    assert all(allowed <= TTL / 6 for _, _, allowed in store.renewals)


def test_two_more_tries_fit(
    renewer: Renewer[LeaseState], store: Store, clock: Clock, held: Any, events: Events
) -> None:
    """A renewal that fails, each time after all the time it may take, is tried at least twice more before the deadline."""
    lease = held()
    granted = clock()
    store.away = StoreUnavailable("away")
    store.takes = lambda allowed: allowed
    go_on(renewer, clock, granted + 2 * TTL)
    before_deadline = [when for when, _, _ in store.renewals if when < granted + TTL]
    assert len(before_deadline) >= 3
    assert ["t"] == events.of("lost")
    assert not lease.held


def test_third_try_saves_the_lease(
    renewer: Renewer[LeaseState], store: Store, clock: Clock, held: Any, events: Events
) -> None:
    """Where the third try succeeds nothing was lost, and the outage is told once."""
    lease = held()
    granted = clock()
    store.away = StoreUnavailable("away")
    store.takes = lambda allowed: allowed
    go_on(renewer, clock, granted + TTL * 0.75 - 0.01)
    assert len(store.renewals) == 2
    store.away, store.takes = None, lambda allowed: 0.0
    go_on(renewer, clock, granted + 3 * TTL)
    assert lease.held
    assert [] == events.of("lost")
    assert ["t"] == events.of("unreachable")


def test_try_that_was_kept_from_running(
    renewer: Renewer[LeaseState], store: Store, clock: Clock, held: Any, events: Events
) -> None:
    """Where the main process renews too, a last try whose thread could not run is repeated; a proper failure is a loss."""
    lease = held(supervised=True)
    clock.advance(TTL)
    store.away, store.takes = StoreUnavailable("late"), lambda allowed: 0.7 * TTL
    renewer.renew_due()
    assert [] == events.of("lost")
    assert lease.due <= clock() + TTL / 12
    clock.advance(TTL / 12)
    store.takes = lambda allowed: allowed
    renewer.renew_due()
    assert ["t"] == events.of("lost")


def test_tries_that_are_always_late(
    renewer: Renewer[LeaseState], store: Store, clock: Clock, held: Any, events: Events
) -> None:
    """Tries that are late for whatever reason put off the news of a loss by no more than a TTL and the last of them."""
    lease = held(supervised=True)
    store.away, store.takes = StoreUnavailable("the name is not resolved"), lambda allowed: TTL / 2
    while not lease.lost:
        clock.advance(max(0.0, lease.due - clock()))
        renewer.renew_due()
    assert clock() <= lease.deadline + TTL + TTL / 2 + TTL / 2 + TTL / 12
    assert ["t"] == events.of("lost")


def test_late_try_where_nobody_else_renews(
    renewer: Renewer[LeaseState], store: Store, clock: Clock, held: Any, events: Events
) -> None:
    """Nobody else has kept the lease: whatever a failed try past the deadline was late for, it is lost."""
    held()
    clock.advance(TTL)
    store.away, store.takes = StoreUnavailable("the name is not resolved"), lambda allowed: 0.7 * TTL
    renewer.renew_due()
    assert ["t"] == events.of("lost")


def test_each_outage_is_told_once(
    renewer: Renewer[LeaseState], store: Store, clock: Clock, held: Any, events: Events
) -> None:
    """Two outages are told as two, however many tries and leases each had."""
    for token in "abc":
        held(token)
    for _ in range(2):
        clock.advance(TTL / 3)
        store.away = StoreUnavailable("away")
        go_on(renewer, clock, clock() + TTL / 3)
        store.away = None
        go_on(renewer, clock, clock() + TTL / 3)
    assert 2 == len(events.of("unreachable"))
    assert [] == events.of("lost")


def test_deadline_counts_from_before_sending(
    renewer: Renewer[LeaseState], store: Store, clock: Clock, held: Any
) -> None:
    """The deadline is the time before the last successful call was sent, plus TTL: a slow reply does not move it."""
    lease = held()
    clock.advance(TTL / 3)
    sent = clock()
    store.takes = lambda allowed: 1.5
    renewer.renew_due()
    assert sent + TTL == lease.deadline
    assert sent + TTL / 3 == lease.due


def test_failed_call_moves_no_deadline(renewer: Renewer[LeaseState], store: Store, clock: Clock, held: Any) -> None:
    """A deadline moves only after a call that succeeded."""
    lease = held()
    deadline = lease.deadline
    clock.advance(TTL / 3)
    store.away = StoreUnavailable("away")
    renewer.renew_due()
    assert deadline == lease.deadline


def test_lost_once(renewer: Renewer[LeaseState], store: Store, clock: Clock, held: Any, events: Events) -> None:
    """A lease whose deadline passed is lost once: told once, interrupted once, and not held for good."""
    lease = held()
    store.away = StoreUnavailable("away")
    go_on(renewer, clock, clock() + 5 * TTL)
    assert not lease.held
    store.away = None
    go_on(renewer, clock, clock() + 5 * TTL)
    assert ["t"] == events.of("lost")
    assert 1 == lease.interrupt.times
    assert (False, 0.0) == (lease.held, lease.remaining)
    with pytest.raises(LockLost):
        lease.ensure()


def test_refusal_is_as_an_outage(
    renewer: Renewer[LeaseState], store: Store, clock: Clock, held: Any, events: Events
) -> None:
    """A store that refuses renewals costs the lease after its deadline, not before."""
    lease = held()
    granted = clock()
    store.away = StoreError("no permission")
    go_on(renewer, clock, granted + TTL * 0.99)
    assert lease.held
    go_on(renewer, clock, granted + TTL * 1.1)
    assert ["t"] == events.of("lost")


def test_taken_by_another(renewer: Renewer[LeaseState], store: Store, clock: Clock, held: Any, events: Events) -> None:
    """Another holder's token is there: lost at once, and left alone; once that is over it is taken again, so that others wait."""
    lease = held()
    store.lose()
    other = LeaseRequest("b:{x}", "digest-t", "other", 600.0, "other")
    store.acquire(other)
    clock.advance(TTL / 3)
    renewer.renew_due()
    assert ["t"] == events.of("lost")
    assert not lease.held
    go_on(renewer, clock, clock() + 5 * TTL)
    holder = store.holder(other.lock)
    assert holder is not None
    assert "other" == holder.task_id
    store.release(other, success=True)
    go_on(renewer, clock, clock() + TTL / 12)
    holder = store.holder(other.lock)
    assert holder is not None
    assert "other" != holder.task_id
    assert not lease.held
    assert ["t"] == events.of("lost")
    assert ["t"] == events.of("reacquired")
    end(renewer, lease)
    store.release(lease.request, success=True)
    assert store.holder(other.lock) is None


def test_patience_beside_a_lost_lease(renewer: Renewer[LeaseState], store: Store, clock: Clock, held: Any) -> None:
    """The deadline that a lost lease once had does not shorten the calls of others."""
    held("lost")
    store.lose()
    store.acquire(LeaseRequest("b:{x}", "digest-lost", "other", 600.0, "other"))
    clock.advance(TTL / 3)
    renewer.renew_due()
    held("other")
    store.renewals.clear()
    go_on(renewer, clock, clock() + 5 * TTL)
    assert {TTL / 6} == {allowed for _, _, allowed in store.renewals}


def test_gone_is_taken_again(
    renewer: Renewer[LeaseState], store: Store, clock: Clock, held: Any, events: Events
) -> None:
    """The store lost the lease, nobody else has it, the deadline lies ahead: it is taken again and was never lost."""
    lease = held()
    store.lose()
    clock.advance(TTL / 3)
    renewer.renew_due()
    assert lease.held
    assert [("reacquired", "t")] == events.reported
    assert store.holder(lease.key) is not None
    assert clock() + TTL == lease.deadline
    go_on(renewer, clock, clock() + 5 * TTL)
    assert lease.held


def test_gone_and_taken_by_another_in_between(
    renewer: Renewer[LeaseState], store: Store, clock: Clock, held: Any, events: Events
) -> None:
    """Gone at renewal, but another's when it is to be taken again: lost, and the other keeps it."""
    lease = held()
    store.lose()
    other = LeaseRequest("b:{x}", "digest-t", "other", 600.0, "other")
    store.meanwhile = lambda: MemoryStore.acquire(store, other)
    clock.advance(TTL / 3)
    renewer.renew_due()
    assert [("lost", "t")] == events.reported
    assert not lease.held
    holder = store.holder(lease.key)
    assert holder is not None
    assert "other" == holder.task_id


@pytest.mark.parametrize("why", ["another came and went", "the deadline had passed"])
def test_gone_and_lost(
    renewer: Renewer[LeaseState], store: Store, clock: Clock, held: Any, events: Events, why: str
) -> None:
    """Whoever was not alone meanwhile, or is late, has lost the lease, once; it is taken again, to keep others out."""
    lease = held()
    store.lose()
    if why == "another came and went":
        clock.advance(TTL / 3)
        other = LeaseRequest("b:{x}", "digest-t", "other", 600.0, "other")
        store.acquire(other)
        store.release(other, success=True)
    else:
        clock.advance(TTL + 1)
    renewer.renew_due()
    assert [("lost", "t"), ("reacquired", "t")] == events.reported
    assert not lease.held
    assert 1 == lease.interrupt.times
    assert store.holder(lease.key) is not None
    go_on(renewer, clock, clock() + 5 * TTL)
    assert store.holder(lease.key) is not None
    assert ["t"] == events.of("lost")


def test_woken_late_but_still_the_owner(
    renewer: Renewer[LeaseState], store: Store, clock: Clock, held: Any, events: Events
) -> None:
    """A process that was stopped past its deadline, but whose lease the store still has, has not lost it."""
    lease = held()
    store._records[lease.key].expires += 10 * TTL  # another process renewed it meanwhile
    clock.advance(3 * TTL)
    assert not lease.held
    renewer.renew_due()
    assert lease.held
    assert [] == events.of("lost")


def test_freed_by_an_operator(
    renewer: Renewer[LeaseState], store: Store, clock: Clock, held: Any, events: Events
) -> None:
    """A lock that an operator took is lost at the next renewal, and not taken again."""
    lease = held()
    store.revoke(lease.request.base, lease.key)
    clock.advance(TTL / 3)
    renewer.renew_due()
    assert [("lost", "t")] == events.reported
    assert store.holder(lease.key) is None


def test_released_is_not_renewed(
    renewer: Renewer[LeaseState], store: Store, clock: Clock, held: Any, events: Events
) -> None:
    """A lease whose body is over is renewed no more."""
    lease = held()
    end(renewer, lease)
    go_on(renewer, clock, clock() + 5 * TTL)
    assert [] == store.renewals
    assert not lease.held


@pytest.mark.parametrize("answer", [RenewResult.RENEWED, RenewResult.MISSING, RenewResult.NOT_OWNER])
def test_released_while_a_renewal_is_in_flight(
    renewer: Renewer[LeaseState], store: Store, clock: Clock, held: Any, events: Events, answer: RenewResult
) -> None:
    """A lease that is released while its renewal is on the way is neither taken again nor reported, whatever the answer."""
    lease = held()
    store.acquired.clear()
    renew = store.renew

    def answered(claims: Sequence[LeaseRequest], timeout: float | None = None) -> list[RenewResult]:
        renew(claims, timeout)
        return [answer]

    store.renew = answered  # type: ignore[method-assign]

    def release() -> None:
        end(renewer, lease)
        store.release(lease.request, success=True)

    store.meanwhile = release
    clock.advance(TTL / 3)
    renewer.renew_due()
    assert [] == events.reported
    assert [] == store.acquired
    assert store.holder(lease.key) is None
    assert 0 == lease.interrupt.times


def test_released_while_an_outage_is_found(
    renewer: Renewer[LeaseState], store: Store, clock: Clock, held: Any, events: Events
) -> None:
    """A lease that is released while its renewal fails past the deadline was not lost."""
    lease = held()
    clock.advance(TTL + 1)
    store.away = StoreUnavailable("away")
    store.meanwhile = lambda: end(renewer, lease)
    renewer.renew_due()
    assert [] == events.of("lost")
    assert 0 == lease.interrupt.times


def test_body_that_ends_while_its_lease_is_reacquired(
    renewer: Renewer[LeaseState], store: Store, clock: Clock, held: Any, events: Events
) -> None:
    """A release that overtakes a call to reacquire is repeated after that call, so no lock is left."""
    lease = held()
    store.lose()
    clock.advance(TTL / 3)
    reacquire = store.reacquire

    def overtaken(request: LeaseRequest, fence: int, timeout: float | None = None) -> tuple[RenewResult, bool]:
        assert lease.reacquired
        end(renewer, lease)
        store.release(request, success=True)
        release_later(renewer, request, success=True)
        return reacquire(request, fence, timeout)

    store.reacquire = overtaken  # type: ignore[method-assign]
    renewer.renew_due()
    assert store.holder(lease.key) is None
    assert [] == events.of("reacquired")


def test_body_that_ended_before_its_lease_is_reacquired(
    renewer: Renewer[LeaseState], handler: BodyRenewal, store: Store, held: Any
) -> None:
    """Nothing is reacquired for a body that has ended."""
    lease = held()
    store.lose()
    lease.ended = True
    handler._reacquire(lease)
    assert store.holder(lease.key) is None


def test_many_leases_in_an_outage(
    renewer: Renewer[LeaseState], store: Store, clock: Clock, held: Any, events: Events
) -> None:
    """Several batches, and a store that lets each call wait to its end until three quarters of the TTL: nothing is lost."""
    leases = [held(str(number)) for number in range(250)]
    granted = clock()
    store.away = StoreUnavailable("away")
    store.takes = lambda allowed: allowed
    go_on(renewer, clock, granted + TTL * 0.75)
    store.away, store.takes = None, lambda allowed: 0.0
    go_on(renewer, clock, granted + 2 * TTL)
    assert [] == events.of("lost")
    assert all(lease.held for lease in leases)


# -- ensure ------------------------------------------------------------------------------------


# -- claims that were never answered -----------------------------------------------------------


def doubtful(token: str = "d") -> LeaseRequest:
    return LeaseRequest("b:{x}", f"digest-{token}", token, TTL, f"task-{token}", "n", os.getpid())


def test_doubt_is_given_back(renewer: Renewer[LeaseState], store: Store, clock: Clock) -> None:
    """What a call got whose answer was lost is released at once, and nothing is asked for ever after."""
    claim = doubtful()
    store.acquire(claim)
    release_later(renewer, claim)
    renewer.renew_due()
    assert store.holder(claim.lock) is None
    go_on(renewer, clock, clock() + 10 * TTL)
    assert 2 == len(store.released)
    assert math.inf == renewer.renew_due()


def test_doubt_is_given_back_when_the_store_is_there_again(
    renewer: Renewer[LeaseState], store: Store, clock: Clock
) -> None:
    """A store that was stopped may do what it was asked after it has done the first release: there is a second."""
    claims = [doubtful(str(number)) for number in range(3)]
    store.away = StoreUnavailable("stopped")
    for claim in claims:
        release_later(renewer, claim)
    go_on(renewer, clock, clock() + 3 * TTL)
    assert 3 * 12 + 1 >= len(store.released), "one try at a time is enough"
    store.away = None
    clock.advance(TTL / 12)
    renewer.renew_due()
    for claim in claims:
        store.acquire(claim)  # done late
    go_on(renewer, clock, clock() + TTL / 12 + 0.1)
    assert [None] * 3 == [store.holder(claim.lock) for claim in claims]
    assert math.inf == renewer.renew_due()


def test_doubts_do_not_hold_up_leases(renewer: Renewer[LeaseState], store: Store, clock: Clock, held: Any) -> None:
    """Leases are renewed as ever while something is in doubt."""
    held()
    release_later(renewer, doubtful())
    store.away = StoreError("refused: no permission to release")
    renewer.renew_due()
    store.away = None
    begin = clock()
    go_on(renewer, clock, clock() + 10 * TTL)
    assert 30 == len([when for when, _, _ in store.renewals if when > begin])


def test_leases_go_before_doubts(
    renewer: Renewer[LeaseState], store: Store, clock: Clock, held: Any, events: Events
) -> None:
    """However many claims are given back after an outage, and however slowly the store answers, no lease is renewed late."""
    held()
    store.takes_to_release = TTL / 20
    for number in range(500):
        release_later(renewer, doubtful(str(number)))
    begin = clock()
    go_on(renewer, clock, begin + 20 * TTL)
    times = [begin, *(when for when, _, _ in store.renewals)]
    assert max(later - sooner for sooner, later in pairwise(times)) <= TTL / 3 + TTL / 20 + 0.01
    assert 20 * 20 * 0.9 <= len(store.released)


@pytest.mark.parametrize(("ttl", "other"), [(6.0, 6.0), (1.0, 1.0), (1.0, 30.0), (3.0, 30.0), (30.0, 3600.0)])
def test_doubts_leave_time_for_two_more_tries(
    renewer: Renewer[LeaseState], store: Store, clock: Clock, held: Any, ttl: float, other: float
) -> None:
    """A store that is away for claims in doubt is away for leases: two more tries to renew still fit before the deadline."""
    lease = held(ttl=ttl)
    store.away = StoreUnavailable("away")
    store.takes = lambda allowed: allowed
    store.takes_to_release = 1.0
    for number in range(3):
        release_later(renewer, LeaseRequest("b:{x}", f"d{number}", f"d{number}", other, "id", "n", os.getpid()))
    clock.time = lease.due
    go_on(renewer, clock, lease.deadline)
    assert 3 <= len([when for when, _, _ in store.renewals if when < lease.deadline])


def test_doubt_of_a_long_lease(renewer: Renewer[LeaseState], store: Store, clock: Clock) -> None:
    """However long a lease would live, what is in doubt is given back soon after the store's return."""
    claim = LeaseRequest("b:{x}", "long", "long", 3600.0, "id", "n", os.getpid())
    store.acquire(claim)
    store.away = StoreUnavailable("away")
    release_later(renewer, claim)
    again = renewer.renew_due()
    assert clock() < again <= clock() + 3
    store.away, clock.time = None, again
    renewer.renew_due()
    assert store.holder(claim.lock) is None


@pytest.mark.parametrize("ttl", [30.0, 600.0, 3600.0])
@pytest.mark.parametrize("begun", ["before the outage", "after the outage"])
def test_left_lease_does_not_wait_for_renewals(
    renewer: Renewer[LeaseState], store: Store, clock: Clock, held: Any, ttl: float, begun: str
) -> None:
    """What could not be released is released soon after the store's return, whenever the next renewal is due."""
    left = held(ttl=ttl)
    if begun == "before the outage":
        held("other", ttl)
    clock.time = left.due
    store.away = StoreUnavailable("away")
    renewer.renew_due()  # a renewal that fails
    end(renewer, left)
    release_later(renewer, left.request, success=True)
    again = renewer.renew_due()
    store.away = None
    if begun == "after the outage":
        held("other", ttl)
    assert clock() < again <= clock() + 3
    clock.time = again
    renewer.renew_due()
    assert store.holder(left.key) is None


def test_left_lease_beside_short_ones(renewer: Renewer[LeaseState], store: Store, clock: Clock, held: Any) -> None:
    """What could not be released does not wait for a renewal that leases of short tasks never come to."""
    left, other = held("left", 3600.0), held("other", 6.0)
    clock.time = other.due
    store.away = StoreUnavailable("away")
    renewer.renew_due()  # a renewal that fails
    for lease in (left, other):
        end(renewer, lease)
        release_later(renewer, lease.request, success=True)
    store.away = None
    for number in range(8):
        short = held(f"short {number}", 6.0)
        go_on(renewer, clock, clock() + 0.5)
        end(renewer, short)
    assert store.holder(left.key) is None


def test_store_that_refuses_is_told_once(
    renewer: Renewer[LeaseState], store: Store, clock: Clock, held: Any, events: Events
) -> None:
    """However much could be neither renewed nor given back meanwhile."""
    held(ttl=60.0)
    store.away = StoreError("refused")
    for number in range(5):
        release_later(renewer, doubtful(str(number)))
        go_on(renewer, clock, clock() + 10)
    assert 1 == len(events.of("unreachable"))


def test_leases_are_kept_in_mind_beside_doubts(renewer: Renewer[LeaseState], store: Store, clock: Clock) -> None:
    """A long outage with many claims leaves room for leases whose bodies end in it."""
    left = doubtful("left")
    store.acquire(left)
    store.away = StoreUnavailable("away")
    for number in range(1500):
        release_later(renewer, doubtful(str(number)))
    release_later(renewer, left, success=True)
    store.away = None
    go_on(renewer, clock, clock() + TTL)
    assert "left" in {token for _, token in store.released}


def test_doubts_are_bounded(renewer: Renewer[LeaseState], store: Store, clock: Clock) -> None:
    """However long a store is away, no more than a thousand claims are kept in mind."""
    store.away = StoreUnavailable("away")
    for number in range(1500):
        release_later(renewer, doubtful(str(number)))
    renewer.renew_due()
    store.away = None
    clock.advance(TTL)
    go_on(renewer, clock, clock() + TTL)
    assert 1000 == len({token for when, token in store.released[1:]})


def test_ensure_before_the_deadline_asks_nobody(renewer: Renewer[LeaseState], store: Store, held: Any) -> None:
    """While the lease is held `ensure` needs no store."""
    held().ensure()
    assert [] == store.renewals


def test_ensure_past_the_deadline_asks_once(
    renewer: Renewer[LeaseState], store: Store, clock: Clock, held: Any
) -> None:
    """Past the deadline it asks once: still owned is renewed and goes on."""
    lease = held()
    store._records[lease.key].expires += 10 * TTL
    clock.advance(TTL + 1)
    lease.ensure()
    assert lease.held
    lease.ensure()
    assert 1 == len(store.renewals)


@pytest.mark.parametrize("trouble", ["away", "gone", "taken"])
def test_ensure_past_the_deadline_and_not_owned(
    renewer: Renewer[LeaseState], store: Store, clock: Clock, held: Any, events: Events, trouble: str
) -> None:
    """Past the deadline, and the store says no or nothing: LockLost, told once, and again at each `ensure`."""
    lease = held()
    clock.advance(TTL + 1)
    if trouble == "away":
        store.away = StoreUnavailable("away")
    if trouble == "taken":
        store.acquire(LeaseRequest("b:{x}", "digest-t", "other", 600.0, "other"))
    for _ in range(2):
        with pytest.raises(LockLost, match=lease.key):
            lease.ensure()
    assert ["t"] == events.of("lost")
    assert 1 == len(store.renewals)


# -- the thread --------------------------------------------------------------------------------


def test_thread_starts_with_the_first_lease(clock: Clock, store: Store, handler: BodyRenewal) -> None:
    """Without a lease there is no thread; the first starts it, and a later one that is due no earlier does not wake it."""
    woken = []
    renewer = Renewer(store, handler, ignore, clock)
    assert not renewer._loop._started

    class Counted(Quiet):
        def wake(self, at: float) -> None:
            woken.append(at)

    renewer._loop = Counted(renewer.renew_due, ignore, clock)
    for token in "ab":
        lease = LeaseState(LeaseRequest("b:{x}", token, token, TTL))
        lease.granted(clock(), 1, handler.verify)
        renewer.add(lease)
    assert 1 == len(woken)


@pytest.mark.parametrize(
    "error", [RuntimeError("unforeseen"), SystemExit(), KeyboardInterrupt(), MemoryError(), StoreError("x")]
)
def test_errors_do_not_end_the_thread(error: BaseException) -> None:
    """Whatever goes wrong in a step, the next one is done."""
    steps: list[int] = []

    def step() -> float:
        steps.append(1)
        if len(steps) == 1:
            raise error
        return math.inf

    loop = BackgroundLoop(step, ignore)
    loop.wake(0.0)
    until(lambda: len(steps) >= 2, timeout=3)


def test_failing_log_does_not_end_the_thread() -> None:
    """A user's logging filter that fails while an error is logged does not end the thread either."""
    steps: list[int] = []

    def step() -> float:
        steps.append(1)
        if len(steps) == 1:
            raise RuntimeError("unforeseen")
        return math.inf

    with broken_log():
        loop = BackgroundLoop(step, ignore)
        loop.wake(0.0)
        until(lambda: len(steps) >= 2, timeout=3)


def test_failing_recovery_does_not_end_the_thread() -> None:
    """Nor does an error while that of a step is dealt with, as where memory is short."""
    steps: list[int] = []
    short: list[MemoryError] = []

    def step() -> float:
        steps.append(1)
        if len(steps) == 1:
            short.append(MemoryError())
            raise short[0]
        return math.inf

    def clock() -> float:
        for error in short[:]:
            short.clear()
            raise error
        return 1.0

    loop = BackgroundLoop(step, ignore, clock=clock)
    loop.wake(0.0)
    until(lambda: len(steps) >= 2, timeout=3)


class broken_log:  # noqa: N801
    """Logging that fails, as a user's filter may."""

    def __enter__(self) -> None:
        logging.getLogger("celery_singleton_lock").addFilter(self._fail)

    def __exit__(self, *exc_info: object) -> None:
        logging.getLogger("celery_singleton_lock").removeFilter(self._fail)

    @staticmethod
    def _fail(record: logging.LogRecord) -> bool:
        raise RuntimeError("a filter of the user's")


def test_failing_log_does_not_cost_other_leases(
    renewer: Renewer[LeaseState], store: Store, clock: Clock, held: Any, events: Events
) -> None:
    """An error while one lease's fate is told keeps no other lease from being renewed."""
    told, other = held("a"), held("b")
    del store._records[told.key]

    def fail(lease: LeaseState) -> None:
        raise RuntimeError("log")

    events.reacquired = fail  # type: ignore[method-assign]
    clock.advance(TTL / 3)
    try:
        renewer.renew_due()
    except RuntimeError:
        renewer.renew_due()
    assert clock() + TTL == other.deadline


def test_thread_sleeps_until_it_is_woken() -> None:
    """While nothing is due no steps are taken over and over; woken for an earlier time, the thread takes one."""
    now = [0.0]
    steps: list[float] = []

    def step() -> float:
        steps.append(now[0])
        return math.inf

    loop = BackgroundLoop(step, ignore, clock=lambda: now[0])
    loop.wake(50.0)
    loop.wake(0.0)
    until(lambda: steps)
    assert len(steps) <= 2
