"""A worker that gets many calls with one lock key, and what they cause."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter, sleep
from types import TracebackType
from typing import Any

from benchmarks import overlap_app
from benchmarks.gates import OPEN, REACHED
from benchmarks.overlap_app import RUNS
from benchmarks.stage import Stage
from benchmarks.worker import Worker
from tests.servers import until

#: Store calls of this library, and of peers. What scripts do is counted by the same names as what the peers send.
SCRIPTS = ("eval", "evalsha")
PLAIN_COMMANDS = ("set", "setnx", "setex", "get", "del", "exists", *SCRIPTS)
#: Seconds without any change after which a storm is over.
CALM = 1.2
#: Longest time in seconds that a storm may take.
LONGEST = 600.0


class Overlaps:
    """A worker with the tasks of `overlap_app`.

    Arguments:
        stage: whose servers it uses.
        places: how many bodies at once.
        commands: which commands count as store calls.
        options: of the worker's command.
    """

    def __init__(
        self, stage: Stage, places: int, commands: Sequence[str] = SCRIPTS, options: Sequence[str] = ()
    ) -> None:
        self._stage, self._commands = stage, commands
        self._app = overlap_app.make(stage.broker.url(), stage.store.url())
        self._worker = Worker(stage, "prefork", places, app="benchmarks.overlap_app", options=options)
        #: When the last message or store call was seen.
        self.last_event = 0.0

    def __enter__(self) -> Overlaps:
        self._worker.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._worker.__exit__(kind, error, trace)
        self._app.close()

    def catch_up(self) -> None:
        """Wait until the worker has handled what was sent before: it handles messages in order."""
        self.send(overlap_app.PLAIN, 1, 0.0)
        self.settle(1)

    def hold(self, kind: str) -> None:
        """Publish a call whose body runs until it is told to end, and wait until the body has begun: nobody overtakes it."""
        self.send(kind, 1, overlap_app.UNTIL_OPENED)
        assert self._stage.broker_client.blpop([REACHED], timeout=LONGEST)

    def let_go(self) -> None:
        """Have that body end."""
        self._stage.broker_client.rpush(OPEN, 1)

    def send(self, kind: str, count: int, seconds: float) -> None:
        """Publish calls of a kind of task, whose bodies take some seconds."""
        task = self._app.tasks[f"overlap.{kind}"]
        for _ in range(count):
            task.apply_async((seconds, "same"), queue=self._worker.queue)

    def succeed(self, count: int, seconds: float) -> None:
        """Publish one call that is followed by others, each published at the end of the one before, until so many have run."""
        task = self._app.tasks[f"overlap.{overlap_app.SUCCESSIVE}"]
        task.apply_async((seconds, "same", count - 1), queue=self._worker.queue)

    def settle(self, runs: int) -> list[tuple[float, float]]:
        """Wait for so many runs; return their starts and ends, in order, and forget them."""
        client = self._stage.broker_client
        until(lambda: client.llen(RUNS) >= runs, f"{runs} runs", LONGEST)
        found = [tuple(map(float, line.split())) for line in client.lrange(RUNS, 0, -1)]
        client.delete(RUNS)
        return sorted((start, end) for start, end in found)

    def wait_for_calm(self, *left: Callable[[], Any]) -> None:
        """Wait until nothing happens any more, no message is in the queue, and none of these counts is left."""
        seen, begin = None, perf_counter()
        while perf_counter() < begin + LONGEST:
            remaining = [count() for count in (self.queued, *left)]
            now = (self.counts()[0], self.runs(), *remaining)
            if now != seen:
                seen, self.last_event = now, perf_counter()
            elif perf_counter() > self.last_event + CALM and not any(remaining):
                break
            sleep(0.02)

    def runs(self) -> int:
        """Return how many bodies have ended."""
        return int(self._stage.broker_client.llen(RUNS))

    def counts(self) -> tuple[int, int]:
        """Return how many messages were published, and how many calls the store has had."""
        found = self._stage.client.info("commandstats")
        return _calls(self._stage.broker_client.info("commandstats"), "lpush"), sum(
            _calls(found, name) for name in self._commands
        )

    def queued(self) -> int:
        """Return how many messages are in the queue."""
        return int(self._stage.broker_client.llen(self._worker.queue))

    def received(self) -> int:
        """Return how many messages the worker has received and not acknowledged, such as those with a delay."""
        return int(self._stage.broker_client.hlen("unacked"))

    def locks(self) -> int:
        """Return how many locks of this library there are."""
        return sum(1 for _ in self._stage.client.scan_iter("*:lock:*"))

    def memory(self) -> int:
        """Return the memory of lines, in bytes."""
        keys = [key for part in ("line", "waiting", "used") for key in self._stage.client.scan_iter(f"*:{part}*")]
        return sum(self._stage.client.memory_usage(key) or 0 for key in keys)


def _calls(statistics: Any, command: str) -> int:
    return int(statistics.get(f"cmdstat_{command}", {}).get("calls", 0))
