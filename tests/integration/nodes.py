"""pytest-celery nodes for local processes, where the plugin uses Docker containers.

Each ``Local...`` class has the methods that the plugin calls on a container. A set-up with real
containers replaces them by overriding the cluster fixtures again.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import celery
import psutil
from celery import Celery
from pytest_celery import CeleryTestWorker

from tests.lanes import AdoptedProcess, Run
from tests.servers import Process, RabbitMQServer, RedisServer, until

#: Default concurrency of a worker.
CONCURRENCY = 4


class LocalContainer:
    """The container methods that pytest-celery's nodes need, for a local process."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.id = secrets.token_hex(8)

    @property
    def status(self) -> str:
        raise NotImplementedError

    @property
    def celeryconfig(self) -> dict[str, Any]:
        raise NotImplementedError

    def ready(self) -> bool:
        return self.status == "running"

    def logs(self) -> str:
        return ""

    def kill(self, signal: str | int = "SIGKILL") -> None:
        raise NotImplementedError

    def restart(self, timeout: float = 0) -> None:
        raise NotImplementedError

    def reload(self) -> None:
        """Do nothing: this object is the state."""

    def teardown(self) -> None:
        """Do nothing: the fixture that started the process ends it."""


class LocalServer(LocalContainer):
    """A Redis or RabbitMQ as broker or backend."""

    def __init__(self, server: RedisServer | RabbitMQServer, url: str) -> None:
        super().__init__(type(server).__name__)
        self.server = server
        self.url = url

    @property
    def status(self) -> str:
        return "running"

    @property
    def celeryconfig(self) -> dict[str, Any]:
        return {"url": self.url, "host_url": self.url}


@dataclass(frozen=True)
class WorkerSpec:
    """What distinguishes one worker from another; equal ones are started once."""

    pool: str = "prefork"
    concurrency: int = CONCURRENCY
    options: tuple[str, ...] = ()
    conf: Mapping[str, Any] = field(default_factory=dict, hash=False)
    log_level: str = "INFO"
    #: What Python runs: Celery's command with an app.
    program: tuple[str, ...] = ("-m", "celery", "-A", "tests.integration.worker_app")
    #: Two workers that differ in nothing else.
    copy: int = 0


class LocalWorker(LocalContainer):
    """A real ``celery worker`` process with a queue of its own.

    Args:
        spec: what distinguishes it.
        conf: configuration that others have too.
        directory: of its log.
        run: directory of the run whose lanes lend it to each other; else it ends with this process.
        name: of a worker that runs already.
    """

    #: Those that this process has started or taken, and neither ended nor given back.
    in_use: ClassVar[list[LocalWorker]] = []

    def __init__(
        self, spec: WorkerSpec, conf: Mapping[str, Any], directory: Path, run: Path | None = None, name: str = ""
    ) -> None:
        super().__init__(name or f"{spec.pool}-{secrets.token_hex(4)}")
        self.spec = spec
        self.conf = {**conf, **spec.conf, "task_default_queue": f"queue-{self.name}"}
        self.process = Process(self._command(), directory / f"{self.name}.log", self._env(), run)

    def _command(self) -> list[str]:
        spec = self.spec
        command = [sys.executable, *spec.program, "worker"]
        command += ["--pool", spec.pool, "--concurrency", str(spec.concurrency)]
        command += ["--hostname", self.node, "--loglevel", spec.log_level]
        return [*command, "--without-mingle", "--without-gossip", *spec.options]

    def _env(self) -> dict[str, str]:
        own = {
            "SINGLETON_TEST_CONF": json.dumps(self.conf),
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            "PYTHONUNBUFFERED": "1",
            "PYTHONWARNINGS": "ignore",
            # Containers and CI run as root, where Celery refuses pickle without this variable.
            "C_FORCE_ROOT": "1",
        }
        return {**os.environ, **own}

    @property
    def node(self) -> str:
        """Celery's name of this worker."""
        return f"{self.name}@local"

    @property
    def status(self) -> str:
        return "running" if self.process.running else "exited"

    def start(self) -> None:
        """Start the process without waiting until it is ready."""
        self.process.start()
        self.in_use.append(self)

    def wait_until_ready(self, app: Celery, timeout: float = 90.0) -> None:
        """Wait for the answer to a ping.

        Raises:
            AssertionError: the worker ended, or did not answer for ``timeout`` seconds.
        """
        deadline = time.monotonic() + timeout
        while not app.control.ping(destination=[self.node], timeout=0.4):
            assert self.process.running, f"{self.name} ended:\n{self.logs()[-4000:]}"
            assert time.monotonic() < deadline, f"{self.name} is not ready:\n{self.logs()[-4000:]}"

    def logs(self) -> str:
        return self.process.output()

    def kill(self, signal: str | int = "SIGKILL") -> None:
        """Send a signal: SIGKILL to the whole group, others to the main process alone."""
        number = _number(signal)
        if number == _number("SIGKILL"):
            self.process.kill()
        else:
            self.process.signal(number)

    def signal_all(self, number: int) -> None:
        """Send a signal to the main process and all its children."""
        self.process.signal_all(number)

    def children(self) -> list[int]:
        """Return the process ids of the children, including helpers of the main process."""
        return [child.pid for child in psutil.Process(self.process.pid).children(recursive=True)]

    def wait_for_end(self, timeout: float) -> int:
        """Return the exit code once the main process has ended.

        Raises:
            subprocess.TimeoutExpired: the process still runs after ``timeout`` seconds.
        """
        return self.process.wait(timeout)

    def restart(self, timeout: float = 0) -> None:
        self.process.stop(min(timeout, 5.0))
        self.process.start()

    def end(self) -> None:
        """End the process at once and for good."""
        self.process.kill()
        self.in_use.remove(self)

    def version(self) -> str:
        return str(celery.__version__)

    def log_level(self) -> str:
        return self.spec.log_level

    def worker_name(self) -> str:
        return self.name

    def worker_queue(self) -> str:
        return str(self.conf["task_default_queue"])


class LocalWorkerNode(CeleryTestWorker):
    """A worker of a test."""

    container: LocalWorker

    def __init__(self, container: LocalWorker, app: Celery) -> None:
        super().__init__(container, app)  # type: ignore[arg-type]

    def hostname(self) -> str:
        return self.container.node

    def ready(self) -> bool:
        self.container.wait_until_ready(self.app)
        return True

    def lines(self, *words: str) -> list[str]:
        """Return the log lines that contain all of these words."""
        return [line for line in self.logs().splitlines() if all(word in line for word in words)]

    def wait_for_lines(self, *words: str, count: int = 1, timeout: float = 60.0) -> list[str]:
        """Wait for ``count`` log lines that contain all of these words, and return them."""
        return until(lambda: (found := self.lines(*words))[count - 1 :] and found, f"log lines with {words}", timeout)


def _number(name: str | int) -> int:
    return int(name if isinstance(name, int) else signal.Signals[name])


class WorkerShelf:
    """Workers that the lanes of a run lend to each other.

    Args:
        run: the run.
    """

    def __init__(self, run: Run) -> None:
        self._run = run

    def take(self, spec: WorkerSpec, conf: Mapping[str, Any]) -> LocalWorker:
        """Return a worker that nobody else uses: one that was given back, or a new one, which is starting."""
        kind, run = json.dumps([astuple(spec), conf], sort_keys=True), self._run.directory
        with self._run.shared("workers") as known:
            for name, one in known.items():
                if one["kind"] == kind and one["free"]:
                    worker = LocalWorker(spec, conf, run, run, name)
                    worker.process = AdoptedProcess(worker.process, run, one["pid"])
                    one["free"] = False
                    if worker.status == "running":
                        worker.in_use.append(worker)
                        return worker
            worker = LocalWorker(spec, conf, run, run)
            worker.start()
            known[worker.name] = {"kind": kind, "pid": worker.process.pid, "free": False}
        return worker

    def give_back(self, worker: LocalWorker) -> None:
        """Let others take a worker."""
        worker.in_use.remove(worker)
        with self._run.shared("workers") as known:
            known[worker.name]["free"] = True


def start_workers(specs: Sequence[WorkerSpec], conf: Mapping[str, Any], directory: Path) -> list[LocalWorker]:
    """Start several workers concurrently, without waiting until they are ready."""
    workers = [LocalWorker(spec, conf, directory) for spec in specs]
    for worker in workers:
        worker.start()
    return workers


def wait_for_end(worker: LocalWorker, timeout: float) -> int | None:
    """Return the exit code of a worker, or None if it still runs after ``timeout`` seconds."""
    try:
        return worker.wait_for_end(timeout)
    except subprocess.TimeoutExpired:
        return None
