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

from celery_singleton_lock.board import SLOTS, Board
from celery_singleton_lock.config import LONGEST, settings_of
from celery_singleton_lock.errors import StoreUnavailable
from celery_singleton_lock.log import logger
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.stores import Answer, Claim, Renewed
from celery_singleton_lock.stores.memory import MemoryStore
from celery_singleton_lock.watch import Child, Watcher
from tests.servers import until


class Store(MemoryStore):
    """A store that remembers its calls, and can be away."""

    def __init__(self) -> None:
        super().__init__()
        self.away = False
        self.renewals: list[list[str]] = []
        self.releases: list[str] = []

    def renew(self, claims: Sequence[Claim], timeout: float | None = None) -> list[Renewed]:
        self.renewals.append([claim.token for claim in claims])
        if self.away:
            raise StoreUnavailable("away")
        return super().renew(claims, timeout)

    def release(self, claim: Claim, success: bool, timeout: float | None = None) -> bool:
        self.releases.append(claim.token)
        if self.away:
            raise StoreUnavailable("away")
        return super().release(claim, success)


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def watcher(store: Store) -> Watcher:
    return Watcher(store)


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


def claim(token: str, ttl: float = 30.0) -> Claim:
    """What a child takes; the watcher is told of it without digest."""
    return Claim("b:{t}", f"digest-{token}", token, ttl, f"task-{token}", "node", 1, watched=True)


def known(whole: Claim) -> Claim:
    """The claim as the main process knows it: the attempt alone."""
    return replace(whole, digest="")


def give(watcher: Watcher, pid: int, whole: Claim, going: bool = True) -> None:
    """Tell the watcher that a child has begun this attempt."""
    watcher.accepted(pid, whole.ttl, lambda pid: known(whole), lambda: going)


def asleep(watcher: Watcher) -> bool:
    """Whether the watcher has worked out when it wakes next, and waits for that."""
    return watcher._thread is not None and watcher._next != 0.0


def held(store: Store, whole: Claim) -> bool:
    return store.holder(whole.lock) is not None


def test_lease_of_a_killed_child_is_freed(watcher: Watcher, store: Store, fork: Callable[[], int]) -> None:
    """A child that is killed loses its lease at once, long before its TTL."""
    pid, one = fork(), claim("one")
    store.acquire(one)
    give(watcher, pid, one)
    until(lambda: asleep(watcher))
    assert held(store, one)
    os.kill(pid, signal.SIGKILL)
    until(lambda: not held(store, one), timeout=2)


def test_lease_of_the_longest_ttl(watcher: Watcher, store: Store, fork: Callable[[], int]) -> None:
    """However long a lease may live, the watch goes on, and the lease goes with the child."""
    pid, one = fork(), claim("one", ttl=LONGEST)
    store.acquire(one)
    give(watcher, pid, one)
    until(lambda: asleep(watcher))
    os.kill(pid, signal.SIGKILL)
    until(lambda: not held(store, one), timeout=2)


def test_lease_of_each_killed_child_is_freed(watcher: Watcher, store: Store, fork: Callable[[], int]) -> None:
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


def test_child_that_was_dead_before_it_was_known(watcher: Watcher, store: Store, fork: Callable[[], int]) -> None:
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
    watcher: Watcher, store: Store, fork: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the system has no pidfd, a death is seen by polling."""
    monkeypatch.delattr(os, "pidfd_open")
    pid, one = fork(), claim("one")
    store.acquire(one)
    give(watcher, pid, one)
    bury(pid)
    until(lambda: not held(store, one), timeout=3)


def test_what_a_living_child_holds_is_not_released(watcher: Watcher, store: Store, fork: Callable[[], int]) -> None:
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


def test_child_that_was_given_another_attempt(watcher: Watcher, store: Store, fork: Callable[[], int]) -> None:
    """A child's new attempt replaces its earlier one: only the new one is freed when it dies."""
    pid, old, new = fork(), claim("old"), claim("new")
    give(watcher, pid, old)
    store.acquire(new)
    give(watcher, pid, new)
    os.kill(pid, signal.SIGKILL)
    until(lambda: not held(store, new), timeout=2)
    assert ["new"] == store.releases


def test_store_away_at_a_death(watcher: Watcher, store: Store, fork: Callable[[], int]) -> None:
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


def test_store_error_does_not_end_the_watch(watcher: Watcher, store: Store, fork: Callable[[], int]) -> None:
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
    watcher: Watcher,
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


def test_error_at_a_death_does_not_end_the_watch(watcher: Watcher, store: Store, fork: Callable[[], int]) -> None:
    """Nor does one while a dead child's lease is freed: the next death is seen."""
    failing = iter([RuntimeError("unforeseen")])
    release = store.release

    def broken(one: Claim, success: bool) -> bool:
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
    watcher: Watcher,
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


def test_attempt_that_is_over_is_let_go(watcher: Watcher, store: Store, fork: Callable[[], int]) -> None:
    """Once the pool is done with an attempt, it is not renewed any more, and the watch sleeps."""
    give(watcher, fork(), claim("one", ttl=1.0), going=False)
    until(lambda: watcher._next == math.inf, timeout=2)
    assert [] == store.renewals


def test_attempt_without_a_lease_yet(watcher: Watcher, store: Store, fork: Callable[[], int]) -> None:
    """An attempt that has no lease yet is kept in view while the pool waits for its end."""
    one = claim("one", ttl=1.0)
    give(watcher, fork(), one)
    until(lambda: store.renewals, timeout=2)
    assert Answer.GRANTED is store.acquire(one).answer
    began = time.monotonic()
    until(lambda: time.monotonic() - began > 1.5, timeout=3)
    assert held(store, one)


def test_renewals_are_batched(store: Store) -> None:
    """Children due together are renewed by one call for up to 100 of them."""
    now = [0.0]
    watcher = Watcher(store, clock=lambda: now[0])
    for number in range(150):
        one = claim(str(number))
        store.acquire(one)
        watcher._children[number] = Child(number, 10_000 + number, known(one), lambda: True, 10.0, 30.0)
    now[0] = 10.0
    watcher._turn()
    assert [100, 50] == [len(tokens) for tokens in store.renewals]
    watcher.close = lambda: None  # type: ignore[method-assign]


# -- what the store has lost -------------------------------------------------------------------


class Watched:
    """A watcher whose only child, this process, has a lease that is due; its clock stands still."""

    def __init__(self, store: Store) -> None:
        self.time = 0.0
        self.store, self.board = store, Board()
        self.whole = Claim("b:{t}", "d" * 32, "0" * 32, 30.0, "task-0", "node", os.getpid(), watched=True)
        self.watcher = Watcher(store, self.board, clock=lambda: self.time)
        self.watcher._thread = threading.current_thread()  # none is started
        self.child = Child(os.getpid(), 10_000, known(self.whole), lambda: True, 10.0, 30.0)
        self.watcher._children[os.getpid()] = self.child
        self.board.join(0)
        self.board.hold(self.whole.token, self.whole.digest)

    def renew(self, at: float = 10.0) -> None:
        self.time = at
        os.write(self.watcher._writer, b"x")  # it does not wait
        self.watcher._turn()

    @property
    def token(self) -> str:
        record = self.store._records.get(self.whole.lock)
        return record.token if record else ""


@pytest.fixture
def watched(store: Store) -> Iterator[Watched]:
    found = Watched(store)
    yield found
    found.watcher._children.clear()
    found.watcher.close()


def test_lost_data(watched: Watched, store: Store, caplog: pytest.LogCaptureFixture) -> None:
    """What the store has lost is taken again for a child that counts on it, with a warning that tells whose it is."""
    watched.renew()
    assert watched.whole.token == watched.token
    assert [Renewed.DONE] * 2 == store.renew([watched.whole, known(watched.whole)])
    assert 40.0 == watched.child.until
    text = caplog.text
    for part in (watched.whole.task_id, watched.whole.node, str(os.getpid()), watched.whole.lock):
        assert part in text
    assert watched.whole.token not in text


def test_lost_data_and_expired(watched: Watched, store: Store) -> None:
    """Taken again after its expiry, the lease has been lost, as the child will learn."""
    watched.renew(30.0)
    assert [Renewed.LOST] == store.renew([watched.whole])


def test_no_lease_to_lose(watched: Watched, store: Store) -> None:
    """For a child whose body is over, or has not begun, nothing is renewed or taken; it is looked at again."""
    watched.board.let_go()
    watched.renew()
    assert "" == watched.token
    assert [] == store.renewals
    assert 20.0 == watched.child.due
    watched.board.hold(watched.whole.token, watched.whole.digest)
    watched.renew(20.0)
    assert watched.whole.token == watched.token


def test_lease_that_began_late(watched: Watched, store: Store) -> None:
    """A child that was slow to ask for its lease has not lost it when the data are lost just after."""
    watched.board.let_go()
    for at in range(10, 100, 10):
        watched.renew(float(at))
    watched.board.hold(watched.whole.token, watched.whole.digest)
    watched.renew(100.0)
    assert [Renewed.DONE] == store.renew([watched.whole])


def test_freed(watched: Watched, store: Store) -> None:
    """What an operator has taken is not taken again for the child, however long it goes on."""
    store.acquire(watched.whole)
    store.free(watched.whole.base, watched.whole.lock)
    watched.renew()
    store._records.clear()
    for at in range(20, 200, 10):
        watched.renew(float(at))
    assert "" == watched.token
    assert math.inf == watched.child.due
    give(watched.watcher, os.getpid(), replace(watched.whole, token="1" * 32))
    watched.renew(200.0)
    assert not watched.child.freed


def test_child_of_which_nothing_is_known(watched: Watched, store: Store) -> None:
    """A child that does not share the memory, as a spawned one, is renewed for; nothing is taken again for it."""
    watched.board.join(1)
    watched.board._memory[:] = bytes(len(watched.board._memory))
    store.acquire(watched.whole)
    watched.renew()
    assert [[watched.whole.token]] == store.renewals
    store._records.clear()
    watched.renew(20.0)
    assert "" == watched.token


def test_lease_of_another_attempt(watched: Watched) -> None:
    """Nor for one that counts on the lease of another attempt."""
    watched.board.hold("1" * 32, watched.whole.digest)
    watched.renew()
    assert "" == watched.token


def test_lost_data_without_a_board(store: Store, watched: Watched) -> None:
    """Nor where children write nothing down."""
    watched.watcher._board = None
    watched.renew()
    assert "" == watched.token


@pytest.mark.parametrize("then", ["release", "lost data"])
def test_lost_data_and_another_has_it(watched: Watched, store: Store, then: str) -> None:
    """What another has by now stays the other's; once that is over it is taken again for the child, who will be told."""
    other = replace(watched.whole, token="other", ttl=600.0)
    store.acquire(other)
    for at in (10.0, 12.5, 15.0):
        watched.renew(at)
        assert "other" == watched.token
        assert at + 2.5 == watched.child.due
    if then == "release":
        store.release(other, success=True)
    else:
        store._records.clear()
    watched.renew(17.5)
    assert watched.whole.token == watched.token
    assert [Renewed.LOST] == store.renew([watched.whole])


def test_lost_data_twice(watched: Watched, store: Store) -> None:
    """What was lost to another stays lost, when it is taken again once more: the child has not been told, as far as is known."""
    other = replace(watched.whole, token="other")
    store.acquire(other)
    store.release(other, success=True)
    watched.renew()
    assert [Renewed.LOST] == store.renew([watched.whole])
    store._records.clear()
    watched.renew(20.0)
    assert [Renewed.LOST] == store.renew([watched.whole])


def test_body_ends_while_it_is_taken_again(watched: Watched, store: Store) -> None:
    """What was taken again for a body that ended meanwhile is given back at once."""
    retake = store.retake

    def late(whole: Claim, expired: bool = False, timeout: float | None = None) -> tuple[Renewed, bool]:
        watched.board.let_go()
        return retake(whole, expired, timeout)

    store.retake = late  # type: ignore[method-assign]
    watched.renew()
    assert "" == watched.token
    assert [watched.whole.token] == store.releases


def test_child_ends_after_it_was_taken_again(watched: Watched, store: Store) -> None:
    """It gives its lease back itself, and knows how its body ended."""
    watched.renew()
    watched.board.let_go()
    give(watched.watcher, os.getpid(), replace(watched.whole, token="1" * 32))
    for at in (20.0, 20.5):
        watched.renew(at)
    assert [] == store.releases


def test_store_away_while_it_is_to_be_taken_again(watched: Watched, store: Store) -> None:
    """It is tried again as soon as after a renewal that failed."""
    retake = store.retake

    def away(whole: Claim, expired: bool = False, timeout: float | None = None) -> tuple[Renewed, bool]:
        raise StoreUnavailable("away")

    store.retake = away  # type: ignore[method-assign]
    watched.renew()
    assert 12.5 == watched.child.due
    store.retake = retake  # type: ignore[method-assign]
    watched.renew(12.5)
    assert watched.whole.token == watched.token
    assert watched.child.doubt is None


@pytest.mark.parametrize("then", ["over", "another attempt", "another attempt meanwhile"])
def test_taken_again_without_an_answer(watched: Watched, store: Store, then: str) -> None:
    """What the store may have taken again for a body that is over is given back, and nothing of the child's next attempt."""
    looks: list[str] = []
    digest = watched.board.digest

    def looked(pid: int, token: str) -> str | None:
        found = digest(pid, token)
        looks.append(token)
        if then == "another attempt meanwhile" and looks == [watched.whole.token] * 2:
            go_on()
        return found

    watched.board.digest = looked  # type: ignore[method-assign]
    retake, following = store.retake, replace(watched.whole, token="1" * 32, digest="e" * 32)

    def go_on() -> None:
        watched.board.let_go()
        if then != "over":
            give(watched.watcher, os.getpid(), following)

    def late(whole: Claim, expired: bool = False, timeout: float | None = None) -> tuple[Renewed, bool]:
        retake(whole, expired, timeout)
        raise StoreUnavailable("no answer")

    store.retake = late  # type: ignore[method-assign]
    watched.renew()
    assert watched.whole.token == watched.token
    if then != "another attempt meanwhile":
        go_on()
    for at in (12.5, 20.0, 20.5):
        watched.renew(at)
        if then != "over":
            store.acquire(following)  # it is slow to ask
    assert "" == watched.token
    assert [watched.whole.token] == store.releases
    assert [] == watched.watcher._dead
    assert held(store, following) == (then != "over")


def test_pool_is_done_before_the_body(watched: Watched, store: Store) -> None:
    """Nothing is given back for a child that still counts on it, as when a pool tells of a time limit before it has killed."""
    watched.child.doubt = watched.child.claim
    watched.child.going = lambda: False
    for at in (10.0, 10.5):
        watched.renew(at)
    assert [] == store.releases
    watched.board.let_go()
    watched.child.due = 10.0
    for at in (20.0, 20.5):
        watched.renew(at)
    assert [watched.whole.token] == store.releases


def test_store_that_hangs_is_asked_once(watched: Watched, store: Store) -> None:
    """Of several leases that are gone, one is asked for again at a time where the store does not answer."""
    asked: list[str] = []

    def away(whole: Claim, expired: bool = False, timeout: float | None = None) -> tuple[Renewed, bool]:
        asked.append(whole.token)
        raise StoreUnavailable("away")

    store.retake = away  # type: ignore[method-assign]
    for number in range(3):
        watched.watcher._children[-number] = replace(watched.child)
    watched.renew()
    assert 1 == len(asked)


def test_one_that_fails_beside_others(store: Store, watched: Watched) -> None:
    """A lease that cannot be taken again does not touch what is known of the others that are due with it."""
    other = Claim("b:{t}", "e" * 32, "2" * 32, 30.0, "task-2", "node", -1, watched=True)
    store.acquire(other)
    child = watched.watcher._children[-1] = Child(-1, 10_001, known(other), lambda: True, 10.0, 30.0)

    def away(whole: Claim, expired: bool = False, timeout: float | None = None) -> tuple[Renewed, bool]:
        raise StoreUnavailable("away")

    store.retake = away  # type: ignore[method-assign]
    watched.renew()
    assert (20.0, 40.0) == (child.due, child.until)
    assert (12.5, 30.0) == (watched.child.due, watched.child.until)


def test_what_a_known_child_is_given_is_taken_up_once(watched: Watched, store: Store) -> None:
    """It is due from when it was given, and each renewal puts off the next."""
    new = replace(watched.whole, token="1" * 32)
    store.acquire(new)
    give(watched.watcher, os.getpid(), new)
    watched.board.hold(new.token, new.digest)
    watched.renew(5.0)
    assert (10.0, 40.0) == (watched.child.due, watched.child.until)
    for at in (10.0, 12.0, 14.0):
        watched.renew(at)
    assert [[new.token]] == store.renewals
    assert (20.0, 40.0) == (watched.child.due, watched.child.until)


def test_doubt_of_the_attempt_before(watched: Watched, store: Store) -> None:
    """Is given back though the child has the lease of its next attempt by the time the thread looks."""
    watched.child.doubt = known(watched.whole)
    store.acquire(watched.whole)
    new = replace(watched.whole, token="1" * 32, digest="e" * 32)
    store.acquire(new)
    watched.board.hold(new.token, new.digest)
    give(watched.watcher, os.getpid(), new)
    for at in (10.0, 10.5):
        watched.renew(at)
    assert [watched.whole.token] == store.releases
    assert held(store, new)


def in_a_fork(*acts: Callable[[], object]) -> int:
    """Do this in a child; answers its pid."""
    pid = os.fork()
    if not pid:
        for act in acts:
            act()
        os._exit(0)
    os.waitpid(pid, 0)
    return pid


@pytest.mark.parametrize("slot", [0, 2, SLOTS - 1])
def test_board_is_shared_with_children(slot: int) -> None:
    """What a child writes down, its parent reads, of that child and that very attempt; others' slots are their own."""
    board = Board()
    mine, other, digest = "1" * 32, "2" * 32, "d" * 32
    others = in_a_fork(lambda: board.join(1), lambda: board.hold(other, "e" * 32))
    for acts, expected in [
        ([], ""),
        ([lambda: board.hold(mine, digest)], digest),
        ([lambda: board.hold(mine, digest), board.let_go], ""),
        ([lambda: board.hold(mine, digest), lambda: board.give_up(mine)], ""),
        ([lambda: board.hold(mine, digest), lambda: board.give_up("3" * 32)], digest),
        ([lambda: board.hold("3" * 32, digest), lambda: board.hold(mine, "f" * 32)], "f" * 32),
        ([lambda: board.hold("3" * 32, digest)], ""),
        ([lambda: board.hold(mine, digest), lambda: in_a_fork(lambda: board.join(slot), board.let_go)], digest),
    ]:
        pid = in_a_fork(lambda: board.join(slot), *acts)
        assert expected == board.digest(pid, mine)
        assert None is board.digest(os.getpid(), mine)
        assert "e" * 32 == board.digest(others, other)


@pytest.mark.parametrize("slot", [None, SLOTS])
def test_process_without_a_slot(slot: int | None) -> None:
    """What is no child of the pool, or one too many, writes nothing: what it has is not known."""
    board = Board()
    board.join(slot)
    board.hold("1" * 32, "d" * 32)
    board.give_up("1" * 32)
    board.let_go()
    assert None is board.digest(os.getpid(), "1" * 32)


def test_attempt_accepted_while_the_wait_is_worked_out(store: Store, fork: Callable[[], int]) -> None:
    """A child that gets work in the very moment in which the thread works out how long to sleep is renewed in time, too."""
    watcher = Watcher(store)
    pid, one = fork(), claim("one", ttl=3.0)
    store.acquire(one)
    watcher._thread = type("Alive", (), {"is_alive": lambda self: True})()  # type: ignore[assignment]

    class Idle(float):
        """The due time of a child without work, which gets some just after the thread has looked at it."""

        def __lt__(self, other: float) -> bool:
            if watcher._children[pid].due is self:
                give(watcher, pid, one)
            return float(self) < other

    watcher._children[pid] = Child(pid, -2, known(one), lambda: False, Idle("inf"), 0.0)
    timeout = watcher._timeout()
    rung = bool(watcher._poll.poll(0))
    assert rung or (timeout is not None and timeout <= 1001), f"sleeps {timeout} ms and nobody rings"


def test_child_that_is_buried_while_it_is_given_something(
    watcher: Watcher, store: Store, fork: Callable[[], int]
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

    watcher._children[pid] = Dying(pid, -1, known(claim("before")), lambda: False, math.inf, 0.0)
    give(watcher, pid, one)
    until(lambda: not held(store, one), timeout=2)


def test_child_dies_before_the_watch_has_looked(watcher: Watcher, store: Store, fork: Callable[[], int]) -> None:
    """What was given last to a child that dies is freed, though the thread had no turn between."""
    pid, one = fork(), claim("one")
    store.acquire(one)
    watcher._children[pid] = child = Child(pid, -1, known(claim("before")), lambda: True, math.inf, 0.0)
    child.given = (0.0, one.ttl, lambda pid: known(one), lambda: True)
    watcher._bury(child, 0.0)
    watcher._free(child, 0.0)
    assert not held(store, one)


def test_fork_closes_what_it_inherited(watcher: Watcher, fork: Callable[[], int]) -> None:
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
    runtime = Runtime(
        settings_of(Celery(broker="memory://", set_as_current=False, changes={"singleton_lock_url": "memory://"}).conf)
    )
    closed: list[int] = []

    def broken(self: Watcher) -> None:
        closed.append(1)
        raise TimeoutError

    monkeypatch.setattr(Watcher, "close", broken)
    assert runtime.watcher
    with pytest.raises(TimeoutError):
        runtime.forget()
    runtime.forget()
    assert [1] == closed


def test_watch_is_a_daemon(watcher: Watcher, fork: Callable[[], int]) -> None:
    """The thread never keeps a worker from ending."""
    give(watcher, fork(), claim("one"))
    assert watcher._thread is not None
    assert watcher._thread.daemon


def test_nothing_starts_before_the_first_child(watcher: Watcher) -> None:
    """Without children there is no thread."""
    assert watcher._thread is None


@pytest.fixture(autouse=True)
def _quiet(watcher: Watcher) -> Iterator[None]:
    yield
    watcher._children.clear()
