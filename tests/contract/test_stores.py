"""What every store promises."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from celery_singleton_lock.store.memory import RELEASES_PER_CLEANUP, MemoryStore
from celery_singleton_lock.store.protocol import AcquireStatus, LeaseRequest, LockStore, RenewResult
from tests.contract.conftest import Backing

MakeClaim = Callable[..., LeaseRequest]


def known(claim: LeaseRequest) -> LeaseRequest:
    """The same attempt as a worker's main process knows it: without digest."""
    return LeaseRequest(claim.base, "", claim.token, claim.ttl, claim.task_id)


def granted(store: LockStore, claim: LeaseRequest) -> bool:
    return store.acquire(claim).answer is AcquireStatus.GRANTED


def left(backing: Backing) -> list[str]:
    """What is stored, but for what is there once for each task name."""
    return [name for name in sorted(backing.keys()) if ":fence" not in name and ":recent" not in name]


def take(store: LockStore, claim: LeaseRequest) -> int:
    """Acquire a free lock; answers the fence of the lease."""
    verdict = store.acquire(claim)
    assert verdict.answer is AcquireStatus.GRANTED
    return verdict.fence


# -- acquire -----------------------------------------------------------------------------------


def test_free_lock_is_granted(store: LockStore, claim: MakeClaim) -> None:
    """A free lock is granted, without a holder to name."""
    verdict = store.acquire(claim())
    assert (AcquireStatus.GRANTED, None) == (verdict.answer, verdict.holder)


def test_held_lock_names_its_holder(backing: Backing, claim: MakeClaim) -> None:
    """A held lock is not granted; the answer has the holder's task id, node, pid, age and remaining time."""
    first = claim(ttl=20.0)
    assert granted(backing.store, first)
    verdict = backing.store.acquire(claim())
    assert verdict.answer is AcquireStatus.HELD
    holder = verdict.holder
    assert holder is not None
    assert (first.task_id, "w1@host", 4711) == (holder.task_id, holder.node, holder.pid)
    assert 0 <= holder.age < 5
    assert 15 < holder.remaining <= 20


def test_holders_fields_may_be_anything(store: LockStore, claim: MakeClaim) -> None:
    """Ids and node names with blanks, braces, quotes and other alphabets come back as they were."""
    odd = claim(task_id="a b{c}'\"\\é\n", node="wörker 1@{höst}", pid=2**31)
    store.acquire(odd)
    holder = store.holder(odd.lock)
    assert holder is not None
    assert (odd.task_id, odd.node, odd.pid) == (holder.task_id, holder.node, holder.pid)


def test_acquire_is_idempotent_on_the_token(backing: Backing, claim: MakeClaim) -> None:
    """Sent twice because a reply was lost, a claim is granted twice: holder and age stay, the expiry is put off."""
    one = claim(ttl=20.0)
    assert granted(backing.store, one)
    backing.wait(10)
    assert granted(backing.store, one)
    holder = backing.store.holder(one.lock)
    assert holder is not None
    assert one.task_id == holder.task_id
    assert holder.remaining > 15


def test_other_signatures_are_free(store: LockStore, claim: MakeClaim) -> None:
    """Another digest is another lock."""
    assert granted(store, claim("a"))
    assert granted(store, claim("b"))


def test_lock_expires(backing: Backing, claim: MakeClaim) -> None:
    """After its TTL a lock is free, and its former owner has nothing."""
    first, second = claim(ttl=5.0), claim()
    store = backing.store
    assert granted(store, first)
    backing.wait(4)
    assert not granted(store, second)
    backing.wait(1.1)
    assert store.holder(first.lock) is None
    assert granted(store, second)
    assert [RenewResult.NOT_OWNER] == store.renew([first])
    assert not store.release(first, success=True)
    assert store.holder(second.lock) is not None


# -- release -----------------------------------------------------------------------------------


def test_release_frees(backing: Backing, claim: MakeClaim) -> None:
    """A released lock is free, and nothing of it is left."""
    one = claim(supervised=True)
    backing.store.acquire(one)
    assert not backing.store.release(one, success=True)
    assert backing.store.holder(one.lock) is None
    assert [] == left(backing)
    assert granted(backing.store, claim())


def test_release_by_the_owner_alone(store: LockStore, claim: MakeClaim) -> None:
    """Nobody else's token frees a lock, the same task id's other attempt included."""
    owner = claim(task_id="same")
    store.acquire(owner)
    for other in (claim(), claim(task_id="same"), known(claim())):
        store.release(other, success=True)
        store.release(other, success=False)
        assert store.holder(owner.lock) is not None
    assert [RenewResult.RENEWED] == store.renew([owner])


def test_release_twice_is_harmless(store: LockStore, claim: MakeClaim) -> None:
    """A second release does nothing, also where the lock has a new owner."""
    first, second = claim(), claim()
    store.acquire(first)
    store.release(first, success=True)
    store.release(first, success=True)
    store.acquire(second)
    store.release(first, success=True)
    assert [RenewResult.RENEWED] == store.renew([second])


def test_release_of_what_was_never_granted(store: LockStore, claim: MakeClaim) -> None:
    """Releasing a claim that has nothing is no error."""
    assert not store.release(claim(), success=True)
    assert not store.release(known(claim()), success=False)


# -- renew -------------------------------------------------------------------------------------


def test_renew_puts_the_expiry_off(backing: Backing, claim: MakeClaim) -> None:
    """RenewResult in time, a lock lives past its TTL."""
    one = claim(ttl=6.0)
    backing.store.acquire(one)
    for _ in range(4):
        backing.wait(4)
        assert [RenewResult.RENEWED] == backing.store.renew([one])
    holder = backing.store.holder(one.lock)
    assert holder is not None
    assert 5 < holder.remaining <= 6


def test_renew_by_the_owner_alone(backing: Backing, claim: MakeClaim) -> None:
    """Another's lock is neither renewed nor touched."""
    owner, other = claim(ttl=5.0), claim(ttl=60.0)
    backing.store.acquire(owner)
    assert [RenewResult.NOT_OWNER] == backing.store.renew([other])
    holder = backing.store.holder(owner.lock)
    assert holder is not None
    assert holder.remaining <= 5


def test_renew_of_what_is_gone(backing: Backing, claim: MakeClaim) -> None:
    """A lock that nobody has is not brought back by a renewal."""
    one = claim()
    backing.store.acquire(one)
    backing.store.release(one, success=False)
    assert [RenewResult.MISSING] == backing.store.renew([one])
    assert [] == left(backing)


def test_batch_has_an_answer_for_each(backing: Backing, claim: MakeClaim) -> None:
    """One call for many leases answers for each of them, in order, whatever became of the others."""
    store = backing.store
    mine, gone, taken, supervised = claim("a"), claim("b"), claim("c"), claim("d", supervised=True)
    for one in (mine, claim("c"), supervised):
        store.acquire(one)
    batch = [gone, mine, known(supervised), taken, known(gone), mine]
    answers = [
        RenewResult.MISSING,
        RenewResult.RENEWED,
        RenewResult.RENEWED,
        RenewResult.NOT_OWNER,
        RenewResult.MISSING,
        RenewResult.RENEWED,
    ]
    assert answers == store.renew(batch)


def test_batch_of_hundred(store: LockStore, claim: MakeClaim) -> None:
    """A full batch is renewed by one call, each with its own TTL."""
    batch = [claim(str(number), ttl=10.0 + number) for number in range(100)]
    for one in batch:
        store.acquire(one)
    assert [RenewResult.RENEWED] * 100 == store.renew(batch)
    for one in (batch[0], batch[-1]):
        holder = store.holder(one.lock)
        assert holder is not None
        assert one.ttl - 5 < holder.remaining <= one.ttl


def test_gone_is_taken_again(backing: Backing, claim: MakeClaim) -> None:
    """What the store has lost is taken again by its holder, who is named as before; asked twice, it is given twice."""
    store, one = backing.store, claim(ttl=20.0, supervised=True)
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


def test_taken_again_from_nobody_else(backing: Backing, claim: MakeClaim) -> None:
    """What another has by now is not taken."""
    store, one, other = backing.store, claim(supervised=True), claim(supervised=True)
    store.acquire(one)
    backing.lose()
    store.acquire(other)
    assert (RenewResult.NOT_OWNER, False) == store.reacquire(one, 0)
    assert [RenewResult.MISSING, RenewResult.RENEWED] == store.renew([known(one), known(other)])


def _released(store: LockStore, one: LeaseRequest) -> None:
    store.release(one, success=True)


def _released_by_attempt(store: LockStore, one: LeaseRequest) -> None:
    store.release(known(one), success=False)


def _freed(store: LockStore, one: LeaseRequest) -> None:
    store.revoke(one.base, one.lock)


@pytest.mark.parametrize("ended", [_released, _released_by_attempt, _freed])
def test_another_came_and_went(
    backing: Backing, claim: MakeClaim, ended: Callable[[LockStore, LeaseRequest], None]
) -> None:
    """Whoever takes its lock again learns that another had it meanwhile, then and whenever it is renewed."""
    store, one, other = backing.store, claim(supervised=True), claim(supervised=True)
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
    assert not granted(store, other if ended is _freed else claim())


def test_runs_before_it_do_not_count(backing: Backing, claim: MakeClaim) -> None:
    """Whoever was released before a lock was granted has not been there meanwhile."""
    store, before, one = backing.store, claim(), claim()
    store.acquire(before)
    store.release(before, success=True)
    fence = take(store, one)
    backing.lose(one.lock)
    assert (RenewResult.RENEWED, True) == store.reacquire(one, fence)


def test_freed_is_not_taken_again(store: LockStore, claim: MakeClaim) -> None:
    """What an operator took from a holder is not taken again by it."""
    one = claim()
    fence = take(store, one)
    store.revoke(one.base, one.lock)
    assert (RenewResult.REVOKED, False) == store.reacquire(one, fence)
    assert store.holder(one.lock) is None


def test_colons_in_names(backing: Backing, claim: MakeClaim) -> None:
    """A task may be named as a part of our keys is."""
    one, other = (replace(claim(), base=f"{claim().base}:lock:x") for _ in range(2))
    fence = take(backing.store, one)
    backing.lose()
    backing.wait(0.001)
    take(backing.store, other)
    backing.store.release(other, success=True)
    assert (RenewResult.LOST, True) == backing.store.reacquire(one, fence)


# -- fences --------------------------------------------------------------------------------------


def test_fence_grows(backing: Backing, claim: MakeClaim) -> None:
    """Each lease of a task name has a higher fence than the one before, whatever its signature; the holder tells it."""
    store, seen = backing.store, []
    for digest in ("d", "e", "d"):
        one = claim(digest)
        seen.append(take(store, one))
        assert seen[-1] == take(store, one), "the same, where a reply was lost"
        holder = store.holder(one.lock)
        assert holder is not None
        assert seen[-1] == holder.fence
        verdict = store.acquire(claim(digest))
        assert verdict.holder is not None
        assert seen[-1] == verdict.holder.fence
        store.release(one, success=True)
    assert sorted(set(seen)) == seen


def test_fence_grows_after_a_loss_of_data(backing: Backing, claim: MakeClaim) -> None:
    """A store that has lost its data goes on with higher fences, made of its clock."""
    before = take(backing.store, claim())
    backing.lose()
    backing.wait(0.001)
    assert before < take(backing.store, claim())


def test_revocation_raises_the_fence(store: LockStore, claim: MakeClaim) -> None:
    """What an operator has freed has a lower fence than all that comes later, also for another signature."""
    one = claim()
    before = take(store, one)
    store.revoke(one.base, one.lock)
    assert before + 1 < take(store, claim("other"))


def test_fence_of_what_is_taken_again(backing: Backing, claim: MakeClaim) -> None:
    """It is the lease's own, and later leases have higher ones, also where the store's clock was set back."""
    store, one = backing.store, claim()
    fence = take(store, one) + 10**9  # as if the clock was ahead then
    backing.lose()
    assert (RenewResult.RENEWED, True) == store.reacquire(one, fence)
    holder = store.holder(one.lock)
    assert holder is not None
    assert fence == holder.fence
    assert fence < take(store, claim("other"))


def test_recent_grants_are_bounded(backing: Backing, claim: MakeClaim) -> None:
    """What is remembered of grants is gone a TTL later."""
    for number in range(20):
        one = claim(str(number))
        take(backing.store, one)
        backing.store.release(one, success=True)
    backing.wait(31)
    assert [f"{one.base}:fence"] == backing.keys()


def test_empty_batch(store: LockStore) -> None:
    """Renewing nothing is no error."""
    assert [] == store.renew([])


# -- by attempt alone --------------------------------------------------------------------------


def test_renew_and_release_by_attempt(backing: Backing, claim: MakeClaim) -> None:
    """Who knows the attempt alone renews and releases what it has, as often as is needed."""
    one = claim(ttl=6.0, supervised=True)
    backing.store.acquire(one)
    for _ in range(4):
        backing.wait(4)
        assert [RenewResult.RENEWED] == backing.store.renew([known(one)])
    backing.store.release(known(one), success=False)
    assert backing.store.holder(one.lock) is None
    assert [] == left(backing)


def test_both_may_renew(backing: Backing, claim: MakeClaim) -> None:
    """The process that runs the body and the main process renew side by side; either alone keeps lock and attempt."""
    one = claim(ttl=6.0, supervised=True)
    backing.store.acquire(one)
    for renewer in (one, one, known(one), known(one), one, known(one)):
        backing.wait(4)
        assert [RenewResult.RENEWED] == backing.store.renew([renewer])


def test_attempt_without_a_lock(backing: Backing, claim: MakeClaim) -> None:
    """An attempt that was never granted anything has nothing: not renewed, not released."""
    holder, duplicate = claim(supervised=True), claim(supervised=True)
    backing.store.acquire(holder)
    backing.store.acquire(duplicate)
    assert [RenewResult.MISSING] == backing.store.renew([known(duplicate)])
    backing.store.release(known(duplicate), success=False)
    assert [RenewResult.RENEWED] == backing.store.renew([known(holder)])


def test_attempt_whose_lock_another_has(backing: Backing, claim: MakeClaim) -> None:
    """An attempt whose lock went to another renews and frees nothing."""
    first, second = claim(ttl=5.0, supervised=True), claim()
    store = backing.store
    store.acquire(first)
    backing.wait(5.1)
    store.acquire(second)
    assert [RenewResult.RENEWED] != store.renew([known(first)])
    store.release(known(first), success=True)
    assert [RenewResult.RENEWED] == store.renew([second])


# -- two deliveries of one message -------------------------------------------------------------


def test_copy_of_a_running_message_waits(store: LockStore, claim: MakeClaim) -> None:
    """Another attempt of the same task id finds itself the holder's task id, and the holder learns of it at release."""
    first, copy = claim(task_id="same"), claim(task_id="same")
    store.acquire(first)
    verdict = store.acquire(copy)
    assert verdict.answer is AcquireStatus.HELD
    assert verdict.holder is not None
    assert "same" == verdict.holder.task_id
    assert store.release(first, success=True)


def test_copy_between_release_and_result(store: LockStore, claim: MakeClaim) -> None:
    """After a release in success the copy waits on, until the result is stored; other work of the signature runs."""
    first, copy = claim(task_id="same"), claim(task_id="same", redelivered=True)
    store.acquire(first)
    store.acquire(copy)
    store.release(first, success=True)
    verdict = store.acquire(copy)
    assert verdict.answer is AcquireStatus.HELD
    assert verdict.holder is not None
    assert "same" == verdict.holder.task_id
    assert granted(store, claim())


def test_copy_after_success_is_dropped(store: LockStore, claim: MakeClaim) -> None:
    """Once the first attempt has ended in success, each copy of the message is told so."""
    first, copy = claim(task_id="same"), claim(task_id="same", redelivered=True)
    store.acquire(first)
    store.acquire(copy)
    store.release(first, success=True)
    store.record_outcome(first, success=True)
    assert store.acquire(copy).answer is AcquireStatus.COMPLETED
    assert store.acquire(claim(task_id="same", redelivered=True)).answer is AcquireStatus.COMPLETED
    assert granted(store, claim())


@pytest.mark.parametrize("other", [{"redelivered": False}, {"redelivered": True, "digest": "other"}])
@pytest.mark.parametrize("is_settled", [False, True])
def test_task_id_that_is_used_again(
    store: LockStore, claim: MakeClaim, other: dict[str, Any], is_settled: bool
) -> None:
    """New work under the task id of an ended one runs: a first delivery, or one of other arguments."""
    first, copy = claim(task_id="same"), claim(task_id="same")
    store.acquire(first)
    store.acquire(copy)
    store.release(first, success=True)
    if is_settled:
        store.record_outcome(first, success=True)
    assert granted(store, claim(task_id="same", **other))


def test_copy_waits_while_the_result_is_being_stored(backing: Backing, claim: MakeClaim) -> None:
    """A release sent again lets a waiting copy wait for another TTL; after the outcome is known it changes nothing."""
    first, copy = claim(task_id="same", ttl=5.0), claim(task_id="same", redelivered=True)
    store = backing.store
    store.acquire(first)
    store.acquire(copy)
    for _ in range(3):
        assert store.release(first, success=True)
        backing.wait(4.0)
        assert store.acquire(copy).answer is AcquireStatus.HELD
    store.record_outcome(first, success=True)
    assert not store.release(first, success=True)
    backing.wait(6.0)
    assert store.acquire(copy).answer is AcquireStatus.COMPLETED


def test_copy_after_no_success_runs(backing: Backing, claim: MakeClaim) -> None:
    """Where the first attempt did not end in success after all, the copy runs."""
    first, copy = claim(task_id="same"), claim(task_id="same")
    store = backing.store
    store.acquire(first)
    store.acquire(copy)
    store.release(first, success=True)
    store.record_outcome(first, success=False)
    assert granted(store, copy)
    store.release(copy, success=True)
    assert [] == left(backing)


def test_copy_after_a_failure_runs(store: LockStore, claim: MakeClaim) -> None:
    """A release without success tells nobody to wait."""
    first, copy = claim(task_id="same"), claim(task_id="same")
    store.acquire(first)
    store.acquire(copy)
    assert not store.release(first, success=False)
    assert granted(store, copy)


def test_copy_after_the_first_died(backing: Backing, claim: MakeClaim) -> None:
    """Where the first attempt's process died, the copy is granted the lock: it is never taken for a duplicate."""
    first, copy = claim(task_id="same", ttl=5.0, supervised=True), claim(task_id="same")
    backing.store.acquire(first)
    backing.store.acquire(copy)
    backing.store.release(known(first), success=False)
    assert granted(backing.store, copy)


def test_unsettled_end_is_not_waited_for_long(backing: Backing, claim: MakeClaim) -> None:
    """A process that died between release and settling keeps a copy waiting no longer than a TTL."""
    first, copy = claim(task_id="same", ttl=5.0), claim(task_id="same")
    backing.store.acquire(first)
    backing.store.acquire(copy)
    backing.store.release(first, success=True)
    backing.wait(5.1)
    assert granted(backing.store, copy)


def test_lost_reply_to_a_release(store: LockStore, claim: MakeClaim) -> None:
    """A release sent twice because a reply was lost says again that a copy waits: else it would run after all."""
    first, copy = claim(task_id="same"), claim(task_id="same")
    store.acquire(first)
    store.acquire(copy)
    assert store.release(first, success=True)
    assert store.release(first, success=True)


def test_no_copy_no_trace(backing: Backing, claim: MakeClaim) -> None:
    """Without a copy nothing is remembered of an attempt that ended, however many signatures there were."""
    for number in range(50):
        one = claim(str(number), supervised=True)
        backing.store.acquire(one)
        backing.store.release(one, success=True)
    assert [] == left(backing)


def test_other_task_ids_are_duplicates_only(store: LockStore, claim: MakeClaim) -> None:
    """A duplicate with another task id makes the holder settle nothing."""
    first = claim()
    store.acquire(first)
    store.acquire(claim())
    assert not store.release(first, success=True)


# -- taken by an operator ----------------------------------------------------------------------


def test_free_answers_who_had_it(store: LockStore, claim: MakeClaim) -> None:
    """An operator's free takes the lock and answers its holder; of a free lock, nothing."""
    one = claim()
    assert store.revoke(one.base, one.lock) is None
    store.acquire(one)
    holder = store.revoke(one.base, one.lock)
    assert holder is not None
    assert (one.task_id, one.node, one.pid) == (holder.task_id, holder.node, holder.pid)
    assert store.holder(one.lock) is None


def test_freed_attempt_does_not_take_it_again(backing: Backing, claim: MakeClaim) -> None:
    """The attempt that lost its lock to an operator is told so whenever it asks within an hour: it may be stopped meanwhile."""
    for supervised in (False, True):
        one = claim("x" if supervised else "y", ttl=6.0, supervised=supervised)
        store = backing.store
        store.acquire(one)
        store.revoke(one.base, one.lock)
        assert [RenewResult.REVOKED] * 2 == store.renew([one, known(one)])
        assert store.acquire(one).answer is AcquireStatus.REVOKED
        backing.wait(3599)
        assert store.acquire(one).answer is AcquireStatus.REVOKED
        assert [RenewResult.REVOKED] * 2 == store.renew([one, known(one)])
        assert (RenewResult.REVOKED, False) == store.reacquire(one, 0)
        assert not store.release(one, success=True)
        assert store.holder(one.lock) is None


def test_freed_lock_is_free_for_others(store: LockStore, claim: MakeClaim) -> None:
    """What an operator freed goes to the next who asks; the former owner frees nothing of it."""
    one, other = claim(), claim()
    store.acquire(one)
    store.revoke(one.base, one.lock)
    assert granted(store, other)
    assert [RenewResult.REVOKED] == store.renew([one])
    assert (RenewResult.REVOKED, False) == store.reacquire(one, 0)
    store.release(one, success=True)
    assert [RenewResult.RENEWED] == store.renew([other])


# -- keys --------------------------------------------------------------------------------------


def test_holder_of_a_free_lock(store: LockStore, claim: MakeClaim) -> None:
    """Nobody holds what was never taken."""
    assert store.holder(claim().lock) is None


def test_every_key_expires(backing: Backing, claim: MakeClaim) -> None:
    """Each kind of key expires but the fence: locks, attempts, recent grants, ends, and what operators took."""
    store = backing.store
    store.acquire(claim("held", supervised=True))
    first, copy = claim("redelivered", task_id="same"), claim("redelivered", task_id="same")
    other, again = claim("open", task_id="open"), claim("open", task_id="open")
    for one in (first, copy, other, again):
        store.acquire(one)
    store.release(first, success=True)
    store.record_outcome(first, success=True)
    store.release(other, success=True)
    freed = claim("freed")
    store.acquire(freed)
    store.revoke(freed.base, freed.lock)
    fence = f"{freed.base}:fence"
    keys = {*backing.keys()} - {fence}
    assert 6 == len(keys)
    for key in keys:
        assert 0 < backing.lives(key) <= 3600
    backing.wait(3601)
    assert [fence] == backing.keys()


def test_redelivery_keeps_the_expiry(backing: Backing, claim: MakeClaim) -> None:
    """A copy that asks neither shortens nor lengthens the holder's lease."""
    first = claim(ttl=10.0, task_id="same")
    backing.store.acquire(first)
    backing.wait(5)
    backing.store.acquire(claim(ttl=600.0, task_id="same"))
    assert 3 < backing.lives(first.lock) <= 5


def test_all_keys_share_the_tasks_hash_tag(backing: Backing, claim: MakeClaim, base: str) -> None:
    """All keys of a task start with its base, hash tag included, so that one script call suffices on a cluster."""
    store = backing.store
    first, copy = claim(task_id="same", supervised=True), claim(task_id="same")
    store.acquire(first)
    store.acquire(copy)
    names = set(backing.keys())
    store.release(first, success=True)
    names |= set(backing.keys())
    assert {
        f"{base}:{name}" for name in ("lock:d", "fence", "recent", f"attempt:{first.token}", "completed:d:same")
    } == names


def test_clone_shares_the_data(store: LockStore, claim: MakeClaim) -> None:
    """A clone has its own connections and the same locks."""
    clone, one = store.clone(), claim()
    store.acquire(one)
    assert clone.holder(one.lock) is not None
    clone.close()
    assert [RenewResult.RENEWED] == store.renew([one])


def test_eviction_policy_is_told(store: LockStore) -> None:
    """A store tells its eviction policy."""
    assert "noeviction" == store.eviction_policy()


def test_memory_store_forgets(claim: MakeClaim) -> None:
    """What has expired in the store in memory is dropped, though nobody asks for it again."""
    time = [0.0]
    store = MemoryStore(clock=lambda: time[0])
    for number in range(5 * RELEASES_PER_CLEANUP):
        one = claim(str(number), ttl=1.0)
        store.acquire(one)
        store.release(one, success=True)
        time[0] += 0.1
    assert len(store._records) <= RELEASES_PER_CLEANUP + 1
