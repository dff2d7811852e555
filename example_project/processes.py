"""The processes of the demo: each leads a process group of its own, and all of them end with the demo."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep

from example_project.interrupts import pause
from example_project.warden import Warden

#: Name -> options of its worker; a lane of the picture each.
WORKERS = {
    "prefork": ["--pool", "prefork", "--concurrency", "4"],
    "threads": ["--pool", "threads", "--concurrency", "4"],
    "gevent": ["--pool", "gevent", "--concurrency", "8"],
}
_QUIET = ["--without-gossip", "--without-mingle", "--loglevel", "INFO"]

Process = subprocess.Popen[bytes]


class DemoFailed(Exception):
    """The demo cannot go on; the message says why."""


def node(worker: str) -> str:
    """Return a worker's node name."""
    return f"{worker}@demo"


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Wait for a condition, looking often.

    Raises:
        DemoFailed: it did not come true in that many seconds.
    """
    deadline = monotonic() + seconds
    while not condition():
        if monotonic() > deadline:
            raise DemoFailed(f"waited {seconds:g} s in vain for {what}")
        pause(0.05)


class Fleet:
    """Starts, kills and stops process groups; logs go to a directory, one file each."""

    def __init__(self, directory: Path, environment: dict[str, str], keep: bool) -> None:
        """Take the directory for logs, what to add to the environment, and whether the directory outlives a crash."""
        self._directory = directory
        # TMPDIR: a worker that is killed cannot remove its temporary files.
        own = {"PYTHONPATH": _import_path(), "TMPDIR": str(directory)}
        self._environment = {**os.environ, **own, **environment}
        self._processes: dict[str, Process] = {}
        self._warden = Warden(None if keep else directory)

    def start(self, name: str, command: list[str]) -> None:
        """Start a command as the leader of a new process group."""
        with self._log(name).open("ab") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
            )
        self._warden.watch(process.pid)
        self._processes[name] = process

    def start_worker(self, name: str) -> None:
        """Start one of `WORKERS`."""
        self._celery(name, "worker", "--hostname", node(name), *WORKERS[name], *_QUIET)

    def start_beat(self, name: str) -> None:
        """Start a beat with a schedule file of its own."""
        schedule = str(self._directory / f"{name}.schedule")
        self._celery(name, "beat", "--schedule", schedule, "--pidfile=", "--loglevel", "INFO")

    def check(self) -> None:
        """Raise `DemoFailed` when a process ended that nobody stopped."""
        for name, process in self._processes.items():
            if process.poll() is not None:
                raise DemoFailed(f"{name} ended by itself, with {process.returncode}:\n{self._tail(name)}")

    def kill(self, name: str) -> float:
        """SIGKILL a whole group, main process and children, and return when its leader was seen dead."""
        self._end([self._processes.pop(name)])
        return monotonic()

    def stop(self, *names: str, seconds: float = 12.0) -> None:
        """Ask processes to end, wait, and kill what is still there afterwards."""
        chosen = [self._processes.pop(name) for name in names if name in self._processes]
        for process in chosen:
            process.terminate()
        deadline = monotonic() + seconds
        while any(process.poll() is None for process in chosen) and monotonic() < deadline:
            sleep(0.05)
        self._end(chosen)

    def close(self) -> None:
        """Kill everything that is left."""
        self._end(list(self._processes.values()))
        self._processes.clear()
        self._warden.close()

    def _end(self, processes: list[Process]) -> None:
        for process in processes:
            with suppress(ProcessLookupError, PermissionError):  # the group is gone already
                os.killpg(process.pid, signal.SIGKILL)
        for process in processes:
            process.wait()
            self._warden.forget(process.pid)

    def _celery(self, name: str, *words: str) -> None:
        self.start(name, [sys.executable, "-m", "celery", "-A", "example_project", *words])

    def _log(self, name: str) -> Path:
        return self._directory / f"{name}.log"

    def _tail(self, name: str) -> str:
        return "\n".join(self._log(name).read_text(errors="replace").splitlines()[-15:])


def _import_path() -> str:
    project = str(Path(__file__).resolve().parent.parent)
    earlier = os.environ.get("PYTHONPATH")
    return os.pathsep.join([project, earlier] if earlier else [project])
