"""Events of tasks, written to files that the tests read, and flags that let waiting bodies end.

Records are files and not broker messages: a body that records something sends no Redis command. It
can do so in every pool and thread, and while a server is unreachable. Times are CLOCK_MONOTONIC,
which all processes of one machine share.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

Event = dict[str, Any]


class Recorder:
    """Events by tag, one JSON line each, in a directory that all processes of the run share."""

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)

    def note(self, tag: str, what: str, **more: Any) -> None:
        """Append an event with one write, so that lines of several writers do not mix."""
        event = {"what": what, "at": time.monotonic(), "pid": os.getpid(), **more}
        line = json.dumps(event, default=repr) + "\n"
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        descriptor = os.open(self.directory / f"{tag}.jsonl", flags, 0o600)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)

    def events(self, tag: str, what: str | None = None) -> list[Event]:
        """Return the events of a tag, or those of one kind, in the order of their writing.

        A line that is being written may be read in part: it counts the next time.
        """
        path = self.directory / f"{tag}.jsonl"
        if not path.exists():
            return []
        whole, _, _ = path.read_text().rpartition("\n")
        found = [json.loads(line) for line in whole.splitlines()]
        return [event for event in found if what is None or event["what"] == what]

    def number(self, tag: str) -> int:
        """Return how many runs of this tag have called this before: 0, 1, 2 ..."""
        for number in range(1_000_000):
            with contextlib.suppress(FileExistsError):
                flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
                os.close(os.open(self.directory / f"{tag}.run{number}", flags))
                return number
        raise AssertionError("a million runs of one tag")

    def raise_flag(self, name: str) -> None:
        """Set a flag that bodies can wait for."""
        (self.directory / f"{name}.flag").touch()

    def lower_flag(self, name: str) -> None:
        """Clear a flag."""
        (self.directory / f"{name}.flag").unlink(missing_ok=True)

    def is_raised(self, name: str) -> bool:
        """Tell whether a flag is set."""
        return (self.directory / f"{name}.flag").exists()

    def wait_for_flag(self, name: str, timeout: float) -> None:
        """Sleep until the flag is set.

        Raises:
            TimeoutError: the flag was not set for ``timeout`` seconds.
        """
        deadline = time.monotonic() + timeout
        while not self.is_raised(name):
            if time.monotonic() > deadline:
                raise TimeoutError(f"flag {name} was never raised")
            time.sleep(0.02)
