"""`lock_at_most`: the lease of a body that runs for too long is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from celery_singleton_lock import LockLost
from celery_singleton_lock.lease import LeaseState
from celery_singleton_lock.renewal.body import BodyRenewal
from celery_singleton_lock.renewal.renewer import Renewer
from tests.unit import test_renewer
from tests.unit.conftest import Clock
from tests.unit.fake_store import FakeStore
from tests.unit.test_renewer import TTL, Events, Held, end, go_on

events, handler, renewer, held = test_renewer.events, test_renewer.handler, test_renewer.renewer, test_renewer.held
clock, store = test_renewer.clock, test_renewer.store


@pytest.fixture
def capped(renewer: Renewer[LeaseState], handler: BodyRenewal, clock: Clock, held: Any) -> Callable[..., Held]:
    """Return a function that acquires a lease which is lost after so many seconds."""

    def make(at_most: float, **more: Any) -> Held:
        lease: Held = held(**more)
        lease.cap = clock() + at_most
        lease.granted(clock(), lease.fence, handler.verify)
        renewer.add(lease)
        return lease

    return make


@pytest.mark.parametrize("at_most", [1.0, TTL / 3, TTL, 2.5 * TTL, 10 * TTL])
def test_lost_at_the_cap(
    renewer: Renewer[LeaseState], store: FakeStore, clock: Clock, capped: Any, events: Events, at_most: float
) -> None:
    """The lease is renewed up to its cap and lost then, once, and the lock expires a TTL later at most."""
    begin, lease = clock(), capped(at_most)
    go_on(renewer, clock, begin + at_most - 0.01)
    assert lease.held
    assert 0 < lease.remaining <= TTL
    assert [] == events.of("lost")
    go_on(renewer, clock, begin + at_most)
    renewer.renew_due()
    assert not lease.held
    assert ["t"] == events.of("lost")
    assert 1 == lease.interrupt.times
    renewals = len(store.renewals)
    go_on(renewer, clock, begin + at_most + TTL)
    assert renewals == len(store.renewals)
    assert all(time < begin + at_most for time, _, _ in store.renewals)
    assert store.holder(lease.key) is None
    assert ["t"] == events.of("lost")


def test_not_reacquired_after_the_cap(
    renewer: Renewer[LeaseState], store: FakeStore, clock: Clock, capped: Any
) -> None:
    """A lock that is missing at the cap stays free, also if the renewal that found it missing was sent before."""
    begin, lease = clock(), capped(10.0)
    go_on(renewer, clock, begin + 8)
    store.lose()
    lease.due = clock()
    store.during_renewal = lambda: clock.advance(3.0)
    renewer.renew_due()
    store.during_renewal = lambda: None
    assert lease.lost
    for later in (11, 12, 30):
        go_on(renewer, clock, begin + later)
        assert store.holder(lease.key) is None


def test_ensure_after_the_cap(store: FakeStore, clock: Clock, capped: Any, events: Events) -> None:
    """Past the cap `ensure` raises, before the renewal thread has found the loss, and does not renew the lock."""
    lease = capped(10.0)
    clock.advance(10.0)
    assert not lease.held
    assert 0 == lease.remaining
    with pytest.raises(LockLost):
        lease.ensure()
    assert [] == store.renewals
    assert ["t"] == events.of("lost")


def test_ended_before_the_cap(renewer: Renewer[LeaseState], clock: Clock, capped: Any, events: Events) -> None:
    """A body that ends before the cap has lost nothing."""
    lease = capped(10.0)
    go_on(renewer, clock, clock() + 5)
    end(renewer, lease)
    go_on(renewer, clock, clock() + 20)
    assert not lease.lost
    assert [] == events.of("lost")


def test_other_leases_go_on(renewer: Renewer[LeaseState], clock: Clock, capped: Any, held: Any, events: Events) -> None:
    """The loss of one lease does not touch the others."""
    capped(10.0, token="short")
    other = held("other")
    go_on(renewer, clock, clock() + 5 * TTL)
    assert ["short"] == events.of("lost")
    assert other.held
