"""Starts and stops the demo's processes. Each leads its own process group, and all of them end with the demo."""

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

#: Name of a worker -> its options. Each worker is one lane of the picture.
WORKERS = {
    "prefork": ["--pool", "prefork", "--concurrency", "4"],
    "threads": ["--pool", "threads", "--concurrency", "4"],
    "gevent": ["--pool", "gevent", "--concurrency", "8"],
}
_QUIET = ["--without-gossip", "--without-mingle", "--loglevel", "INFO"]

Process = subprocess.Popen[bytes]


class DemoFailed(Exception):
    """Raised when the demo cannot continue; the message says why."""


def node(worker: str) -> str:
    """Return a worker's node name."""
    return f"{worker}@demo"


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Wait until a condition is true.

    Raises:
        DemoFailed: the condition was still false after this many seconds.
    """
    deadline = monotonic() + seconds
    while not condition():
        if monotonic() > deadline:
            raise DemoFailed(f"waited {seconds:g} s for {what}, without success")
        pause(0.05)


class Fleet:
    """Starts, kills and stops process groups. Each writes a log file into one directory."""

    def __init__(self, directory: Path, environment: dict[str, str], keep: bool) -> None:
        """Take the directory for logs, additions to the environment, and whether to keep the directory after a crash."""
        self._directory = directory
        # TMPDIR: a killed worker cannot remove its temporary files.
        own = {"PYTHONPATH": _import_path(), "TMPDIR": str(directory)}
        self._environment = {**os.environ, **own, **environment}
        self._processes: dict[str, Process] = {}
        self._commands: dict[str, Process] = {}  # that end by themselves
        self._warden = Warden(None if keep else directory)

    def start(self, name: str, command: list[str]) -> None:
        """Start a command as the leader of a new process group."""
        self._processes[name] = self._start(name, command)

    def start_command(self, name: str, *words: str) -> None:
        """Start a command of Celery that ends by itself."""
        self._commands[name] = self._start(name, _celery(*words))

    def output_of(self, name: str) -> str:
        """Return what such a command has printed, once, after its end; "" until then."""
        if name not in self._commands or self._commands[name].poll() is None:
            return ""
        self._end([self._commands.pop(name)])
        return self._log(name).read_text(errors="replace").rstrip()

    def _start(self, name: str, command: list[str]) -> Process:
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
        return process

    def start_worker(self, name: str) -> None:
        """Start one of `WORKERS`."""
        self.start(name, _celery("worker", "--hostname", node(name), *WORKERS[name], *_QUIET))

    def start_beat(self, name: str) -> None:
        """Start a beat with its own schedule file."""
        schedule = str(self._directory / f"{name}.schedule")
        self.start(name, _celery("beat", "--schedule", schedule, "--pidfile=", "--loglevel", "INFO"))

    def check(self) -> None:
        """Raise `DemoFailed` if a process has ended that the demo did not stop."""
        for name, process in self._processes.items():
            if process.poll() is not None:
                raise DemoFailed(f"{name} ended unexpectedly, with exit code {process.returncode}:\n{self._tail(name)}")

    def kill(self, name: str) -> float:
        """Kill a whole group (main process and children) with SIGKILL, and return the time when its leader was dead."""
        self._end([self._processes.pop(name)])
        return monotonic()

    def stop(self, *names: str, seconds: float = 12.0) -> None:
        """Ask processes to end, wait, and kill those that still run after this many seconds."""
        chosen = [self._processes.pop(name) for name in names if name in self._processes]
        for process in chosen:
            process.terminate()
        deadline = monotonic() + seconds
        while any(process.poll() is None for process in chosen) and monotonic() < deadline:
            sleep(0.05)
        self._end(chosen)

    def close(self) -> None:
        """Kill all remaining processes."""
        self._end([*self._processes.values(), *self._commands.values()])
        self._processes.clear()
        self._warden.close()

    def _end(self, processes: list[Process]) -> None:
        for process in processes:
            with suppress(ProcessLookupError, PermissionError):  # the group has ended already
                os.killpg(process.pid, signal.SIGKILL)
        for process in processes:
            process.wait()
            self._warden.forget(process.pid)

    def _log(self, name: str) -> Path:
        return self._directory / f"{name}.log"

    def _tail(self, name: str) -> str:
        return "\n".join(self._log(name).read_text(errors="replace").splitlines()[-15:])


def _celery(*words: str) -> list[str]:
    return [sys.executable, "-m", "celery", "-A", "example_project", *words]


def _import_path() -> str:
    project = str(Path(__file__).resolve().parent.parent)
    earlier = os.environ.get("PYTHONPATH")
    return os.pathsep.join([project, earlier] if earlier else [project])
