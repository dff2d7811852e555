"""Publishing and running tasks one at a time in this process, and meeting a lock that is held."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from time import perf_counter
from typing import Any, NamedTuple

from benchmarks.stage import Stage
from benchmarks.tasks import ONCE, OURS, SINGLETON
from benchmarks.tracer import Tracer, around_body
from celery_singleton_lock.testing import locked

QUEUE = "benchmarks-unread"
#: A kind of task beside those of the stage.
IGNORED = "bare task that raises Ignore"

Arguments = tuple[int, str, float]


class Took(NamedTuple):
    """Seconds of one task's way.

    Arguments:
        published: in `apply_async`.
        called: in what the tracer calls, of a delivery of its own.
        traced: in the tracer.
        whole: of publishing and tracing.
    """

    published: float
    called: float
    traced: float
    whole: float


class Deliveries:
    """Publishes to a queue that nobody reads, and hands the same call to the tracer.

    Arguments:
        stage: where.
    """

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._tasks = {**stage.tasks, IGNORED: stage.ignoring}
        self._tracers = {kind: Tracer(task) for kind, task in self._tasks.items()}

    def run(self, kind: str) -> Took:
        """Call a task, then publish a call of it and run that."""
        called = self._called(kind, self._arguments())
        published, traced = self.deliver(kind, self._arguments())
        return Took(published, called, traced, published + traced)

    def duplicate(self, kind: str, args: Arguments) -> Took:
        """The same while the lock of these arguments is held; peers refuse the call when it is published."""
        if kind in (ONCE, SINGLETON):
            published = self.publish(kind, args)
            return Took(published, 0.0, 0.0, published)
        called = self._called(kind, args)
        published, traced = self.deliver(kind, args)
        return Took(published, called, traced, published + traced)

    @contextmanager
    def held(self, kind: str) -> Iterator[Arguments]:
        """Arguments whose lock is held meanwhile: by someone else, or with the peers by a message on its way."""
        args = self._arguments()
        if kind == OURS:
            with locked(self._tasks[OURS], *args):
                yield args
        else:
            self.publish(kind, args)
            yield args
            self._tracers[kind](args)

    def deliver(self, kind: str, args: Arguments | None = None) -> tuple[float, float]:
        """Publish a call and run it; answers the seconds of both."""
        args = args or self._arguments()
        return self.publish(kind, args), self._tracers[kind](args)

    def publish(self, kind: str, args: Arguments) -> float:
        """Publish a call; answers the seconds that this took."""
        begin = perf_counter()
        with suppress(_refusal(kind)):
            self._tasks[kind].apply_async(args, queue=QUEUE)
        return perf_counter() - begin

    def _called(self, kind: str, args: Arguments) -> float:
        """Of two calls the second, as publishing and tracing leave cold caches behind."""
        around_body(self._tasks[kind], args)
        return around_body(self._tasks[kind], args)

    def _arguments(self) -> Arguments:
        return next(self._stage.numbers), "account-17", 0.0


def _refusal(kind: str) -> Any:
    """What `apply_async` of this kind raises for a duplicate."""
    if kind == ONCE:
        from celery_once import AlreadyQueued

        return AlreadyQueued
    return ()
