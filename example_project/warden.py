"""Ends the demo's processes when the demo itself dies without a chance to: killed with SIGKILL, or out of memory.

Run as a script, it reads which process groups the demo has, one line each, `+pid` or `-pid`. When that pipe closes,
it kills the groups that are left and removes the directory in its first argument, if there is one.
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
        """Start the script, in a process group of its own; it removes the directory in the end, None means none."""
        command = [sys.executable, __file__, *([str(directory)] if directory else [])]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    def watch(self, group: int) -> None:
        """See to it that this process group ends with the demo."""
        self._tell(f"+{group}")

    def forget(self, group: int) -> None:
        """Leave this process group alone: it has ended."""
        self._tell(f"-{group}")

    def close(self) -> None:
        """Let the script do its work, and end."""
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()

    def _tell(self, line: str) -> None:
        assert self._process.stdin
        self._process.stdin.write(f"{line}\n".encode())
        self._process.stdin.flush()


def main() -> None:
    """Read until the pipe closes, then clear up."""
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
