"""The promises of every store about reservations: locks of messages that no worker has started."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from celery_singleton_lock.store.keys import queued_token
from celery_singleton_lock.store.protocol import AcquireStatus, LockStore, Released, RenewResult
from celery_singleton_lock.store.requests import AfterRelease, LeaseSpec
from tests.contract.conftest import Backing

MakeRequest = Callable[..., LeaseSpec]


@pytest.fixture
def reserve(backing: Backing, lease_request: MakeRequest) -> Callable[..., LeaseSpec]:
    """Return a function that reserves the lock for the message of a task id."""

    def reserved(task_id: str = "t1", ttl: float = 3600.0) -> LeaseSpec:
        spec = lease_request(token=queued_token(task_id), task_id=task_id, ttl=ttl, queued=True, node="", pid=0)
        assert backing.store.acquire(spec).status is AcquireStatus.GRANTED
        return spec

    return reserved


def test_reservation_keeps_others_out(backing: Backing, lease_request: MakeRequest, reserve: MakeRequest) -> None:
    """A reservation is held by its message, with the state queued, for as long as it was asked for."""
    reserve()
    result = backing.store.acquire(lease_request(task_id="t2"))
    assert result.status is AcquireStatus.REFUSED
    assert result.holder is not None
    assert ("t1", "queued") == (result.holder.task_id, result.holder.state)
    assert 3500 < result.holder.remaining <= 3600
    backing.wait(3601)
    assert backing.store.acquire(lease_request(task_id="t2")).status is AcquireStatus.GRANTED


def test_reserving_twice(backing: Backing, reserve: MakeRequest, lease_request: MakeRequest) -> None:
    """A reservation that is sent twice is granted twice; a reservation for another message is not granted."""
    reserve()
    reserve()
    other = lease_request(token=queued_token("t2"), task_id="t2", queued=True)
    assert backing.store.acquire(other).status is AcquireStatus.REFUSED


@pytest.mark.parametrize("supervised", [False, True])
def test_start_turns_it_into_a_lease(
    backing: Backing, lease_request: MakeRequest, reserve: MakeRequest, supervised: bool
) -> None:
    """The delivery that starts the message gets the lock with its own TTL, and a holder that runs."""
    reserve()
    started = lease_request(task_id="t1", ttl=20.0, supervised=supervised)
    assert backing.store.acquire(started).status is AcquireStatus.GRANTED
    holder = backing.store.holder(started.lock)
    assert holder is not None
    assert ("t1", "running", 4711) == (holder.task_id, holder.state, holder.pid)
    assert holder.remaining <= 20
    assert [RenewResult.RENEWED] == backing.store.renew([started])
    assert backing.store.release(started, success=True) == Released()
    assert backing.store.holder(started.lock) is None


def test_end_of_a_reservation_does_not_end_the_lease(
    backing: Backing, lease_request: MakeRequest, reserve: MakeRequest
) -> None:
    """Releasing a reservation frees a lock that nobody has started, and does nothing once its message runs."""
    reserved = reserve()
    backing.store.release(reserved, success=False)
    assert backing.store.holder(reserved.lock) is None
    reserve()
    started = lease_request(task_id="t1")
    backing.store.acquire(started)
    backing.store.release(reserved, success=False)
    assert [RenewResult.RENEWED] == backing.store.renew([started])


def test_second_delivery_of_a_started_message(
    backing: Backing, lease_request: MakeRequest, reserve: MakeRequest
) -> None:
    """Once the message was started, another delivery of it meets a holder, as without a reservation."""
    reserve()
    first, second = lease_request(task_id="t1"), lease_request(task_id="t1", redelivered=True)
    assert backing.store.acquire(first).status is AcquireStatus.GRANTED
    assert backing.store.acquire(second).status is AcquireStatus.REFUSED
    assert backing.store.release(first, success=True) == Released(redelivery_waits=True)


@pytest.mark.parametrize("supervised", [False, True])
def test_release_that_keeps_a_reservation(backing: Backing, lease_request: MakeRequest, supervised: bool) -> None:
    """A lease can end as the reservation of its message: others meet a queued holder, and the next delivery starts."""
    first = lease_request(task_id="t1", supervised=supervised)
    backing.store.acquire(first)
    kept = AfterRelease("queued", 100.0, queued_token("t1"))
    for _ in range(2):  # a release may be sent twice
        backing.store.release(first, False, None, kept)
    assert [RenewResult.NOT_OWNER] == backing.store.renew([first])
    result = backing.store.acquire(lease_request(task_id="t2"))
    assert result.holder is not None
    assert ("t1", "queued") == (result.holder.task_id, result.holder.state)
    assert 80 < result.holder.remaining <= 100
    assert backing.store.acquire(lease_request(task_id="t1")).status is AcquireStatus.GRANTED


def test_lost_lease_keeps_nothing(backing: Backing, lease_request: MakeRequest) -> None:
    """A release that keeps a reservation touches no lock of another owner."""
    first, second = lease_request(task_id="t1"), lease_request(task_id="t2")
    backing.store.acquire(first)
    backing.lose(first.lock)
    backing.store.acquire(second)
    backing.store.release(first, False, None, AfterRelease("queued", 100.0, queued_token("t1")))
    assert [RenewResult.RENEWED] == backing.store.renew([second])


def test_revoked_reservation(backing: Backing, lease_request: MakeRequest, base: str, reserve: MakeRequest) -> None:
    """A revoked reservation frees the lock; its message competes for it like any other when it starts."""
    reserved = reserve()
    holder = backing.store.revoke(base, reserved.lock)
    assert holder is not None
    assert ("t1", "queued") == (holder.task_id, holder.state)
    assert backing.store.acquire(lease_request(task_id="t2")).status is AcquireStatus.GRANTED
    assert backing.store.acquire(lease_request(task_id="t1")).status is AcquireStatus.REFUSED


def test_fence_grows_from_reservation_to_lease(store: LockStore, lease_request: MakeRequest) -> None:
    """The lease of a reserved message has a newer fence than its reservation, and than any lease before."""
    reserved = lease_request(token=queued_token("t1"), task_id="t1", queued=True)
    first = store.acquire(reserved).fence
    second = store.acquire(lease_request(task_id="t1")).fence
    assert 0 < first < second
