"""Steps of a test that must be over before something comes by itself, such as the end of a countdown or of a cooldown."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")


def in_time(attempt: Callable[[float], Found | None], seconds: float = 2.0, longest: float = 60.0) -> Found:
    """Call ``attempt`` with a few seconds, and with more of them while it was too slow; return what it returns.

    Arguments:
        attempt: gets the seconds after which that something comes; returns None if its steps may have taken longer.
        seconds: of the first call.
        longest: of the last one.

    Raises:
        AssertionError: each call was too slow.
    """
    while True:
        found = attempt(seconds)
        if found is not None:
            return found
        assert seconds < longest, f"these steps are not over after {seconds:g} s"
        seconds *= 4
