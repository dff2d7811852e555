"""Native events, the loop of the renewal thread, and the thread that runs callbacks, without gevent or eventlet."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from celery_singleton_lock import StoreError, native
from celery_singleton_lock.lease import Lease
from celery_singleton_lock.native import CallbackRunner, NativeEvent, start_native_thread
from celery_singleton_lock.renewal import renewer as renewal
from celery_singleton_lock.renewal.renewer import BackgroundLoop, Renewer
from celery_singleton_lock.store.memory import MemoryStore
from celery_singleton_lock.store.protocol import LeaseRequest
from tests.servers import until
from tests.unit.conftest import Clock

WAIT = 5.0


def failing_once(monkeypatch: pytest.MonkeyPatch, module: Any) -> list[Callable[[], object]]:
    """Let this module's first start of a thread fail, as at a limit; return a list of all that it tried to start."""
    tried: list[Callable[[], object]] = []

    def start(target: Callable[[], object]) -> None:
        tried.append(target)
        if len(tried) == 1:
            raise RuntimeError("can't start new thread")
        start_native_thread(target)

    monkeypatch.setattr(module, "start_native_thread", start)
    return tried


# -- event -------------------------------------------------------------------------------------


def test_event_ends_one_wait() -> None:
    """An event that was set once or several times ends the next wait only; other waits end after their time."""
    event = NativeEvent()
    for _ in range(3):
        event.set()
    assert event.wait(WAIT) is True
    assert event.wait(0.01) is False
    assert event.wait(-1.0) is False


@pytest.mark.parametrize("seconds", [None, WAIT, 1e300, math.inf])
def test_event_from_another_thread(seconds: float | None) -> None:
    """Another thread can end a wait of any length."""
    event, answers, waiting = NativeEvent(), [], threading.Event()

    def wait() -> None:
        waiting.set()
        answers.append(event.wait(seconds))

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    assert waiting.wait(WAIT)
    event.set()
    thread.join(WAIT)
    assert [True] == answers


# -- loop --------------------------------------------------------------------------------------


def test_thread_that_could_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that cannot be started is an error for the caller; the next `wake` starts it, and only once."""
    tried = failing_once(monkeypatch, renewal)
    steps: list[int] = []

    def step() -> float:
        steps.append(threading.get_ident())
        return math.inf

    loop = BackgroundLoop(step, CallbackRunner())
    with pytest.raises(RuntimeError, match="new thread"):
        loop.wake(0.0)
    loop.wake(0.0)
    until(lambda: steps, timeout=WAIT)
    loop.wake(0.0)
    until(lambda: len(steps) > 1, timeout=WAIT)
    assert 2 == len(tried)
    assert 1 == len(set(steps))


def test_wake_during_a_step_is_not_lost() -> None:
    """A `wake` during a step leads to another step, even if the first one finds nothing due."""
    steps: list[int] = []

    def step() -> float:
        steps.append(1)
        if len(steps) == 1:
            loop.wake(0.0)
        return math.inf

    loop = BackgroundLoop(step, CallbackRunner())
    loop.wake(0.0)
    until(lambda: len(steps) >= 2, timeout=WAIT)


# -- callbacks ---------------------------------------------------------------------------------------


def test_callbacks_run_in_order_in_one_other_thread() -> None:
    """Callbacks run in their order in one other thread, also after one that fails."""
    runner, seen = CallbackRunner(), []

    def note(number: int) -> None:
        seen.append((number, threading.get_ident()))
        if number % 3 == 0:
            raise RuntimeError("a receiver of the user's")

    for number in range(50):
        runner.call(lambda number=number: note(number))  # type: ignore[misc]
    until(lambda: len(seen) == 50, timeout=WAIT)
    assert list(range(50)) == [number for number, _ in seen]
    (thread,) = {thread for _, thread in seen}
    assert thread != threading.get_ident()


@pytest.mark.parametrize("way", ["call", "call_in_loop"])
def test_slow_callback_keeps_no_caller(way: str) -> None:
    """A call returns at once while another callback runs; its own callback waits for the end of that one."""
    runner, go, seen = CallbackRunner(), threading.Event(), []
    call = getattr(runner, way)
    call(lambda: seen.append(go.wait(WAIT)))
    call(lambda: seen.append("second"))
    time.sleep(0.05)  # for a second thread, if there were one
    assert [] == seen
    go.set()
    until(lambda: len(seen) == 2, timeout=WAIT)
    assert [True, "second"] == seen


def test_callback_thread_that_could_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """A callback whose thread could not be started runs with the next one."""
    tried = failing_once(monkeypatch, native)
    runner, seen = CallbackRunner(), []
    with pytest.raises(RuntimeError, match="new thread"):
        runner.call(lambda: seen.append(1))
    runner.call(lambda: seen.append(2))
    until(lambda: len(seen) == 2, timeout=WAIT)
    assert [1, 2] == seen
    assert 2 == len(tried)


def test_no_thread_before_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a callback there is no thread."""
    monkeypatch.setattr(native, "start_native_thread", lambda target: pytest.fail("started"))
    CallbackRunner()


class Receiver:
    """Listens to a renewer as a user's slow or failing receivers do."""

    def __init__(self, receive: Callable[[], object]) -> None:
        self._receive = receive

    def renewed(self, lease: Lease) -> None: ...

    def lost(self, lease: Lease) -> None:
        self._receive()

    def reacquired(self, lease: Lease) -> None:
        self._receive()

    def unreachable(self, lease: Lease, error: StoreError) -> None: ...


@pytest.fixture
def three(clock: Clock) -> Callable[[Receiver], tuple[Renewer, list[Lease]]]:
    """Return a function that makes a renewer with three due leases: one revoked, one missing in the store, one intact."""

    def make(receiver: Receiver) -> tuple[Renewer, list[Lease]]:
        store = MemoryStore(clock)
        renewer = Renewer(store, store, CallbackRunner(), receiver, clock)
        renewer._loop.wake = lambda at: None  # type: ignore[method-assign]
        leases = []
        for number in range(3):
            wanted = LeaseRequest("b:{x}", f"d{number}", f"t{number}", 12.0)
            result = store.acquire(wanted)
            lease = Lease(wanted.lock, wanted)
            lease.granted(clock(), result.fence, renewer.verify)
            renewer.add(lease)
            leases.append(lease)
        store.revoke("b:{x}", leases[0].key)
        store.acquire(LeaseRequest("b:{x}", "d0", "other", 60.0))
        del store._records[leases[1].key]
        clock.advance(4.0)
        return renewer, leases

    return make


def test_slow_receiver_delays_no_renewal(three: Any, clock: Clock) -> None:
    """While a receiver of `lost` is busy, the other leases are renewed."""
    go, seen = threading.Event(), []
    renewer, leases = three(Receiver(lambda: seen.append(go.wait(WAIT))))
    renewer.renew_due()
    assert [] == seen
    assert [True, False, False] == [lease.lost for lease in leases]
    assert [clock() + 12.0] * 2 == [lease.deadline for lease in leases[1:]]
    go.set()
    until(lambda: seen == [True, True], timeout=WAIT)


def test_failing_receiver_delays_no_renewal(three: Any, clock: Clock) -> None:
    """When a receiver fails, the other leases of the same batch are renewed."""
    seen = []

    def fail() -> None:
        seen.append(1)
        raise RuntimeError("a receiver of the user's")

    renewer, leases = three(Receiver(fail))
    renewer.renew_due()
    assert [clock() + 12.0] * 2 == [lease.deadline for lease in leases[1:]]
    until(lambda: len(seen) == 2, timeout=WAIT)
