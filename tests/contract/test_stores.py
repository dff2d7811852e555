"""The promises of every store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from celery_singleton_lock.max_starts import MaxStarts
from celery_singleton_lock.store.keys import BEGUN_TTL
from celery_singleton_lock.store.memory import MemoryStore
from celery_singleton_lock.store.memory.store import RELEASES_PER_CLEANUP
from celery_singleton_lock.store.protocol import AcquireStatus, LockStore, RenewResult
from celery_singleton_lock.store.requests import AfterRelease, LeaseSpec
from tests.contract.conftest import Backing

MakeRequest = Callable[..., LeaseSpec]


def known(lease_request: LeaseSpec) -> LeaseSpec:
    """Return the request as the supervisor knows it: without digest."""
    return LeaseSpec(lease_request.base, "", lease_request.token, lease_request.ttl, lease_request.task_id)


def granted(store: LockStore, lease_request: LeaseSpec) -> bool:
    return store.acquire(lease_request).status is AcquireStatus.GRANTED


def left(backing: Backing) -> list[str]:
    """Return the stored keys, without those that exist once for each task name."""
    return [name for name in sorted(backing.keys()) if ":fence" not in name and ":recent" not in name]


def take(store: LockStore, lease_request: LeaseSpec) -> int:
    """Acquire a free lock, and return the fence of its lease."""
    result = store.acquire(lease_request)
    assert result.status is AcquireStatus.GRANTED
    return result.fence


# -- acquire -----------------------------------------------------------------------------------


def test_free_lock_is_granted(store: LockStore, lease_request: MakeRequest) -> None:
    """A free lock is granted, and the answer names no holder."""
    result = store.acquire(lease_request())
    assert (AcquireStatus.GRANTED, None) == (result.status, result.holder)


def test_held_lock_names_its_holder(backing: Backing, lease_request: MakeRequest) -> None:
    """A held lock is not granted; the answer has the holder's task id, node, pid, age and remaining time."""
    first = lease_request(ttl=20.0)
    assert granted(backing.store, first)
    result = backing.store.acquire(lease_request())
    assert result.status is AcquireStatus.REFUSED
    holder = result.holder
    assert holder is not None
    assert (first.task_id, "w1@host", 4711) == (holder.task_id, holder.node, holder.pid)
    assert 0 <= holder.age < 100
    assert 15 < holder.remaining <= 20


def test_holders_fields_may_be_anything(store: LockStore, lease_request: MakeRequest) -> None:
    """The store returns ids and node names with blanks, braces, quotes and other alphabets unchanged."""
    odd = lease_request(task_id="a b{c}'\"\\é\n", node="wörker 1@{höst}", pid=2**31)
    store.acquire(odd)
    holder = store.holder(odd.lock)
    assert holder is not None
    assert (odd.task_id, odd.node, odd.pid) == (holder.task_id, holder.node, holder.pid)


def test_acquire_is_idempotent_on_the_token(backing: Backing, lease_request: MakeRequest) -> None:
    """A request that is sent twice because a reply was lost is granted twice: holder and age stay, the lease is extended."""
    one = lease_request(ttl=20.0)
    assert granted(backing.store, one)
    backing.wait(10)
    assert granted(backing.store, one)
    holder = backing.store.holder(one.lock)
    assert holder is not None
    assert one.task_id == holder.task_id
    assert holder.remaining > 15


def test_other_locks_are_free(store: LockStore, lease_request: MakeRequest) -> None:
    """Another digest is another lock."""
    assert granted(store, lease_request("a"))
    assert granted(store, lease_request("b"))


def test_lock_expires(backing: Backing, lease_request: MakeRequest) -> None:
    """After its TTL a lock is free, and its former owner neither renews nor releases it."""
    first, second = lease_request(ttl=5.0), lease_request()
    store = backing.store
    assert granted(store, first)
    backing.wait(4)
    assert not granted(store, second)
    backing.wait(1.1)
    assert store.holder(first.lock) is None
    assert granted(store, second)
    assert [RenewResult.NOT_OWNER] == store.renew([first])
    assert not store.release(first, success=True).redelivery_waits
    assert store.holder(second.lock) is not None


# -- release -----------------------------------------------------------------------------------


def test_release_frees(backing: Backing, lease_request: MakeRequest) -> None:
    """A released lock is free and leaves no keys."""
    one = lease_request(supervised=True)
    backing.store.acquire(one)
    assert not backing.store.release(one, success=True).redelivery_waits
    assert backing.store.holder(one.lock) is None
    assert [] == left(backing)
    assert granted(backing.store, lease_request())


def test_release_by_the_owner_alone(store: LockStore, lease_request: MakeRequest) -> None:
    """Only the owner's token releases a lock; the token of another delivery of the same task id does not."""
    owner = lease_request(task_id="same")
    store.acquire(owner)
    for other in (lease_request(), lease_request(task_id="same"), known(lease_request())):
        store.release(other, success=True)
        store.release(other, success=False)
        assert store.holder(owner.lock) is not None
    assert [RenewResult.RENEWED] == store.renew([owner])


def test_release_twice_is_harmless(store: LockStore, lease_request: MakeRequest) -> None:
    """A second release does nothing, also where the lock has a new owner."""
    first, second = lease_request(), lease_request()
    store.acquire(first)
    store.release(first, success=True)
    store.release(first, success=True)
    store.acquire(second)
    store.release(first, success=True)
    assert [RenewResult.RENEWED] == store.renew([second])


def test_release_of_what_was_never_granted(store: LockStore, lease_request: MakeRequest) -> None:
    """A release of a lock that was never granted has no effect and is no error."""
    assert not store.release(lease_request(), success=True).redelivery_waits
    assert not store.release(known(lease_request()), success=False).redelivery_waits


# -- renew -------------------------------------------------------------------------------------


def test_renew_puts_the_expiry_off(backing: Backing, lease_request: MakeRequest) -> None:
    """A lock that is renewed in time outlives its TTL."""
    one = lease_request(ttl=6.0)
    backing.store.acquire(one)
    for _ in range(4):
        backing.wait(4)
        assert [RenewResult.RENEWED] == backing.store.renew([one])
    holder = backing.store.holder(one.lock)
    assert holder is not None
    assert 5 < holder.remaining <= 6


def test_renew_by_the_owner_alone(backing: Backing, lease_request: MakeRequest) -> None:
    """A renewal does not touch another holder's lock."""
    owner, other = lease_request(ttl=5.0), lease_request(ttl=60.0)
    backing.store.acquire(owner)
    assert [RenewResult.NOT_OWNER] == backing.store.renew([other])
    holder = backing.store.holder(owner.lock)
    assert holder is not None
    assert holder.remaining <= 5


def test_renewal_of_a_missing_lock(backing: Backing, lease_request: MakeRequest) -> None:
    """A renewal does not create a missing lock."""
    one = lease_request()
    backing.store.acquire(one)
    backing.store.release(one, success=False)
    assert [RenewResult.MISSING] == backing.store.renew([one])
    assert [] == left(backing)


def test_batch_has_an_answer_for_each(backing: Backing, lease_request: MakeRequest) -> None:
    """One call for many leases returns a result for each of them, in order."""
    store = backing.store
    mine, missing, other = (lease_request(digest) for digest in "abc")
    supervised = lease_request("d", supervised=True)
    for one in (mine, lease_request("c"), supervised):
        store.acquire(one)
    batch = [missing, mine, known(supervised), other, known(missing), mine]
    answers = [
        RenewResult.MISSING,
        RenewResult.RENEWED,
        RenewResult.RENEWED,
        RenewResult.NOT_OWNER,
        RenewResult.MISSING,
        RenewResult.RENEWED,
    ]
    assert answers == store.renew(batch)


def test_batch_of_hundred(store: LockStore, lease_request: MakeRequest) -> None:
    """A full batch is renewed by one call, each with its own TTL."""
    batch = [lease_request(str(number), ttl=10.0 + number) for number in range(100)]
    for one in batch:
        store.acquire(one)
    assert [RenewResult.RENEWED] * 100 == store.renew(batch)
    for one in (batch[0], batch[-1]):
        holder = store.holder(one.lock)
        assert holder is not None
        assert one.ttl - 5 < holder.remaining <= one.ttl


def test_missing_lock_is_reacquired(backing: Backing, lease_request: MakeRequest) -> None:
    """A holder reacquires the lock that the store lost, and is named as before; sent twice, the call succeeds twice."""
    store, one = backing.store, lease_request(ttl=20.0, supervised=True)
    store.acquire(one)
    backing.lose()
    assert [RenewResult.MISSING] == store.renew([one])
    assert [(RenewResult.RENEWED, True), (RenewResult.RENEWED, False)] == [
        store.reacquire(one, 0),
        store.reacquire(one, 0),
    ]
    holder = store.holder(one.lock)
    assert holder is not None
    assert (one.task_id, "w1@host", 4711) == (holder.task_id, holder.node, holder.pid)
    assert 15 < holder.remaining <= 20
    assert [RenewResult.RENEWED] * 2 == store.renew([one, known(one)])
    store.release(known(one), success=False)
    assert store.holder(one.lock) is None


def test_reacquired_from_nobody_else(backing: Backing, lease_request: MakeRequest) -> None:
    """A lock that another delivery holds by now is not reacquired."""
    store, one, other = backing.store, lease_request(supervised=True), lease_request(supervised=True)
    store.acquire(one)
    backing.lose()
    store.acquire(other)
    assert (RenewResult.NOT_OWNER, False) == store.reacquire(one, 0)
    assert [RenewResult.MISSING, RenewResult.RENEWED] == store.renew([known(one), known(other)])


def _released(store: LockStore, one: LeaseSpec) -> None:
    store.release(one, success=True)


def _released_by_attempt(store: LockStore, one: LeaseSpec) -> None:
    store.release(known(one), success=False)


def _revoked(store: LockStore, one: LeaseSpec) -> None:
    store.revoke(one.base, one.lock)


@pytest.mark.parametrize("ended", [_released, _released_by_attempt, _revoked])
def test_another_came_and_went(
    backing: Backing, lease_request: MakeRequest, ended: Callable[[LockStore, LeaseSpec], None]
) -> None:
    """A holder that reacquires its lock learns that another held it in between, also when the call is repeated."""
    store, one, other = backing.store, lease_request(supervised=True), lease_request(supervised=True)
    fence = take(store, one)
    backing.lose()
    backing.wait(0.001)
    store.acquire(other)
    ended(store, other)
    backing.wait(29)
    assert [(RenewResult.LOST, True), (RenewResult.LOST, False)] == [
        store.reacquire(one, fence),
        store.reacquire(one, fence),
    ]
    backing.wait(29)
    assert [RenewResult.RENEWED] * 2 == store.renew([one, known(one)])
    assert not granted(store, other if ended is _revoked else lease_request())


def test_runs_before_it_do_not_count(backing: Backing, lease_request: MakeRequest) -> None:
    """A lease that was released before a lock was granted does not count as held in between."""
    store, before, one = backing.store, lease_request(), lease_request()
    store.acquire(before)
    store.release(before, success=True)
    fence = take(store, one)
    backing.lose(one.lock)
    assert (RenewResult.RENEWED, True) == store.reacquire(one, fence)


def test_revoked_lock_is_not_reacquired(store: LockStore, lease_request: MakeRequest) -> None:
    """A holder does not reacquire a lock that was revoked from it."""
    one = lease_request()
    fence = take(store, one)
    store.revoke(one.base, one.lock)
    assert (RenewResult.REVOKED, False) == store.reacquire(one, fence)
    assert store.holder(one.lock) is None


def test_colons_in_names(backing: Backing, lease_request: MakeRequest) -> None:
    """A task name may be equal to a part of our keys."""
    one, other = (replace(lease_request(), base=f"{lease_request().base}:lock:x") for _ in range(2))
    fence = take(backing.store, one)
    backing.lose()
    backing.wait(0.001)
    take(backing.store, other)
    backing.store.release(other, success=True)
    assert (RenewResult.LOST, True) == backing.store.reacquire(one, fence)


# -- fences --------------------------------------------------------------------------------------


def test_fence_grows(backing: Backing, lease_request: MakeRequest) -> None:
    """Each lease of a task name has a higher fence than the one before, whatever its lock key; `Holder` has it too."""
    store, seen = backing.store, []
    for digest in ("d", "e", "d"):
        one = lease_request(digest)
        seen.append(take(store, one))
        assert seen[-1] == take(store, one), "the same, where a reply was lost"
        holder = store.holder(one.lock)
        assert holder is not None
        assert seen[-1] == holder.fence
        result = store.acquire(lease_request(digest))
        assert result.holder is not None
        assert seen[-1] == result.holder.fence
        store.release(one, success=True)
    assert sorted(set(seen)) == seen


def test_fence_grows_after_a_loss_of_data(backing: Backing, lease_request: MakeRequest) -> None:
    """A store that lost its data continues with higher fences, derived from its clock."""
    before = take(backing.store, lease_request())
    backing.lose()
    backing.wait(0.001)
    assert before < take(backing.store, lease_request())


def test_revocation_raises_the_fence(store: LockStore, lease_request: MakeRequest) -> None:
    """A revoked lease has a lower fence than all later ones, also those of another lock key."""
    one = lease_request()
    before = take(store, one)
    store.revoke(one.base, one.lock)
    assert before + 1 < take(store, lease_request("other"))


def test_fence_of_a_reacquired_lock(backing: Backing, lease_request: MakeRequest) -> None:
    """A reacquired lease keeps its fence, and later leases have higher ones, also if the store's clock was set back."""
    store, one = backing.store, lease_request()
    fence = take(store, one) + 10**9  # as if the clock had been ahead
    backing.lose()
    assert (RenewResult.RENEWED, True) == store.reacquire(one, fence)
    holder = store.holder(one.lock)
    assert holder is not None
    assert fence == holder.fence
    assert fence < take(store, lease_request("other"))


def test_recent_grants_are_bounded(backing: Backing, lease_request: MakeRequest) -> None:
    """The store forgets recent grants after a TTL."""
    for number in range(20):
        one = lease_request(str(number))
        take(backing.store, one)
        backing.store.release(one, success=True)
    backing.wait(31)
    assert [f"{one.base}:fence"] == backing.keys()


def test_empty_batch(store: LockStore) -> None:
    """A renewal of no leases is no error."""
    assert [] == store.renew([])


# -- by token alone ----------------------------------------------------------------------------


def test_renew_and_release_by_attempt(backing: Backing, lease_request: MakeRequest) -> None:
    """A supervisor, which knows the token alone, renews and releases the lock, as often as needed."""
    one = lease_request(ttl=6.0, supervised=True)
    backing.store.acquire(one)
    for _ in range(4):
        backing.wait(4)
        assert [RenewResult.RENEWED] == backing.store.renew([known(one)])
    backing.store.release(known(one), success=False)
    assert backing.store.holder(one.lock) is None
    assert [] == left(backing)


def test_both_may_renew(backing: Backing, lease_request: MakeRequest) -> None:
    """The process that runs the body and the supervisor both renew; either alone keeps the lock and the attempt key."""
    one = lease_request(ttl=6.0, supervised=True)
    backing.store.acquire(one)
    for renewer in (one, one, known(one), known(one), one, known(one)):
        backing.wait(4)
        assert [RenewResult.RENEWED] == backing.store.renew([renewer])


def test_attempt_without_a_lock(backing: Backing, lease_request: MakeRequest) -> None:
    """A token that was never granted a lock renews and releases nothing."""
    holder, duplicate = lease_request(supervised=True), lease_request(supervised=True)
    backing.store.acquire(holder)
    backing.store.acquire(duplicate)
    assert [RenewResult.MISSING] == backing.store.renew([known(duplicate)])
    backing.store.release(known(duplicate), success=False)
    assert [RenewResult.RENEWED] == backing.store.renew([known(holder)])


def test_attempt_whose_lock_another_has(backing: Backing, lease_request: MakeRequest) -> None:
    """A token whose lock another delivery holds renews and releases nothing."""
    first, second = lease_request(ttl=5.0, supervised=True), lease_request()
    store = backing.store
    store.acquire(first)
    backing.wait(5.1)
    store.acquire(second)
    assert [RenewResult.RENEWED] != store.renew([known(first)])
    store.release(known(first), success=True)
    assert [RenewResult.RENEWED] == store.renew([second])


# -- two deliveries of one message -------------------------------------------------------------


def test_redelivery_of_a_running_message_waits(store: LockStore, lease_request: MakeRequest) -> None:
    """A redelivery finds a holder with its own task id, and the holder learns of it at release."""
    first, again = lease_request(task_id="same"), lease_request(task_id="same")
    store.acquire(first)
    result = store.acquire(again)
    assert result.status is AcquireStatus.REFUSED
    assert result.holder is not None
    assert "same" == result.holder.task_id
    assert store.release(first, success=True).redelivery_waits


def test_redelivery_between_release_and_result(store: LockStore, lease_request: MakeRequest) -> None:
    """After a successful run a redelivery waits until the result is stored; other work with the lock key runs."""
    first, again = lease_request(task_id="same"), lease_request(task_id="same", redelivered=True)
    store.acquire(first)
    store.acquire(again)
    store.release(first, success=True)
    result = store.acquire(again)
    assert result.status is AcquireStatus.REFUSED
    assert result.holder is not None
    assert ("same", 0) == (result.holder.task_id, result.holder.age)
    assert granted(store, lease_request())


def test_redelivery_after_success_is_dropped(store: LockStore, lease_request: MakeRequest) -> None:
    """Once the first delivery has succeeded, each redelivery is answered `COMPLETED`."""
    first, again = lease_request(task_id="same"), lease_request(task_id="same", redelivered=True)
    store.acquire(first)
    store.acquire(again)
    store.release(first, success=True)
    store.record_outcome(first, success=True)
    assert store.acquire(again).status is AcquireStatus.COMPLETED
    assert store.acquire(lease_request(task_id="same", redelivered=True)).status is AcquireStatus.COMPLETED
    assert granted(store, lease_request())


@pytest.mark.parametrize("other", [{"redelivered": False}, {"redelivered": True, "digest": "other"}])
@pytest.mark.parametrize("is_stored", [False, True])
def test_task_id_that_is_used_again(
    store: LockStore, lease_request: MakeRequest, other: dict[str, Any], is_stored: bool
) -> None:
    """New work under the task id of an ended task runs: a first delivery, or one with other arguments."""
    first, again = lease_request(task_id="same"), lease_request(task_id="same")
    store.acquire(first)
    store.acquire(again)
    store.release(first, success=True)
    if is_stored:
        store.record_outcome(first, success=True)
    assert granted(store, lease_request(task_id="same", **other))


def test_redelivery_waits_while_the_result_is_being_stored(backing: Backing, lease_request: MakeRequest) -> None:
    """A release that is sent again lets a redelivery wait for another TTL; once the outcome is stored it changes nothing."""
    first, again = lease_request(task_id="same", ttl=5.0), lease_request(task_id="same", redelivered=True)
    store = backing.store
    store.acquire(first)
    store.acquire(again)
    for _ in range(3):
        assert store.release(first, success=True).redelivery_waits
        backing.wait(4.0)
        assert store.acquire(again).status is AcquireStatus.REFUSED
    store.record_outcome(first, success=True)
    assert not store.release(first, success=True).redelivery_waits
    backing.wait(6.0)
    assert store.acquire(again).status is AcquireStatus.COMPLETED


def test_redelivery_after_no_success_runs(backing: Backing, lease_request: MakeRequest) -> None:
    """If the first delivery did not succeed after all, the redelivery runs."""
    first, again = lease_request(task_id="same"), lease_request(task_id="same")
    store = backing.store
    store.acquire(first)
    store.acquire(again)
    store.release(first, success=True)
    store.record_outcome(first, success=False)
    assert granted(store, again)
    store.release(again, success=True)
    assert [] == left(backing)


def test_redelivery_after_a_failure_runs(store: LockStore, lease_request: MakeRequest) -> None:
    """After a release without success no redelivery waits."""
    first, again = lease_request(task_id="same"), lease_request(task_id="same")
    store.acquire(first)
    store.acquire(again)
    assert not store.release(first, success=False).redelivery_waits
    assert granted(store, again)


def test_redelivery_after_the_first_died(backing: Backing, lease_request: MakeRequest) -> None:
    """If the process of the first delivery died, the redelivery is granted the lock: it is no duplicate."""
    first, again = lease_request(task_id="same", ttl=5.0, supervised=True), lease_request(task_id="same")
    backing.store.acquire(first)
    backing.store.acquire(again)
    backing.store.release(known(first), success=False)
    assert granted(backing.store, again)


def test_missing_outcome_is_not_waited_for_long(backing: Backing, lease_request: MakeRequest) -> None:
    """A process that died between release and outcome lets a redelivery wait no longer than a TTL."""
    first, again = lease_request(task_id="same", ttl=5.0), lease_request(task_id="same")
    backing.store.acquire(first)
    backing.store.acquire(again)
    backing.store.release(first, success=True)
    backing.wait(5.1)
    assert granted(backing.store, again)


def test_lost_reply_to_a_release(store: LockStore, lease_request: MakeRequest) -> None:
    """A release that is repeated after a lost reply answers again that a redelivery waits; otherwise that would run."""
    first, again = lease_request(task_id="same"), lease_request(task_id="same")
    store.acquire(first)
    store.acquire(again)
    assert store.release(first, success=True).redelivery_waits
    assert store.release(first, success=True).redelivery_waits


def test_no_copy_no_trace(backing: Backing, lease_request: MakeRequest) -> None:
    """Without a redelivery the store keeps nothing about ended deliveries, however many lock keys there were."""
    for number in range(50):
        one = lease_request(str(number), supervised=True)
        backing.store.acquire(one)
        backing.store.release(one, success=True)
    assert [] == left(backing)


def test_other_task_ids_are_duplicates_only(store: LockStore, lease_request: MakeRequest) -> None:
    """A duplicate with another task id does not make the holder store its outcome."""
    first = lease_request()
    store.acquire(first)
    store.acquire(lease_request())
    assert not store.release(first, success=True).redelivery_waits


# -- revoked by an operator ----------------------------------------------------------------------


def test_revoke_returns_the_holder(store: LockStore, lease_request: MakeRequest) -> None:
    """`revoke` takes the lock and returns its holder, or None if the lock is free."""
    one = lease_request()
    assert store.revoke(one.base, one.lock) is None
    store.acquire(one)
    holder = store.revoke(one.base, one.lock)
    assert holder is not None
    assert (one.task_id, one.node, one.pid) == (holder.task_id, holder.node, holder.pid)
    assert store.holder(one.lock) is None


def test_revoked_delivery_does_not_acquire_it_again(backing: Backing, lease_request: MakeRequest) -> None:
    """A delivery whose lock was revoked learns this for an hour, because its process may be stopped meanwhile."""
    for supervised in (False, True):
        one = lease_request("x" if supervised else "y", ttl=6.0, supervised=supervised)
        store = backing.store
        store.acquire(one)
        store.revoke(one.base, one.lock)
        assert [RenewResult.REVOKED] * 2 == store.renew([one, known(one)])
        assert store.acquire(one).status is AcquireStatus.REVOKED
        backing.wait(3599)
        assert store.acquire(one).status is AcquireStatus.REVOKED
        assert [RenewResult.REVOKED] * 2 == store.renew([one, known(one)])
        assert (RenewResult.REVOKED, False) == store.reacquire(one, 0)
        assert not store.release(one, success=True).redelivery_waits
        assert store.holder(one.lock) is None


def test_revoked_lock_is_free_for_others(store: LockStore, lease_request: MakeRequest) -> None:
    """A revoked lock is granted to the next request; the former holder does not release it."""
    one, other = lease_request(), lease_request()
    store.acquire(one)
    store.revoke(one.base, one.lock)
    assert granted(store, other)
    assert [RenewResult.REVOKED] == store.renew([one])
    assert (RenewResult.REVOKED, False) == store.reacquire(one, 0)
    store.release(one, success=True)
    assert [RenewResult.RENEWED] == store.renew([other])


# -- keys --------------------------------------------------------------------------------------


def test_holder_of_a_free_lock(store: LockStore, lease_request: MakeRequest) -> None:
    """Nobody holds a lock that was never acquired."""
    assert store.holder(lease_request().lock) is None


def test_every_key_expires(backing: Backing, lease_request: MakeRequest) -> None:
    """All kinds of keys except the fence expire: locks, attempts, recent grants, outcomes, revoked tokens."""
    store = backing.store
    store.acquire(lease_request("held", supervised=True))
    first, again = lease_request("redelivered", task_id="same"), lease_request("redelivered", task_id="same")
    other, third = lease_request("open", task_id="open"), lease_request("open", task_id="open")
    for one in (first, again, other, third):
        store.acquire(one)
    store.release(first, success=True)
    store.record_outcome(first, success=True)
    store.release(other, success=True)
    revoked = lease_request("revoked")
    store.acquire(revoked)
    store.revoke(revoked.base, revoked.lock)
    fence = f"{revoked.base}:fence"
    keys = {*backing.keys()} - {fence}
    assert 6 == len(keys)
    for key in keys:
        assert 0 < backing.lives(key) <= 3600
    backing.wait(3601)
    assert [fence] == backing.keys()


def test_redelivery_keeps_the_expiry(backing: Backing, lease_request: MakeRequest) -> None:
    """The request of a redelivery neither shortens nor extends the holder's lease."""
    first = lease_request(ttl=10.0, task_id="same")
    backing.store.acquire(first)
    backing.wait(5)
    backing.store.acquire(lease_request(ttl=600.0, task_id="same"))
    assert 3 < backing.lives(first.lock) <= 5


def test_all_keys_share_the_tasks_hash_tag(backing: Backing, lease_request: MakeRequest, base: str) -> None:
    """All keys of a task start with its base, hash tag included, so that one script call suffices on a cluster."""
    store = backing.store
    first, again = lease_request(task_id="same", supervised=True), lease_request(task_id="same")
    store.acquire(first)
    store.acquire(again)
    names = set(backing.keys())
    store.release(first, success=True)
    names |= set(backing.keys())
    assert {
        f"{base}:{name}" for name in ("lock:d", "fence", "recent", f"attempt:{first.token}", "completed:d:same")
    } == names


def test_clone_shares_the_data(store: LockStore, lease_request: MakeRequest) -> None:
    """A clone has its own connections and the same locks."""
    clone, one = store.clone(), lease_request()
    store.acquire(one)
    assert clone.holder(one.lock) is not None
    clone.close()
    assert [RenewResult.RENEWED] == store.renew([one])


def test_task_that_goes_on_as_another(backing: Backing, lease_request: MakeRequest) -> None:
    """A store remembers for an hour, and for an hour after each look, that another task goes on with a task's id."""
    store, first, other = backing.store, lease_request(), lease_request(task_id="other")
    store.acquire(first)
    assert not store.keep_continued(first)
    first.is_continued = True
    store.release(first, success=False)
    for _ in range(3):
        assert store.keep_continued(first)
        backing.wait(3000)
    assert not store.keep_continued(other)
    assert store.acquire(lease_request(task_id=first.task_id, redelivered=True)).status is AcquireStatus.GRANTED
    backing.wait(3601)
    assert not store.keep_continued(first)


def test_eviction_policy(store: LockStore) -> None:
    """A store returns its eviction policy."""
    assert "noeviction" == store.eviction_policy()


def test_memory_store_forgets(lease_request: MakeRequest) -> None:
    """The store in memory drops expired records, also those that are never requested again."""
    time = [0.0]
    store = MemoryStore(clock=lambda: time[0])
    for number in range(5 * RELEASES_PER_CLEANUP):
        one = lease_request(str(number), ttl=1.0)
        store.acquire(one)
        store.release(one, success=True)
        time[0] += 0.1
    assert len(store._records) <= RELEASES_PER_CLEANUP + 1


# -- a cooldown after a success -------------------------------------------------------------------


def test_cooldown_after_a_success(backing: Backing, lease_request: MakeRequest) -> None:
    """A release with a cooldown keeps others out for so long, longer or shorter than the TTL, and leaves one key."""
    for digest, ttl, cooldown in (("long", 5.0, 60.0), ("short", 60.0, 5.0)):
        one, store = lease_request(digest, ttl=ttl, supervised=True), backing.store
        store.acquire(one)
        assert not store.release(one, success=True, kept=AfterRelease("cooldown", cooldown)).redelivery_waits
        backing.wait(cooldown - 1)
        result = store.acquire(lease_request(digest))
        assert result.status is AcquireStatus.REFUSED
        assert result.holder is not None
        assert ("cooldown", one.task_id) == (result.holder.state, result.holder.task_id)
        assert 0 < result.holder.remaining <= 1
        assert [one.lock] == left(backing)
        backing.wait(1.1)
        assert store.holder(one.lock) is None
        assert [] == left(backing)


def test_cooldown_has_no_owner(store: LockStore, lease_request: MakeRequest) -> None:
    """Nobody renews, reacquires, acquires or releases a cooldown, not even with the token of the lease that left it."""
    one = lease_request(supervised=True)
    fence = take(store, one)
    store.release(one, success=True, kept=AfterRelease("cooldown", 20.0))
    assert [RenewResult.NOT_OWNER, RenewResult.MISSING] == store.renew([one, known(one)])
    assert (RenewResult.NOT_OWNER, False) == store.reacquire(one, fence)
    assert store.acquire(one).status is AcquireStatus.REFUSED
    for success in (True, False):
        store.release(one, success)
        store.release(known(one), success)
    holder = store.holder(one.lock)
    assert holder is not None
    assert "cooldown" == holder.state


def test_lease_after_a_hold(backing: Backing, lease_request: MakeRequest) -> None:
    """A lease that follows a cooldown is running, with a higher fence, and its failure frees the lock."""
    first, second, store = lease_request(), lease_request(), backing.store
    fence = take(store, first)
    store.release(first, success=True, kept=AfterRelease("cooldown", 5.0))
    backing.wait(5.1)
    assert take(store, second) > fence
    holder = store.holder(second.lock)
    assert holder is not None
    assert "running" == holder.state
    store.release(second, success=False)
    assert store.holder(second.lock) is None


def test_cooldown_is_revoked(store: LockStore, lease_request: MakeRequest) -> None:
    """`revoke` ends a cooldown, and names it."""
    one = lease_request()
    store.acquire(one)
    store.release(one, success=True, kept=AfterRelease("cooldown", 20.0))
    holder = store.revoke(one.base, one.lock)
    assert holder is not None
    assert "cooldown" == holder.state
    assert granted(store, lease_request())


def test_cooldown_of_a_lost_lease(backing: Backing, lease_request: MakeRequest) -> None:
    """A release with a cooldown does nothing to a lock that is missing, or that another delivery has."""
    first, second, store = lease_request(ttl=5.0), lease_request(), backing.store
    store.acquire(first)
    backing.wait(5.1)
    store.release(first, success=True, kept=AfterRelease("cooldown", 20.0))
    assert store.holder(first.lock) is None
    store.acquire(second)
    store.release(first, success=True, kept=AfterRelease("cooldown", 20.0))
    assert [RenewResult.RENEWED] == store.renew([second])


def test_waiting_redelivery_and_a_hold(store: LockStore, lease_request: MakeRequest) -> None:
    """A redelivery that waited learns the outcome as without a cooldown; other work meets the cooldown."""
    first, again = lease_request(task_id="same"), lease_request(task_id="same", redelivered=True)
    store.acquire(first)
    store.acquire(again)
    assert store.release(first, success=True, kept=AfterRelease("cooldown", 20.0)).redelivery_waits
    assert store.acquire(again).status is AcquireStatus.REFUSED
    store.record_outcome(first, success=True)
    assert store.acquire(again).status is AcquireStatus.COMPLETED
    assert store.acquire(lease_request()).status is AcquireStatus.REFUSED


# -- starts that are counted ----------------------------------------------------------------------

CRASHED, UNSUCCESSFUL = MaxStarts(2, per=3600.0), MaxStarts(2, per=3600.0, count="unsuccessful")
each_count = pytest.mark.parametrize("limit", [CRASHED, UNSUCCESSFUL], ids=["crashed", "unsuccessful"])


def crash(backing: Backing, one: LeaseSpec) -> AcquireStatus:
    """Start, and die with the whole worker."""
    status = backing.store.acquire(one).status
    backing.wait(one.ttl + 0.1)
    return status


@each_count
def test_crashed_starts_are_counted(backing: Backing, lease_request: MakeRequest, limit: MaxStarts) -> None:
    """After so many starts without an end the next one is refused, which takes no lock, until `per` has passed."""
    statuses = [crash(backing, lease_request(max_starts=limit)) for _ in range(4)]
    assert [AcquireStatus.GRANTED] * 2 + [AcquireStatus.TOO_MANY_STARTS] * 2 == statuses
    one = lease_request(max_starts=limit)
    assert backing.store.holder(one.lock) is None
    assert [one.starts] == left(backing)
    assert 0 < backing.lives(one.starts) <= limit.per
    assert granted(backing.store, lease_request("other", max_starts=limit))
    assert granted(backing.store, lease_request())  # a task without the option
    backing.wait(limit.per)
    assert granted(backing.store, one)


def test_each_start_counts_for_its_own_time(backing: Backing, lease_request: MakeRequest) -> None:
    """The oldest start stops counting first."""
    limit = MaxStarts(2, per=100.0)
    assert crash(backing, lease_request(max_starts=limit)) is AcquireStatus.GRANTED
    backing.wait(50)
    assert crash(backing, lease_request(max_starts=limit)) is AcquireStatus.GRANTED
    assert crash(backing, lease_request(max_starts=limit)) is AcquireStatus.GRANTED
    assert crash(backing, lease_request(max_starts=limit, ttl=1.0)) is AcquireStatus.TOO_MANY_STARTS


def test_start_of_a_killed_child_counts(store: LockStore, lease_request: MakeRequest) -> None:
    """A release by the supervisor, which does not know the lock key, leaves the start of a dead child."""
    for _ in range(2):
        one = lease_request(max_starts=CRASHED, supervised=True)
        assert granted(store, one)
        store.release(known(one), success=False)
    assert store.acquire(lease_request(max_starts=CRASHED)).status is AcquireStatus.TOO_MANY_STARTS


@each_count
def test_revoking_forgets_starts(backing: Backing, lease_request: MakeRequest, limit: MaxStarts) -> None:
    """Also where nobody holds the lock; without their key, starts stay."""
    for _ in range(3):
        status = crash(backing, one := lease_request(max_starts=limit))
    assert status is AcquireStatus.TOO_MANY_STARTS
    assert backing.store.revoke(one.base, one.lock) is None
    assert backing.store.acquire(one).status is AcquireStatus.TOO_MANY_STARTS
    assert backing.store.revoke(one.base, one.lock, "", one.starts) is None
    assert granted(backing.store, one)


@pytest.mark.parametrize("success", [True, False, None])
def test_crashed_does_not_count_ends(backing: Backing, lease_request: MakeRequest, success: bool | None) -> None:
    """Under `crashed` a release takes its own start out, also after the lock was lost; other starts stay."""
    store, limit = backing.store, MaxStarts(1)
    for _ in range(3):
        one = lease_request(max_starts=limit)
        assert granted(store, one)
        backing.lose(one.lock)
        store.release(one, success)
    assert [] == left(backing)
    crash(backing, lease_request(max_starts=limit))
    store.release(lease_request(max_starts=limit), success)
    assert store.acquire(lease_request(max_starts=limit)).status is AcquireStatus.TOO_MANY_STARTS


def test_unsuccessful_counts_since_the_last_success(store: LockStore, lease_request: MakeRequest) -> None:
    """Under `unsuccessful` failures count, and a success clears all starts."""
    for outcomes in ([False, True], [False, True], [False, False]):
        for success in outcomes:
            one = lease_request(max_starts=UNSUCCESSFUL)
            assert granted(store, one)
            store.release(one, success)
    assert store.acquire(lease_request(max_starts=UNSUCCESSFUL)).status is AcquireStatus.TOO_MANY_STARTS


@each_count
def test_what_is_no_start(store: LockStore, lease_request: MakeRequest, limit: MaxStarts) -> None:
    """A request that is sent twice is one start; one that met a holder, or was never answered, is none."""
    one = lease_request(max_starts=limit)
    for _ in range(3):
        assert granted(store, one)
        assert store.acquire(lease_request(max_starts=limit)).status is AcquireStatus.REFUSED
    store.release(one, success=False)
    for _ in range(3):
        unanswered = lease_request(max_starts=limit)
        assert granted(store, unanswered)
        store.release(unanswered, success=None)
    assert granted(store, lease_request(max_starts=limit))


def test_last_start_is_asked_for_again(backing: Backing, lease_request: MakeRequest) -> None:
    """A request whose lock has expired meanwhile may be sent again though its own start was the last one."""
    one = lease_request(max_starts=MaxStarts(1))
    assert crash(backing, one) is AcquireStatus.GRANTED
    assert granted(backing.store, one)


def test_starts_of_lost_data(backing: Backing, lease_request: MakeRequest) -> None:
    """A store that lost its data starts at zero."""
    for _ in range(2):
        crash(backing, lease_request(max_starts=CRASHED))
    backing.lose()
    assert granted(backing.store, lease_request(max_starts=CRASHED))


def test_starts_and_a_hold(backing: Backing, lease_request: MakeRequest) -> None:
    """A release may clear the starts and leave a cooldown."""
    one = lease_request(max_starts=UNSUCCESSFUL)
    assert granted(backing.store, one)
    backing.store.release(one, success=True, kept=AfterRelease("cooldown", 20.0))
    assert [one.lock] == left(backing)
    assert 15 < backing.lives(one.lock) <= 20


def test_revoke_from_one_lease_alone(store: LockStore, lease_request: MakeRequest) -> None:
    """With a fence, only the lock of that lease is revoked, with or without counted starts."""
    one = lease_request(task_id="mine")
    fence = store.acquire(one).fence
    assert store.revoke(one.base, one.lock, fence=fence - 1) is None
    assert store.renew([one]) == [RenewResult.RENEWED]
    found = store.revoke(one.base, one.lock, "", one.starts, fence)
    assert found is not None
    assert found.task_id == "mine"
    assert store.renew([one]) == [RenewResult.REVOKED]


@pytest.mark.parametrize(("comes_again", "cut_off"), [(True, True), (True, False), (False, True)])
def test_body_that_began(backing: Backing, lease_request: MakeRequest, comes_again: bool, cut_off: bool) -> None:
    """A store remembers for a week that a body began whose message comes again, unless its own process has seen its end."""
    store, spec = backing.store, lease_request(task_id="a", comes_again=comes_again)
    assert not store.has_begun(spec)
    store.acquire(spec)
    assert comes_again is store.has_begun(spec)
    assert not store.has_begun(lease_request(task_id="b"))
    spec.is_unfinished = cut_off
    store.release(spec, success=False)
    assert (comes_again and cut_off) is store.has_begun(spec)
    backing.wait(BEGUN_TTL + 1)
    assert not store.has_begun(spec)


def test_body_whose_process_died(backing: Backing, lease_request: MakeRequest) -> None:
    """A supervisor's release says nothing of the body; a new start of the message that ends is its end."""
    store, spec = backing.store, lease_request(task_id="a", supervised=True, comes_again=True)
    store.acquire(spec)
    store.release(replace(spec, digest="", comes_again=False), success=False)
    assert store.holder(spec.lock) is None
    assert store.has_begun(spec)
    again = lease_request(task_id="a", comes_again=True)
    store.acquire(again)
    store.release(again, success=True)
    assert not store.has_begun(spec)
