"""Raises `LockLost` in a running body, at most once and never after the body's end.

`run` arms an interrupt before the body and disarms it after. The renewal thread fires it when the lease is lost. There is one
class for each way to reach a body: a signal for the main thread (prefork, solo), CPython's asynchronous exception for other
threads, a throw for greenlets. A finalizer such as `__del__` that runs at that moment swallows it, as it does any exception.
"""

from __future__ import annotations

import ctypes
import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import FrameType
from typing import Any

from celery_singleton_lock.errors import LockLost
from celery_singleton_lock.native import Callback, patched_by

_SIGNAL: Any = getattr(signal, "SIGURG", None)  # ignored by default, and Celery uses it for nothing


def interrupt_here(key: str, call_in_loop: Callable[[Callback], None]) -> Interrupt:
    """Return an interrupt for a body that will run in the calling thread or greenlet."""
    if patched_by():
        return _GreenletInterrupt(key, call_in_loop)
    if _SIGNAL is not None and threading.current_thread() is threading.main_thread():
        return _MainThreadInterrupt(key)
    return _ThreadInterrupt(key)


def run(interrupt: Interrupt, body: Callable[[], Any]) -> Any:
    """Call the body with the interrupt armed; raise `LockLost` if it is fired before the body ends."""
    value: Any = None
    error: BaseException | None = LockLost()  # unless the body gets to its end
    try:
        try:
            interrupt.arm()
            value = body()
            error = None
        except BaseException as raised:
            error = raised
        interrupt.disarm()
    except LockLost:  # raised after the body's end: what the body returned or raised counts
        interrupt.disarm()
    try:
        if error is not None:
            raise error
        return value
    finally:
        error = None  # no cycle of exception, traceback and frame


class Interrupt(ABC):
    """Raises `LockLost` in one body."""

    def __init__(self, key: str) -> None:
        self._key = key

    def arm(self) -> None:
        """Note that the body starts. Called in its thread or greenlet, as `disarm` is."""
        _armed[self] = None

    def disarm(self) -> None:
        """Note that the body has ended. May be called twice."""
        _armed.pop(self, None)

    @abstractmethod
    def fire(self) -> None:
        """Raise in the body if it runs. Called once, from any thread."""


_armed: dict[Interrupt, None] = {}  # in the order in which their bodies started


class _GreenletInterrupt(Interrupt):
    """Throws from the loop's own greenlet, as the timeouts of gevent and eventlet do."""

    def __init__(self, key: str, call_in_loop: Callable[[Callback], None]) -> None:
        from greenlet import getcurrent

        super().__init__(key)
        self._call_in_loop = call_in_loop
        self._greenlet = getcurrent()

    def fire(self) -> None:
        self._call_in_loop(self._throw)

    def _throw(self) -> None:
        if self in _armed and not self._greenlet.dead:
            self._greenlet.throw(LockLost(self._key))


class _ThreadInterrupt(Interrupt):
    """Sets an asynchronous exception, which CPython raises at the thread's next bytecode."""

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self._thread = threading.get_ident()
        self._mutex = threading.Lock()

    def fire(self) -> None:
        with self._mutex:
            if self in _armed:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), ctypes.py_object(LockLost))

    def disarm(self) -> None:
        """Note that the body has ended.

        An exception that is set while this waits for the mutex is raised in here, at the next call, and `run` drops it.
        """
        with self._mutex:
            super().disarm()


class _MainThreadInterrupt(_ThreadInterrupt):
    """Sends a signal whose handler raises. This also ends a blocking call (PEP 475)."""

    fired = False

    def arm(self) -> None:
        earlier = signal.getsignal(_SIGNAL)
        if not isinstance(earlier, _SignalHandler):
            signal.signal(_SIGNAL, _SignalHandler(earlier))
        super().arm()

    def fire(self) -> None:
        self.fired = True
        signal.pthread_kill(self._thread, _SIGNAL)


class _SignalHandler:
    """Passes signals that no interrupt sent to the handler that was there before."""

    def __init__(self, earlier: Any) -> None:
        self._earlier = earlier

    def __call__(self, number: int, frame: FrameType | None) -> None:
        for interrupt in reversed(list(_armed)):
            if isinstance(interrupt, _MainThreadInterrupt) and interrupt.fired:
                interrupt.fired = False
                raise LockLost(interrupt._key)
        if callable(self._earlier):
            self._earlier(number, frame)
