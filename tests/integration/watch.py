"""Watches one long run: its lock must always exist, and no duplicate of it may run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import redis
from celery import Task
from celery.result import AsyncResult

from tests.integration.recorder import Event, Recorder
from tests.integration.tasks import lock_tag


class Watch:
    """Polls a lock key twenty times a second and sends a duplicate of the work about every 2 s.

    Args:
        job: the task; its duplicates go to the app's default queue.
        tag: what makes its lock key.
        result: the run to watch; its body has started.
        recorder: has the end of that body.
        store: a client of the lock store.
    """

    def __init__(self, job: Task, tag: str, result: AsyncResult, recorder: Recorder, store: redis.Redis) -> None:
        self.job, self.tag, self.result = job, tag, result
        self.key = job.lock_key_for(tag)  # type: ignore[attr-defined]
        self._recorder, self._store = recorder, store
        #: Moments at which the key was not there though the body had not ended.
        self.missing: list[float] = []
        self.copies = 0

    def until_over(self, timeout: float, every: float = 2.0) -> None:
        """Watch until the body ends.

        Raises:
            AssertionError: the body has not ended after ``timeout`` seconds.
        """
        deadline, next_copy = time.monotonic() + timeout, 0.0
        while not self._ended():
            now = time.monotonic()
            assert now < deadline, f"the body of {self.tag} does not end"
            if not self._store.exists(self.key) and not self._ended():
                self.missing.append(now)
            if now >= next_copy:
                self.job.apply_async((self.tag,), ignore_result=True)
                self.copies, next_copy = self.copies + 1, now + min(every, 2.0)
            time.sleep(0.05)
        self._store.close()

    def _ended(self) -> bool:
        return bool(self._recorder.events(self.tag, "end"))

    @property
    def starts(self) -> int:
        """The number of bodies that started before the watched one ended."""
        end = self._recorder.events(self.tag, "end")[0]["at"]
        return len([e for e in self._recorder.events(self.tag, "start") if e["at"] < end])

    @property
    def duration(self) -> float:
        """Seconds from the body's start to its end."""
        start = self._recorder.events(self.tag, "start")[0]["at"]
        end = self._recorder.events(self.tag, "end")[0]["at"]
        return float(end - start)

    @property
    def lost(self) -> list[Event]:
        """The reported events of a lost lock."""
        return self._recorder.events(lock_tag(self.key), "lock_lost")


class NinetySeconds:
    """Bodies of 90 s, one for each pool, watched in threads while other tests run."""

    def __init__(self, make_watch: Mapping[str, Callable[[], Watch]]) -> None:
        self._watches: dict[str, Any] = {}
        self._threads = {
            pool: threading.Thread(target=self._run, args=(pool, make), daemon=True)
            for pool, make in make_watch.items()
        }
        for thread in self._threads.values():
            thread.start()

    def _run(self, pool: str, make: Callable[[], Watch]) -> None:
        try:
            watch = make()
            self._watches[pool] = watch
            watch.until_over(timeout=200)
        except BaseException as error:
            self._watches[pool] = error

    def watch(self, pool: str) -> Watch:
        """Return the finished watch of a pool, or raise its error."""
        self._threads[pool].join(200)
        watch = self._watches[pool]
        if isinstance(watch, BaseException):
            raise watch
        assert isinstance(watch, Watch)
        return watch
