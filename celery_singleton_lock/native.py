"""Threads, locks and callbacks that work in a process whose threading gevent or eventlet has patched."""

from __future__ import annotations

import _thread
import gc
import os
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from queue import SimpleQueue
from typing import Any, ClassVar

from celery_singleton_lock.log import logger

Callback = Callable[[], object]


def patched_by() -> str:
    """Return ``"gevent"`` or ``"eventlet"`` if that library has patched this process's threads, else an empty string."""
    gevent = sys.modules.get("gevent.monkey")
    if gevent is not None and gevent.is_module_patched("threading"):
        return "gevent"
    eventlet = sys.modules.get("eventlet.patcher")
    if eventlet is not None and eventlet.is_monkey_patched("thread"):
        return "eventlet"
    return ""


def _unpatched(name: str) -> Any:
    """Return this function of `_thread` as it was before any patch."""
    library = patched_by()
    if library == "gevent":
        return sys.modules["gevent.monkey"].get_original("_thread", name)
    if library == "eventlet":
        return getattr(sys.modules["eventlet.patcher"].original("_thread"), name)
    return getattr(_thread, name)


def start_native_thread(target: Callback) -> None:
    """Start an operating-system thread that never keeps the process from ending."""
    _unpatched("start_new_thread")(target, ())


def native_lock() -> Any:
    """Return a lock that blocks the operating-system thread."""
    return _unpatched("allocate_lock")()


class CollectorPause:
    """Pauses Python's garbage collector while a native thread works in a process that gevent or eventlet has patched.

    A collection runs finalizers in its own thread. Those of Celery's results and of redis-py's connections use sockets and locks
    of the loop. A greenlet that waits for a patched lock may wait for ever if a native thread has the lock. User code that
    disables the collector during a pause finds it enabled again.
    """

    _threads: ClassVar[set[CollectorPause]] = set()  # that pause the collector now
    _was_enabled: ClassVar[bool] = False

    def begin(self) -> None:
        """Called by the thread before it works."""
        if patched_by():
            self._threads.add(self)
            if gc.isenabled():
                gc.disable()
                CollectorPause._was_enabled = True
            _register_fork()

    def end(self) -> bool:
        """Called by the thread before it waits or ends; return whether it had begun."""
        had_begun = self in self._threads
        self._threads.discard(self)
        if not self._threads and self._was_enabled:
            CollectorPause._was_enabled = False
            gc.enable()
        return had_begun

    @classmethod
    def end_all(cls) -> None:
        """End the pauses of threads that a forked process does not have."""
        cls._threads.clear()
        cls().end()


@cache
def _register_fork() -> None:
    os.register_at_fork(after_in_child=CollectorPause.end_all)


class NativeEvent:
    """Wakes one waiting native thread. Any thread or greenlet can set it without blocking.

    Arguments:
        pause: of the thread that waits; it is interrupted meanwhile.
    """

    def __init__(self, pause: CollectorPause | None = None) -> None:
        self._lock = native_lock()
        self._lock.acquire()
        self._pause = pause or CollectorPause()

    def wait(self, seconds: float | None) -> bool:
        """Return true once the event is set, or false after so many seconds (None: never)."""
        timeout = -1 if seconds is None else min(max(seconds, 0.0), _thread.TIMEOUT_MAX)
        acquire = self._lock.acquire
        paused = self._pause.end()
        woken = acquire(True, timeout)  # at once: what is allocated now may start a collection in this thread
        if paused:
            self._pause.begin()
        return bool(woken)

    def set(self) -> None:
        """End the present wait, or the next one."""
        with suppress(RuntimeError):  # it is set already
            self._lock.release()


class CallbackRunner:
    """Runs callbacks for the renewal thread that log or call user code, which may be slow.

    `call` runs them one after the other in a thread of their own. In gevent and eventlet workers each runs in a new greenlet of
    the thread that made this object: logging and user code hold patched locks, which a native thread must not wait for.
    `call_in_loop` runs a callback in the loop's own greenlet, the only one that can throw into others.
    `end` ends what this object has started, after the callbacks that wait. The error of a callback is logged; in
    gevent and eventlet, the loop writes it to stderr.
    """

    def __init__(self) -> None:
        library = patched_by()
        if library == "gevent":
            from gevent import get_hub, spawn

            run: Any = get_hub().loop.run_callback_threadsafe
            self.call: Callable[[Callback], None] = partial(run, spawn)
            self.call_in_loop: Callable[[Callback], None] = run
            self.end: Callable[[], None] = lambda: None
        elif library == "eventlet":
            from eventlet import spawn_n

            loop = _EventletLoop()
            self.call_in_loop, self.end = loop.call, loop.end
            self.call = lambda callback: loop.call(partial(spawn_n, callback))
        else:
            thread = _CallbackThread()
            self.call = self.call_in_loop = thread.call
            self.end = thread.end


class _CallbackThread:
    def __init__(self) -> None:
        self._callbacks: SimpleQueue[Callback | None] = SimpleQueue()
        self._mutex = native_lock()
        self._started = False

    def call(self, callback: Callback) -> None:
        self._callbacks.put(callback)
        with self._mutex:
            if not self._started:
                start_native_thread(self._run)
                self._started = True

    def end(self) -> None:
        with self._mutex:
            if self._started:
                self._callbacks.put(None)
                self._started = False

    def _run(self) -> None:
        while (callback := self._callbacks.get()) is not None:
            try:
                callback()
            except BaseException as error:
                with suppress(BaseException):  # it may come from a user's log filter, which then fails again
                    logger.error("A background thread of locks met an error and goes on", exc_info=error)


class _EventletLoop:
    """Lets other threads call in eventlet's loop: a greenlet waits for the byte that such a thread writes to a socket."""

    def __init__(self) -> None:
        from eventlet import hubs, spawn_n
        from eventlet.green import socket

        self._schedule = hubs.get_hub().schedule_call_global
        self._thread = _unpatched("get_ident")()
        self._callbacks: deque[Callback] = deque()
        self._reader, self._writer = socket.socketpair()
        self._write = sys.modules["eventlet.patcher"].original("os").write
        spawn_n(self._run)

    def call(self, callback: Callback) -> None:
        if _unpatched("get_ident")() == self._thread:  # at once: before `_run` any greenlet that is ready would run
            self._schedule(0, callback)
        else:
            self._callbacks.append(callback)
            self._write(self._writer.fileno(), b"x")  # one byte into a nearly empty buffer never blocks

    def end(self) -> None:
        self._writer.close()

    def _run(self) -> None:
        while self._reader.recv(64):
            while self._callbacks:
                self._schedule(0, self._callbacks.popleft())
        self._reader.close()
