"""Pairs of options that do not exclude each other: each has its documented outcome in one real worker (docs/OPTIONS.md)."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import redis
from celery import Celery
from pytest_celery import CeleryWorkerCluster

from celery_singleton_lock import DuplicateTask
from tests.integration.nodes import WorkerSpec
from tests.integration.recorder import Event, Recorder
from tests.integration.tasks import lock_tag, perform
from tests.pairs import HOLD, LIVE, Pair, add_pairs, completed, task_name
from tests.servers import until

#: Value of `on_duplicate` -> what becomes of a call that meets a running body.
OUTCOMES = {
    "default": "skipped",
    "raise": "failed",
    "callable": "failed",
    "retry": "runs after",
    "wait": "runs after",
    "run_once_more": "runs after",
    "latest": "runs after",
    "join": "has the holder's result",
    "replace": "runs after",
}
#: Of a call under `lock_from="publish"`, where its policy applies to the publish.
AT_PUBLISH = {"skipped": "has the holder's id", "failed": "fails in the caller"}
#: Keys of a task that expire when nothing has run for a while (CONTRIBUTING.md, "Keys in the store").
EXPIRING = {"recent", "slots", "starts", "used"}
#: Seconds for which a case waits for what may take long.
LATE = 40.0
#: Cases that run side by side. Each occupies up to three children.
SIDE_BY_SIDE = 10


@pytest.fixture(scope="module")
def worker_specs() -> Sequence[WorkerSpec]:
    program = ("-m", "celery", "-A", "tests.integration.pairs_app")
    return [WorkerSpec("prefork", 2 * SIDE_BY_SIDE + 4, program=program)]


@pytest.fixture(scope="module")
def extra_conf() -> dict[str, Any]:
    return {"singleton_lock_ttl": 4.0}


class Case:
    """The task of one pair of options."""

    def __init__(self, app: Celery, recorder: Recorder, store: Any, pair: Pair) -> None:
        self.task: Any = app.tasks[task_name(pair)]
        self.values = completed(pair)
        self.recorder = recorder
        self.store = store
        self.tag = f"pair-{LIVE.index(pair)}-{secrets.token_hex(4)}"
        self.key: str = self.task.lock_key_for(self.tag)

    def has(self, value: str) -> bool:
        return any(value in (own, own.partition("=")[0]) for own in self.values)

    @property
    def is_locked(self) -> bool:
        """Whether the lock is held while a body runs."""
        return not self.has("singleton=False") and not self.has("lock_until=start")

    @property
    def outcome(self) -> str:
        """What becomes of a call that meets the running bodies."""
        if not self.is_locked:
            return "runs at once"
        policy = next(
            (value.partition("=")[2] for value in self.values if value.startswith("on_duplicate=")), "default"
        )
        outcome = OUTCOMES["retry" if policy == "default" and self.has("lock_group") else policy]
        return AT_PUBLISH.get(outcome, outcome) if self.has("lock_from=publish") else outcome

    def send(self) -> Any:
        return self.task.delay(self.tag)

    def started(self, result: Any) -> list[Event]:
        return [start for start in self.recorder.events(self.tag, "start") if start["id"] == result.id]

    def ended(self, result: Any) -> list[Event]:
        return [end for end in self.recorder.events(self.tag, "end") if end["id"] == result.id]

    def hold(self) -> Any:
        """Start a body that runs until `let_go`."""
        result = self.send()
        (start,) = until(lambda: self.started(result), "the body starts", LATE)
        assert self.is_locked == start["protected"] == start["held"]
        return result

    def let_go(self) -> None:
        self.recorder.raise_flag(f"{self.tag}.go")

    def value(self, result: Any) -> Any:
        until(lambda: result.state == "SUCCESS", f"SUCCESS of {result.id}", LATE, 0.05)
        return result.result

    def run(self) -> None:
        """Let bodies run, and another call meet them."""
        running = [self.hold() for _ in range(2 if self.has("lock_limit") else 1)]
        self.check_held(running)
        try:
            duplicate = self.meet(running[0])
        finally:
            self.let_go()
        assert ["held"] * len(running) == [self.value(result) for result in running]
        if self.outcome.startswith("runs"):
            assert "held" == self.value(duplicate)
            self.check_order(running, duplicate)
        self.check_end()

    def check_held(self, running: list[Any]) -> None:
        if self.has("singleton=False"):
            assert not self.store.exists(self.key)
        elif self.is_locked:
            assert (running[0].id, "running") == (self.task.lock_holder(self.tag).task_id, "running")
        else:
            until(lambda: not self.store.exists(self.key), "the lock is free")

    def meet(self, first: Any) -> Any:
        """Call the task once more, and check all that is to be seen before the bodies end."""
        if self.outcome == "fails in the caller":
            with pytest.raises(DuplicateTask):
                self.send()
            return None
        duplicate = self.send()
        if self.outcome == "has the holder's id":
            assert (first.id, first.id) == (duplicate.id, duplicate.duplicate.task_id)
            return None
        if self.outcome == "runs at once":
            until(lambda: self.started(duplicate), "the other body starts", LATE)
            assert [] == self.ended(first)
            return duplicate
        met = f"{duplicate.id} is a duplicate"
        until(
            lambda: duplicate.id in [e["task_id"] for e in self.recorder.events(lock_tag(self.key), "duplicate")], met
        )
        if self.outcome == "skipped":
            assert self.value(duplicate) is None
        elif self.outcome == "failed":
            until(lambda: duplicate.state == "FAILURE", "FAILURE")
            assert isinstance(duplicate.result, DuplicateTask)
        assert [] == self.started(duplicate)
        return duplicate

    def check_order(self, running: list[Any], duplicate: Any) -> None:
        (start,) = self.started(duplicate)
        if self.outcome == "runs after":
            assert start["at"] > min(self.ended(result)[0]["at"] for result in running)
        if self.outcome == "runs after" and self.has("lock_at_least"):
            assert start["at"] > self.started(running[0])[0]["at"] + HOLD - 0.1

    def check_end(self) -> None:
        """The lock is free, or held after a success, and nothing is left but the fence and what expires."""
        if self.has("lock_at_least") and self.is_locked:
            assert "held" == until(lambda: self.task.lock_holder(self.tag), "a hold").state
            self.task.force_unlock(self.tag)
        until(lambda: not self.store.exists(self.key), "the lock is free")
        base = self.key.partition("lock:")[0]
        left = {
            str(key).removeprefix(base).partition(":")[0]: self.store.pttl(key)
            for key in self.store.scan_iter(f"{base}*")
        }
        assert left.pop("fence", -1) == -1
        assert left.keys() <= EXPIRING
        assert -1 not in left.values()


@pytest.fixture(scope="module")
def outcomes(
    celery_setup_app: Celery, celery_worker_cluster: CeleryWorkerCluster, recorder: Recorder
) -> Iterator[dict[Pair, Future[None]]]:
    """Run all cases, some side by side; yield what becomes of each."""
    add_pairs(celery_setup_app, perform)
    client = redis.Redis.from_url(celery_setup_app.conf.broker_url, decode_responses=True)
    with contextlib.closing(client), ThreadPoolExecutor(SIDE_BY_SIDE) as threads:
        yield {pair: threads.submit(Case(celery_setup_app, recorder, client, pair).run) for pair in LIVE}


@pytest.mark.parametrize("pair", LIVE, ids="+".join)
def test_pair(outcomes: dict[Pair, Future[None]], pair: Pair) -> None:
    """The first call runs, a second one has the outcome of its policy, and then the lock is free, or held as documented."""
    outcomes[pair].result()
