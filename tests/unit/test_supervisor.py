"""The main process's watch over its children, with real child processes and a store in memory."""

from __future__ import annotations

import logging
import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from celery_singleton_lock.config.options import LONGEST
from celery_singleton_lock.errors import StoreError, StoreUnavailable
from celery_singleton_lock.renewal.loop import BackgroundLoop
from celery_singleton_lock.renewal.renewer import Renewer
from celery_singleton_lock.store.protocol import AcquireStatus, Released
from celery_singleton_lock.store.requests import LeaseSpec
from celery_singleton_lock.worker.supervisor import Supervisor
from tests.servers import until
from tests.unit.fake_store import FakeStore


def tokens_of(store: FakeStore) -> list[list[str]]:
    """Return the tokens of each renewal."""
    return [one.tokens for one in store.renewals]


@pytest.fixture
def store() -> FakeStore:
    return FakeStore()


@pytest.fixture
def errors() -> list[BaseException]:
    return []


@pytest.fixture
def supervisor(store: FakeStore, errors: list[BaseException]) -> Iterator[Supervisor]:
    made = Supervisor(store, errors.append)
    yield made
    made._loop.end()
    made._renewer.end()


@pytest.fixture
def fork() -> Iterator[Callable[[], int]]:
    """Starts child processes that do nothing, and ends them at last."""
    pids = []

    def start() -> int:
        pid = os.fork()
        if not pid:
            try:
                signal.pause()
            finally:
                os._exit(0)
        pids.append(pid)
        return pid

    yield start
    for pid in pids:
        bury(pid)


def bury(pid: int) -> None:
    """Kill a child and reap it, where that has not been done yet."""
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError):
        pass


def lease_request(token: str, ttl: float = 600.0) -> LeaseSpec:
    """What a child acquires; the supervisor gets it without the digest."""
    return LeaseSpec("b:{t}", f"digest-{token}", token, ttl, f"task-{token}", "node", 1, supervised=True)


class Delivery:
    """What the main process knows of a delivery."""

    def __init__(self, is_running: bool) -> None:
        self.is_running = is_running
        self.dead: list[int] = []

    def is_unfinished(self) -> bool:
        return self.is_running

    def publish_next(self, message: str) -> None: ...

    def log_death(self, pid: int) -> None:
        self.dead.append(pid)


def accept(
    supervisor: Supervisor, pid: int, request: LeaseSpec, is_running: bool = True, at_most: float | None = None
) -> Delivery:
    """Tell the supervisor that a child has begun this delivery."""
    supervisor.accepted(pid, replace(request, digest=""), delivery := Delivery(is_running), at_most)
    return delivery


def held(store: FakeStore, whole: LeaseSpec) -> bool:
    return store.holder(whole.lock) is not None


def test_lease_of_a_killed_child_is_freed(supervisor: Supervisor, store: FakeStore, fork: Callable[[], int]) -> None:
    """A child that is killed loses its lease at once, long before its TTL."""
    pid, one = fork(), lease_request("one")
    store.acquire(one)
    accept(supervisor, pid, one)
    assert held(store, one)
    os.kill(pid, signal.SIGKILL)
    until(lambda: not held(store, one))


def test_release_for_a_dead_child_is_logged(
    supervisor: Supervisor, store: FakeStore, fork: Callable[[], int], caplog: pytest.LogCaptureFixture
) -> None:
    """A task whose lock is released for a dead child is logged; one that had finished before, at DEBUG."""
    caplog.set_level(logging.DEBUG, "celery_singleton_lock")
    known, pids = [], []
    for token, is_running in (("finished", False), ("running", True)):
        pids.append(fork())
        store.acquire(one := lease_request(token))
        known.append(accept(supervisor, pids[-1], one, is_running))
        os.kill(pids[-1], signal.SIGKILL)
        until(lambda one=one: not held(store, one))
    until(lambda: known[1].dead == [pids[1]])
    assert [] == known[0].dead
    (line,) = [record.getMessage() for record in caplog.records if "has ended" in record.getMessage()]
    assert str(pids[0]) in line


def test_lease_of_the_longest_ttl(supervisor: Supervisor, store: FakeStore, fork: Callable[[], int]) -> None:
    """However long a lease may live, the watch goes on, and the lease goes with the child."""
    pid, one = fork(), lease_request("one", ttl=LONGEST)
    store.acquire(one)
    accept(supervisor, pid, one)
    os.kill(pid, signal.SIGKILL)
    until(lambda: not held(store, one))


def test_lease_of_each_killed_child_is_freed(supervisor: Supervisor, store: FakeStore, fork: Callable[[], int]) -> None:
    """Of several children, each that is killed loses its lease, however long the TTLs are."""
    whole = [lease_request(str(number), ttl=300.0) for number in range(3)]
    pids = []
    for one in whole:
        pids.append(fork())
        store.acquire(one)
        accept(supervisor, pids[-1], one)
        time.sleep(0.05)  # the thread is now in its system call, as it is between two tasks of a worker
    for pid, one in reversed(list(zip(pids, whole, strict=True))):
        os.kill(pid, signal.SIGKILL)
        until(lambda one=one: not held(store, one), f"lease {one.token} of a killed child is freed")


def test_child_that_was_dead_before_it_was_known(
    supervisor: Supervisor, store: FakeStore, fork: Callable[[], int]
) -> None:
    """A child that died before the main process heard of its task is found dead, though others have time."""
    first, second = lease_request("first", ttl=300.0), lease_request("second", ttl=300.0)
    for one in (first, second):
        store.acquire(one)
    accept(supervisor, fork(), first)
    dead = fork()
    bury(dead)
    accept(supervisor, dead, second)
    until(lambda: not held(store, second))
    assert held(store, first)


def test_child_without_pidfd(
    supervisor: Supervisor, store: FakeStore, fork: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the system has no pidfd, a death is seen by polling."""
    monkeypatch.delattr(os, "pidfd_open")
    pid, one = fork(), lease_request("one")
    store.acquire(one)
    accept(supervisor, pid, one)
    bury(pid)
    until(lambda: not held(store, one))


def test_what_a_living_child_holds_is_not_released(
    supervisor: Supervisor, store: FakeStore, fork: Callable[[], int]
) -> None:
    """Nothing is released for a child that lives, a stopped one included; it is renewed."""
    pid, one = fork(), lease_request("one", ttl=6.0)
    store.acquire(one)
    accept(supervisor, pid, one)
    os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    until(lambda: len(store.renewals) >= 4)
    assert time.monotonic() - began > 6.0, "four renewals take longer than the TTL"
    assert held(store, one)
    assert [] == store.released


def test_child_that_was_given_another_attempt(
    supervisor: Supervisor, store: FakeStore, fork: Callable[[], int]
) -> None:
    """A child's new delivery replaces its earlier one: only the lease of the new one is released when the child dies."""
    pid, old, new = fork(), lease_request("old"), lease_request("new")
    accept(supervisor, pid, old)
    store.acquire(new)
    accept(supervisor, pid, new)
    os.kill(pid, signal.SIGKILL)
    until(lambda: not held(store, new))
    assert {"new"} == set(store.released)


def test_store_away_at_a_death(supervisor: Supervisor, store: FakeStore, fork: Callable[[], int]) -> None:
    """The supervisor releases a dead child's lease as soon as the store is reachable."""
    pid, one = fork(), lease_request("one")
    store.acquire(one)
    accept(supervisor, pid, one)
    store.failure = StoreUnavailable("away")
    os.kill(pid, signal.SIGKILL)
    until(lambda: store.released)
    assert held(store, one)
    store.failure = None
    until(lambda: not held(store, one))


def test_release_that_fails_is_reported(store: FakeStore, fork: Callable[[], int]) -> None:
    """While the store is away, each failed release for a dead child is reported."""
    failures: list[tuple[str, StoreError]] = []
    supervisor = Supervisor(store, print, on_failure=lambda verb, error: failures.append((verb, error)))
    pid, one = fork(), lease_request("one")
    store.acquire(one)
    accept(supervisor, pid, one)
    store.failure = StoreUnavailable("away")
    os.kill(pid, signal.SIGKILL)
    until(lambda: ("release", store.failure) in failures)
    store.failure = None
    until(lambda: not held(store, one))
    supervisor._loop.end()
    supervisor._renewer.end()


def test_store_error_does_not_end_the_watch(supervisor: Supervisor, store: FakeStore, fork: Callable[[], int]) -> None:
    """A renewal that fails is tried again soon enough for the lease to survive."""
    pid, one = fork(), lease_request("one", ttl=6.0)
    store.acquire(one)
    store.failure = StoreUnavailable("away")
    accept(supervisor, pid, one)
    until(lambda: len(store.renewals) >= 2)
    store.failure = None
    until(lambda: len(store.renewals) >= 4)
    assert held(store, one)


@pytest.mark.parametrize(
    "unforeseen", [RuntimeError("unforeseen"), SystemExit(), KeyboardInterrupt(), MemoryError()], ids=repr
)
def test_no_error_ends_the_supervisor(
    store: FakeStore, fork: Callable[[], int], monkeypatch: pytest.MonkeyPatch, unforeseen: BaseException
) -> None:
    """An unexpected error is reported and ends no thread: leases are renewed, and the next death is noticed."""
    errors: list[BaseException] = []
    once = {"watch_children", "renew_due"}

    def broken(owner: type, step: str) -> None:
        call = getattr(owner, step)

        def instead(self: object) -> float:
            if step in once:
                once.remove(step)
                raise unforeseen
            return float(call(self))

        monkeypatch.setattr(owner, step, instead)

    broken(Supervisor, "watch_children")
    broken(Renewer, "renew_due")
    supervisor = Supervisor(store, errors.append)
    pid, one = fork(), lease_request("one", ttl=1.2)
    store.acquire(one)
    accept(supervisor, pid, one)
    until(lambda: len(store.renewals) >= 2)
    os.kill(pid, signal.SIGKILL)
    until(lambda: store.released)  # for the first time: each release is confirmed by a second one soon
    assert {one.token} == set(store.released)
    assert [unforeseen] * 2 == errors
    supervisor._loop.end()
    supervisor._renewer.end()


def test_error_at_a_death_does_not_end_the_watch(
    supervisor: Supervisor, store: FakeStore, fork: Callable[[], int]
) -> None:
    """An error while a dead child's lease is released does not end the watch: the next death is detected."""
    failing = iter([RuntimeError("unforeseen")])
    release = store.release

    def broken(one: LeaseSpec, success: bool | None, timeout: float | None = None, kept: object = None) -> Released:
        for error in failing:
            raise error
        return release(one, success)

    store.release = broken  # type: ignore[method-assign]
    first, second, other = fork(), fork(), lease_request("other")
    accept(supervisor, first, lease_request("one"))
    os.kill(first, signal.SIGKILL)
    store.acquire(other)
    accept(supervisor, second, other)
    os.kill(second, signal.SIGKILL)
    until(lambda: not held(store, other))


def test_finished_delivery_is_not_renewed(supervisor: Supervisor, store: FakeStore, fork: Callable[[], int]) -> None:
    """Once the pool has the result of a delivery, its lease is not renewed any more."""
    accept(supervisor, fork(), lease_request("one", ttl=1.0), is_running=False)
    until(lambda: supervisor._renewer._leases == {})
    assert [] == store.renewals


def test_delivery_past_its_cap_is_not_renewed(
    supervisor: Supervisor, store: FakeStore, fork: Callable[[], int]
) -> None:
    """The lease of a child is renewed up to its task's `lock_at_most`, and expires then; other leases go on."""
    one, other = lease_request("one", ttl=1.0), lease_request("other", ttl=1.0)
    for request, at_most in ((one, 3.0), (other, None)):
        store.acquire(request)
        accept(supervisor, fork(), request, at_most=at_most)

    def renewals(request: LeaseSpec) -> int:
        return sum(request.token in tokens for tokens in tokens_of(store))

    until(lambda: renewals(other) > renewals(one) + 3)
    assert renewals(one) > 0
    assert not held(store, one)


def test_attempt_without_a_lease_yet(supervisor: Supervisor, store: FakeStore, fork: Callable[[], int]) -> None:
    """An attempt that has no lease yet is kept in view while the pool waits for its end."""
    one = lease_request("one", ttl=6.0)
    accept(supervisor, fork(), one)
    until(lambda: store.renewals)
    assert AcquireStatus.GRANTED is store.acquire(one).status
    began = time.monotonic()
    until(lambda: time.monotonic() - began > 7.0)
    assert held(store, one)


# -- what the store answers --------------------------------------------------------------------


class Quiet(BackgroundLoop):
    """A loop without a thread."""

    def wake(self, at: float) -> None:
        pass


class OneChild:
    """A supervisor whose only child, this process, has a lease that is due; its clock stands still."""

    def __init__(self, store: FakeStore) -> None:
        self.time = 0.0
        self.whole = LeaseSpec("b:{t}", "d" * 32, "0" * 32, 30.0, "task-0", "node", os.getpid(), supervised=True)
        self.supervisor = Supervisor(store, print, clock=lambda: self.time)
        for owner in (self.supervisor, self.supervisor._renewer):
            owner._loop = Quiet(lambda: math.inf, print)
        accept(self.supervisor, os.getpid(), self.whole)

    def renew(self, at: float = 10.0) -> float:
        """Renew what is due at a time; return when the next is due."""
        self.time = at
        return self.supervisor._renewer.renew_due()


@pytest.fixture
def child(store: FakeStore) -> OneChild:
    return OneChild(store)


def test_lost_data(child: OneChild, store: FakeStore) -> None:
    """A lease that the store has lost is left to the child; once the child has reacquired it, it is renewed as before."""
    store.acquire(child.whole)
    store.lose()
    assert 20.0 == child.renew()
    assert not held(store, child.whole)
    store.reacquire(child.whole, 0)
    assert 30.0 == child.renew(20.0)
    assert [[child.whole.token]] * 2 == tokens_of(store)


def test_revoked(child: OneChild, store: FakeStore) -> None:
    """The supervisor does not ask again for a lock that an operator has revoked; the child's next delivery is renewed."""
    store.acquire(child.whole)
    store.revoke(child.whole.base, child.whole.lock)
    for at in range(10, 100, 10):
        child.renew(float(at))
    assert [[child.whole.token]] == tokens_of(store)
    accept(child.supervisor, os.getpid(), replace(child.whole, token="1" * 32))
    child.renew(110.0)
    assert ["1" * 32] == store.renewals[-1].tokens


def test_another_has_it(child: OneChild, store: FakeStore) -> None:
    """A lock that another delivery has stays with that, and is asked for again soon."""
    store.acquire(child.whole)
    store.lose(child.whole.lock)
    store.acquire(replace(child.whole, token="other", task_id="other", ttl=600.0))
    for at in (10.0, 12.5, 15.0):
        assert at + 2.5 == child.renew(at)
        found = store.holder(child.whole.lock)
        assert found is not None
        assert "other" == found.task_id


def test_next_delivery_replaces_the_earlier_one(child: OneChild, store: FakeStore) -> None:
    """A child's new delivery is renewed from when it began, the earlier one no more."""
    new = replace(child.whole, token="1" * 32)
    store.acquire(new)
    child.time = 5.0
    accept(child.supervisor, os.getpid(), new)
    for at in (10.0, 12.0, 15.0, 20.0, 24.0):
        child.renew(at)
    assert [[new.token]] * 2 == tokens_of(store)


def test_child_that_died_before_its_next_delivery_was_accepted(
    supervisor: Supervisor, store: FakeStore, fork: Callable[[], int]
) -> None:
    """A child that is dead when the main process learns of its next delivery leaves no lock of that."""
    pid, before, one = fork(), lease_request("before"), lease_request("one")
    store.acquire(one)
    accept(supervisor, pid, before)
    bury(pid)
    accept(supervisor, pid, one)
    until(lambda: not held(store, one))


def test_nothing_starts_before_the_first_child(supervisor: Supervisor) -> None:
    """Without children there is no thread."""
    assert not supervisor._loop._started
    assert not supervisor._renewer._loop._started
