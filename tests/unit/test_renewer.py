"""Renewal, with a clock that only the test moves and a store whose faults the test chooses."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from celery_singleton_lock import LockLost, StoreError, StoreUnavailable
from celery_singleton_lock import lease as lease_module
from celery_singleton_lock.lease import Lease, LeaseState
from celery_singleton_lock.renewal.body import BodyRenewal
from celery_singleton_lock.renewal.loop import ERROR_DELAY, BackgroundLoop
from celery_singleton_lock.renewal.pending import PendingRelease
from celery_singleton_lock.renewal.renewer import Renewer
from celery_singleton_lock.store.memory import MemoryStore
from celery_singleton_lock.store.protocol import AcquireStatus, RenewResult
from celery_singleton_lock.store.requests import LeaseSpec, Place
from tests.servers import until
from tests.unit.conftest import Clock
from tests.unit.fake_store import FakeStore

TTL = 12.0


class Events:
    """Records the reported events."""

    def __init__(self) -> None:
        self.reported: list[tuple[str, str]] = []
        self.reasons: list[str] = []
        self.alone: list[bool] = []  # whether another task had a lock that was lost
        self.failing: Exception | None = None

    def _report(self, what: str, lease: LeaseState) -> None:
        self.reported.append((what, lease.spec.token))

    def renewed(self, lease: LeaseState) -> None:
        self._report("renewed", lease)

    def not_renewed(self, leases: Sequence[LeaseState], error: StoreError) -> None:
        for lease in leases:
            self._report("not renewed", lease)

    def lost(self, lease: LeaseState, reason: str) -> None:
        self._report("lost", lease)
        self.reasons.append(reason)

    def learned(self, lease: LeaseState, was_alone: bool) -> None:
        if lease.lost:
            self.alone.append(was_alone)

    def replaced(self, lease: LeaseState) -> None:
        self._report("replaced", lease)

    def reacquired(self, lease: LeaseState) -> None:
        self._report("reacquired", lease)

    def unreachable(self, lease: LeaseState, error: StoreError) -> None:
        self._report("unreachable", lease)

    def of(self, what: str) -> list[str]:
        return [token for event, token in self.reported if event == what]


class Quiet(BackgroundLoop):
    """The renewal thread's loop without the thread: tests call `renew_due` themselves."""

    def wake(self, at: float) -> None:
        pass


def ignore(error: BaseException, request: LeaseSpec | None = None) -> None:
    """Ignore the error."""


class Held(LeaseState):
    """A lease state with the attributes that its body sees."""

    @property
    def key(self) -> str:
        return self.spec.lock

    @property
    def remaining(self) -> float:
        return Lease(self.key, self).remaining

    def ensure(self) -> None:
        Lease(self.key, self).ensure()


def end(renewer: Renewer[LeaseState], lease: LeaseState) -> None:
    """End the body of a lease."""
    lease.ended = True
    renewer.remove(lease)


def release_later(renewer: Renewer[LeaseState], request: LeaseSpec, success: bool | None = None) -> None:
    """Add a pending release for a body that ended with ``success``; None stands for an acquire without an answer."""
    renewer.release_later(PendingRelease(request, bool(success), bool(success)), unanswered=success is None)


class Fired:
    """Counts the interruptions of a body."""

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
def store(clock: Clock) -> FakeStore:
    return FakeStore(clock)


@pytest.fixture
def events() -> Events:
    return Events()


@pytest.fixture
def handler(store: FakeStore, events: Any, clock: Clock) -> BodyRenewal:
    return BodyRenewal(store, store, events, clock)


@pytest.fixture
def renewer(store: FakeStore, handler: BodyRenewal, clock: Clock) -> Renewer[LeaseState]:
    renewer = Renewer(store, handler, ignore, clock)
    renewer._loop = Quiet(renewer.renew_due, ignore, clock)
    return renewer


@pytest.fixture
def held(renewer: Renewer[LeaseState], handler: BodyRenewal, store: FakeStore, clock: Clock) -> Callable[..., Held]:
    """Return a function that acquires a lease and adds it to the renewer."""

    def make(token: str = "t", ttl: float = TTL, supervised: bool = False) -> Held:
        request = LeaseSpec("b:{x}", f"digest-{token}", token, ttl, f"task-{token}", "n", os.getpid(), supervised)
        result = store.acquire(request)
        assert result.status is AcquireStatus.GRANTED
        lease = Held(request)
        lease.granted(clock(), result.fence, handler.verify)
        lease.interrupt = Fired()
        renewer.add(lease)
        return lease

    return make


def go_on(renewer: Renewer[LeaseState], clock: Clock, until: float) -> None:
    """Do the work of the renewal thread, whenever it is due, up to this time."""
    while True:
        at = max(renewer.renew_due(), clock())
        if at > until:
            clock.time = until
            return
        clock.time = at if at > clock.time else clock.time + 0.001


def test_renewed_each_third_of_the_ttl(
    renewer: Renewer[LeaseState], store: FakeStore, clock: Clock, held: Any, events: Events
) -> None:
    """The renewer renews a lease each third of its TTL, so the lease lives as long as its work."""
    lease = held()
    go_on(renewer, clock, clock() + 100 * TTL)
    times = [when for when, *_ in store.renewals]
    assert {round(TTL / 3, 2)} == {round(later - earlier, 2) for earlier, later in pairwise(times)}
    assert lease.held
    assert {"renewed"} == {what for what, _ in events.reported}


def test_no_renewal_before_it_is_due(renewer: Renewer[LeaseState], store: FakeStore, held: Any, clock: Clock) -> None:
    """A sweep that finds nothing due does not call the store, and returns the time of the next one."""
    lease = held()
    assert lease.due == renewer.renew_due()
    assert [] == store.renewals


def test_idle_without_leases(renewer: Renewer[LeaseState], clock: Clock, held: Any) -> None:
    """Without leases the thread sleeps until it is woken, also after the last planned renewal has passed."""
    assert math.inf == renewer.renew_due()
    lease = held()
    end(renewer, lease)
    clock.advance(TTL)
    assert math.inf == renewer.renew_due()


def test_due_together_one_call_per_hundred(
    renewer: Renewer[LeaseState], store: FakeStore, clock: Clock, held: Any
) -> None:
    """One call renews up to 100 leases that are due at about the same time."""
    for number in range(230):
        held(str(number))
        clock.advance(0.001)
    clock.advance(TTL / 3 - 0.2)
    renewer.renew_due()
    assert [100, 100, 30] == [len(one.tokens) for one in store.renewals]


def test_call_may_take_a_sixth_of_the_ttl(
    renewer: Renewer[LeaseState], store: FakeStore, clock: Clock, held: Any
) -> None:
    """The timeout of a renewal is at most a sixth of the shortest TTL, also past the deadline."""
    held("a", ttl=60.0)
    held("b", ttl=TTL)
    clock.advance(TTL)
    renewer.renew_due()
    assert store.renewals
    assert all(allowed <= TTL / 6 for *_, allowed in store.renewals)


def test_two_retries_fit_before_the_deadline(
    renewer: Renewer[LeaseState], store: FakeStore, clock: Clock, held: Any, events: Events
) -> None:
    """A renewal that fails at its full timeout is repeated at least twice before the deadline."""
    lease = held()
    granted = clock()
    store.failure = StoreUnavailable("unreachable")
    store.renewal_takes = lambda allowed: allowed
    go_on(renewer, clock, granted + 2 * TTL)
    before_deadline = [when for when, *_ in store.renewals if when < granted + TTL]
    assert len(before_deadline) >= 3
    assert ["t"] == events.of("lost")
    assert not lease.held


def test_third_renewal_saves_the_lease(
    renewer: Renewer[LeaseState], store: FakeStore, clock: Clock, held: Any, events: Events
) -> None:
    """A lease whose third renewal succeeds is not lost, and the outage is reported once."""
    lease = held()
    granted = clock()
    store.failure = StoreUnavailable("unreachable")
    store.renewal_takes = lambda allowed: allowed
    go_on(renewer, clock, granted + TTL * 0.75 - 0.01)
    assert len(store.renewals) == 2
    store.failure, store.renewal_takes = None, lambda allowed: 0.0
    go_on(renewer, clock, granted + 3 * TTL)
    assert lease.held
    assert [] == events.of("lost")
    assert ["t"] == events.of("unreachable")


def test_starved_renewal_is_repeated(
    renewer: Renewer[LeaseState], store: FakeStore, clock: Clock, held: Any, events: Events
) -> None:
    """Where the main process renews too, a last renewal whose thread was starved is repeated; a failure in time is a loss."""
    lease = held(supervised=True)
    clock.advance(TTL)
    store.failure, store.renewal_takes = StoreUnavailable("late"), lambda allowed: 0.7 * TTL
    renewer.renew_due()
    assert [] == events.of("lost")
    assert lease.due <= clock() + TTL / 12
    clock.advance(TTL / 12)
    store.renewal_takes = lambda allowed: allowed
    renewer.renew_due()
    assert ["t"] == events.of("lost")


def test_renewals_that_are_always_late(
    renewer: Renewer[LeaseState], store: FakeStore, clock: Clock, held: Any, events: Events
) -> None:
    """Late renewals postpone the report of a loss by at most a TTL and the last renewal, whatever delays them."""
    lease = held(supervised=True)
    store.failure, store.renewal_takes = StoreUnavailable("the name is not resolved"), lambda allowed: TTL / 2
    while not lease.lost:
        clock.advance(max(0.0, lease.due - clock()))
        renewer.renew_due()
    assert clock() <= lease.deadline + TTL + TTL / 2 + TTL / 2 + TTL / 12
    assert ["t"] == events.of("lost")


def test_late_renewal_without_a_supervisor(
    renewer: Renewer[LeaseState], store: FakeStore, clock: Clock, held: Any, events: Events
) -> None:
    """Without a supervisor a renewal that fails past the deadline loses the lease, whatever delayed it."""
    held()
    clock.advance(TTL)
    store.failure, store.renewal_takes = StoreUnavailable("the name is not resolved"), lambda allowed: 0.7 * TTL
    renewer.renew_due()
    assert ["t"] == events.of("lost")


def test_each_outage_is_reported_once(
    renewer: Renewer[LeaseState], store: FakeStore, clock: Clock, held: Any, events: Events
) -> None:
    """Each outage is reported once, however many renewals failed and however many leases are held."""
    for token in "abc":
        held(token)
    for _ in range(2):
        clock.advance(TTL / 3)
        store.failure = StoreUnavailable("unreachable")
        go_on(renewer, clock, clock() + TTL / 3)
        store.failure = None
        go_on(renewer, clock, clock() + TTL / 3)
    assert 2 == len(events.of("unreachable"))
    assert [] == events.of("lost")


def test_deadline_counts_from_before_sending(
    renewer: Renewer[LeaseState], store: FakeStore, clock: Clock, held: Any
) -> None:
    """The deadline is one TTL after the last successful call was sent; a slow reply does not move it."""
    lease = held()
    clock.advance(TTL / 3)
    sent = clock()
    store.renewal_takes = lambda allowed: 1.5
    renewer.renew_due()
    assert sent + TTL == lease.deadline
    assert sent + TTL / 3 == lease.due


def test_failed_call_moves_no_deadline(renewer: Renewer[LeaseState], store: FakeStore, clock: Clock, held: Any) -> None:
    """A deadline moves only after a call that succeeded."""
    lease = held()
    deadline = lease.deadline
    clock.advance(TTL / 3)
    store.failure = StoreUnavailable("unreachable")
    renewer.renew_due()
    assert deadline == lease.deadline


def test_lost_once(renewer: Renewer[LeaseState], store: FakeStore, clock: Clock, held: Any, events: Events) -> None:
    """A lease past its deadline is lost for good: the loss is reported once and the body is interrupted once."""
    lease = held()
    store.failure = StoreUnavailable("unreachable")
    go_on(renewer, clock, clock() + 5 * TTL)
    assert not lease.held
    store.failure = None
    go_on(renewer, clock, clock() + 5 * TTL)
    assert ["t"] == events.of("lost")
    assert 1 == lease.interrupt.times
    assert (False, 0.0) == (lease.held, lease.remaining)
    with pytest.raises(LockLost):
        lease.ensure()


def test_refusal_counts_as_an_outage(
    renewer: Renewer[LeaseState], store: FakeStore, clock: Clock, held: Any, events: Events
) -> None:
    """A lease whose renewals the store refuses is lost after its deadline, not before."""
    lease = held()
    granted = clock()
    store.failure = StoreError("no permission")
    go_on(renewer, clock, granted + TTL * 0.99)
    assert lease.held
    go_on(renewer, clock, granted + TTL * 1.1)
    assert ["t"] == events.of("lost")


def test_lease_that_another_holder_has(
    renewer: Renewer[LeaseState], store: FakeStore, clock: Clock, held: Any, events: Events
) -> None:
    """A lease that another holder has is lost at once, and the renewer does not touch the other holder's lock.

    Once that lock is released, the renewer reacquires it, so that others wait for the body.
    """
    lease = held()
    store.lose()
    other = LeaseSpec("b:{x}", "digest-t", "other", 600.0, "other")
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
    store.release(lease.spec, success=True)
    assert store.holder(other.lock) is None


def test_lost_lease_does_not_shorten_the_timeout_of_others(
    renewer: Renewer[LeaseState], store: FakeStore, clock: Clock, held: Any
) -> None:
    """The deadline of a lost lease does not shorten the timeout of other renewals."""
    held("lost")
    store.lose()
    store.acquire(LeaseSpec("b:{x}", "digest-lost", "other", 600.0, "other"))
    clock.advance(TTL / 3)
    renewer.renew_due()
    held("other")
    store.renewals.clear()
    go_on(renewer, clock, clock() + 5 * TTL)
    assert {TTL / 6} == {allowed for *_, allowed in store.renewals}


def test_missing_lease_is_reacquired(
    renewer: Renewer[LeaseState], store: FakeStore, clock: Clock, held: Any, events: Events
) -> None:
    """The renewer reacquires a missing lease before its deadline if no other holder has it; that lease is not lost."""
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


def test_missing_lease_that_another_acquires_before_the_reacquire(
    renewer: Renewer[LeaseState], store: FakeStore, clock: Clock, held: Any, events: Events
) -> None:
    """A missing lease that another holder acquires before the reacquire is lost, and the other holder keeps it."""
    lease = held()
    store.lose()
    other = LeaseSpec("b:{x}", "digest-t", "other", 600.0, "other")
    store.during_renewal = lambda: MemoryStore.acquire(store, other)
    clock.advance(TTL / 3)
    renewer.renew_due()
    assert [("lost", "t")] == events.reported
    assert not lease.held
    holder = store.holder(lease.key)
    assert holder is not None
    assert "other" == holder.task_id


@pytest.mark.parametrize("cause", ["another acquired and released it", "the deadline had passed"])
def test_missing_lease_that_is_lost(
    renewer: Renewer[LeaseState], store: FakeStore, clock: Clock, held: Any, events: Events, cause: str
) -> None:
    """A missing lease is lost, once, if another holder had it meanwhile or its deadline has passed.

    The renewer still reacquires it, to keep others out.
    """
    lease = held()
    store.lose()
    if cause == "another acquired and released it":
        clock.advance(TTL / 3)
        other = LeaseSpec("b:{x}", "digest-t", "other", 600.0, "other")
        store.acquire(other)
        store.release(other, success=True)
    else:
        clock.advance(TTL + 1)
    renewer.renew_due()
    assert [("lost", "t"), ("reacquired", "t")] == events.reported
    assert [cause == "the deadline had passed"] == events.alone
    assert not lease.held
    assert 1 == lease.interrupt.times
    assert store.holder(lease.key) is not None
    go_on(renewer, clock, clock() + 5 * TTL)
    assert store.holder(lease.key) is not None
    assert ["t"] == events.of("lost")


def test_woken_late_but_still_the_owner(
    renewer: Renewer[LeaseState], store: FakeStore, clock: Clock, held: Any, events: Events
) -> None:
    """A process that was stopped past its deadline keeps a lease that the store still has."""
    lease = held()
    store.prolong(lease.key, 10 * TTL)  # another process renewed it meanwhile
    clock.advance(3 * TTL)
    assert not lease.held
    renewer.renew_due()
    assert lease.held
    assert [] == events.of("lost")


def test_revoked_by_an_operator(
    renewer: Renewer[LeaseState], store: FakeStore, clock: Clock, held: Any, events: Events
) -> None:
    """A lock that an operator revoked is lost at the next renewal and is not reacquired."""
    lease = held()
    store.revoke(lease.spec.base, lease.key)
    clock.advance(TTL / 3)
    renewer.renew_due()
    assert [("lost", "t")] == events.reported
    assert store.holder(lease.key) is None


def test_released_is_not_renewed(
    renewer: Renewer[LeaseState], store: FakeStore, clock: Clock, held: Any, events: Events
) -> None:
    """A lease whose body has ended is not renewed."""
    lease = held()
    end(renewer, lease)
    go_on(renewer, clock, clock() + 5 * TTL)
    assert [] == store.renewals
    assert not lease.held


@pytest.mark.parametrize("answer", [RenewResult.RENEWED, RenewResult.MISSING, RenewResult.NOT_OWNER])
def test_released_while_a_renewal_is_in_flight(
    renewer: Renewer[LeaseState], store: FakeStore, clock: Clock, held: Any, events: Events, answer: RenewResult
) -> None:
    """A lease that is released during its renewal is neither reacquired nor reported, whatever the store answers."""
    lease = held()
    store.acquired.clear()
    renew = store.renew

    def renew_then_answer(leases: Sequence[LeaseSpec], timeout: float | None = None) -> list[RenewResult]:
        renew(leases, timeout)
        return [answer]

    store.renew = renew_then_answer  # type: ignore[method-assign]

    def release() -> None:
        end(renewer, lease)
        store.release(lease.spec, success=True)

    store.during_renewal = release
    clock.advance(TTL / 3)
    renewer.renew_due()
    assert [] == events.reported
    assert [] == store.acquired
    assert store.holder(lease.key) is None
    assert 0 == lease.interrupt.times


def test_released_while_an_outage_is_found(
    renewer: Renewer[LeaseState], store: FakeStore, clock: Clock, held: Any, events: Events
) -> None:
    """A lease that is released while its renewal fails past the deadline is not lost."""
    lease = held()
    clock.advance(TTL + 1)
    store.failure = StoreUnavailable("unreachable")
    store.during_renewal = lambda: end(renewer, lease)
    renewer.renew_due()
    assert [] == events.of("lost")
    assert 0 == lease.interrupt.times


def test_body_that_ends_while_its_lease_is_reacquired(
    renewer: Renewer[LeaseState], store: FakeStore, clock: Clock, held: Any, events: Events
) -> None:
    """The renewer repeats a release that overtook a call to reacquire, so no lock is left."""
    lease = held()
    store.lose()
    clock.advance(TTL / 3)
    reacquire = store.reacquire

    def release_then_reacquire(
        request: LeaseSpec, fence: int, timeout: float | None = None
    ) -> tuple[RenewResult, bool]:
        assert lease.reacquired
        end(renewer, lease)
        store.release(request, success=True)
        release_later(renewer, request, success=True)
        return reacquire(request, fence, timeout)

    store.reacquire = release_then_reacquire  # type: ignore[method-assign]
    renewer.renew_due()
    assert store.holder(lease.key) is None
    assert [] == events.of("reacquired")


def test_body_that_ended_before_its_lease_is_reacquired(
    renewer: Renewer[LeaseState], handler: BodyRenewal, store: FakeStore, held: Any
) -> None:
    """Nothing is reacquired for a body that has ended."""
    lease = held()
    store.lose()
    lease.ended = True
    handler._reacquire(lease)
    assert store.holder(lease.key) is None


def test_many_leases_in_an_outage(
    renewer: Renewer[LeaseState], store: FakeStore, clock: Clock, held: Any, events: Events
) -> None:
    """No lease of several batches is lost where each call times out until three quarters of the TTL have passed."""
    leases = [held(str(number)) for number in range(250)]
    granted = clock()
    store.failure = StoreUnavailable("unreachable")
    store.renewal_takes = lambda allowed: allowed
    go_on(renewer, clock, granted + TTL * 0.75)
    store.failure, store.renewal_takes = None, lambda allowed: 0.0
    go_on(renewer, clock, granted + 2 * TTL)
    assert [] == events.of("lost")
    assert all(lease.held for lease in leases)


# -- pending releases --------------------------------------------------------------------------


def unanswered(token: str = "d") -> LeaseSpec:
    return LeaseSpec("b:{x}", f"digest-{token}", token, TTL, f"task-{token}", "n", os.getpid())


def test_unanswered_request_is_released(renewer: Renewer[LeaseState], store: FakeStore, clock: Clock) -> None:
    """The renewer releases the lock of a request whose answer was lost at once, and stops after a second release."""
    request = unanswered()
    store.acquire(request)
    release_later(renewer, request)
    renewer.renew_due()
    assert store.holder(request.lock) is None
    go_on(renewer, clock, clock() + 10 * TTL)
    assert 2 == len(store.released)
    assert math.inf == renewer.renew_due()


def test_pending_release_publishes_the_next_in_line(
    renewer: Renewer[LeaseState], store: FakeStore, clock: Clock
) -> None:
    """The next in line is published once the store has confirmed the release, and once only."""
    published: list[str] = []
    request = unanswered()
    store.acquire(request)
    joins = Place("ticket", 0.0, 9, due=1000.0, message="message")
    waiting = replace(request, token="waiting", task_id="task-waiting", place=joins)
    store.acquire(waiting)
    store.failure = StoreUnavailable("stopped")
    renewer.release_later(PendingRelease(request, False, False, publish=published.append))
    go_on(renewer, clock, clock() + TTL / 2)
    assert [] == published
    store.failure = None
    go_on(renewer, clock, clock() + 10 * TTL)
    assert ["message"] == published
    assert math.inf == renewer.renew_due()


def test_unanswered_request_is_released_again_after_an_outage(
    renewer: Renewer[LeaseState], store: FakeStore, clock: Clock
) -> None:
    """The renewer releases twice, because a stopped store may execute the acquire after the first release."""
    requests = [unanswered(str(number)) for number in range(3)]
    store.failure = StoreUnavailable("stopped")
    for request in requests:
        release_later(renewer, request)
    go_on(renewer, clock, clock() + 3 * TTL)
    assert 3 * 12 + 1 >= len(store.released), "one pending release at a time is tried"
    store.failure = None
    clock.advance(TTL / 12)
    renewer.renew_due()
    for request in requests:
        store.acquire(request)  # executed late
    go_on(renewer, clock, clock() + TTL / 12 + 0.1)
    assert [None] * 3 == [store.holder(request.lock) for request in requests]
    assert math.inf == renewer.renew_due()


def test_pending_releases_do_not_delay_renewals(
    renewer: Renewer[LeaseState], store: FakeStore, clock: Clock, held: Any
) -> None:
    """Leases are renewed on time while a release is pending."""
    held()
    release_later(renewer, unanswered())
    store.failure = StoreError("refused: no permission to release")
    renewer.renew_due()
    store.failure = None
    begin = clock()
    go_on(renewer, clock, clock() + 10 * TTL)
    assert 30 == len([when for when, *_ in store.renewals if when > begin])


def test_refused_release_is_reported(store: FakeStore, handler: BodyRenewal, clock: Clock) -> None:
    """A store that refuses a pending release is reported once, with the lease; the lock is left to expire."""
    errors: list[tuple[str, str]] = []

    def on_error(error: BaseException, request: LeaseSpec) -> None:
        errors.append((request.task_id, str(error)))

    renewer = Renewer(store, handler, on_error, clock)
    renewer._loop = Quiet(renewer.renew_due, ignore, clock)
    release_later(renewer, unanswered("u"))
    store.failure = StoreError("the store refused: NOPERM")
    go_on(renewer, clock, clock() + 10 * TTL)
    assert [("task-u", "the store refused: NOPERM")] == errors
    assert 1 == len(store.released)


def test_error_that_is_not_the_stores(renewer: Renewer[LeaseState], store: FakeStore, clock: Clock) -> None:
    """An error of a user's code, such as a credential provider's, is met once in an interval, however many releases wait."""
    for number in range(20):
        release_later(renewer, unanswered(str(number)))
    store.failure = ValueError("no secret")
    errors, end = 0, clock() + TTL
    while clock() < end:
        try:
            clock.time = max(clock(), renewer.renew_due())
        except ValueError:
            errors += 1
            clock.advance(ERROR_DELAY)
    assert 10 <= errors <= 13


def test_renewals_come_before_pending_releases(
    renewer: Renewer[LeaseState], store: FakeStore, clock: Clock, held: Any, events: Events
) -> None:
    """Releases after an outage do not delay a renewal, however many they are and however slowly the store answers."""
    held()
    store.release_takes = TTL / 20
    for number in range(500):
        release_later(renewer, unanswered(str(number)))
    begin = clock()
    go_on(renewer, clock, begin + 20 * TTL)
    times = [begin, *(when for when, *_ in store.renewals)]
    assert max(later - sooner for sooner, later in pairwise(times)) <= TTL / 3 + TTL / 20 + 0.01
    assert 20 * 20 * 0.9 <= len(store.released)


@pytest.mark.parametrize(("ttl", "other"), [(6.0, 6.0), (1.0, 1.0), (1.0, 30.0), (3.0, 30.0), (30.0, 3600.0)])
def test_pending_releases_leave_time_for_two_retries(
    renewer: Renewer[LeaseState], store: FakeStore, clock: Clock, held: Any, ttl: float, other: float
) -> None:
    """Two more renewals fit before the deadline while the store is unreachable and releases are pending."""
    lease = held(ttl=ttl)
    store.failure = StoreUnavailable("unreachable")
    store.renewal_takes = lambda allowed: allowed
    store.release_takes = 1.0
    for number in range(3):
        release_later(renewer, LeaseSpec("b:{x}", f"d{number}", f"d{number}", other, "id", "n", os.getpid()))
    clock.time = lease.due
    go_on(renewer, clock, lease.deadline)
    assert 3 <= len([when for when, *_ in store.renewals if when < lease.deadline])


def test_pending_release_of_a_long_lease(renewer: Renewer[LeaseState], store: FakeStore, clock: Clock) -> None:
    """An unanswered request is released within 3 s of the store's return, however long its TTL is."""
    request = LeaseSpec("b:{x}", "long", "long", 3600.0, "id", "n", os.getpid())
    store.acquire(request)
    store.failure = StoreUnavailable("unreachable")
    release_later(renewer, request)
    again = renewer.renew_due()
    assert clock() < again <= clock() + 3
    store.failure, clock.time = None, again
    renewer.renew_due()
    assert store.holder(request.lock) is None


@pytest.mark.parametrize("ttl", [30.0, 600.0, 3600.0])
@pytest.mark.parametrize("other_starts", ["before the outage", "after the outage"])
def test_pending_release_does_not_wait_for_renewals(
    renewer: Renewer[LeaseState], store: FakeStore, clock: Clock, held: Any, ttl: float, other_starts: str
) -> None:
    """A pending release is done within 3 s of the store's return, whenever the next renewal is due."""
    left = held(ttl=ttl)
    if other_starts == "before the outage":
        held("other", ttl)
    clock.time = left.due
    store.failure = StoreUnavailable("unreachable")
    renewer.renew_due()  # a renewal that fails
    end(renewer, left)
    release_later(renewer, left.spec, success=True)
    again = renewer.renew_due()
    store.failure = None
    if other_starts == "after the outage":
        held("other", ttl)
    assert clock() < again <= clock() + 3
    clock.time = again
    renewer.renew_due()
    assert store.holder(left.key) is None


def test_pending_release_while_short_leases_come_and_go(
    renewer: Renewer[LeaseState], store: FakeStore, clock: Clock, held: Any
) -> None:
    """A pending release does not wait for a renewal, which the leases of short tasks never need."""
    left, other = held("left", 3600.0), held("other", 6.0)
    clock.time = other.due
    store.failure = StoreUnavailable("unreachable")
    renewer.renew_due()  # a renewal that fails
    for lease in (left, other):
        end(renewer, lease)
        release_later(renewer, lease.spec, success=True)
    store.failure = None
    for number in range(8):
        short = held(f"short {number}", 6.0)
        go_on(renewer, clock, clock() + 0.5)
        end(renewer, short)
    assert store.holder(left.key) is None


def test_refusing_store_is_reported_once(
    renewer: Renewer[LeaseState], store: FakeStore, clock: Clock, held: Any, events: Events
) -> None:
    """A store that refuses every call is reported once, however many renewals and releases fail."""
    held(ttl=60.0)
    store.failure = StoreError("refused")
    for number in range(5):
        release_later(renewer, unanswered(str(number)))
        go_on(renewer, clock, clock() + 10)
    assert 1 == len(events.of("unreachable"))


def test_released_bodies_have_room_among_unanswered_requests(
    renewer: Renewer[LeaseState], store: FakeStore, clock: Clock
) -> None:
    """Many unanswered requests in an outage do not displace the pending release of a body that ended in it."""
    left = unanswered("left")
    store.acquire(left)
    store.failure = StoreUnavailable("unreachable")
    for number in range(1500):
        release_later(renewer, unanswered(str(number)))
    release_later(renewer, left, success=True)
    store.failure = None
    go_on(renewer, clock, clock() + TTL)
    assert "left" in store.released


def test_unanswered_requests_are_bounded(renewer: Renewer[LeaseState], store: FakeStore, clock: Clock) -> None:
    """The renewer keeps at most 1000 unanswered requests, however long the store is unreachable."""
    store.failure = StoreUnavailable("unreachable")
    for number in range(1500):
        release_later(renewer, unanswered(str(number)))
    renewer.renew_due()
    store.failure = None
    clock.advance(TTL)
    go_on(renewer, clock, clock() + TTL)
    assert 1000 == len(set(store.released[1:]))


def test_ensure_before_the_deadline_calls_no_store(renewer: Renewer[LeaseState], store: FakeStore, held: Any) -> None:
    """`ensure` does not call the store before the deadline."""
    held().ensure()
    assert [] == store.renewals


def test_ensure_past_the_deadline_renews_once(
    renewer: Renewer[LeaseState], store: FakeStore, clock: Clock, held: Any
) -> None:
    """Past the deadline `ensure` renews once; a lease that is still owned is held again."""
    lease = held()
    store.prolong(lease.key, 10 * TTL)
    clock.advance(TTL + 1)
    lease.ensure()
    assert lease.held
    lease.ensure()
    assert 1 == len(store.renewals)


@pytest.mark.parametrize("fault", ["unreachable", "missing", "another holder"])
def test_ensure_past_the_deadline_and_not_owned(
    renewer: Renewer[LeaseState], store: FakeStore, clock: Clock, held: Any, events: Events, fault: str
) -> None:
    """Past the deadline each `ensure` raises LockLost if the lease is not confirmed; the loss is reported once."""
    lease = held()
    clock.advance(TTL + 1)
    if fault == "unreachable":
        store.failure = StoreUnavailable("unreachable")
    if fault == "another holder":
        store.acquire(LeaseSpec("b:{x}", "digest-t", "other", 600.0, "other"))
    for _ in range(2):
        with pytest.raises(LockLost, match=lease.key):
            lease.ensure()
    assert ["t"] == events.of("lost")
    assert 1 == len(store.renewals)


# -- the thread --------------------------------------------------------------------------------


def test_thread_starts_with_the_first_lease(clock: Clock, store: FakeStore, handler: BodyRenewal) -> None:
    """The first lease starts the thread; a later lease that is due no earlier does not wake it."""
    woken = []
    renewer = Renewer(store, handler, ignore, clock)
    assert not renewer._loop._started

    class Counted(Quiet):
        def wake(self, at: float) -> None:
            woken.append(at)

    renewer._loop = Counted(renewer.renew_due, ignore, clock)
    for token in "ab":
        lease = LeaseState(LeaseSpec("b:{x}", token, token, TTL))
        lease.granted(clock(), 1, handler.verify)
        renewer.add(lease)
    assert 1 == len(woken)


def test_short_tasks_do_not_wake_the_thread(
    renewer: Renewer[LeaseState], clock: Clock, held: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream of tasks that end before their first renewal wakes the thread once for each planned renewal, not for each task."""
    woken: list[float] = []
    monkeypatch.setattr(renewer._loop, "wake", woken.append)
    for number in range(10):
        lease = held(f"{number}")
        clock.advance(TTL / 40)
        end(renewer, lease)
        renewer.renew_due()
    assert 1 == len(woken)


@pytest.mark.parametrize(
    "error", [RuntimeError("unforeseen"), SystemExit(), KeyboardInterrupt(), MemoryError(), StoreError("x")]
)
def test_errors_do_not_end_the_thread(error: BaseException) -> None:
    """The thread does its next step whatever error the last one raised."""
    steps: list[int] = []

    def step() -> float:
        steps.append(1)
        if len(steps) == 1:
            raise error
        return math.inf

    loop = BackgroundLoop(step, ignore)
    loop.wake(0.0)
    until(lambda: len(steps) >= 2)


def test_failing_log_does_not_end_the_thread() -> None:
    """A user's logging filter that fails while an error is logged does not end the thread."""
    steps: list[int] = []

    def step() -> float:
        steps.append(1)
        if len(steps) == 1:
            raise RuntimeError("unforeseen")
        return math.inf

    with broken_log():
        loop = BackgroundLoop(step, ignore)
        loop.wake(0.0)
        until(lambda: len(steps) >= 2)


def test_failing_recovery_does_not_end_the_thread() -> None:
    """A second error while the first is handled does not end the thread, as may happen when memory is short."""
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
    until(lambda: len(steps) >= 2)


class broken_log:  # noqa: N801
    """Makes logging fail, as a user's filter can."""

    def __enter__(self) -> None:
        logging.getLogger("celery_singleton_lock").addFilter(self._fail)

    def __exit__(self, *exc_info: object) -> None:
        logging.getLogger("celery_singleton_lock").removeFilter(self._fail)

    @staticmethod
    def _fail(record: logging.LogRecord) -> bool:
        raise RuntimeError("a filter of the user's")


def test_failing_report_does_not_stop_other_renewals(
    renewer: Renewer[LeaseState], store: FakeStore, clock: Clock, held: Any, events: Events
) -> None:
    """An error while one lease is reported does not stop the renewal of other leases."""
    missing, other = held("a"), held("b")
    store.lose(missing.key)

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
    """The thread does no step while nothing is due; woken for an earlier time, it does one."""
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
