"""Raises `LockLost` inside a body that runs, at most once, and never outside of it.

An interrupt is armed just before the body and disarmed just after. Where the exception strikes in that last moment, after the
body's end, it is dropped (see `run`).
"""

from __future__ import annotations

import ctypes
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any, ClassVar, NoReturn, Protocol

from celery_singleton_lock.errors import LockLost
from celery_singleton_lock.native import Callback, patched_by

_SIGNAL = getattr(signal, "SIGURG", None)  # ignored by default, and Celery uses it for nothing


class Interrupt(Protocol):
    """A way to raise in one running body."""

    def arm(self) -> None:
        """From now on the body runs. Called where it runs."""

    def disarm(self) -> None:
        """The body is over. Called where it ran; may be called twice."""

    def fire(self) -> None:
        """Raise in the body if it is armed. Called from the renewal thread."""

    def swallowed(self, error: LockLost) -> int | None:
        """A finalizer swallowed this error: answer the thread to raise it in again, or 0; None: it is not this interrupt's."""


def interrupt_here(key: str, call_in_hub: Callable[[Callback], None]) -> Interrupt:
    """The kind of interrupt that reaches the calling thread or greenlet.

    Arguments:
        key: the lock's key, for the error.
        call_in_hub: runs a callback in the greenlet library's loop, from any thread.
    """
    if patched_by():
        return _GreenletInterrupt(key, call_in_hub)
    if _SIGNAL is not None and threading.current_thread() is threading.main_thread():
        return _MainThreadInterrupt(key)
    return _ThreadInterrupt()


def run(interrupt: Interrupt, body: Callable[[], Any]) -> Any:
    """Call the body with the interrupt armed.

    Raises:
        LockLost: the interrupt was fired while the body ran.
        BaseException: whatever the body raises.
    """
    value: Any = _RUNNING
    error: BaseException | None = None
    try:
        try:
            interrupt.arm()
            value = body()
        except BaseException as raised:
            error = raised
        interrupt.disarm()
    except LockLost as late:  # it struck between the body's end and `disarm`
        interrupt.disarm()
        if value is _RUNNING and error is None:
            raise
        del late
    try:
        if error is not None:
            raise error
        return value
    finally:
        error = None  # no cycle of exception, traceback and frame


_RUNNING = object()


_running: dict[Any, None] = {}  # interrupts whose bodies run, innermost last


def _nothing() -> None:
    """Stands for a weak reference to no exception."""


class _ThreadInterrupt:
    """By CPython's asynchronous exception, which strikes at the thread's next bytecode."""

    _fired = False  # an asynchronous exception was set, and may not have struck

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._thread = threading.get_ident()
        self._armed = False

    def arm(self) -> None:
        _notice_swallowed()
        self._armed = True
        _running[self] = None

    def disarm(self) -> None:
        with self._mutex:
            self._armed = False
            _running.pop(self, None)
            if self._fired:
                try:
                    self._strike_now(_Settled)
                except _Settled:
                    self._fired = False

    def fire(self) -> None:
        with self._mutex:
            if self._armed:
                self._fired = True
                self._set(LockLost)

    def swallowed(self, error: LockLost) -> int | None:
        mine = self._fired and not error.args and threading.get_ident() == self._thread
        return self._thread if mine else None

    def _set(self, exception: type[BaseException]) -> None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), ctypes.py_object(exception))

    def _strike_now(self, exception: type[BaseException]) -> None:
        """Until it gets through: where the collector runs just then, a finalizer swallows it (CPython 3.12 and 3.13).

        Apart: in Python 3.13 an exception that strikes where a loop jumps back passes by an `except` around the loop.
        """
        while True:
            self._set(exception)


class _Settled(BaseException):
    """Takes the place of an exception that has not struck, and is caught at once.

    To take one back is no way: CPython before 3.13 would go on looking for it, and 3.11 so never gets into a traced function.
    """


class _MainThreadInterrupt(_ThreadInterrupt):
    """By a signal to the process's main thread, whose handler raises. Ends a blocking call (PEP 475)."""

    _earlier: ClassVar[Any] = None

    def __init__(self, key: str) -> None:
        super().__init__()
        self._key = key
        self._signalled = False
        self._raised: Callable[[], LockLost | None] = _nothing

    def arm(self) -> None:
        cls = _MainThreadInterrupt
        installed = signal.getsignal(_SIGNAL)  # type: ignore[arg-type]
        if installed is not _on_signal:
            cls._earlier = installed
            signal.signal(_SIGNAL, _on_signal)  # type: ignore[arg-type]
        super().arm()

    def fire(self) -> None:
        self._signalled = True
        signal.pthread_kill(threading.main_thread().ident, _SIGNAL)  # type: ignore[arg-type]

    def swallowed(self, error: LockLost) -> int | None:
        if self._raised() is error:
            self._fired = True
            return self._thread
        return super().swallowed(error)

    @classmethod
    def strike(cls, frame: FrameType | None) -> bool:
        """Raise for a fired interrupt whose body runs in this frame; false if there is none."""
        for interrupt in reversed(list(_running)):
            if isinstance(interrupt, cls) and interrupt._signalled:
                interrupt._signalled = False
                if frame is None or frame.f_code not in _OURS:
                    interrupt._raise()
                return True
        return False

    def _raise(self) -> NoReturn:
        error = LockLost(self._key)
        self._raised = weakref.ref(error)
        try:
            raise error
        finally:
            del error  # which would keep this frame, and all below, in a cycle


def _on_signal(number: int, frame: FrameType | None) -> None:
    if not _MainThreadInterrupt.strike(frame) and callable(_MainThreadInterrupt._earlier):
        _MainThreadInterrupt._earlier(number, frame)


_OURS = {
    run.__code__,
    _MainThreadInterrupt.arm.__code__,
    _ThreadInterrupt.arm.__code__,
    _ThreadInterrupt.disarm.__code__,
}


class _GreenletInterrupt:
    """By a throw from the loop's own greenlet, as the greenlet libraries' timeouts do."""

    def __init__(self, key: str, call_in_hub: Callable[[Callback], None]) -> None:
        from greenlet import getcurrent

        self._key = key
        self._call_in_hub = call_in_hub
        self._greenlet = getcurrent()
        self._armed = False
        self._raised: Callable[[], LockLost | None] = _nothing

    def arm(self) -> None:
        _notice_swallowed()
        self._armed = True
        _running[self] = None

    def disarm(self) -> None:
        self._armed = False
        _running.pop(self, None)

    def fire(self) -> None:
        self._call_in_hub(self._strike)

    def _strike(self) -> None:
        if self._armed and not self._greenlet.dead:
            self._armed = False
            error = LockLost(self._key)
            self._raised = weakref.ref(error)
            self._greenlet.throw(error)

    def swallowed(self, error: LockLost) -> int | None:
        if self._raised() is not error:
            return None
        self._armed = True
        self.fire()  # at the greenlet's next switch
        return 0


_hook: Any = None


def _notice_swallowed() -> None:
    """Put a hook before `sys.unraisablehook`, to which CPython gives what finalizers and callbacks of weak references raise.

    An interrupt's error is then raised again. An asynchronous exception that is set in the hook would strike in the hook itself.
    So the hook is the C function that sets it: ctypes converts its argument by `from_param` first, and between its end and the
    end of the finalizer no bytecode runs. Where several finalizers follow each other, each of them is struck before the body is.
    """
    global _hook
    if sys.unraisablehook is _hook:
        return
    earlier = sys.unraisablehook

    class Unraisable:
        @staticmethod
        def from_param(unraisable: Any) -> ctypes.c_ulong:
            """Return the thread to strike, or zero, which is none."""
            error = unraisable.exc_value
            if ours is _hook and isinstance(error, LockLost):
                for interrupt in reversed(list(_running)):
                    if (thread := interrupt.swallowed(error)) is not None:
                        return ctypes.c_ulong(thread)
            earlier(unraisable)
            return ctypes.c_ulong(0)

    functype: Any = ctypes.PYFUNCTYPE
    prototype = functype(ctypes.c_int, Unraisable, ctypes.py_object)
    ours = prototype(("PyThreadState_SetAsyncExc", ctypes.pythonapi), ((1, "id"), (1, "exc", LockLost)))
    _hook = sys.unraisablehook = ours
