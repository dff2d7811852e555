"""A worker that gets many calls of one signature, and what they cause."""

from __future__ import annotations

from time import perf_counter, sleep
from types import TracebackType
from typing import Any

from benchmarks import overlap_app
from benchmarks.overlap_app import RUNS
from benchmarks.stage import Stage
from benchmarks.worker import Worker
from tests.servers import until

#: Commands of peers that use no scripts.
_PLAIN = ("set", "setnx", "setex", "get", "del")
#: Seconds without any message or store call after which a storm is over.
CALM = 1.2
#: Longest time in seconds that a storm may take.
LONGEST = 600.0


class Overlaps:
    """A worker with the tasks of `overlap_app`.

    Arguments:
        stage: whose servers it uses.
        places: how many bodies at once.
    """

    def __init__(self, stage: Stage, places: int) -> None:
        self._stage = stage
        self._app = overlap_app.make(stage.broker.url(), stage.store.url())
        self._worker = Worker(stage, "prefork", places, app="benchmarks.overlap_app")
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

    def warm_up(self) -> None:
        """Wait until the worker runs bodies."""
        self.send(overlap_app.PLAIN, 1, 0.0)
        self.settle(1)

    def send(self, kind: str, count: int, seconds: float) -> None:
        """Publish calls of a kind of task, whose bodies take some seconds."""
        task = self._app.tasks[f"overlap.{kind}"]
        for _ in range(count):
            task.apply_async((seconds,), queue=self._worker.queue)

    def settle(self, runs: int) -> list[tuple[float, float]]:
        """Wait for so many runs; return their starts and ends, in order, and forget them."""
        client = self._stage.broker_client
        until(lambda: client.llen(RUNS) >= runs, f"{runs} runs", LONGEST)
        found = [tuple(map(float, line.split())) for line in client.lrange(RUNS, 0, -1)]
        client.delete(RUNS)
        return sorted((start, end) for start, end in found)

    def wait_for_calm(self, over: bool = False) -> None:
        """Wait until nothing happens any more; `over`: and no lock is left."""
        seen, begin = None, perf_counter()
        while perf_counter() < begin + LONGEST:
            now = (*self.counts(), self.runs())
            if now != seen:
                seen, self.last_event = now, perf_counter()
            elif perf_counter() > self.last_event + CALM and not self._is_busy(over):
                break
            sleep(0.02)

    def runs(self) -> int:
        """Return how many bodies have ended."""
        return int(self._stage.broker_client.llen(RUNS))

    def counts(self) -> tuple[int, int]:
        """Return how many messages were published, and how many calls the store has had.

        Scripts count once; what they do would be counted by the same names as what the peers send.
        """
        store, scripts = self._stage.client, ("eval", "evalsha")
        calls = sum(_calls(store, name) for name in scripts) or sum(_calls(store, name) for name in _PLAIN)
        return _calls(self._stage.broker_client, "lpush"), calls

    def _is_busy(self, over: bool) -> bool:
        if self._stage.broker_client.llen(self._worker.queue):
            return True
        return over and any(self._stage.client.scan_iter("*:lock:*"))

    def memory(self) -> int:
        """Return the memory of lines, in bytes."""
        keys = [key for part in ("line", "waiting", "used") for key in self._stage.client.scan_iter(f"*:{part}*")]
        return sum(self._stage.client.memory_usage(key) or 0 for key in keys)


def _calls(client: Any, command: str) -> int:
    """Return how often a server has run a command."""
    return int(client.info("commandstats").get(f"cmdstat_{command}", {}).get("calls", 0))
