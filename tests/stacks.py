"""Stacks of all threads and greenlets of a worker and its children, for the report of a test that timed out.

A worker calls `install` when it starts; its forked children inherit that. `stacks_of` sends a signal to each of these processes,
which write to their standard error: first faulthandler, even if a thread keeps the GIL or the loop of greenlets is blocked; then
the greenlets, as soon as the main thread runs Python code or waits for something that a signal interrupts.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

import psutil

from tests.servers import Process

#: Ignored by processes that have not called `install`; Celery, billiard, gevent and the library use it for nothing.
SIGNAL = signal.SIGWINCH

STDERR = 2

#: The time in a line of Celery's log.
LOGGED = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),\d{3}: ")
END = "-- end of stacks --"


def last_minute(log: str) -> str:
    """Return what a worker logged in the 60 s before its last line: a test may have waited for longer, and nothing came."""
    lines = log.splitlines(keepends=True)
    times = {number: datetime.fromisoformat(at[1]) for number, line in enumerate(lines) if (at := LOGGED.match(line))}
    since = max(times.values(), default=datetime.max) - timedelta(seconds=60)
    return "".join(lines[next((number for number, at in times.items() if at >= since), 0) :])


def install() -> None:
    """Let this process write its stacks when it gets the signal. To be called in its main thread."""
    signal.signal(SIGNAL, _write_greenlets)
    faulthandler.register(SIGNAL, file=STDERR, all_threads=True, chain=True)


def _write_greenlets(number: int, frame: Any) -> None:
    try:
        text = "".join(_greenlets())
    except Exception:  # it must not end what it interrupts
        text = traceback.format_exc()
    os.write(STDERR, f"{text}{END}\n".encode(errors="backslashreplace"))


def _greenlets() -> Iterator[str]:
    """Yield the stacks of all greenlets that do not run; those that do are on top of their threads."""
    if "greenlet" not in sys.modules:
        return
    from greenlet import greenlet

    for found in gc.get_objects():
        if issubclass(type(found), greenlet) and found.gr_frame is not None:  # isinstance would wake lazy objects
            lines = traceback.format_stack(found.gr_frame)
            yield f"\nGreenlet 0x{id(found):x}, {type(found).__name__} (most recent call last):\n{''.join(lines)}"


def stacks_of(process: Process, timeout: float = 3.0) -> str:
    """Return the stacks of a process of the run and of its children, one after the other.

    Arguments:
        process: its log is its standard error.
        timeout: seconds for each of them; one that is stopped, or whose main thread is in a C call, does not say that it is done.
    """
    try:
        main = psutil.Process(process.pid)
        family = [main, *main.children(recursive=True)]
    except psutil.NoSuchProcess:
        return f"process {process.pid} has ended\n"
    return "".join(_stacks_of_one(one, process, timeout) for one in family)


def _stacks_of_one(one: psutil.Process, process: Process, timeout: float) -> str:
    before = len(process.output())
    try:
        title = f"\n== process {one.pid}, {one.status()}: {' '.join(one.cmdline())[:200]}\n"
        one.send_signal(SIGNAL)
    except psutil.NoSuchProcess:
        return f"\n== process {one.pid} has ended\n"
    deadline = time.monotonic() + timeout
    while END not in (text := process.output()[before:]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return title + text
