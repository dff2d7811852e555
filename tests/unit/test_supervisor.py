"""The main process's watch over its children, with real child processes and a store in memory."""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
from celery import Celery

from celery_singleton_lock.config.options import LONGEST
from celery_singleton_lock.config.settings import settings_of
from celery_singleton_lock.context import ProcessContext
from celery_singleton_lock.errors import StoreUnavailable
from celery_singleton_lock.log import logger
from celery_singleton_lock.store.memory import MemoryStore
from celery_singleton_lock.store.protocol import AcquireStatus, LeaseRequest, RenewResult
from celery_singleton_lock.worker.supervisor import Child, Supervisor
from tests.servers import until


class Store(MemoryStore):
    """A store that remembers its calls, and can be away."""

    def __init__(self) -> None:
        super().__init__()
        self.away = False
        self.renewals: list[list[str]] = []
        self.releases: list[str] = []

    def renew(self, claims: Sequence[LeaseRequest], timeout: float | None = None) -> list[RenewResult]:
        self.renewals.append([claim.token for claim in claims])
        if self.away:
            raise StoreUnavailable("away")
        return super().renew(claims, timeout)

    def release(self, claim: LeaseRequest, success: bool, timeout: float | None = None) -> bool:
        self.releases.append(claim.token)
        if self.away:
            raise StoreUnavailable("away")
        return super().release(claim, success)


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def watcher(store: Store) -> Supervisor:
    return Supervisor(store)


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


def claim(token: str, ttl: float = 30.0) -> LeaseRequest:
    """What a child takes; the watcher is told of it without digest."""
    return LeaseRequest("b:{t}", f"digest-{token}", token, ttl, f"task-{token}", "node", 1, watched=True)


def known(whole: LeaseRequest) -> LeaseRequest:
    """The claim as the main process knows it: the attempt alone."""
    return replace(whole, digest="")


def give(watcher: Supervisor, pid: int, whole: LeaseRequest, going: bool = True) -> None:
    """Tell the watcher that a child has begun this attempt."""
    watcher.accepted(pid, whole.ttl, lambda pid: known(whole), lambda: going)


def asleep(watcher: Supervisor) -> bool:
    """Whether the watcher has worked out when it wakes next, and waits for that."""
    return watcher._thread is not None and watcher._next != 0.0


def held(store: Store, whole: LeaseRequest) -> bool:
    return store.holder(whole.lock) is not None


def test_lease_of_a_killed_child_is_freed(watcher: Supervisor, store: Store, fork: Callable[[], int]) -> None:
    """A child that is killed loses its lease at once, long before its TTL."""
    pid, one = fork(), claim("one")
    store.acquire(one)
    give(watcher, pid, one)
    until(lambda: asleep(watcher))
    assert held(store, one)
    os.kill(pid, signal.SIGKILL)
    until(lambda: not held(store, one), timeout=2)


def test_lease_of_the_longest_ttl(watcher: Supervisor, store: Store, fork: Callable[[], int]) -> None:
    """However long a lease may live, the watch goes on, and the lease goes with the child."""
    pid, one = fork(), claim("one", ttl=LONGEST)
    store.acquire(one)
    give(watcher, pid, one)
    until(lambda: asleep(watcher))
    os.kill(pid, signal.SIGKILL)
    until(lambda: not held(store, one), timeout=2)


def test_lease_of_each_killed_child_is_freed(watcher: Supervisor, store: Store, fork: Callable[[], int]) -> None:
    """Of several children, each that is killed loses its lease within 6 s, however long the TTLs are."""
    whole = [claim(str(number), ttl=300.0) for number in range(3)]
    pids = []
    for one in whole:
        pids.append(fork())
        store.acquire(one)
        give(watcher, pids[-1], one)
        until(lambda: asleep(watcher))
        time.sleep(0.05)  # the thread is now in its system call, as it is between two tasks of a worker
    for pid, one in reversed(list(zip(pids, whole, strict=True))):
        os.kill(pid, signal.SIGKILL)
        until(lambda one=one: not held(store, one), f"lease {one.token} of a killed child is freed", timeout=6)


def test_child_that_was_dead_before_it_was_known(watcher: Supervisor, store: Store, fork: Callable[[], int]) -> None:
    """A child that died before the main process heard of its task is found dead within 6 s, though others have time."""
    first, second = claim("first", ttl=300.0), claim("second", ttl=300.0)
    for one in (first, second):
        store.acquire(one)
    give(watcher, fork(), first)
    until(lambda: asleep(watcher))
    dead = fork()
    bury(dead)
    give(watcher, dead, second)
    until(lambda: not held(store, second), timeout=6)
    assert held(store, first)


def test_child_without_pidfd(
    watcher: Supervisor, store: Store, fork: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the system has no pidfd, a death is seen by polling."""
    monkeypatch.delattr(os, "pidfd_open")
    pid, one = fork(), claim("one")
    store.acquire(one)
    give(watcher, pid, one)
    bury(pid)
    until(lambda: not held(store, one), timeout=3)


def test_what_a_living_child_holds_is_not_released(watcher: Supervisor, store: Store, fork: Callable[[], int]) -> None:
    """Nothing is released for a child that lives, a stopped one included; it is renewed."""
    pid, one = fork(), claim("one", ttl=1.0)
    store.acquire(one)
    give(watcher, pid, one)
    os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    until(lambda: len(store.renewals) >= 4, timeout=5)
    assert time.monotonic() - began > 1.0, "four renewals take longer than the TTL"
    assert held(store, one)
    assert [] == store.releases


def test_child_that_was_given_another_attempt(watcher: Supervisor, store: Store, fork: Callable[[], int]) -> None:
    """A child's new attempt replaces its earlier one: only the new one is freed when it dies."""
    pid, old, new = fork(), claim("old"), claim("new")
    give(watcher, pid, old)
    store.acquire(new)
    give(watcher, pid, new)
    os.kill(pid, signal.SIGKILL)
    until(lambda: not held(store, new), timeout=2)
    assert ["new"] == store.releases


def test_store_away_at_a_death(watcher: Supervisor, store: Store, fork: Callable[[], int]) -> None:
    """A dead child's lease is freed as soon as the store is back."""
    pid, one = fork(), claim("one")
    store.acquire(one)
    give(watcher, pid, one)
    store.away = True
    os.kill(pid, signal.SIGKILL)
    until(lambda: store.releases, timeout=2)
    assert held(store, one)
    store.away = False
    until(lambda: not held(store, one), timeout=2)


def test_store_error_does_not_end_the_watch(watcher: Supervisor, store: Store, fork: Callable[[], int]) -> None:
    """A renewal that fails is tried again soon enough for the lease to survive."""
    pid, one = fork(), claim("one", ttl=1.2)
    store.acquire(one)
    store.away = True
    give(watcher, pid, one)
    until(lambda: len(store.renewals) >= 2, timeout=2)
    store.away = False
    until(lambda: len(store.renewals) >= 6, timeout=3)
    assert held(store, one)


@pytest.mark.parametrize(
    "unforeseen", [RuntimeError("unforeseen"), SystemExit(), KeyboardInterrupt(), MemoryError()], ids=repr
)
def test_any_error_does_not_end_the_watch(
    watcher: Supervisor,
    store: Store,
    fork: Callable[[], int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    unforeseen: BaseException,
) -> None:
    """An error that nobody foresaw is logged and does not end the thread, which renews on and sees the next death."""
    failing, turn = iter([unforeseen]), watcher._turn

    def broken() -> None:
        for error in failing:
            raise error
        turn()

    monkeypatch.setattr(watcher, "_turn", broken)
    pid, one = fork(), claim("one", ttl=1.2)
    store.acquire(one)
    give(watcher, pid, one)
    until(lambda: len(store.renewals) >= 2, timeout=3)
    assert "met an error and goes on" in caplog.text
    os.kill(pid, signal.SIGKILL)
    until(lambda: not held(store, one), timeout=1)


def test_error_at_a_death_does_not_end_the_watch(watcher: Supervisor, store: Store, fork: Callable[[], int]) -> None:
    """Nor does one while a dead child's lease is freed: the next death is seen."""
    failing = iter([RuntimeError("unforeseen")])
    release = store.release

    def broken(one: LeaseRequest, success: bool) -> bool:
        for error in failing:
            raise error
        return release(one, success)

    store.release = broken  # type: ignore[method-assign]
    first, second, other = fork(), fork(), claim("other")
    give(watcher, first, claim("one"))
    os.kill(first, signal.SIGKILL)
    store.acquire(other)
    give(watcher, second, other)
    os.kill(second, signal.SIGKILL)
    until(lambda: not held(store, other), timeout=4)


@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_failing_log_does_not_end_the_watch(
    watcher: Supervisor,
    store: Store,
    fork: Callable[[], int],
    monkeypatch: pytest.MonkeyPatch,
    error: type[BaseException],
) -> None:
    """A user's logging filter that fails while an error is logged does not end the thread either."""
    failing, turn = iter([RuntimeError("unforeseen")]), watcher._turn

    def broken() -> None:
        for error in failing:
            raise error
        turn()

    def filter_of_the_user(record: logging.LogRecord) -> bool:
        raise error("a filter of the user's")

    monkeypatch.setattr(watcher, "_turn", broken)
    monkeypatch.setattr(logger, "filters", [filter_of_the_user])
    pid, one = fork(), claim("one", ttl=1.2)
    store.acquire(one)
    give(watcher, pid, one)
    until(lambda: len(store.renewals) >= 2, timeout=3)


def test_attempt_that_is_over_is_let_go(watcher: Supervisor, store: Store, fork: Callable[[], int]) -> None:
    """Once the pool is done with an attempt, it is not renewed any more, and the watch sleeps."""
    give(watcher, fork(), claim("one", ttl=1.0), going=False)
    until(lambda: watcher._next == math.inf, timeout=2)
    assert [] == store.renewals


def test_attempt_without_a_lease_yet(watcher: Supervisor, store: Store, fork: Callable[[], int]) -> None:
    """An attempt that has no lease yet is kept in view while the pool waits for its end."""
    one = claim("one", ttl=1.0)
    give(watcher, fork(), one)
    until(lambda: store.renewals, timeout=2)
    assert AcquireStatus.GRANTED is store.acquire(one).answer
    began = time.monotonic()
    until(lambda: time.monotonic() - began > 1.5, timeout=3)
    assert held(store, one)


def test_renewals_are_batched(store: Store) -> None:
    """Children due together are renewed by one call for up to 100 of them."""
    now = [0.0]
    watcher = Supervisor(store, clock=lambda: now[0])
    for number in range(150):
        one = claim(str(number))
        store.acquire(one)
        watcher._children[number] = Child(number, 10_000 + number, known(one), lambda: True, 10.0)
    now[0] = 10.0
    watcher._turn()
    assert [100, 50] == [len(tokens) for tokens in store.renewals]
    watcher.close = lambda: None  # type: ignore[method-assign]


# -- what the store answers --------------------------------------------------------------------


class Watched:
    """A watcher whose only child, this process, has a lease that is due; its clock stands still."""

    def __init__(self, store: Store) -> None:
        self.time = 0.0
        self.store = store
        self.whole = LeaseRequest("b:{t}", "d" * 32, "0" * 32, 30.0, "task-0", "node", os.getpid(), watched=True)
        self.watcher = Supervisor(store, clock=lambda: self.time)
        self.watcher._thread = threading.current_thread()  # none is started
        self.child = Child(os.getpid(), 10_000, known(self.whole), lambda: True, 10.0)
        self.watcher._children[os.getpid()] = self.child

    def renew(self, at: float = 10.0) -> None:
        self.time = at
        os.write(self.watcher._writer, b"x")  # it does not wait
        self.watcher._turn()


@pytest.fixture
def watched(store: Store) -> Iterator[Watched]:
    found = Watched(store)
    yield found
    found.watcher._children.clear()
    found.watcher.close()


def test_lost_data(watched: Watched, store: Store) -> None:
    """What the store has lost is left to the child; once the child has taken it again, it is renewed as before."""
    store.acquire(watched.whole)
    store._records.clear()
    watched.renew()
    assert not held(store, watched.whole)
    assert 20.0 == watched.child.due
    store.reacquire(watched.whole, 0)
    watched.renew(20.0)
    assert [[watched.whole.token]] * 2 == store.renewals
    assert 30.0 == watched.child.due


def test_freed(watched: Watched, store: Store) -> None:
    """What an operator has taken is not asked for again, until the child is given another attempt."""
    store.acquire(watched.whole)
    store.revoke(watched.whole.base, watched.whole.lock)
    for at in range(10, 100, 10):
        watched.renew(float(at))
    assert [[watched.whole.token]] == store.renewals
    assert math.inf == watched.child.due
    give(watched.watcher, os.getpid(), replace(watched.whole, token="1" * 32))
    watched.renew(100.0)
    assert not watched.child.freed


def test_another_has_it(watched: Watched, store: Store) -> None:
    """What another has by now stays the other's, and is asked for again soon."""
    other = replace(watched.whole, token="other", ttl=600.0)
    store.acquire(other)
    store._records[watched.whole.attempt] = replace(store._records[other.attempt], token=watched.whole.lock)
    for at in (10.0, 12.5, 15.0):
        watched.renew(at)
        assert "other" == store._records[watched.whole.lock].token
        assert at + 2.5 == watched.child.due


def test_what_a_known_child_is_given_is_taken_up_once(watched: Watched, store: Store) -> None:
    """It is due from when it was given, and each renewal puts off the next."""
    new = replace(watched.whole, token="1" * 32)
    store.acquire(new)
    give(watched.watcher, os.getpid(), new)
    watched.renew(5.0)
    assert 10.0 == watched.child.due
    for at in (10.0, 12.0, 14.0):
        watched.renew(at)
    assert [[new.token]] == store.renewals
    assert 20.0 == watched.child.due


def test_attempt_accepted_while_the_wait_is_worked_out(store: Store, fork: Callable[[], int]) -> None:
    """A child that gets work in the very moment in which the thread works out how long to sleep is renewed in time, too."""
    watcher = Supervisor(store)
    pid, one = fork(), claim("one", ttl=3.0)
    store.acquire(one)
    watcher._thread = type("Alive", (), {"is_alive": lambda self: True})()  # type: ignore[assignment]

    class Idle(float):
        """The due time of a child without work, which gets some just after the thread has looked at it."""

        def __lt__(self, other: float) -> bool:
            if watcher._children[pid].due is self:
                give(watcher, pid, one)
            return float(self) < other

    watcher._children[pid] = Child(pid, -2, known(one), lambda: False, Idle("inf"))
    timeout = watcher._timeout()
    rung = bool(watcher._poll.poll(0))
    assert rung or (timeout is not None and timeout <= 1001), f"sleeps {timeout} ms and nobody rings"


def test_child_that_is_buried_while_it_is_given_something(
    watcher: Supervisor, store: Store, fork: Callable[[], int]
) -> None:
    """What the main process hears of a child in the very moment in which its death is seen is freed, too."""
    pid, one = fork(), claim("one")
    store.acquire(one)
    bury(pid)

    class Dying(Child):
        """Its death is seen just before it is noted what it was given."""

        def __setattr__(self, name: str, value: object) -> None:
            if name == "given" and value is not None:
                del watcher._children[pid]
            super().__setattr__(name, value)

    watcher._children[pid] = Dying(pid, -1, known(claim("before")), lambda: False, math.inf)
    give(watcher, pid, one)
    until(lambda: not held(store, one), timeout=2)


def test_child_dies_before_the_watch_has_looked(watcher: Supervisor, store: Store, fork: Callable[[], int]) -> None:
    """What was given last to a child that dies is freed, though the thread had no turn between."""
    pid, one = fork(), claim("one")
    store.acquire(one)
    watcher._children[pid] = child = Child(pid, -1, known(claim("before")), lambda: True, math.inf)
    child.given = (0.0, one.ttl, lambda pid: known(one), lambda: True)
    watcher._bury(child, 0.0)
    watcher._free(child, 0.0)
    assert not held(store, one)


def test_fork_closes_what_it_inherited(watcher: Supervisor, fork: Callable[[], int]) -> None:
    """A forked process gives up the watch's file descriptors, and the watch of its parent goes on."""
    give(watcher, fork(), claim("one"))
    before = set(os.listdir("/proc/self/fd"))
    child = os.fork()
    if not child:
        watcher.close()
        os._exit(0 if len(os.listdir("/proc/self/fd")) == len(before) - 3 else 1)
    assert 0 == os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert watcher._thread is not None
    assert watcher._thread.is_alive()


def test_interrupted_while_it_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a signal handler broke off is not closed again: the numbers may be other files' by then."""
    runtime = ProcessContext(
        settings_of(Celery(broker="memory://", set_as_current=False, changes={"singleton_lock_url": "memory://"}).conf)
    )
    closed: list[int] = []

    def broken(self: Supervisor) -> None:
        closed.append(1)
        raise TimeoutError

    monkeypatch.setattr(Supervisor, "close", broken)
    assert runtime.watcher
    with pytest.raises(TimeoutError):
        runtime.forget()
    runtime.forget()
    assert [1] == closed


def test_watch_is_a_daemon(watcher: Supervisor, fork: Callable[[], int]) -> None:
    """The thread never keeps a worker from ending."""
    give(watcher, fork(), claim("one"))
    assert watcher._thread is not None
    assert watcher._thread.daemon


def test_nothing_starts_before_the_first_child(watcher: Supervisor) -> None:
    """Without children there is no thread."""
    assert watcher._thread is None


@pytest.fixture(autouse=True)
def _quiet(watcher: Supervisor) -> Iterator[None]:
    yield
    watcher._children.clear()
