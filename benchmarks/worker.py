"""A real worker that drains batches of tasks, and how long that takes."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import clock_gettime, perf_counter
from typing import Any

from benchmarks.gates import DONE, OPEN, REACHED
from benchmarks.stage import Stage
from tests.servers import Process, new_directory, remove_directory, until

#: Processes. Which one runs the bodies depends on the pool: the main process, or a child of it.
PUBLISHER, MAIN, BODIES, STORE, BROKER = "publisher", "main process", "bodies", "store", "broker"


@dataclass(frozen=True)
class Drained:
    """Seconds for each task of a batch.

    Arguments:
        published: to publish it.
        drained: until its body has run, once all are published.
        cpu: of each process; of that of the bodies while they are drained, of the others from the first message on.
    """

    published: float
    drained: float
    cpu: dict[str, float]

    @property
    def whole(self) -> float:
        return self.published + self.drained


class Worker:
    """A worker of one pool, with a queue of its own.

    Arguments:
        stage: whose servers it uses.
        pool: Celery's name of the pool.
        concurrency: how many bodies at once.
        app: module of its app.
        options: of the worker's command.
    """

    def __init__(
        self,
        stage: Stage,
        pool: str,
        concurrency: int = 1,
        app: str = "benchmarks.worker_app",
        options: Sequence[str] = (),
    ) -> None:
        self._app = app
        self._options = options
        self._stage = stage
        self._concurrency = concurrency
        self.queue = f"benchmarks-{next(stage.numbers)}"
        self._directory = new_directory("worker")
        self._process = Process(self._command(pool), Path(self._directory) / "worker.log", self._environment(pool))

    def __enter__(self) -> Worker:
        self._process.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._process.stop()
        remove_directory(self._directory)

    def _command(self, pool: str) -> list[str]:
        quiet = ["--without-gossip", "--without-mingle", "--without-heartbeat", "--loglevel", "WARNING"]
        where = ["--pool", pool, "--concurrency", str(self._concurrency), "--queues", self.queue]
        return [sys.executable, "-m", "celery", "-A", self._app, "worker", *where, *quiet, *self._options]

    def _environment(self, pool: str) -> dict[str, str]:
        own = {
            "BENCHMARKS_BROKER": self._stage.broker.url(),
            "BENCHMARKS_STORE": self._stage.store.url(),
            "BENCHMARKS_COMMANDS": json.dumps(self._stage.commands(supervised=pool == "prefork")),
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            "PYTHONWARNINGS": "ignore",
            "C_FORCE_ROOT": "1",
        }
        return {**os.environ, **own}

    def drain(self, task: Any, size: int, seconds: float = 0.0) -> Drained:
        """Publish a batch of this task while the worker's pool is kept busy, then let the worker drain it.

        Arguments:
            task: one of the stage's tasks.
            size: how many.
            seconds: how long each body waits.
        """
        self._close_gates(size)
        calls = [(next(self._stage.numbers), "account-17", seconds) for _ in range(size)]
        before, begin = self._clocks(), perf_counter()
        for args in calls:
            task.apply_async(args, queue=self.queue)
        published = perf_counter() - begin
        self._stage.broker_client.rpush(OPEN, 1)
        drained, bodies = json.loads(self._answer(DONE))
        cpu = {name: (clock - before[name]) / size for name, clock in self._clocks().items()}
        return Drained(published / size, drained / size, {**cpu, BODIES: bodies / size})

    def _clocks(self) -> dict[str, float]:
        pids = {
            PUBLISHER: os.getpid(),
            MAIN: self._process.pid,
            STORE: self._stage.store.pid,
            BROKER: self._stage.broker.pid,
        }
        return {name: clock_gettime(_cpu_clock(pid)) for name, pid in pids.items()}

    def _close_gates(self, size: int) -> None:
        self._stage.broker_client.delete(REACHED)
        for number in range(self._concurrency):
            self._stage.app.send_task("benchmarks.gate", (size, number == 0), queue=self.queue)
        for _ in range(self._concurrency):
            self._answer(REACHED)

    def _answer(self, key: str) -> bytes:
        def look() -> Any:
            found = self._stage.broker_client.blpop([key], timeout=1)
            assert found or self._process.running, f"the worker ended:\n{self._process.output()[-2000:]}"
            return found

        answer: bytes = until(look, f"the worker answers; its log:\n{self._process.output()[-2000:]}", timeout=60)[1]
        return answer


def _cpu_clock(pid: int) -> int:
    """Id of a process's CPU clock, as clock_getcpuclockid(3) makes it on Linux."""
    return ~pid << 3 | 2
