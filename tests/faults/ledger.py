"""The events of a run, one JSON line each, written by bodies, signals, probes and the test itself.

One ``write`` appends a line to a file that all processes share, so lines do not mix and a killed process loses none. Times are
from a clock that all processes of one machine share and that cannot be set.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

Event = dict[str, Any]

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def now() -> float:
    """Return the seconds on the clock of all ledgers."""
    return time.clock_gettime(_CLOCK)


def name_of(token: str) -> str:
    """Return the name of a lease in a ledger, which does not reveal its token."""
    return hashlib.sha256(token.encode()).hexdigest()[:10]


class Ledger:
    """The events of one run, in a directory that all of its processes share."""

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)
        self.path = self.directory / "ledger.jsonl"
        self._mutex = threading.Lock()
        self._offset = 0
        self._events: list[Event] = []
        self._kinds: dict[str, list[Event]] = {}  # a probe reads one kind every few milliseconds

    def note(self, what: str, at: float | None = None, **more: Any) -> None:
        """Append an event; its time is now unless given."""
        event = {"what": what, "at": now() if at is None else at, "pid": os.getpid(), **more}
        line = (json.dumps(event, default=repr) + "\n").encode()
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(descriptor, line)
        finally:
            os.close(descriptor)

    def events(self, what: str | None = None, **same: Any) -> list[Event]:
        """Return the events so far of one kind and with these values."""
        with self._mutex:
            self._read()
            events = list(self._events if what is None else self._kinds.get(what, ()))
        spec = same.items()
        return [event for event in events if spec <= event.items()] if same else events

    def _read(self) -> None:
        with contextlib.suppress(FileNotFoundError), self.path.open("rb") as file:
            file.seek(self._offset)
            whole, _, _ = file.read().rpartition(b"\n")
            if whole:
                self._offset += len(whole) + 1
                new = [json.loads(line) for line in whole.split(b"\n")]
                self._events += new
                for event in new:
                    self._kinds.setdefault(event["what"], []).append(event)

    def number(self, name: str) -> int:
        """Return 0, 1, 2 ... : how often this name has been asked for before."""
        for number in range(1_000_000):
            with contextlib.suppress(FileExistsError):
                os.close(os.open(self.directory / f"{name}.run{number}", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
                return number
        raise AssertionError("a million runs of one name")

    def raise_flag(self, name: str) -> None:
        """Set a flag that bodies can wait for."""
        (self.directory / f"{name}.flag").touch()

    def is_raised(self, name: str) -> bool:
        """Tell whether a flag is set."""
        return (self.directory / f"{name}.flag").exists()
