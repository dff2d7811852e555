"""What a body sees of its lock."""

from __future__ import annotations

import os

import pytest

from celery_singleton_lock import Lease, LockLost
from celery_singleton_lock import lease as module
from celery_singleton_lock.stores import Claim
from tests.unit.conftest import Clock

CLAIM = Claim("b:{x}", "d", "secret-token", 30.0, "id", "node", os.getpid())


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "now", clock)
    return clock


def granted(clock: Clock, confirm: bool = False) -> Lease:
    lease = Lease(CLAIM.lock, CLAIM)
    lease.granted(clock(), lambda lease: confirm)
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
