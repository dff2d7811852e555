"""Native events, the loop of the renewal thread, and the thread that runs callbacks, without gevent or eventlet."""

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
from celery_singleton_lock.renewal.loop import BackgroundLoop
from tests.servers import until

WAIT = 60.0


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
    """Callbacks run in their order in one other thread."""
    runner, seen = CallbackRunner(), []

    def note(number: int) -> None:
        seen.append((number, threading.get_ident()))

    for number in range(50):
        runner.call(lambda number=number: note(number))  # type: ignore[misc]
    until(lambda: len(seen) == 50, timeout=WAIT)
    assert list(range(50)) == [number for number, _ in seen]
    (thread,) = {thread for _, thread in seen}
    assert thread != threading.get_ident()


@pytest.mark.parametrize("kind", [RuntimeError, SystemExit])
def test_callback_that_fails(kind: type[BaseException], caplog: pytest.LogCaptureFixture) -> None:
    """An error of a callback is logged, and the next callback runs."""
    runner, seen = CallbackRunner(), []

    def fail() -> None:
        raise kind("no such queue")

    runner.call(fail)
    runner.call(lambda: seen.append("next"))
    until(lambda: seen, timeout=WAIT)
    (record,) = caplog.records
    assert ("ERROR", "no such queue") == (record.levelname, str(record.exc_info[1]))  # type: ignore[index]


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
