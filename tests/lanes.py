"""What the processes of one test run share: servers, and workers that they lend to each other.

pytest-xdist runs tests in several processes, called lanes here. The process that starts the run makes a directory for all of
them. The first lane that needs a server starts it there, and the others find its port. A worker is used by one lane at a time:
a lane takes one that nobody uses, or starts it. Everything ends with the process that made the directory.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import psutil

from tests.servers import GROUPS, Process, RabbitMQServer, RedisServer, until

Server = TypeVar("Server", RedisServer, RabbitMQServer)

#: Seconds that a lane waits for the tests of the others, at most.
ALL_OTHERS = 1800.0


class Run:
    """A test run, as each of its processes sees it.

    Args:
        directory: the run's, which exists.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._lanes = directory / "lanes"
        for folder in ("redis", "rabbitmq", GROUPS, self._lanes):
            (directory / folder).mkdir(exist_ok=True)

    @contextlib.contextmanager
    def shared(self, name: str) -> Iterator[dict[str, Any]]:
        """Yield a mapping that one process at a time can use; all of them see its changes."""
        with (self.directory / f"{name}.json").open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            content = json.loads(file.read() or "{}")
            yield content
            file.truncate(0)
            file.write(json.dumps(content))

    def server(self, kind: type[Server]) -> Server:
        """Return the run's server of a kind, started once.

        Raises:
            ServerMissing: its program is not installed.
            ServerFailed: it does not become ready.
        """
        server = kind(run=self.directory)
        with self.shared(kind.__name__) as known:
            if known:
                server.port = known["port"]
            else:
                known["port"] = server.start().port
        return server

    # -- lanes -------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Note that this process has tests to run."""
        (self._lanes / str(os.getpid())).touch()

    def end(self) -> None:
        """Note that this process has run its tests."""
        (self._lanes / str(os.getpid())).unlink(missing_ok=True)

    def wait_until_alone(self) -> None:
        """Wait until all other lanes have run their tests, or have died."""
        until(lambda: not self._others(), "the tests of all other lanes have ended", ALL_OTHERS, 0.5)

    def _others(self) -> list[int]:
        lanes = [int(file.name) for file in self._lanes.iterdir()]
        return [pid for pid in lanes if pid != os.getpid() and psutil.pid_exists(pid)]


class AdoptedProcess(Process):
    """A process that another lane has started."""

    def __init__(self, process: Process, run: Path, pid: int) -> None:
        super().__init__(process.command, process.log, process.env, run)
        self._popen: Any = _Adopted(pid)


class _Adopted:
    """Has the methods of a Popen that ``Process`` needs. The exit code of another process's child is not known."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def poll(self) -> int | None:
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(self.pid).status() != psutil.STATUS_ZOMBIE:
                return None
        return 0

    def wait(self, timeout: float = 60.0) -> int:
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(0.02)
        return 0
