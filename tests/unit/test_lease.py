"""What a body sees of its lock."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from celery.app.task import Context

from celery_singleton_lock import Lease, LockLost
from celery_singleton_lock import lease as module
from celery_singleton_lock.store.protocol import LeaseRequest
from celery_singleton_lock.worker.delivery import PROPERTY, Delivery, delivery_of
from tests.unit.conftest import Clock

CLAIM = LeaseRequest("b:{x}", "d", "secret-token", 30.0, "id", "node", os.getpid())


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "now", clock)
    return clock


def granted(clock: Clock, confirm: bool = False) -> Lease:
    lease = Lease(CLAIM.lock, CLAIM)
    lease.granted(clock(), 1, lambda lease: confirm)
    return lease


def test_held_until_the_deadline(clock: Clock) -> None:
    """Held until the TTL after the granting call was sent; `remaining` counts down to nothing."""
    lease = granted(clock)
    assert (True, True, 30.0) == (lease.held, lease.protected, lease.remaining)
    clock.advance(29.0)
    assert (True, 1.0) == (lease.held, lease.remaining)
    lease.ensure()
    clock.advance(1.0)
    assert (False, 0.0) == (lease.held, lease.remaining)


def test_renewed(clock: Clock) -> None:
    """A renewal puts the deadline off, counted from before it was sent."""
    lease = granted(clock)
    clock.advance(10.0)
    sent = clock()
    clock.advance(5.0)
    lease.renewed(sent)
    assert 25.0 == lease.remaining


def test_asks_past_the_deadline(clock: Clock) -> None:
    """Past the deadline `ensure` goes by what the store says."""
    for owned in (True, False):
        lease = granted(clock, confirm=owned)
        clock.advance(31.0)
        if owned:
            lease.ensure()
        else:
            with pytest.raises(LockLost) as lost:
                lease.ensure()
            assert lease.key == lost.value.key


@pytest.mark.parametrize("end", ["lost", "closed"])
def test_end_is_final(clock: Clock, end: str) -> None:
    """Once lost, or once its body is over, a lease is not held for good, whatever is renewed later."""
    lease = granted(clock, confirm=True)
    setattr(lease, end, True)
    lease.renewed(clock())
    assert (False, 0.0) == (lease.held, lease.remaining)
    with pytest.raises(LockLost):
        lease.ensure()


def test_unprotected_lease() -> None:
    """Where there is no lock, nothing is held, and `ensure` does nothing."""
    lease = Lease("")
    assert (False, False, 0.0) == (lease.protected, lease.held, lease.remaining)
    lease.ensure()


def test_token_is_not_shown(clock: Clock) -> None:
    """The token is in no text that a lease, or what it is made of, shows."""
    lease = granted(clock)
    assert CLAIM.token not in f"{lease!r} {lease} {lease.key}"
    assert CLAIM.token not in f"{CLAIM!r} {CLAIM}"


# -- copies --------------------------------------------------------------------------------------

COPIES = [copy.copy, copy.deepcopy, *(lambda one, p=p: pickle.loads(pickle.dumps(one, p)) for p in range(6))]
every_copy = pytest.mark.parametrize("copied", COPIES)


@every_copy
def test_copy_is_unprotected(clock: Clock, copied: Callable[[Any], Any]) -> None:
    """A copy of a lease has its key, is not protected and has nothing to lose or release; the lease stays as it is."""
    lease = granted(clock)
    other = copied(lease)
    assert (lease.key, False, False, 0.0) == (other.key, other.protected, other.held, other.remaining)
    assert (None, False) == (other.claim, other.owned)
    other.ensure()
    assert lease.held


@pytest.mark.parametrize("copied", COPIES[1:])
@pytest.mark.parametrize("supervised", [False, True])
def test_copy_of_a_request(clock: Clock, supervised: bool, copied: Callable[[Any], Any]) -> None:
    """What guards hide in a request can be copied: the copy has nothing to release, and is another attempt."""
    attempt = Delivery(content_type="application/json", events=True, supervised=supervised)
    request = {"_singleton_lease": granted(clock), "_singleton_left": CLAIM, "properties": {PROPERTY: attempt}}
    assert attempt is delivery_of(Context(request))
    other = copied(request)
    assert other["_singleton_left"] is None
    found = delivery_of(Context(other))
    assert attempt.token != found.token
    assert ("application/json", True, False) == (found.content_type, found.events, found.supervised)


@pytest.mark.parametrize("protocol", range(6))
def test_token_is_not_pickled(clock: Clock, protocol: int) -> None:
    """No pickle of what a body can reach has the token in it."""
    claim, attempt = LeaseRequest(*(getattr(CLAIM, name) for name in ("base", "digest", "token", "ttl"))), Delivery()
    lease = Lease(claim.lock, claim)
    written = pickle.dumps([lease, claim, attempt], protocol)
    for token in (claim.token, attempt.token):
        assert token.encode() not in written
