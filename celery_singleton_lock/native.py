"""What a native thread needs in a process whose threading may be patched by gevent or eventlet."""

from __future__ import annotations

import _thread
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

Callback = Callable[[], object]


def patched_by() -> str:
    """``"gevent"`` or ``"eventlet"`` where that library has patched this process's threads, else an empty string."""
    gevent = sys.modules.get("gevent.monkey")
    if gevent is not None and gevent.is_module_patched("threading"):
        return "gevent"
    eventlet = sys.modules.get("eventlet.patcher")
    if eventlet is not None and eventlet.is_monkey_patched("thread"):
        return "eventlet"
    return ""


def _native() -> Any:
    """The `_thread` functions as they were before any patch."""
    kind = patched_by()
    if kind == "gevent":
        names = ("start_new_thread", "allocate_lock")
        found = sys.modules["gevent.monkey"].get_original("_thread", list(names))
        return type("native", (), {name: staticmethod(f) for name, f in zip(names, found, strict=True)})
    if kind == "eventlet":
        return sys.modules["eventlet.patcher"].original("_thread")
    return _thread


def start_native_thread(target: Callback) -> None:
    """Start an operating-system thread that never keeps the process from ending."""
    _native().start_new_thread(target, ())


def native_lock() -> Any:
    """A lock that blocks the operating-system thread."""
    return _native().allocate_lock()


class NativeEvent:
    """A wake-up call for one waiting native thread, set from any thread or greenlet without blocking."""

    def __init__(self) -> None:
        self._lock = native_lock()
        self._lock.acquire()

    def wait(self, seconds: float | None) -> bool:
        """Return true when the alarm is set, or false after so many seconds (None: only when it is set)."""
        return bool(self._lock.acquire(True, -1 if seconds is None else min(max(seconds, 0.0), _thread.TIMEOUT_MAX)))

    def set(self) -> None:
        """End the present wait, or the next one."""
        with suppress(RuntimeError):  # it is set already
            self._lock.release()


class CallbackRunner:
    """Where the renewal thread lets callbacks run that log or meet user code, which may be slow.

    `call` runs them one after the other in a thread of their own; in gevent and eventlet workers each in a new greenlet of the
    thread that made this object: logging and user code hold patched locks there, which a native thread must not wait for.
    `call_in_loop` runs one in the loop's own greenlet, the only place to throw into another greenlet from.
    `end` gives up what the hub has started, once it has run the callbacks that wait.
    """

    def __init__(self) -> None:
        makers = {"gevent": _gevent_calls, "eventlet": _eventlet_calls}
        self.call, self.call_in_loop, self.end = makers.get(patched_by(), _thread_calls)()


Caller = Callable[[Callback], None]
Calls = tuple[Caller, Caller, Callable[[], None]]


def _thread_calls() -> Calls:
    waiting: SimpleQueue[Callback | None] = SimpleQueue()
    started: list[bool] = []
    mutex = native_lock()

    def run() -> None:
        while (callback := waiting.get()) is not None:
            with suppress(BaseException):  # an error in a user's log filter, say
                callback()

    def call(callback: Callback) -> None:
        waiting.put(callback)
        with mutex:
            if not started:
                start_native_thread(run)
                started.append(True)

    def end() -> None:
        with mutex:
            if started:
                waiting.put(None)
                started.clear()

    return call, call, end


def _gevent_calls() -> Calls:
    import gevent

    loop = gevent.get_hub().loop
    return (
        lambda callback: loop.run_callback_threadsafe(gevent.spawn, callback),
        loop.run_callback_threadsafe,
        lambda: None,
    )


def _eventlet_calls() -> Calls:
    import eventlet
    from eventlet.green import socket

    waiting: deque[Callback] = deque()
    reader, writer = socket.socketpair()
    write = sys.modules["eventlet.patcher"].original("os").write
    schedule = eventlet.hubs.get_hub().schedule_call_global
    get_ident = _native().get_ident
    loop_thread = get_ident()

    def agent() -> None:
        while reader.recv(64):
            while waiting:
                eventlet.spawn_n(waiting.popleft())
        reader.close()

    def call(callback: Callback) -> None:
        waiting.append(callback)
        write(writer.fileno(), b"x")  # one byte into a near-empty buffer never blocks

    eventlet.spawn_n(agent)

    def call_in_loop(callback: Callback) -> None:
        if get_ident() == loop_thread:  # at once: by way of the agent, any greenlet that is ready would run first
            schedule(0, callback)
        else:
            call(lambda: schedule(0, callback))

    return call, call_in_loop, writer.close
