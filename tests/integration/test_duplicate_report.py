"""What one sees of a duplicate: the error, the log line, hooks, signals and events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from celery import states
from celery.result import AsyncResult

from celery_singleton_lock import DuplicateTask
from tests.integration.bench import Bench
from tests.integration.event_stream import EventStream
from tests.integration.nodes import WorkerSpec
from tests.integration.recorder import Event
from tests.servers import until

SETTINGS = [("prefork", "json"), ("prefork", "pickle"), ("threads", "json")]


@pytest.fixture(scope="module", params=SETTINGS, ids="-".join)
def setting(request: pytest.FixtureRequest) -> tuple[str, str]:
    """Pool and result serializer."""
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def extra_conf(setting: tuple[str, str]) -> dict[str, Any]:
    return {"result_serializer": setting[1], "result_accept_content": [setting[1]]}


@pytest.fixture(scope="module")
def worker_specs(setting: tuple[str, str]) -> Sequence[WorkerSpec]:
    return [WorkerSpec(setting[0], options=("-E",))]


class TestError:
    def test_carries_key_and_holder(self, bench: Bench) -> None:
        """DuplicateTask keeps its key and its holder on the way through the result backend."""
        holder = bench.hold("raising")
        error = bench.error(bench.job("raising").apply_async((bench.tag,)))
        assert type(error) is DuplicateTask
        assert error.key == bench.key("raising")
        assert holder.id == error.holder.task_id
        assert error.holder.node == bench.starts()[0]["node"]
        assert error.holder.pid == bench.starts()[0]["pid"]
        assert 0 <= error.holder.age < 60
        assert 0 < error.holder.remaining <= 30
        assert holder.id in str(error)
        assert bench.key("raising") in str(error)

    def test_is_the_cause_of_a_failed_postponement(self, bench: Bench) -> None:
        """A run given up after max_wait fails with the same error."""
        holder = bench.hold("impatient")
        error = bench.error(bench.job("impatient").apply_async((bench.tag,)))
        assert type(error) is DuplicateTask
        assert holder.id == error.holder.task_id


class TestLog:
    def decide(self, bench: Bench, name: str) -> tuple[AsyncResult, list[str]]:
        """Send a duplicate; return it, and the log lines that name it and the key."""
        self.holder = bench.hold(name)
        duplicate = bench.job(name).delay(bench.tag)
        if name == "retry":
            bench.wait_for_state(duplicate, states.RETRY)
        else:
            duplicate.get(timeout=20, propagate=False)
        return duplicate, bench.worker.wait_for_lines(duplicate.id, self.holder.id)

    @pytest.mark.parametrize(("name", "level"), [("skip", "INFO"), ("retry", "INFO"), ("raising", "WARNING")])
    def test_one_line_with_the_holder(self, bench: Bench, name: str, level: str) -> None:
        """One line for each decision: the key, the task and who holds it."""
        _, lines = self.decide(bench, name)
        own = [line for line in lines if f": {level}/" in line and bench.key(name) in line]
        decisions = len(bench.lock_signals(bench.key(name), "duplicate"))
        assert 1 <= len(own) <= decisions
        start = bench.starts()[0]
        assert start["node"] in own[0]
        assert name == "retry" or len(own) == 1

    @pytest.mark.parametrize("name", ["skip", "retry", "raising", "impatient"])
    def test_no_traceback(self, bench: Bench, name: str) -> None:
        """A duplicate is no accident: no traceback, and nothing at ERROR."""
        before = len(bench.worker.logs())
        duplicate, _ = self.decide(bench, name)
        bench.let_go()
        duplicate.get(timeout=20, propagate=False)
        bench.settle(duplicate.id)
        logs = bench.worker.logs()[before:]
        assert "Traceback" not in logs
        assert ": ERROR/" not in logs
        assert ": CRITICAL/" not in logs


class TestSignal:
    @pytest.mark.parametrize("name", ["skip", "raising"])
    def test_sent_once_for_a_decision(self, bench: Bench, name: str) -> None:
        """The signal says which task, which key, who holds it, and what was decided."""
        holder = bench.hold(name)
        duplicate = bench.job(name).delay(bench.tag)
        duplicate.get(timeout=20, propagate=False)
        bench.settle(duplicate.id)
        (event,) = bench.lock_signals(bench.key(name), "duplicate")
        assert event["task"] == f"job.{name}"
        assert duplicate.id == event["task_id"]
        assert holder.id == event["holder"]
        assert event["policy"].startswith("Skip" if name == "skip" else "Raise")

    def test_sent_for_each_look(self, bench: Bench) -> None:
        """A postponed run that meets the holder again decides again."""
        bench.hold("retry")
        bench.job("retry").delay(bench.tag)
        until(lambda: len(bench.lock_signals(bench.key("retry"), "duplicate")) >= 3, "3 looks")


class TestHooks:
    def hooks(self, bench: Bench, since: int) -> list[str]:
        return [event["hook"] for event in bench.events("hook")[since:]]

    def test_skip(self, bench: Bench) -> None:
        """Of Celery's hooks only task_prerun and task_postrun, which says IGNORED."""
        bench.hold("hooked")
        assert ["before_start"] == self.hooks(bench, 0)
        duplicate = bench.job("hooked").apply_async(kwargs={"tag": bench.tag})
        assert bench.get(duplicate) is None
        until(lambda: bench.signals(duplicate.id, "task_postrun"), "task_postrun")
        assert [(event["what"], event["state"]) for event in bench.signals(duplicate.id)] == [
            ("task_prerun", None),
            ("task_postrun", "IGNORED"),
        ]
        assert [] == self.hooks(bench, 1)

    def test_retry(self, bench: Bench) -> None:
        """A postponement is no success, no failure and no start of the user's code."""
        bench.hold("hooked_retry")
        duplicate = bench.job("hooked_retry").apply_async(kwargs={"tag": bench.tag})
        until(lambda: bench.signals(duplicate.id, "task_postrun"), "postponed once")
        names = {event["what"] for event in bench.signals(duplicate.id)}
        assert not names & {"task_success", "task_failure"}
        assert not {"before_start", "on_success", "on_failure"} & set(self.hooks(bench, 1))
        (why, *_) = (event["why"] for event in bench.events("hook") if event["hook"] == "on_retry")
        assert ["DuplicateTask", bench.key("hooked_retry")] == why

    def test_raise(self, bench: Bench) -> None:
        """A raised duplicate is a failure like others, but the user's code never started."""
        bench.hold("hooked_raise")
        duplicate = bench.job("hooked_raise").apply_async(kwargs={"tag": bench.tag})
        assert isinstance(bench.error(duplicate), DuplicateTask)
        until(lambda: "after_return" in self.hooks(bench, 1), "after_return")
        assert ["on_failure", "after_return"] == self.hooks(bench, 1)
        assert bench.signals(duplicate.id, "task_failure")


class TestEvent:
    def test_skip_is_in_the_event_stream(self, bench: Bench) -> None:
        """A skip is an event of its own kind, so that it can be counted and alarmed on."""
        holder = bench.hold("skip")
        with EventStream(bench.app) as stream:
            duplicate = bench.job("skip").delay(bench.tag)
            assert bench.get(duplicate) is None

            def skipped() -> list[Event]:
                return [event for event in stream.events if event["type"] == "task-singleton-skipped"]

            until(lambda: [e for e in skipped() if e["uuid"] == duplicate.id], "the event")
            (event,) = [event for event in skipped() if event["uuid"] == duplicate.id]
            assert event["hostname"] == bench.worker.hostname()
            assert holder.id in str(event)
