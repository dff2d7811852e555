"""`LockLost` is raised in a running body at most once, and never after the body's end."""

from __future__ import annotations

import contextlib
import gc
import random
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import pytest

from celery_singleton_lock import LockLost
from celery_singleton_lock.renewal import interrupts as module
from celery_singleton_lock.renewal.interrupts import interrupt_here, run
from tests.servers import until

SECONDS = 0.8


def here(key: str = "k") -> Any:
    return interrupt_here(key, lambda callback: callback())


def in_thread(work: Callable[[], Any]) -> Any:
    """Do this in a thread of its own; return what it returns, raise what it raises."""
    outcome: list[Any] = []

    def target() -> None:
        try:
            outcome.append((True, work()))
        except BaseException as error:
            outcome.append((False, error))

    thread = threading.Thread(target=target)
    thread.start()
    thread.join(100)
    assert outcome, "the thread died of an exception that escaped"
    done, value = outcome[0]
    if not done:
        raise value
    return value


@pytest.fixture(params=["main thread", "other thread"])
def place(request: pytest.FixtureRequest) -> Callable[[Callable[[], Any]], Any]:
    """Where bodies run: in the main thread (prefork, solo) or in another one (threads)."""
    return in_thread if request.param == "other thread" else lambda work: work()


Place = Callable[[Callable[[], Any]], Any]

#: Seconds after which a body ends by itself that an interrupt is to end.
LATE = 60.0


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    before = signal.getsignal(signal.SIGURG)
    yield
    signal.signal(signal.SIGURG, before)
    assert {} == module._armed


def firing(interrupt: Any, seconds: float) -> Callable[[], None]:
    """Return what the body calls to be interrupted by another thread so many seconds later, or at once on a busy machine.

    The thread starts here: `Thread.start` makes a `KeyError` of an exception that is raised in it.
    """
    begun = threading.Event()

    def fire() -> None:
        begun.wait()
        time.sleep(seconds)
        interrupt.fire()

    threading.Thread(target=fire, daemon=True).start()  # a body that fails before never calls it
    return begun.set


def run_and_fire(interrupt: Any, seconds: float, body: Callable[[], Any]) -> Any:
    """Run the body, and fire the interrupt so many seconds after its start."""
    fire_soon = firing(interrupt, seconds)

    def fired() -> Any:
        fire_soon()
        return body()

    return run(interrupt, fired)


def test_body_is_interrupted(place: Place) -> None:
    """LockLost is raised in a body that runs Python code."""

    def work() -> None:
        deadline = time.monotonic() + LATE
        with pytest.raises(LockLost):
            run_and_fire(here(), 0.02, lambda: spin(deadline))
        assert time.monotonic() < deadline

    place(work)


def spin(deadline: float) -> None:
    while time.monotonic() < deadline:
        pass


def test_blocking_call_in_the_main_thread_is_interrupted() -> None:
    """In the main thread a blocking call ends at once, and the error has the key."""
    began = time.monotonic()
    with pytest.raises(LockLost) as lost:
        run_and_fire(here("the-key"), 0.05, lambda: time.sleep(LATE))  # which ends early
    assert time.monotonic() - began < LATE
    assert "the-key" == lost.value.key


@pytest.mark.parametrize(
    "block", [lambda: threading.Event().wait(LATE), lambda: signal.sigtimedwait({signal.SIGUSR2}, LATE)]
)
def test_other_blocking_calls(block: Callable[[], Any]) -> None:
    """Other system calls end, too."""
    began = time.monotonic()
    with pytest.raises(LockLost):
        run_and_fire(here(), 0.05, block)
    assert time.monotonic() - began < LATE


def test_value_and_own_error_are_kept(place: Place) -> None:
    """Without an interrupt, `run` returns the body's value or raises the body's own error of any kind."""

    def work() -> None:
        assert 5 == run(here(), lambda: 5)
        assert run(here(), lambda: None) is None
        for error in (ValueError("mine"), SystemExit(3), LockLost("own"), KeyboardInterrupt()):
            with pytest.raises(type(error)) as raised:
                run(here(), thrower(error))
            assert error is raised.value

    place(work)


def thrower(error: BaseException) -> Callable[[], None]:
    def body() -> None:
        raise error

    return body


def test_fired_before_and_after_does_nothing(place: Place) -> None:
    """An interrupt that is fired while its body does not run raises nothing, then or later."""

    def work() -> None:
        interrupt = here()
        assert 1 == run(interrupt, lambda: 1)
        interrupt.fire()
        for _ in range(1000):
            pass
        assert 2 == run(here(), lambda: spin(time.monotonic() + 0.02) or 2)
        interrupt.disarm()

    place(work)


def test_body_may_catch_it_and_go_on(place: Place) -> None:
    """It is raised once: a body that catches it and goes on is left alone."""

    def work() -> None:
        interrupt, caught = here(), []
        fire_soon = firing(interrupt, 0.02)

        def body() -> str:
            try:
                fire_soon()
                spin(time.monotonic() + LATE)
            except LockLost:
                caught.append(1)
            spin(time.monotonic() + 0.05)
            return "went on"

        assert "went on" == run(interrupt, body)
        assert [1] == caught

    place(work)


def test_nested_bodies(place: Place) -> None:
    """Only the body whose lock was lost is interrupted: first the inner one, later the outer one."""

    def work() -> None:
        outer, inner = here("outer"), here("inner")
        fire_soon = firing(outer, 0.02)
        seen = []

        def body() -> None:
            with pytest.raises(LockLost):
                run_and_fire(inner, 0.02, lambda: spin(time.monotonic() + LATE))
            seen.append("inner lost")
            spin(time.monotonic() + 0.02)
            seen.append("outer went on")
            fire_soon()
            spin(time.monotonic() + LATE)

        with pytest.raises(LockLost):
            run(outer, body)
        assert ["inner lost", "outer went on"] == seen

    place(work)


def test_two_threads_at_once() -> None:
    """Only the thread whose body lost its lock is interrupted."""
    mine, ready, over, results = [], threading.Barrier(3), threading.Event(), {}

    def work(name: str) -> None:
        interrupt = here()
        mine.append((name, interrupt))
        ready.wait()
        try:
            run(interrupt, lambda: until(over.is_set, timeout=LATE))
            results[name] = "whole"
        except LockLost:
            results[name] = "lost"

    threads = [threading.Thread(target=work, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    ready.wait()
    until(lambda: len(module._armed) == 2)
    dict(mine)["a"].fire()
    threads[0].join()
    over.set()
    threads[1].join()
    assert {"a": "lost", "b": "whole"} == results


def test_users_own_handler_is_kept() -> None:
    """The handler that the user had for the signal still gets signals that no interrupt sent."""
    got = []
    signal.signal(signal.SIGURG, lambda number, frame: got.append(number))
    run(here(), lambda: None)
    signal.raise_signal(signal.SIGURG)
    assert [signal.SIGURG] == got

    def body() -> str:
        signal.raise_signal(signal.SIGURG)
        return "went on"

    assert "went on" == run(here(), body)
    assert 2 == len(got)


def test_users_signal_after_an_interrupt() -> None:
    """A signal of the user's raises nothing in a body that has caught its interrupt before."""
    interrupt, got = here(), []
    fire_soon = firing(interrupt, 0.02)
    signal.signal(signal.SIGURG, lambda number, frame: got.append(number))

    def body() -> str:
        with contextlib.suppress(LockLost):
            fire_soon()
            spin(time.monotonic() + LATE)
        signal.raise_signal(signal.SIGURG)
        return "went on"

    assert "went on" == run(interrupt, body)
    assert [signal.SIGURG] == got


def test_no_reference_cycle(place: Place) -> None:
    """No reference cycle keeps a body's locals alive after its error was raised."""

    class Big:
        pass

    def work() -> None:
        gc.disable()
        try:
            gone = weakref.ref(fail())
        finally:
            gc.enable()
        assert gone() is None

    def fail() -> Any:
        big = Big()

        def body() -> None:
            raise ValueError(big)

        with pytest.raises(ValueError, match="Big"):
            run(here(), body)
        return big

    place(work)


class Firing:
    """Fires each interrupt at a given moment, from another thread."""

    def __init__(self) -> None:
        self._target: tuple[Any, float] | None = None
        self._over = False
        self.fired = 0
        self._thread = threading.Thread(target=self._work)

    def __enter__(self) -> Firing:
        self._interval = sys.getswitchinterval()
        sys.setswitchinterval(2e-6)
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._over = True
        self._thread.join()
        sys.setswitchinterval(self._interval)

    def at(self, interrupt: Any, moment: float) -> None:
        self._target = (interrupt, moment)

    def _work(self) -> None:
        while not self._over:
            if self._target is None:
                continue
            interrupt, moment = self._target
            self._target = None
            while time.perf_counter() < moment:
                pass
            interrupt.fire()
            self.fired += 1


def hammer(
    body: Callable[[float, list[str]], Any], check: Callable[[list[str], Any, BaseException | None], None]
) -> None:
    """Run a body many times and fire its interrupt close to its end; nothing may be raised outside of `run`.

    The body's length is adjusted until about half of the interrupts are raised in it; on a busy machine that takes longer.
    """
    length = 1e-4
    met: set[bool] = set()
    with Firing() as firing:
        began = time.perf_counter()
        while (now := time.perf_counter()) < began + SECONDS or (len(met) < 2 and now < began + 20 * SECONDS):
            interrupt, marks = here(), []
            value: Any = None
            error: BaseException | None = None
            before = firing.fired
            begin = time.perf_counter()
            end = begin + length
            try:
                firing.at(interrupt, begin + random.uniform(2e-5, 6e-5))
                value = run(interrupt, lambda end=end, marks=marks: body(end, marks))
            except (LockLost, ValueError) as raised:
                error = raised
            check(marks, value, error)
            interrupted = bool(marks) or isinstance(error, LockLost)
            met.add(interrupted)
            length = min(max(length * (0.9 if interrupted else 1.1), 1e-5), 0.05)
            while firing.fired == before:  # bytecodes in which a late error would show
                pass
            for _ in range(20):
                pass


def busy(end: float) -> None:
    while time.perf_counter() < end:
        pass


def test_hammer_value(place: Place) -> None:
    """Whenever it is fired, `run` returns the body's value or raises LockLost; nothing is raised later."""
    lost = []

    def body(end: float, marks: list[str]) -> str:
        busy(end)
        return "value"

    def check(marks: list[str], value: Any, error: BaseException | None) -> None:
        assert isinstance(error, LockLost) or (error is None and "value" == value)
        lost.append(error is not None)

    place(lambda: hammer(body, check))
    assert 0 < sum(lost) < len(lost), "the hammer must meet both"


def test_hammer_own_error(place: Place) -> None:
    """Whenever it is fired, a body that fails raises its own error, or LockLost if that came before."""

    def body(end: float, marks: list[str]) -> None:
        busy(end)
        raise ValueError

    def check(marks: list[str], value: Any, error: BaseException | None) -> None:
        assert isinstance(error, (ValueError, LockLost))
        kinds.add(type(error))

    kinds: set[type] = set()
    place(lambda: hammer(body, check))
    assert {ValueError, LockLost} == kinds, "the hammer must meet both"


def test_hammer_that_catches(place: Place) -> None:
    """Whenever it is fired, a body that catches LockLost and returns is not interrupted a second time."""

    def body(end: float, marks: list[str]) -> str:
        try:
            busy(end)
        except LockLost:
            marks.append("caught")
        return "value"

    caught = []

    def check(marks: list[str], value: Any, error: BaseException | None) -> None:
        caught.append(len(marks))
        assert len(marks) <= 1
        assert not (marks and error), "raised twice"

    place(lambda: hammer(body, check))
    assert 0 < sum(caught) < len(caught), "the hammer must meet both"


def test_fired_between_end_and_disarm(place: Place) -> None:
    """One that is fired when the body has ended changes neither its value nor its error, and is raised nowhere."""

    def work() -> None:
        for body in (lambda: "value", thrower(ValueError("mine"))):
            interrupt = here()
            disarm, fired = interrupt.disarm, []

            def fire_and_disarm(interrupt: Any = interrupt, disarm: Any = disarm, fired: list[int] = fired) -> None:
                if not fired:
                    fired.append(1)
                    interrupt.fire()
                disarm()

            interrupt.disarm = fire_and_disarm
            with contextlib.suppress(ValueError):
                assert "value" == run(interrupt, body)
            assert [1] == fired
            spin(time.monotonic() + 0.02)

    place(work)


def test_fired_while_disarm_waits() -> None:
    """One that is fired while another thread's `disarm` waits for the mutex is raised nowhere after that."""
    for _ in range(200):
        interrupts: list[Any] = []
        mutex = threading.Lock()

        def work(interrupts: list[Any] = interrupts, mutex: Any = mutex) -> str:
            interrupt = here()
            interrupt._mutex = mutex
            interrupts.append(interrupt)
            value = run(interrupt, lambda: "value")
            spin(time.monotonic() + 0.0005)
            return str(value)

        with ThreadPoolExecutor(1) as threads:
            with mutex:
                result = threads.submit(work)
                until(lambda: any(in_disarm(frame) for frame in sys._current_frames().values()), every=0.0002)
                interrupts[0]._mutex = contextlib.nullcontext()  # `fire` goes first
                interrupts[0].fire()
            assert "value" == result.result()


def in_disarm(frame: FrameType) -> bool:
    return frame.f_code is module._ThreadInterrupt.disarm.__code__


class Cycle:
    """An object that only the collector frees, and whose finalizer is written in Python."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        for _ in range(3):
            pass


def test_exception_that_a_finalizer_swallows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A body ends, though the collector runs all the time and its finalizers swallow interrupts, at the body's end too."""
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    before = gc.get_threshold()

    def work() -> None:
        gc.set_threshold(1)
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            Cycle()
            interrupt = here()

            def body(interrupt: Any = interrupt) -> None:
                interrupt.fire()
                for _ in range(200):
                    pass

            with contextlib.suppress(LockLost):
                run(interrupt, body)

    try:
        in_thread(work)
    finally:
        gc.set_threshold(*before)


TRACED = """
import sys, threading
from celery_singleton_lock.errors import LockLost
from celery_singleton_lock.renewal.interrupts import interrupt_here, run

def work():
    interrupt = interrupt_here("key", None)
    def body():
        interrupt.fire()
        while True:
            pass
    try:
        run(interrupt, body)
    except LockLost:
        print("interrupted")

def traced():
    print("traced")

thread = threading.Thread(target=work)
thread.start()
thread.join()
sys.setprofile(lambda *_: None)
traced()
"""


def test_tracer_after_an_interrupt() -> None:
    """A process can be traced after an interrupt: CPython 3.11 would hang if the exception had been cleared."""
    ended = subprocess.run([sys.executable, "-c", TRACED], capture_output=True, text=True, timeout=110)
    assert "interrupted\ntraced\n" == ended.stdout, ended.stderr
