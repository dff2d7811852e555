"""Durations such as `2h`, and times, as people write them."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Any

import click

from celery_singleton_lock.clock import UNITS

_DURATION = re.compile(r"(\d+(?:\.\d+)?)([dhms]?)", re.ASCII)


class Duration(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.2
    """A number of seconds, or a number with one of the units s, m, h and d; 0 only if `zero` is allowed."""

    name = "duration"

    def __init__(self, zero: bool = True) -> None:
        self._zero = zero

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the seconds."""
        if isinstance(value, float):
            return value
        found = _DURATION.fullmatch(value)
        seconds = float(found[1]) * UNITS[found[2] or "s"] if found else 0.0
        if not found or not (seconds or self._zero):
            self.fail(f"{value!r} is no duration: 45s, 30m, 2h, 1d, or a number of seconds", param, ctx)
        return seconds


DURATION = Duration()


def time_text(seconds: float) -> str:
    """Return a time since 1970 as local time with its offset from UTC, without a blank; `-` for 0.

    Local is what the app makes of it: Django sets the zone of its processes.
    """
    return datetime.fromtimestamp(seconds).astimezone().isoformat(timespec="seconds") if seconds else "-"
