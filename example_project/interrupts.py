"""Ctrl-C, and its like, noticed only where the demo waits: never between starting a process and writing it down."""

import signal
from time import monotonic, sleep
from types import FrameType

_asked: list[int] = []


def listen() -> None:
    """From now on only remember SIGINT, SIGTERM and SIGHUP."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _remember)


def pause(seconds: float) -> None:
    """Sleep for at least so many seconds.

    Raises:
        KeyboardInterrupt: somebody wants the demo to end.
    """
    deadline = monotonic() + seconds
    while not _asked and (left := deadline - monotonic()) > 0:
        sleep(min(left, 0.05))
    if _asked:
        raise KeyboardInterrupt


def _remember(number: int, _frame: FrameType | None) -> None:
    _asked.append(number)
