"""Locks with a limit: up to N holders at once, each in a slot of its own."""

from __future__ import annotations

import os
import random
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from redis import Redis

from celery_singleton_lock.max_starts import MaxStarts
from celery_singleton_lock.store.keys import queued_token
from celery_singleton_lock.store.memory import MemoryStore
from celery_singleton_lock.store.protocol import AcquireResult, AcquireStatus, LockStore, RenewResult
from celery_singleton_lock.store.redis import RedisStore, connector
from celery_singleton_lock.store.requests import LeaseSpec
from tests.contract.conftest import Backing
from tests.contract.test_stores import MakeRequest, known, left
from tests.servers import RedisServer


def take(store: LockStore, one: LeaseSpec) -> LeaseSpec:
    """Acquire a slot and note it in the request, as the process of a body does."""
    result = store.acquire(one)
    assert result.status is AcquireStatus.GRANTED
    one.use_slot(result.slot)
    return one


def refused(store: LockStore, one: LeaseSpec) -> str:
    """Check that a request is not granted; return the task id of the holder in the answer."""
    result = store.acquire(one)
    assert (AcquireStatus.REFUSED, True) == (result.status, result.holder is not None)
    return result.holder.task_id if result.holder else ""


@pytest.fixture
def fill(store: LockStore, lease_request: MakeRequest) -> Callable[..., list[LeaseSpec]]:
    """Return a function that has slots granted until a limit is reached."""

    def make(limit: int, **more: Any) -> list[LeaseSpec]:
        return [take(store, lease_request(limit=limit, **more)) for _ in range(limit)]

    return make


Fill = Callable[..., list[LeaseSpec]]


# -- acquire -----------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1, 3, 20])
def test_up_to_the_limit(store: LockStore, lease_request: MakeRequest, fill: Fill, limit: int) -> None:
    """N requests are granted, each in another slot; the next one is refused and learns of the oldest holder."""
    holders = fill(limit)
    assert limit == len({one.lock for one in holders})
    assert holders[0].task_id == refused(store, lease_request(limit=limit))
    store.release(holders[-1], success=True)
    assert holders[-1].lock == take(store, lease_request(limit=limit)).lock


def test_first_slot_is_the_lock_of_a_task_without_a_limit(store: LockStore, lease_request: MakeRequest) -> None:
    """During a rolling deploy from 1 to N, old and new workers exclude each other: slot 0 is the plain lock."""
    plain = lease_request()
    assert store.acquire(plain).status is AcquireStatus.GRANTED
    limited = take(store, lease_request(limit=2))
    assert limited.lock == f"{plain.lock}:1"
    assert plain.task_id == refused(store, lease_request(limit=2))
    store.release(plain, success=True)
    assert plain.lock == take(store, lease_request(limit=2)).lock
    assert store.acquire(lease_request()).status is AcquireStatus.REFUSED


def test_the_oldest_holder_is_named(store: LockStore, lease_request: MakeRequest, fill: Fill) -> None:
    """The answer names the oldest lease, whatever its slot; `holder` does the same, and returns None if all slots are free."""
    first, second, third = fill(3)
    store.release(first, success=True)
    newest = take(store, lease_request(limit=3))
    assert newest.lock == first.lock
    for oldest in (second, third, newest):
        holder = store.holder(newest.slot_lock(0), newest.slots)
        assert holder is not None
        assert oldest.task_id == holder.task_id
        if oldest is second:
            assert second.task_id == refused(store, lease_request(limit=3))
        store.release(oldest, success=True)
    assert store.holder(newest.slot_lock(0), newest.slots) is None


def test_acquire_is_idempotent_on_the_token(backing: Backing, lease_request: MakeRequest, fill: Fill) -> None:
    """A request that is sent twice is granted the same slot with the same fence, also when the limit is reached."""
    store, (first, *_) = backing.store, fill(2, ttl=20.0)
    asked = lease_request(limit=3, ttl=20.0)
    before = store.acquire(asked)
    store.release(first, success=True)  # slot 0 is free now
    assert refused(store, lease_request(limit=1))
    backing.wait(10)
    for _ in range(2):
        again = store.acquire(asked)
        assert (AcquireStatus.GRANTED, 2, before.fence) == (again.status, again.slot, again.fence)
        asked.use_slot(again.slot)
    assert backing.lives(asked.slot_lock(2)) > 15


def test_fences_grow_over_the_slots(store: LockStore, lease_request: MakeRequest) -> None:
    """Each grant has a higher fence than the one before, whatever its slot; the store keeps them to find the oldest."""
    fences = [store.acquire(lease_request(limit=4)).fence for _ in range(4)]
    assert sorted(set(fences)) == fences


def test_expired_slots_are_free(backing: Backing, lease_request: MakeRequest, fill: Fill) -> None:
    """A slot that was not renewed is free; its former holder neither renews nor releases it."""
    store, (first, second) = backing.store, fill(2, ttl=5.0)
    backing.wait(4)
    assert [RenewResult.RENEWED] == store.renew([first])
    backing.wait(1.1)
    newcomer = take(store, lease_request(limit=2))
    assert second.lock == newcomer.lock
    assert [RenewResult.RENEWED, RenewResult.NOT_OWNER] == store.renew([first, second])
    store.release(second, success=True)
    assert [RenewResult.RENEWED] == store.renew([newcomer])


def test_locks_have_their_own_slots(store: LockStore, lease_request: MakeRequest, fill: Fill) -> None:
    """The holders of another lock do not count."""
    fill(2, digest="a")
    fill(2, digest="b")
    refused(store, lease_request("a", limit=2))


# -- a limit that changes ----------------------------------------------------------------------


def test_growth(store: LockStore, lease_request: MakeRequest, fill: Fill) -> None:
    """A newcomer with a higher limit gets one more slot; the newcomer with the lower limit is refused."""
    fill(2)
    take(store, lease_request(limit=3))
    refused(store, lease_request(limit=2))
    refused(store, lease_request(limit=3))
    assert f"{lease_request().lock}:3" == take(store, lease_request(limit=4)).lock


def test_shrink(backing: Backing, lease_request: MakeRequest, fill: Fill) -> None:
    """A newcomer counts the holders of slots above its own limit, also long after they were granted."""
    store, holders = backing.store, fill(5, ttl=6.0)
    for _ in range(4):
        backing.wait(4)
        assert [RenewResult.RENEWED] * 5 == store.renew(holders)
    for one in holders[:2]:
        store.release(one, success=True)
    assert holders[2].task_id == refused(store, lease_request(limit=3))  # slots 2, 3 and 4 are held
    store.release(holders[3], success=True)
    newcomer = take(store, lease_request(limit=3))
    assert newcomer.slot_lock(0) == newcomer.lock
    refused(store, lease_request(limit=3))


def test_shrink_to_one(store: LockStore, lease_request: MakeRequest, fill: Fill) -> None:
    """A limit of 1 that was once higher waits for all holders."""
    first, second = fill(2)
    store.release(first, success=True)
    assert second.task_id == refused(store, lease_request(limit=1))
    store.release(second, success=True)
    take(store, lease_request(limit=1))


def test_slots_are_remembered_by_a_supervisor_alone(backing: Backing, lease_request: MakeRequest, fill: Fill) -> None:
    """The supervisor, which knows tokens alone, keeps slots above a lower limit counted."""
    store, (_, second) = backing.store, fill(2, ttl=6.0, supervised=True)
    supervisor = known(second)
    supervisor.limit = 1
    for _ in range(4):
        backing.wait(4)
        assert [RenewResult.RENEWED] == store.renew([supervisor])
    assert second.task_id == refused(store, lease_request(limit=1))


def test_remembered_slots_are_bounded(backing: Backing, lease_request: MakeRequest, fill: Fill) -> None:
    """Slots of an earlier, higher limit are forgotten once they are free, and what is left expires."""
    store = backing.store
    for one in fill(9):
        store.release(one, success=True)
    for _ in range(2):
        busy = take(store, lease_request(limit=2))
    if not isinstance(store, MemoryStore):  # which has no such set
        assert {"1"} == backing._redis.smembers(busy.slots)  # type: ignore[attr-defined]
    backing.wait(31)
    assert [] == left(backing)


def test_lost_memory_of_slots(backing: Backing, lease_request: MakeRequest, fill: Fill) -> None:
    """Where the store lost which slots are used, held ones below the limit are found all the same."""
    store, holders = backing.store, fill(3)
    for one in (holders[0], holders[2]):
        store.release(one, success=True)
    if not isinstance(store, MemoryStore):  # which has no such set
        backing.lose(holders[0].slots)
    assert [holders[0].lock, holders[2].lock] == [take(store, lease_request(limit=3)).lock for _ in range(2)]
    refused(store, lease_request(limit=3))


# -- starts ------------------------------------------------------------------------------------


def test_starts_that_run_are_no_crashes(backing: Backing, lease_request: MakeRequest, fill: Fill) -> None:
    """Only starts whose lease is gone count as crashed, however many run; a start that is sent twice is granted twice."""
    store, limit = backing.store, MaxStarts(2)
    holders = fill(4, max_starts=limit, ttl=20.0)
    for one in (*holders, *holders):
        assert store.acquire(one).status is AcquireStatus.GRANTED
    store.release(holders[0], success=False)
    backing.wait(15)
    store.renew(holders[1:3])
    backing.wait(10)  # the last one has crashed
    second = take(store, lease_request(limit=4, max_starts=limit, supervised=True))
    take(store, lease_request(limit=4, max_starts=limit))
    store.release(known(second), success=False)  # of a dead child
    assert store.acquire(lease_request(limit=4, max_starts=limit)).status is AcquireStatus.TOO_MANY_STARTS
    store.release(holders[1], success=True)
    assert store.acquire(lease_request(limit=4, max_starts=limit)).status is AcquireStatus.TOO_MANY_STARTS


def test_unsuccessful_starts_include_those_that_run(store: LockStore, lease_request: MakeRequest, fill: Fill) -> None:
    """Starts since the last success count while they run; a success forgets all of them."""
    limit = MaxStarts(2, count="unsuccessful")
    holders = fill(2, max_starts=limit)
    assert store.acquire(lease_request(limit=4, max_starts=limit)).status is AcquireStatus.TOO_MANY_STARTS
    store.release(holders[0], success=True)
    take(store, lease_request(limit=4, max_starts=limit))


def test_refused_start_frees_its_reserved_slot(backing: Backing, lease_request: MakeRequest) -> None:
    """A message whose start is refused gives up the slot that was reserved for it."""
    store, limit = backing.store, MaxStarts(1)
    take(store, lease_request(limit=3))
    take(store, lease_request(limit=3, max_starts=limit, ttl=5.0))
    reserved = lease_request(limit=3, token=queued_token("m"), task_id="m", queued=True, ttl=100.0)
    assert store.acquire(reserved).slot == 2
    backing.wait(6)
    one = lease_request(limit=3, max_starts=limit, task_id="m")
    assert store.acquire(one).status is AcquireStatus.TOO_MANY_STARTS
    assert store.holder(reserved.slot_lock(2)) is None


# -- leases of slots ---------------------------------------------------------------------------


@pytest.mark.parametrize("by", [lambda one: one, known], ids=["body", "supervisor"])
def test_renew_and_release(
    backing: Backing, lease_request: MakeRequest, fill: Fill, by: Callable[[LeaseSpec], LeaseSpec]
) -> None:
    """The process of the body and the supervisor each renew and release one slot, and no other. A renewal tells which."""
    store, holders = backing.store, fill(3, ttl=6.0, supervised=True)
    for _ in range(3):
        backing.wait(4)
        assert [RenewResult.RENEWED] * 3 == store.renew(leases := [by(one) for one in holders])
        assert [one.lock for one in holders] == [one.lock for one in leases]
    store.release(by(holders[1]), success=False)
    assert holders[1].lock == take(store, lease_request(limit=3)).lock
    assert [RenewResult.RENEWED] * 2 == store.renew([holders[0], holders[2]])


def test_batch_with_and_without_a_limit(store: LockStore, lease_request: MakeRequest, fill: Fill) -> None:
    """One call renews leases of slots and plain ones, and answers in order."""
    plain, missing, slots = lease_request("plain"), lease_request("missing"), fill(2)
    store.acquire(plain)
    expected = [RenewResult.RENEWED, RenewResult.MISSING, RenewResult.RENEWED, RenewResult.RENEWED]
    assert expected == store.renew([plain, missing, *slots])
    assert RenewResult.MISSING is store.renew([lease_request("missing", limit=2)])[0]


def test_lost_reply(backing: Backing, lease_request: MakeRequest, fill: Fill) -> None:
    """A request whose reply was lost does not know its slot; it renews and releases it by its token."""
    store = backing.store
    fill(1)
    asked = lease_request(limit=3)
    assert store.acquire(asked).slot == 1
    assert [RenewResult.RENEWED] == store.renew([asked])
    store.release(asked, success=False)
    store.release(asked, success=False)
    assert asked.slot_lock(1) == take(store, lease_request(limit=3)).lock


def test_lost_reply_of_a_refusal(store: LockStore, lease_request: MakeRequest, fill: Fill) -> None:
    """The release of a request that was refused releases nobody's slot."""
    holders, asked = fill(2), lease_request(limit=2)
    refused(store, asked)
    store.release(asked, success=False)
    assert [RenewResult.RENEWED] * 2 == store.renew(holders)
    assert [RenewResult.MISSING] == store.renew([asked])


def test_redelivery_finds_its_first_delivery(store: LockStore, lease_request: MakeRequest, fill: Fill) -> None:
    """A redelivery is refused though slots are free, names its first delivery, and learns of its success."""
    fill(2)
    first = take(store, lease_request(limit=5, task_id="same"))
    again = lease_request(limit=5, task_id="same", redelivered=True)
    assert "same" == refused(store, again)
    assert store.release(first, success=True).redelivery_waits
    assert "same" == refused(store, again)
    store.record_outcome(first, success=True)
    assert store.acquire(again).status is AcquireStatus.COMPLETED


def test_redelivery_after_a_failure_runs(store: LockStore, lease_request: MakeRequest, fill: Fill) -> None:
    """After a release without success the redelivery is granted a slot."""
    fill(1)
    first = take(store, lease_request(limit=2, task_id="same"))
    again = lease_request(limit=2, task_id="same")
    assert "same" == refused(store, again)
    assert not store.release(first, success=False).redelivery_waits
    take(store, again)


def test_reacquired_after_a_loss_of_data(backing: Backing, lease_request: MakeRequest, fill: Fill) -> None:
    """Each holder reacquires its own slot; it is named, renewed and counted as before."""
    store, holders = backing.store, fill(3, ttl=20.0)
    fences = [store.acquire(one).fence for one in holders]
    backing.lose()
    assert [RenewResult.MISSING] * 3 == store.renew(holders)
    for one, fence in zip(holders, fences, strict=True):
        assert [(RenewResult.RENEWED, True), (RenewResult.RENEWED, False)] == [
            store.reacquire(one, fence),
            store.reacquire(one, fence),
        ]
    assert [RenewResult.RENEWED] * 3 == store.renew(holders)
    assert holders[0].task_id == refused(store, lease_request(limit=3))
    assert holders[1].task_id == (store.release(holders[0], success=True), refused(store, lease_request(limit=2)))[1]


def test_reacquired_slot_is_known_at_once(backing: Backing, lease_request: MakeRequest, fill: Fill) -> None:
    """A slot that was reacquired is found, before its next renewal, by who looks for holders or allows fewer of them."""
    store, holders = backing.store, fill(2)
    fence = store.acquire(holders[1]).fence
    backing.lose()
    assert (RenewResult.RENEWED, True) == store.reacquire(holders[1], fence)
    found = store.holder(holders[1].slot_lock(0), holders[1].slots)
    assert found is not None
    assert holders[1].task_id == found.task_id == refused(store, lease_request(limit=1))


def test_slot_that_a_newcomer_has_by_now(backing: Backing, lease_request: MakeRequest, fill: Fill) -> None:
    """After a loss of data a holder does not reacquire a slot that a newcomer has or had; the others are untouched."""
    store, holders = backing.store, fill(3)
    fences = [store.acquire(one).fence for one in holders]
    backing.lose()
    backing.wait(0.001)
    newcomer, other = (take(store, lease_request(limit=3)) for _ in range(2))
    store.release(other, success=True)
    answers = [store.reacquire(one, fence) for one, fence in zip(holders, fences, strict=True)]
    assert [(RenewResult.NOT_OWNER, False), (RenewResult.LOST, True), (RenewResult.RENEWED, True)] == answers
    assert [RenewResult.RENEWED] == store.renew([newcomer])


def test_slot_that_a_newcomer_had_for_a_while(backing: Backing, lease_request: MakeRequest, fill: Fill) -> None:
    """A holder that was stopped learns that a newcomer had its slot, as long as others are granted theirs, also after a TTL."""
    store, holders = backing.store, fill(2)
    fence = store.acquire(holders[1]).fence
    backing.wait(31)
    fill(2)
    backing.wait(20)
    take(store, lease_request(limit=3))
    backing.wait(11)
    assert (RenewResult.LOST, True) == store.reacquire(holders[1], fence)


def test_two_deliveries_that_both_have_a_slot(backing: Backing, lease_request: MakeRequest, fill: Fill) -> None:
    """If a loss of data gave two deliveries of one message a slot each, each finds its own again; a third one finds the first."""
    store = backing.store
    fill(1)
    first, again = take(store, lease_request(limit=3, task_id="same")), lease_request(limit=3, task_id="same")
    fence = store.acquire(first).fence
    backing.lose()
    take(store, again)
    assert (RenewResult.RENEWED, True) == store.reacquire(first, fence)
    for one, slot in ((again, 0), (first, 1)):
        result = store.acquire(one)
        assert (AcquireStatus.GRANTED, slot) == (result.status, result.slot)
    found = store.acquire(lease_request(limit=3, task_id="same")).holder
    assert found is not None
    assert store.acquire(again).fence == found.fence


def test_revoke(store: LockStore, lease_request: MakeRequest, fill: Fill) -> None:
    """`revoke` takes the slot of the oldest holder, one at a time; the holder finds it revoked and does not reacquire it."""
    first, *others = fill(3)
    store.release(first, success=True)
    newest = take(store, lease_request(limit=3))
    for oldest in (*others, newest):
        holder = store.revoke(oldest.base, oldest.slot_lock(0), oldest.slots)
        assert holder is not None
        assert oldest.task_id == holder.task_id
        assert [RenewResult.REVOKED] == store.renew([oldest])
        assert (RenewResult.REVOKED, False) == store.reacquire(oldest, 0)
        assert store.acquire(oldest).status is AcquireStatus.REVOKED
    assert store.revoke(newest.base, newest.slot_lock(0), newest.slots) is None


# -- keys --------------------------------------------------------------------------------------


def test_every_key_expires(backing: Backing, fill: Fill) -> None:
    """The keys of slots share the task's hash tag, and all of them expire, except the fence."""
    holders = fill(3, ttl=20.0)
    first = holders[0]
    names = {f"{first.base}:{name}" for name in ("fence", "recent", "slots:d", "lock:d", "lock:d:1", "lock:d:2")}
    names |= {one.attempt for one in holders}
    if isinstance(backing.store, MemoryStore):
        names.remove(first.slots)  # it looks at all its records instead
    assert names == set(backing.keys())
    for key in names - {f"{first.base}:fence"}:
        assert 15 < backing.lives(key) <= 20


def test_no_trace(backing: Backing, lease_request: MakeRequest) -> None:
    """Locks whose holders came one by one leave nothing behind."""
    for number in range(50):
        backing.store.release(take(backing.store, lease_request(str(number), limit=3)), success=True)
    assert [] == left(backing)


def test_set_of_slots_outlives_the_longest_lease(backing: Backing, lease_request: MakeRequest) -> None:
    """A lease with a short TTL does not shorten how long the slots of others are remembered."""
    store = backing.store
    first, second = (take(store, lease_request(limit=3, ttl=60.0)) for _ in range(2))
    short = take(store, lease_request(limit=3, ttl=2.0))
    store.renew([short])
    backing.wait(10)
    store.release(first, success=True)
    assert second.task_id == refused(store, lease_request(limit=1))


# -- many at once ------------------------------------------------------------------------------

SECONDS = 1.5
#: How often fewer than N may hold a lock at once, as the threads are slow.
TRIES = 5
LIMIT = 3


def play(store: LockStore, base: str, enter: Callable[[], int], leave: Callable[[], object]) -> int:
    """Acquire slots for some time, and return the highest number of holders that were in their sections at once.

    Arguments:
        enter: enters the section and returns how many are in it.

    Raises:
        AssertionError: there were more than the limit allows, or a lease ended early.
    """
    until, most = time.monotonic() + SECONDS, 0
    while time.monotonic() < until:
        own = random.choice((LIMIT, LIMIT, LIMIT - 1))
        one = LeaseSpec(
            base, "d", secrets.token_hex(8), 100.0, secrets.token_hex(4), supervised=random.random() < 0.5, limit=own
        )
        result: AcquireResult = store.acquire(one)
        if result.status is not AcquireStatus.GRANTED:
            assert result.holder is not None
            assert store.renew([one]) == [RenewResult.MISSING]
            continue
        inside = enter()
        assert inside <= LIMIT, f"{inside} at once"
        most = max(most, inside)
        if random.random() < 0.8:  # else as after a lost reply
            one.use_slot(result.slot)
        assert [RenewResult.RENEWED] == store.renew([one])
        time.sleep(random.random() * 0.002)
        leave()
        store.release(one, success=True)
        store.release(one, success=True)
    return most


def test_threads_in_memory() -> None:
    """Never more than N threads of one process hold a lock, and N of them do."""
    store, inside, mutex = MemoryStore(), [0], threading.Lock()

    def enter() -> int:
        with mutex:
            inside[0] += 1
            return inside[0]

    def leave() -> None:
        with mutex:
            inside[0] -= 1

    assert LIMIT in (hammer(8, lambda: play(store, "b:{t}", enter, leave)) for _ in range(TRIES))


def hammer(threads: int, work: Callable[[], int]) -> int:
    """Do the work in several threads, check that all succeed, and return the highest answer."""
    answers: list[int] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            answers.append(work())
        except BaseException as error:
            failures.append(error)

    running = [threading.Thread(target=run) for _ in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert [] == failures
    assert threads == len(answers)
    return max(answers)


def on_server(url: str, base: str, threads: int) -> int:
    """Compete for slots on a server, which also counts who is in a section."""
    store = RedisStore(connector(url, {}), 60.0, 3)
    redis: Any = Redis.from_url(url, decode_responses=True)
    counter = f"{base}:inside"
    return hammer(threads, lambda: play(store, base, lambda: int(redis.incr(counter)), lambda: redis.decr(counter)))


def test_threads_and_processes_on_redis(redis_server: RedisServer) -> None:
    """Never more than N threads of several processes hold a lock, and N of them do; no lock is left behind."""
    url, base = redis_server.url(), f"hammer:{{{secrets.token_hex(6)}}}"
    children = []
    for _ in range(3):
        pid = os.fork()
        if pid:
            children.append(pid)
            continue
        code = 1
        try:
            on_server(url, base, threads=3)
            code = 0
        except BaseException as error:
            print(repr(error), flush=True)
        finally:
            os._exit(code)
    try:
        assert LIMIT in (on_server(url, base, threads=3) for _ in range(TRIES))
    finally:
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    assert [0, 0, 0] == codes
    with Redis.from_url(url, decode_responses=True) as redis:
        names = {key.removeprefix(base) for key in redis.scan_iter(match=f"{base}*", count=1000)}
    assert names <= {":fence", ":recent", ":inside", ":slots:d"}
