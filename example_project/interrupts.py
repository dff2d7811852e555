"""Handles Ctrl-C and similar signals only while the demo waits, so that it never loses a process that it has just started."""

import signal
from time import monotonic, sleep
from types import FrameType

_asked: list[int] = []


def listen() -> None:
    """Remember SIGINT, SIGTERM and SIGHUP from now on; `pause` acts on them."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _remember)


def pause(seconds: float) -> None:
    """Sleep for at least this many seconds.

    Raises:
        KeyboardInterrupt: one of these signals has arrived.
    """
    deadline = monotonic() + seconds
    while not _asked and (left := deadline - monotonic()) > 0:
        sleep(min(left, 0.05))
    if _asked:
        raise KeyboardInterrupt


def _remember(number: int, _frame: FrameType | None) -> None:
    _asked.append(number)
