"""What the scripts record: the locks that exist, counters and the last runs; and an operators' pauses.

That the counters balance is checked after each test of this folder that runs on Redis (`check_balance`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from celery_singleton_lock.max_starts import MaxStarts
from celery_singleton_lock.store.keys import queued_token, record_keys
from celery_singleton_lock.store.protocol import AcquireStatus, RenewResult
from celery_singleton_lock.store.records import BOUNDS, WHOLE_TASK, Lock, RecordStore, RunRecord
from celery_singleton_lock.store.requests import AfterRelease, LeaseSpec, Place
from tests.contract.conftest import RedisBacking
from tests.servers import RedisServer

MakeRequest = Callable[..., LeaseSpec]
DUPLICATE = RunRecord(policy="skip")


@pytest.fixture
def backing(redis_server: RedisServer, base: str) -> Iterator[RedisBacking]:
    """Yield a store that keeps three runs."""
    found = RedisBacking(redis_server.url(), base, history=3)
    yield found
    found.close()


@pytest.fixture
def records(backing: RedisBacking) -> RecordStore:
    return backing.store.records()  # type: ignore[no-any-return]


@pytest.fixture
def counters(records: RecordStore, base: str) -> Callable[[], Mapping[str, int]]:
    """Return a function that returns the counters, without times and histograms."""

    def found() -> Mapping[str, int]:
        records.sweep(base)
        kept = records.counters(base).items()
        return {name: n for name, n in kept if not name.startswith(("last_", "hold", "wait"))}

    return found


@pytest.fixture
def locks(records: RecordStore, base: str) -> Callable[[], list[Lock]]:
    return lambda: list(records.locks(base))


@pytest.fixture
def hold(backing: RedisBacking, lease_request: MakeRequest) -> MakeRequest:
    """Return a function that acquires a lock."""

    def held(digest: str = "d", **more: Any) -> LeaseSpec:
        spec = lease_request(digest, **more)
        assert AcquireStatus.GRANTED is backing.store.acquire(spec).status
        return spec

    return held


def end(backing: RedisBacking, spec: LeaseSpec, outcome: str = "success", error: str = "", **more: Any) -> None:
    spec.record = RunRecord(outcome=outcome, error=error)
    backing.store.release(spec, outcome == "success", **more)


def test_a_run(backing: RedisBacking, records: RecordStore, hold: MakeRequest, base: str, locks: Any) -> None:
    """A lease is listed while it exists; then its run is in the history, with outcome, times and error."""
    spec = hold(task_id="t1")
    (lock,) = locks()
    holder = lock.holder
    assert (spec.lock, "t1", "w1@host", 4711) == (lock.key, holder.task_id, holder.node, holder.pid)
    assert ("running", 0, 0) == (holder.state, lock.duplicates, lock.waiting)
    assert 20 < holder.remaining <= 30
    end(backing, spec, "failure", "ValueError: x")
    assert [] == locks()
    (run,) = records.history(base)
    assert (spec.lock, "t1", "failure", "ValueError: x") == (run.key, run.task_id, run.outcome, run.error)
    assert lock.since == run.started <= run.ended < run.started + 100
    found = records.counters(base)
    assert (1, 1) == (found["acquired"], found["released:failure"])
    assert run.started * 1000 == pytest.approx(found["last_start"], abs=1)
    assert "last_success" not in found
    end(backing, hold())
    assert records.history(base)[0].ended * 1000 == pytest.approx(records.counters(base)["last_success"], abs=1)


@pytest.mark.parametrize("swept", [False, True])
@pytest.mark.parametrize("newcomer", [False, True])
@pytest.mark.parametrize("outcome", ["success", "failure"])
def test_body_that_outlives_its_lease(
    backing: RedisBacking, records: RecordStore, hold: MakeRequest, base: str, swept: bool, newcomer: bool, outcome: str
) -> None:
    """A body that ends after its lease has expired is a run with its own outcome, and one row; a success counts as one."""
    first = hold(ttl=5.0, task_id="t1")
    fence = holder_fence(backing, first)
    backing.wait(10)
    if newcomer:
        hold(token="other", task_id="t2")
    if swept:
        records.sweep(base)
        assert ["expired"] == [run.outcome for run in records.history(base)]
    for _ in range(2):  # its reply may be lost
        first.record = RunRecord(outcome=outcome, error="why", fence=fence, loss="expired")
        backing.store.release(first, outcome == "success")
    records.sweep(base)
    (run,) = records.history(base)
    assert (outcome, "why", "expired", "t1") == (run.outcome, run.error, run.lease, run.task_id)
    found = records.counters(base)
    assert 1 == found["expired"]
    assert (outcome == "success") is ("last_success" in found)
    if outcome == "success":
        assert run.ended * 1000 == pytest.approx(found["last_success"], abs=1)


def holder_fence(backing: RedisBacking, spec: LeaseSpec) -> int:
    found = backing.store.holder(spec.lock)
    assert found is not None
    return found.fence


def test_body_whose_lock_was_revoked(backing: RedisBacking, records: RecordStore, hold: MakeRequest, base: str) -> None:
    """The end of a body takes the place of the revocation of its lease, which it names. Nothing is counted twice."""
    first = hold(task_id="t1")
    fence = holder_fence(backing, first)
    backing.store.revoke(base, first.lock)
    assert [("released_by_operator", "released_by_operator")] == [
        (run.outcome, run.lease) for run in records.history(base)
    ]
    first.record = RunRecord(outcome="success", fence=fence, loss="released_by_operator")
    backing.store.release(first, True)
    assert [("success", "released_by_operator")] == [(run.outcome, run.lease) for run in records.history(base)]
    found = records.counters(base)
    assert (1, 0) == (found["released_by_operator"], found.get("released:success", 0))


def test_late_end_of_a_run_that_nothing_tells_of(
    backing: RedisBacking, records: RecordStore, base: str, lease_request: MakeRequest
) -> None:
    """If the store has lost its data, the end of a body is recorded with the time of its fence."""
    first = lease_request(task_id="t1")
    first.record = RunRecord(outcome="success", fence=1_700_000_000_123_456, loss="expired")
    backing.store.release(first, True)
    (run,) = records.history(base)
    assert (first.lock, "t1", "w1@host", 4711) == (run.key, run.task_id, run.node, run.pid)
    assert (1_700_000_000.123, "success", "expired") == (run.started, run.outcome, run.lease)


def test_capped_lease(backing: RedisBacking, records: RecordStore, hold: MakeRequest, base: str) -> None:
    """A lease that was lost, and is still this body's at its end, is released; its run says why it was lost."""
    first = hold()
    first.record = RunRecord(outcome="success", fence=holder_fence(backing, first), loss="lock_at_most")
    backing.store.release(first, True)
    assert [("success", "lock_at_most")] == [(run.outcome, run.lease) for run in records.history(base)]
    assert 1 == records.counters(base)["released:success"]


def test_end_of_what_had_no_body(
    backing: RedisBacking, records: RecordStore, base: str, lease_request: MakeRequest
) -> None:
    """A reservation that has expired, or an acquire without an answer, is no run."""
    for spec in (lease_request(), lease_request(token=queued_token("t1"), queued=True)):
        backing.store.release(spec, False)
    assert [] == records.history(base)


def test_history_is_bounded(backing: RedisBacking, records: RecordStore, hold: MakeRequest, base: str) -> None:
    """Only the last runs are kept, the newest first."""
    for number in range(5):
        end(backing, hold(f"d{number}", task_id=f"t{number}"))
    assert ["t4", "t3", "t2"] == [run.task_id for run in records.history(base)]
    assert 3 == int(backing.store.command("LLEN", record_keys(base)[2]))


def test_expired_run_is_noted_late(backing: RedisBacking, records: RecordStore, hold: MakeRequest, base: str) -> None:
    """Runs are ordered by their ends, also if that of an expired lease was found later."""
    hold("expires", ttl=5.0, task_id="expired")
    backing.wait(10)
    end(backing, hold(task_id="later"))
    records.sweep(base)
    assert ["later", "expired"] == [run.task_id for run in records.history(base)]


def test_no_history(redis_server: RedisServer, lease_request: MakeRequest, base: str) -> None:
    """With a history of 0, runs are counted and none is kept."""
    backing = RedisBacking(redis_server.url(), base, history=0)
    for ended in ("release", "revoke", "expire"):
        spec = lease_request(ended)
        backing.store.acquire(spec)
        if ended == "release":
            end(backing, spec)
        elif ended == "revoke":
            backing.store.revoke(base, spec.lock)
        else:
            backing.wait(32)
    records = backing.store.records()
    records.sweep(base)
    assert [] == records.history(base)
    assert not backing.store.command("EXISTS", record_keys(base)[2])
    assert 3 == records.counters(base)["acquired"]
    backing.close()


def test_durations(backing: RedisBacking, records: RecordStore, hold: MakeRequest, base: str) -> None:
    """Hold and wait times are counted once each, below the lowest bound that they do not exceed."""
    end(backing, hold(record=RunRecord(waited=61.5)))
    found = records.counters(base)
    assert ({"hold:0.1": 1, "wait:300": 1}, 61500) == (
        {name: n for name, n in found.items() if name.startswith(("hold:", "wait:"))},
        found["wait_ms"],
    )
    assert {"0.1", "300"} <= set(BOUNDS)


def test_duplicates(
    backing: RedisBacking, lease_request: MakeRequest, hold: MakeRequest, counters: Any, locks: Any
) -> None:
    """A duplicate is counted once, for its policy and its holder. A redelivery is none. A new holder has met none."""
    first = hold(task_id="t1")
    for request in (lease_request(record=DUPLICATE), lease_request(), lease_request(task_id="t1", record=DUPLICATE)):
        assert AcquireStatus.REFUSED is backing.store.acquire(request).status
    assert 1 == locks()[0].duplicates
    assert {"acquired": 1, "duplicates:skip": 1, "redelivery_checks": 1} == counters()
    end(backing, first)
    hold()
    assert 0 == locks()[0].duplicates


def test_duplicates_of_a_former_holder(
    backing: RedisBacking, lease_request: MakeRequest, hold: MakeRequest, locks: Any
) -> None:
    """The next in line has met none of the duplicates that its predecessor has met, but those since its reservation."""
    first = hold(task_id="t1")
    joining = Place("a", 0.0, 9, False, 1.5, 40.0, "text")
    assert (
        AcquireStatus.REFUSED
        is backing.store.acquire(lease_request(task_id="t2", place=joining, record=DUPLICATE)).status
    )
    assert 1 == locks()[0].duplicates
    end(backing, first)
    assert AcquireStatus.REFUSED is backing.store.acquire(lease_request(task_id="t3", record=DUPLICATE)).status
    hold(task_id="t2", place=Place("a", 0.5))
    assert [("t2", 1)] == [(lock.holder.task_id, lock.duplicates) for lock in locks()]


def test_reservation(
    backing: RedisBacking,
    lease_request: MakeRequest,
    hold: MakeRequest,
    counters: Any,
    locks: Any,
    records: RecordStore,
    base: str,
) -> None:
    """A reservation is a lease in the state queued, and its start no second one."""
    hold(token=queued_token("t1"), task_id="t1", queued=True, ttl=3600.0)
    assert ["queued"] == [lock.holder.state for lock in locks()]
    assert "last_start" not in records.counters(base)
    backing.store.acquire(lease_request(record=DUPLICATE))
    spec = hold(task_id="t1")
    assert [("running", 1)] == [(lock.holder.state, lock.duplicates) for lock in locks()]
    end(backing, spec, "retry", kept=AfterRelease("queued", 60.0, queued_token("t1")))
    assert ["queued"] == [lock.holder.state for lock in locks()]
    assert {"acquired": 2, "released:retry": 1, "duplicates:skip": 1} == counters()


def test_cooldown(backing: RedisBacking, hold: MakeRequest, counters: Any, locks: Any) -> None:
    """A cooldown is listed until it ends. Its end is no expiry."""
    end(backing, hold(), kept=AfterRelease("cooldown", 60.0))
    assert ["cooldown"] == [lock.holder.state for lock in locks()]
    backing.wait(62)
    assert {"acquired": 1, "released:success": 1} == counters()
    assert [] == locks()


def test_expired(backing: RedisBacking, records: RecordStore, hold: MakeRequest, counters: Any, base: str) -> None:
    """A lease that nobody released is found expired: its run is in the history, with who held it."""
    hold(task_id="t1")
    backing.wait(32)
    assert {"acquired": 1, "expired": 1} == counters()
    (run,) = records.history(base)
    assert ("t1", "w1@host", 4711, "expired") == (run.task_id, run.node, run.pid, run.outcome)
    assert 30 - 32 == pytest.approx(run.ended - run.started, abs=0.1), (
        "it expired after 30 s, and the test moved that by 32"
    )


def test_registry_is_bounded(backing: RedisBacking, hold: MakeRequest, locks: Any) -> None:
    """One in eight grants looks at 16 leases that have expired, so that they do not pile up, whatever lives beside them."""
    hold("long", ttl=3600.0)
    for number in range(20):
        hold(f"gone{number}")
    backing.wait(32)
    for number in range(12):
        hold(f"new{number}")
    assert {"long", *(f"new{number}" for number in range(12))} == {lock.key.rpartition(":")[2] for lock in locks()}


def test_renewal_keeps_it_listed(backing: RedisBacking, hold: MakeRequest, counters: Any, locks: Any) -> None:
    """A renewed lease is listed with its new expiry, in a slot, too."""
    one, slot = hold(), hold("s", limit=2)
    slot.use_slot(0)
    backing.wait(20)
    assert [RenewResult.RENEWED] * 2 == backing.store.renew([one, slot])
    backing.wait(20)
    assert {"acquired": 2} == counters()
    assert all(0 < lock.holder.remaining <= 10 for lock in locks())


def test_reacquired(backing: RedisBacking, hold: MakeRequest, counters: Any, locks: Any) -> None:
    """A lease that is reacquired is one more; the one before it expires."""
    spec = hold()
    backing.lose(spec.lock)
    backing.store.reacquire(spec, 7)
    backing.wait(20)
    backing.store.renew([spec])
    assert [False, True] == sorted(lock.missing for lock in locks())
    backing.wait(15)
    assert {"acquired": 1, "reacquired": 1, "expired": 1} == counters()
    assert [7] == [lock.holder.fence for lock in locks()]


def test_reacquired_in_one_millisecond(backing: RedisBacking, lease_request: MakeRequest, counters: Any) -> None:
    """Leases of one lock that begin in the same millisecond are counted one by one, though they look the same."""
    spec = lease_request()
    fence = backing.store.acquire(spec).fence
    for _ in range(200):
        backing.lose(spec.lock)
        backing.store.reacquire(spec, fence)
    backing.wait(32)
    assert {"acquired": 1, "reacquired": 200, "expired": 201} == counters()


@pytest.mark.parametrize("limit", [0, 2])
def test_missing_lock(backing: RedisBacking, hold: MakeRequest, locks: Any, limit: int) -> None:
    """A lease whose key is not in the store does not exist, also before its time is over, and after another one has the lock."""
    spec = hold(limit=limit)
    assert [True] == [lock.exists for lock in locks()]
    backing.lose(spec.lock)
    assert [(False, True)] == [(lock.exists, lock.missing) for lock in locks()]
    other = hold(limit=limit, task_id="other")
    assert [other.task_id] == [lock.holder.task_id for lock in locks() if lock.exists]


def test_revoked(backing: RedisBacking, records: RecordStore, hold: MakeRequest, counters: Any, base: str) -> None:
    """A revoked lease is counted as that, and the release of its former holder is not."""
    spec = hold()
    backing.store.revoke(base, spec.lock)
    end(backing, spec)
    assert {"acquired": 1, "released_by_operator": 1} == counters()
    assert ["released_by_operator"] == [run.outcome for run in records.history(base)]


def test_first_call_that_waits_for_quiet(backing: RedisBacking, lease_request: MakeRequest, counters: Any) -> None:
    """The first call under a quiet time has found no lock held, so it is no duplicate; the second one is."""
    quiet = {"place": Place(quiet=10.0, max_quiet=25.0), "record": RunRecord("run_once_more")}
    joins = {"place": Place("ticket", 0.0, 1, False, 1.5, 60.0, "message", quiet=10.0, max_quiet=25.0)}
    assert AcquireStatus.REFUSED is backing.store.acquire(lease_request(task_id="one", **quiet)).status
    assert AcquireStatus.REFUSED is backing.store.acquire(lease_request(task_id="one", **joins)).status
    assert {} == counters()
    assert AcquireStatus.REFUSED is backing.store.acquire(lease_request(task_id="two", **quiet)).status
    assert {"duplicates:run_once_more": 1} == counters()


def test_refused_start(backing: RedisBacking, lease_request: MakeRequest, hold: MakeRequest, counters: Any) -> None:
    """A start that is refused ends the reservation of its message."""
    more: Any = {"max_starts": MaxStarts(1)}
    hold(**more)
    backing.wait(32)
    hold(token=queued_token("t1"), task_id="t1", queued=True)
    assert AcquireStatus.TOO_MANY_STARTS is backing.store.acquire(lease_request(task_id="t1", **more)).status
    assert {"acquired": 2, "expired": 1, "starts_refused": 1, "released:other": 1} == counters()


def test_replaced_reservation(backing: RedisBacking, hold: MakeRequest, counters: Any) -> None:
    """A reservation that another message replaces has ended."""
    hold(token=queued_token("t1"), task_id="t1", queued=True)
    hold(task_id="t2", place=Place("ticket", 1.0, 1, True, 2.0, 60.0, "", stop=True))
    assert {"acquired": 2, "released:other": 1} == counters()


def test_line(
    backing: RedisBacking,
    lease_request: MakeRequest,
    hold: MakeRequest,
    counters: Any,
    locks: Any,
    records: RecordStore,
) -> None:
    """Messages that wait in line are counted with the lock, and how long they waited, once they start."""
    first = hold(place=Place())
    joins = lease_request(task_id="t2", place=Place("ticket", 1.0, 5, False, 2.0, 60.0, ""))
    assert AcquireStatus.REFUSED is backing.store.acquire(joins).status
    assert 1 == locks()[0].waiting
    end(backing, first)
    end(backing, hold(task_id="t2", place=Place("ticket", 1.0)))
    assert {"acquired": 2, "released:success": 2} == counters()
    assert 1 == records.counters(first.base)["wait:0.1"]


def test_counts_of_a_process(records: RecordStore, base: str, counters: Any) -> None:
    """What a process has counted is added to the counters."""
    records.count(base, {"lost:expired": 2, "renewals": 3})
    records.count(base, {"lost:expired": 1})
    assert {"lost:expired": 3, "renewals": 3} == counters()


# -- an operators' pauses -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["d", WHOLE_TASK])
def test_operators_hold(
    backing: RedisBacking, records: RecordStore, lease_request: MakeRequest, hold: MakeRequest, base: str, name: str
) -> None:
    """Nobody starts during a pause, of one lock key or of the task; it ends by itself, or when it is lifted."""
    records.pause(base, name, 60.0)
    result = backing.store.acquire(lease_request(record=DUPLICATE))
    assert result.holder is not None
    assert (AcquireStatus.REFUSED, "paused", "") == (result.status, result.holder.state, result.holder.task_id)
    assert 50 < result.holder.remaining <= 60
    other = backing.store.acquire(lease_request("other"))
    assert (AcquireStatus.REFUSED if name == WHOLE_TASK else AcquireStatus.GRANTED) is other.status
    assert f"{base}:lock:{name}" in {lock.key for lock in records.locks(base)}
    records.pause(base, "short", 0.0)
    assert records.resume(base, name)
    assert not records.resume(base, name)
    assert not records.resume(base, "short"), "it is over"
    hold()


def test_running_body_goes_on(backing: RedisBacking, records: RecordStore, hold: MakeRequest, base: str) -> None:
    """A body that runs keeps its lock during a pause, and asking again is granted again."""
    spec = hold()
    records.pause(base, WHOLE_TASK, 60.0)
    assert AcquireStatus.GRANTED is backing.store.acquire(spec).status
    assert [RenewResult.RENEWED] == backing.store.renew([spec])
    end(backing, spec)


def test_reservation_in_a_pause(
    backing: RedisBacking, records: RecordStore, lease_request: MakeRequest, hold: MakeRequest, base: str, counters: Any
) -> None:
    """A message whose delivery meets a pause has lost its reservation, which would outlive it."""
    hold(token=queued_token("t1"), task_id="t1", queued=True, ttl=3600.0)
    records.pause(base, WHOLE_TASK, 60.0)
    assert AcquireStatus.REFUSED is backing.store.acquire(lease_request(task_id="t1")).status
    records.resume(base, WHOLE_TASK)
    hold(task_id="t2")
    assert {"acquired": 2, "released:other": 1} == counters()


@pytest.mark.parametrize("limit", [0, 2])
def test_line_in_a_pause(
    backing: RedisBacking, records: RecordStore, lease_request: MakeRequest, hold: MakeRequest, base: str, limit: int
) -> None:
    """A message joins the line during a pause, starts after it, and no key without an expiry is left."""
    records.pause(base, WHOLE_TASK, 60.0)
    place = Place("ticket", 1.0, 5, False, 2.0, 60.0, "message")
    joined = backing.store.acquire(lease_request(task_id="t1", place=place, limit=limit))
    assert (AcquireStatus.REFUSED, True, 1) == (joined.status, joined.is_waiting, joined.waiting)
    keys = [key for key in backing.keys() if not key.endswith(":fence")]  # noqa: SIM118 - it is no dict
    assert all(backing.lives(key) > 0 for key in keys)
    assert AcquireStatus.REFUSED is backing.store.acquire(lease_request(place=Place(), limit=limit)).status
    records.resume(base, WHOLE_TASK)
    hold(task_id="t1", place=Place("ticket", 1.0), limit=limit)
