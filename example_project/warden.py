"""Ends the demo's processes if the demo itself is killed and cannot end them.

Run as a script, this module reads the demo's process groups from a pipe, one per line: `+pid` or `-pid`. When the pipe
closes, the script kills the remaining groups and removes the directory in its first argument, if there is one.
"""

import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path


class Warden:
    """The demo's end of the pipe."""

    def __init__(self, directory: Path | None) -> None:
        """Start the script in its own process group. At its end it removes the directory, unless that is None."""
        command = [sys.executable, __file__, *([str(directory)] if directory else [])]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    def watch(self, group: int) -> None:
        """Add a process group that must end with the demo."""
        self._write(f"+{group}")

    def forget(self, group: int) -> None:
        """Remove a process group that has ended."""
        self._write(f"-{group}")

    def close(self) -> None:
        """Close the pipe, so that the script does its work, and wait for its end."""
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()

    def _write(self, line: str) -> None:
        assert self._process.stdin
        self._process.stdin.write(f"{line}\n".encode())
        self._process.stdin.flush()


def main() -> None:
    """Read until the pipe closes, then kill and remove what is left."""
    groups: set[int] = set()
    for line in sys.stdin:
        group = int(line[1:])
        groups = groups | {group} if line[0] == "+" else groups - {group}
    for group in groups:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    for directory in sys.argv[1:]:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
