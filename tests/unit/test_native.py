"""The renewal thread's loop, its alarm, and the thread that tells users, in a process whose threads nobody has patched."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from celery_singleton_lock import native
from celery_singleton_lock.native import CallbackRunner, NativeEvent, start_native_thread
from celery_singleton_lock.renewal import loop as loop_module
from celery_singleton_lock.renewal.renewer import BackgroundLoop
from tests.servers import until

WAIT = 5.0


def failing_once(monkeypatch: pytest.MonkeyPatch, module: Any) -> list[Callable[[], object]]:
    """Let this module's first start of a thread fail, as where no more are allowed; answers what was to be started."""
    tried: list[Callable[[], object]] = []

    def start(target: Callable[[], object]) -> None:
        tried.append(target)
        if len(tried) == 1:
            raise RuntimeError("can't start new thread")
        start_native_thread(target)

    monkeypatch.setattr(module, "start_native_thread", start)
    return tried


# -- alarm -------------------------------------------------------------------------------------


def test_alarm_ends_one_wait() -> None:
    """Set before a wait, however often, it ends that one at once and no other; unset, the wait ends when its time is over."""
    alarm = NativeEvent()
    for _ in range(3):
        alarm.set()
    assert alarm.wait(WAIT) is True
    assert alarm.wait(0.01) is False
    assert alarm.wait(-1.0) is False


@pytest.mark.parametrize("seconds", [None, WAIT, 1e300, math.inf])
def test_alarm_from_another_thread(seconds: float | None) -> None:
    """It ends a wait under way, however long that was to be."""
    alarm, answers, waiting = NativeEvent(), [], threading.Event()

    def wait() -> None:
        waiting.set()
        answers.append(alarm.wait(seconds))

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    assert waiting.wait(WAIT)
    alarm.set()
    thread.join(WAIT)
    assert [True] == answers


# -- loop --------------------------------------------------------------------------------------


def test_thread_that_could_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the thread cannot be started the caller learns of it; the next wake starts it, and then it is the only one."""
    tried = failing_once(monkeypatch, loop_module)
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
    """Whoever wakes the thread during a step that then finds nothing due gets a step of his own."""
    steps: list[int] = []

    def step() -> float:
        steps.append(1)
        if len(steps) == 1:
            loop.wake(0.0)
        return math.inf

    loop = BackgroundLoop(step, CallbackRunner())
    loop.wake(0.0)
    until(lambda: len(steps) >= 2, timeout=WAIT)


# -- hub ---------------------------------------------------------------------------------------


def test_callbacks_run_in_order_in_one_other_thread() -> None:
    """One after the other, as they were given, in a thread that is not the caller's; a failing one keeps none away."""
    hub, seen = CallbackRunner(), []

    def note(number: int) -> None:
        seen.append((number, threading.get_ident()))
        if number % 3 == 0:
            raise RuntimeError("a receiver of the user's")

    for number in range(50):
        hub.call(lambda number=number: note(number))  # type: ignore[misc]
    until(lambda: len(seen) == 50, timeout=WAIT)
    assert list(range(50)) == [number for number, _ in seen]
    (thread,) = {thread for _, thread in seen}
    assert thread != threading.get_ident()


@pytest.mark.parametrize("way", ["call", "call_in_loop"])
def test_slow_callback_keeps_no_caller(way: str) -> None:
    """A call returns at once while a callback is under way, and those behind it wait for its end."""
    hub, go, seen = CallbackRunner(), threading.Event(), []
    call = getattr(hub, way)
    call(lambda: seen.append(go.wait(WAIT)))
    call(lambda: seen.append("second"))
    time.sleep(0.05)  # for a second thread, if there were one
    assert [] == seen
    go.set()
    until(lambda: len(seen) == 2, timeout=WAIT)
    assert [True, "second"] == seen


def test_telling_thread_that_could_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """What could not be told for want of a thread is told with the next."""
    tried = failing_once(monkeypatch, native)
    hub, seen = CallbackRunner(), []
    with pytest.raises(RuntimeError, match="new thread"):
        hub.call(lambda: seen.append(1))
    hub.call(lambda: seen.append(2))
    until(lambda: len(seen) == 2, timeout=WAIT)
    assert [1, 2] == seen
    assert 2 == len(tried)


def test_no_thread_before_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub that has nothing to tell starts no thread."""
    monkeypatch.setattr(native, "start_native_thread", lambda target: pytest.fail("started"))
    CallbackRunner()
