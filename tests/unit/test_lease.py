"""What a body sees of its lock."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from celery_singleton_lock import Lease, LockLost
from celery_singleton_lock import lease as module
from celery_singleton_lock.delivery.attempt import ATTEMPT, Attempt
from celery_singleton_lock.lease import LeaseState
from celery_singleton_lock.store.requests import LeaseSpec
from tests.unit.conftest import Clock

REQUEST = LeaseSpec("b:{x}", "d", "secret-token", 30.0, "id", "node", os.getpid())


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "now", clock)
    return clock


def granted(clock: Clock, verified: bool = False) -> Lease:
    state = LeaseState(REQUEST)
    state.granted(clock(), 1, lambda state: verified)
    return Lease(REQUEST.lock, state)


def state_of(lease: Lease) -> LeaseState:
    assert lease._state is not None
    return lease._state


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
    state_of(lease).renewed(sent)
    assert 25.0 == lease.remaining


def test_asks_past_the_deadline(clock: Clock) -> None:
    """Past the deadline `ensure` goes by what the store says."""
    for owned in (True, False):
        lease = granted(clock, verified=owned)
        clock.advance(31.0)
        if owned:
            lease.ensure()
        else:
            with pytest.raises(LockLost) as lost:
                lease.ensure()
            assert lease.key == lost.value.key


@pytest.mark.parametrize("end", ["lost", "ended"])
def test_end_is_final(clock: Clock, end: str) -> None:
    """Once lost, or once its body is over, a lease is not held for good, whatever is renewed later."""
    lease = granted(clock, verified=True)
    setattr(state_of(lease), end, True)
    state_of(lease).renewed(clock())
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
    assert REQUEST.token not in f"{lease!r} {lease} {lease.key}"
    assert REQUEST.token not in f"{REQUEST!r} {REQUEST}"


# -- copies --------------------------------------------------------------------------------------

COPIES = [copy.copy, copy.deepcopy, *(lambda one, p=p: pickle.loads(pickle.dumps(one, p)) for p in range(6))]
every_copy = pytest.mark.parametrize("copied", COPIES)


@every_copy
def test_copy_is_unprotected(clock: Clock, copied: Callable[[Any], Any]) -> None:
    """A copy of a lease has its key, is not protected and has nothing to lose or release; the lease stays as it is."""
    lease = granted(clock)
    other = copied(lease)
    assert (lease.key, False, False, 0.0) == (other.key, other.protected, other.held, other.remaining)
    other.ensure()
    assert lease.held


@pytest.mark.parametrize("copied", COPIES[1:])
def test_copy_of_a_request(clock: Clock, copied: Callable[[Any], Any]) -> None:
    """What a request hides can be copied: the copy has nothing to release."""
    attempt = Attempt()
    attempt.lease = granted(clock)
    attempt.state = state_of(attempt.lease)
    other = copied({ATTEMPT: attempt})
    assert (None, False) == (other[ATTEMPT].state, other[ATTEMPT].lease.protected)


@pytest.mark.parametrize("protocol", range(6))
def test_token_is_not_pickled(clock: Clock, protocol: int) -> None:
    """No pickle of what a body can reach has the token in it."""
    lease, attempt = granted(clock), Attempt()
    attempt.lease, attempt.state, attempt.spec = lease, state_of(lease), REQUEST
    written = pickle.dumps([lease, attempt], protocol)
    assert REQUEST.token.encode() not in written
