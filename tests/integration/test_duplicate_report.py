"""How a duplicate is reported: the error, the log line, hooks, signals and events."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
from celery import states
from celery.result import AsyncResult

from celery_singleton_lock import DuplicateTask
from tests.integration.environment import SOON, WorkerEnvironment
from tests.integration.event_stream import EventStream
from tests.integration.nodes import WorkerSpec
from tests.integration.recorder import Event
from tests.servers import until

SETTINGS = [("prefork", "json"), ("prefork", "pickle"), ("threads", "json")]


@pytest.fixture(scope="module", params=SETTINGS, ids="-".join)
def setting(request: pytest.FixtureRequest) -> tuple[str, str]:
    """Return the pool and the result serializer."""
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def extra_conf(setting: tuple[str, str]) -> dict[str, Any]:
    return {"result_serializer": setting[1], "result_accept_content": [setting[1]]}


@pytest.fixture(scope="module")
def worker_specs(setting: tuple[str, str]) -> Sequence[WorkerSpec]:
    return [WorkerSpec(setting[0], options=("-E",))]


class TestError:
    def test_carries_key_and_holder(self, env: WorkerEnvironment) -> None:
        """DuplicateTask keeps its key and its holder through the result backend."""
        holder = env.hold("raising")
        error = env.error(env.job("raising").apply_async((env.tag,)))
        assert type(error) is DuplicateTask
        assert error.key == env.key("raising")
        assert holder.id == error.holder.task_id
        assert error.holder.node == env.starts()[0]["node"]
        assert error.holder.pid == env.starts()[0]["pid"]
        assert 0 <= error.holder.age < 60
        assert 0 < error.holder.remaining <= 30
        assert holder.id in str(error)
        assert env.key("raising") in str(error)

    def test_is_the_cause_of_a_failed_postponement(self, env: WorkerEnvironment) -> None:
        """A run that is postponed past max_wait fails with the same error."""
        holder = env.hold("impatient")
        error = env.error(env.job("impatient").apply_async((env.tag,)))
        assert type(error) is DuplicateTask
        assert holder.id == error.holder.task_id


class TestLog:
    def decide(self, env: WorkerEnvironment, name: str) -> tuple[AsyncResult, list[str]]:
        """Send a duplicate, and return it with the log lines that name it and the key."""
        self.holder = env.hold(name)
        duplicate = env.job(name).delay(env.tag)
        if name == "retry":
            env.wait_for_state(duplicate, states.RETRY)
        else:
            duplicate.get(timeout=SOON, propagate=False)
        return duplicate, env.worker.wait_for_lines(duplicate.id, self.holder.id)

    @pytest.mark.parametrize(("name", "level"), [("skip", "INFO"), ("retry", "INFO"), ("raising", "WARNING")])
    def test_one_line_with_the_holder(self, env: WorkerEnvironment, name: str, level: str) -> None:
        """Each decision logs one line with the key, the task and the holder."""
        _, lines = self.decide(env, name)
        own = [line for line in lines if f": {level}/" in line and env.key(name) in line]
        decisions = len(env.lock_signals(env.key(name), "duplicate"))
        assert 1 <= len(own) <= decisions
        start = env.starts()[0]
        assert start["node"] in own[0]
        assert name == "retry" or len(own) == 1

    @pytest.mark.parametrize("name", ["skip", "retry", "raising", "impatient"])
    def test_no_traceback(self, env: WorkerEnvironment, name: str) -> None:
        """A duplicate logs no traceback and nothing at ERROR."""
        duplicate, _ = self.decide(env, name)
        env.let_go()
        duplicate.get(timeout=SOON, propagate=False)
        env.finish(duplicate.id)
        records = re.split(r"^(?=\[\d{4}-)", env.worker.logs(), flags=re.MULTILINE)  # each with its traceback
        own = [record for record in records if duplicate.id in record or env.key(name) in record]
        assert own
        assert [] == [record for record in own if re.search("Traceback|: (ERROR|CRITICAL)/", record)]


class TestSignal:
    @pytest.mark.parametrize("name", ["skip", "raising"])
    def test_sent_once_for_a_decision(self, env: WorkerEnvironment, name: str) -> None:
        """The signal has the task, the key, the holder and the decision."""
        holder = env.hold(name)
        duplicate = env.job(name).delay(env.tag)
        duplicate.get(timeout=SOON, propagate=False)
        env.finish(duplicate.id)
        (event,) = env.lock_signals(env.key(name), "duplicate")
        assert event["task"] == f"job.{name}"
        assert duplicate.id == event["task_id"]
        assert holder.id == event["holder"]
        assert event["policy"].startswith("Skip" if name == "skip" else "Raise")

    def test_sent_for_each_delivery(self, env: WorkerEnvironment) -> None:
        """The policy decides again for each delivery that finds its lock held."""
        env.hold("retry")
        env.job("retry").delay(env.tag)
        until(lambda: len(env.lock_signals(env.key("retry"), "duplicate")) >= 3, "three deliveries")


class TestHooks:
    def hooks(self, env: WorkerEnvironment, since: int) -> list[str]:
        return [event["hook"] for event in env.events("hook")[since:]]

    def test_skip(self, env: WorkerEnvironment) -> None:
        """A skip calls only two of Celery's hooks, task_prerun and task_postrun, the latter with IGNORED."""
        env.hold("hooked")
        assert ["before_start"] == self.hooks(env, 0)
        duplicate = env.job("hooked").apply_async(kwargs={"tag": env.tag})
        assert env.get(duplicate) is None
        until(lambda: env.signals(duplicate.id, "task_postrun"), "task_postrun")
        assert [(event["what"], event["state"]) for event in env.signals(duplicate.id)] == [
            ("task_prerun", None),
            ("task_postrun", "IGNORED"),
        ]
        assert [] == self.hooks(env, 1)

    def test_retry(self, env: WorkerEnvironment) -> None:
        """A postponement calls no hook of a success or failure and does not start the user's code."""
        env.hold("hooked_retry")
        duplicate = env.job("hooked_retry").apply_async(kwargs={"tag": env.tag})
        until(lambda: env.signals(duplicate.id, "task_postrun"), "postponed once")
        names = {event["what"] for event in env.signals(duplicate.id)}
        assert not names & {"task_success", "task_failure"}
        assert not {"before_start", "on_success", "on_failure"} & set(self.hooks(env, 1))
        (why, *_) = (event["why"] for event in env.events("hook") if event["hook"] == "on_retry")
        assert ["DuplicateTask", env.key("hooked_retry")] == why

    def test_raise(self, env: WorkerEnvironment) -> None:
        """A raised duplicate calls the hooks of a failure, but the user's code never starts."""
        env.hold("hooked_raise")
        duplicate = env.job("hooked_raise").apply_async(kwargs={"tag": env.tag})
        assert isinstance(env.error(duplicate), DuplicateTask)
        until(lambda: "after_return" in self.hooks(env, 1), "after_return")
        assert ["on_failure", "after_return"] == self.hooks(env, 1)
        assert env.signals(duplicate.id, "task_failure")


class TestEvent:
    def test_skip_is_in_the_event_stream(self, env: WorkerEnvironment) -> None:
        """A skip sends its own kind of event, so that it can be counted and monitored."""
        holder = env.hold("skip")
        with EventStream(env) as stream:
            duplicate = env.job("skip").delay(env.tag)
            assert env.get(duplicate) is None

            def skipped() -> list[Event]:
                return [event for event in stream.events if event["type"] == "task-singleton-skipped"]

            until(lambda: [e for e in skipped() if e["uuid"] == duplicate.id], "the event")
            (event,) = [event for event in skipped() if event["uuid"] == duplicate.id]
            assert event["hostname"] == env.worker.hostname()
            assert "job.skip" == event["name"], "it may come before the event that says which task this is"
            assert holder.id in str(event)

    def test_lost_lock_is_in_the_event_stream(self, env: WorkerEnvironment) -> None:
        """A lost lock sends an event, which names the task, the lock and the reason."""
        holder = env.hold("skip_short", lock_options={"lock_ttl": 9})
        with EventStream(env) as stream:
            env.job("skip_short").force_unlock(env.tag)  # type: ignore[attr-defined]

            def lost() -> list[Event]:
                events = [event for event in stream.events if event["type"] == "task-singleton-lost"]
                return [event for event in events if event["uuid"] == holder.id]

            until(lost, "the event")
        (event,) = lost()
        assert (holder.id, "job.skip_short", env.worker.hostname()) == (event["uuid"], event["name"], event["hostname"])
        assert (env.key("skip_short"), "released_by_operator") == (event["key"], event["reason"])

    @pytest.mark.parametrize("name", ["once_more", "once_more_latest", "replace"])
    def test_run_in_its_place(self, env: WorkerEnvironment, name: str) -> None:
        """The event, the signal and the log line of a message that does not run name the one that waits in its place."""
        env.hold(name)
        with EventStream(env) as stream:
            options = {"lock_options": {"lock_ttl": 1}}  # its copy comes soon
            results = [env.job(name).apply_async((env.tag,), **options)]
            env.worker.wait_for_lines(results[0].id, "waits in line")
            results.append(env.job(name).apply_async((env.tag,), **options))
            pending, skipped = results if name == "once_more" else reversed(results)
            assert env.get(skipped) is None

            def events() -> list[Event]:
                return [event for event in stream.events if event["type"] == "task-singleton-skipped"]

            until(lambda: [event for event in events() if event["uuid"] == skipped.id], "the event")
        assert [pending.id] == [event["pending"] for event in events() if event["uuid"] == skipped.id]
        env.worker.wait_for_lines("INFO", skipped.id, "skipped", pending.id)
        if name == "once_more":  # others were no duplicates of it when the policy decided
            signals = env.lock_signals(env.key(name), "duplicate")
            assert [pending.id] == [event["pending"] for event in signals if event["task_id"] == skipped.id]
