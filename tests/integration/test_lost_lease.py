"""A whole worker is stopped for longer than its lease lives: it detects the loss and does no harm."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from celery import Celery
from pytest_celery import CeleryWorkerCluster

from tests.integration.environment import SOON
from tests.integration.nodes import LocalWorkerNode, WorkerSpec
from tests.integration.recorder import Event, Recorder
from tests.integration.tasks import lock_tag
from tests.servers import until

POOLS = ("prefork", "threads", "gevent", "eventlet", "solo")

#: Seconds. The first lease is to expire soon, and the one of the new holder never.
TTL, LONG = 2.0, 600.0
#: Starting eleven workers, and letting ten of them play, may take long.
pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def worker_specs() -> Sequence[WorkerSpec]:
    """Return one worker for the new holder, and for each pool and setting one that is stopped."""
    others = [WorkerSpec(pool, 1, copy=copy) for pool in POOLS for copy in (3, 4)]
    return [WorkerSpec("threads", concurrency=16, copy=3), *others]


@dataclass
class Story:
    """The events of one worker that was stopped while its body ran."""

    first: str
    second: str
    events: list[Event]
    signals: list[Event]
    #: Task ids that held the lock, as seen at moments after the first woke up.
    holders: list[str | None]
    log: str

    def of(self, what: str, task_id: str) -> list[Event]:
        """Return the events of one kind that one of the two runs recorded."""
        number = next(e["number"] for e in self.events if e.get("id") == task_id)
        return [e for e in self.events if e["what"] == what and e.get("number") == number]


class Drama:
    """Run the same steps with every pool concurrently, under both settings."""

    def __init__(self, cluster: CeleryWorkerCluster, app: Celery, recorder: Recorder) -> None:
        self.app, self.recorder = app, recorder
        self.other, *stopped = cluster
        self.stories: dict[tuple[str, str], Any] = {}
        plots = []
        for index, node in enumerate(stopped):
            job = ("skip_short", "told")[index % 2]
            plots.append(threading.Thread(target=self._record, args=(node, job), daemon=True))
        for plot in plots:
            plot.start()
        for plot in plots:
            plot.join(200)

    def _record(self, node: LocalWorkerNode, job: str) -> None:
        pool = node.container.spec.pool
        try:
            self.stories[pool, job] = self._play(node, job)
        except BaseException as error:
            self.stories[pool, job] = error

    def _play(self, node: LocalWorkerNode, job_name: str) -> Story:
        job, tag = self.app.tasks[f"job.{job_name}"], f"stopped-{node.worker_name}"
        begin = len(node.logs())
        acts = ["hold_watching", "hold", "return"]
        first = job.apply_async((tag, acts), queue=node.worker_queue, lock_options={"lock_ttl": TTL})
        until(lambda: self.recorder.events(tag, "start"), "the first run starts")
        node.container.signal_all(signal.SIGSTOP)
        try:
            second = self._take_over(job, tag, acts)
        finally:
            node.container.signal_all(signal.SIGCONT)
        holders = self._watch_holder(job, tag, 2.5)
        until(lambda: self.recorder.events(lock_tag(job.lock_key_for(tag)), "lock_lost"), "lost")
        seen = "error" if job_name == "told" else "not-held"
        until(lambda: self.recorder.events(tag, seen), "the body sees it")
        self.recorder.raise_flag(f"{tag}.go")
        for result in (first, job.AsyncResult(second)):
            result.get(timeout=SOON, propagate=False)
        signals = self.recorder.events(lock_tag(job.lock_key_for(tag)))
        events = self.recorder.events(tag)
        return Story(first.id, second, events, signals, holders, node.logs()[begin:])

    def _take_over(self, job: Any, tag: str, acts: list[str]) -> str:
        """Send duplicates to the other worker until one of them acquires the lock, and return its id."""

        def try_once() -> list[Event]:
            options = {"lock_options": {"lock_ttl": LONG}}
            result = job.apply_async((tag, acts), queue=self.other.worker_queue, **options)
            until(lambda: result.state not in ("PENDING", "STARTED") or self._second(tag), "answer")
            return self._second(tag)

        return str(until(try_once, "another worker takes over", every=0.2)[0]["id"])

    def _second(self, tag: str) -> list[Event]:
        return self.recorder.events(tag, "start")[1:]

    def _watch_holder(self, job: Any, tag: str, seconds: float) -> list[str | None]:
        end, seen = time.monotonic() + seconds, []
        while time.monotonic() < end:
            holder = job.lock_holder(tag)
            seen.append(holder.task_id if holder else None)
            time.sleep(0.05)
        return seen


@pytest.fixture(scope="module")
def drama(celery_worker_cluster: CeleryWorkerCluster, celery_setup_app: Celery, recorder: Recorder) -> Drama:
    celery_setup_app.set_current()
    return Drama(celery_worker_cluster, celery_setup_app, recorder)


@pytest.fixture(params=POOLS)
def tell(request: pytest.FixtureRequest, drama: Drama) -> Callable[[str], Story]:
    """Return a function that returns the story of this pool under a setting, or raises its error."""

    def tell(job: str) -> Story:
        story = drama.stories[request.param, job]
        if isinstance(story, BaseException):
            raise story
        return story  # type: ignore[no-any-return]

    return tell


@pytest.mark.parametrize("job", ["skip_short", "told"])
def test_finds_that_it_lost(tell: Callable[[str], Story], job: str) -> None:
    """After the stop the loss is signalled and logged once."""
    story = tell(job)
    lost = [event for event in story.signals if event["what"] == "lock_lost"]
    assert 1 == len(lost)
    lines = [line for line in story.log.splitlines() if ": WARNING/" in line and "lost" in line]
    assert 1 == len([line for line in lines if lost[0]["key"] in line])


@pytest.mark.parametrize("job", ["skip_short", "told"])
def test_leaves_the_new_holder_alone(tell: Callable[[str], Story], job: str) -> None:
    """The new holder has the lock from the end of the stop to the end of its body."""
    story = tell(job)
    assert {story.second} == set(story.holders)
    released = [event for event in story.signals if event["what"] == "lock_released"]
    assert [story.of("start", story.second)[0]["pid"]] == [event["pid"] for event in released]


def test_warned_body_goes_on(tell: Callable[[str], Story]) -> None:
    """Under warn the body sees that its lease is not held, and may continue."""
    story = tell("skip_short")
    assert 1 == [event["what"] for event in story.events].count("not-held")
    assert [] == story.of("error", story.first)


def test_raise_ends_the_body(tell: Callable[[str], Story]) -> None:
    """Under raise, LockLost ends the body soon after the stop, even in a blocking call."""
    story = tell("told")
    (error,) = story.of("error", story.first)
    assert "LockLost" == error["error"]
    (end,) = story.of("end", story.first)
    new_end = story.of("end", story.second)[0]["at"]
    assert end["at"] < new_end


def test_lost_is_found_before_the_next_step(
    fresh_worker: Callable[..., LocalWorkerNode], celery_setup_app: Celery, recorder: Recorder
) -> None:
    """A body whose lease was lost while it was stopped reads ``held`` as false at once."""
    worker = fresh_worker(WorkerSpec("prefork", concurrency=1))
    job, tag = celery_setup_app.tasks["job.skip_short"], f"at-once-{worker.worker_name}"
    job.apply_async((tag, ["hold_looking"]), queue=worker.worker_queue)
    until(lambda: recorder.events(tag, "held"), "the body looks at its lease")
    worker.container.signal_all(signal.SIGSTOP)
    until(lambda: job.lock_holder(tag) is None, "the lock has expired")
    woken = time.monotonic()
    worker.container.signal_all(signal.SIGCONT)
    until(lambda: recorder.events(tag, "not-held"), "the body sees it")
    recorder.raise_flag(f"{tag}.go")
    looks = [event["what"] for event in recorder.events(tag) if event["at"] > woken and event["what"].endswith("held")]
    assert "not-held" in looks[:2]  # it may have looked just before the stop, and recorded that after it
    assert looks.count("held") <= 1
