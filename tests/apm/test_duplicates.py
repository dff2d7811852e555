"""Beside an integration duplicates end as without it, and nothing of what it gives to a run is lost or counted twice."""

from __future__ import annotations

from collections import Counter
from typing import Any

from celery import states
from celery.result import AsyncResult

from celery_singleton_lock import DuplicateTask
from celery_singleton_lock.testing import locked
from tests.apm.integrations import Integration
from tests.integration.environment import WorkerEnvironment
from tests.integration.recorder import Event
from tests.servers import until

OWN = {"x-own": "of the caller"}


def send(env: WorkerEnvironment, policy: str, tag: str | None = None, **kwargs: Any) -> AsyncResult:
    """Send a task with a header of its caller's."""
    return env.app.tasks[f"traced.{policy}"].apply_async((tag or env.tag,), kwargs, headers=OWN)


def run_until_let_go(env: WorkerEnvironment, policy: str) -> AsyncResult:
    """Send a task and return once its body waits for `let_go`."""
    result = send(env, policy, acts=("hold", "return"))
    env.wait_for("start")
    return result


def postponed(env: WorkerEnvironment, result: AsyncResult, count: int = 2) -> None:
    """Wait until a task was published again so often."""
    env.worker.wait_for_lines(result.id, " waits ", count=count)


def traced(env: WorkerEnvironment, result: AsyncResult, tag: str | None = None) -> Event:
    """Return what the body of a task saw."""
    env.get(result)
    (seen,) = [event for event in env.events("traced", tag) if event["id"] == result.id]
    return {name: seen[name] for name in ("own", "trace")}


def sent(env: WorkerEnvironment) -> Counter[str]:
    """Return what the worker's integration would have sent, by kind, up to the end of what runs now."""
    env.finish_node(env.worker.worker_queue)
    return Counter(event["what"] for event in env.recorder.events(f"sent-{env.worker.worker_queue}"))


def told(env: WorkerEnvironment, task_id: str) -> Counter[str]:
    """Return Celery's signals about a task."""
    return Counter(event["what"] for event in env.signals(task_id))


def test_skip(env: WorkerEnvironment) -> None:
    """A skipped duplicate is a SUCCESS without a value, and the integration is told of no error."""
    before = sent(env)
    run_until_let_go(env, "skip")
    duplicate = send(env, "skip")
    assert env.get(duplicate) is None
    assert states.SUCCESS == duplicate.state
    env.let_go()
    assert 0 == (sent(env) - before)["error"]
    assert 1 == len(env.starts())


def test_raise(env: WorkerEnvironment) -> None:
    """A refused duplicate is a FAILURE; as the error is one of the task's ``throws``, it is no incident."""
    before = sent(env)
    run_until_let_go(env, "raise")
    duplicate = send(env, "raise")
    assert isinstance(env.error(duplicate), DuplicateTask)
    env.let_go()
    assert 0 == (sent(env) - before)["error"]
    assert 1 == len(env.starts())


def test_retry(env: WorkerEnvironment) -> None:
    """A postponed duplicate runs once, after the holder."""
    holder = run_until_let_go(env, "retry")
    duplicate = send(env, "retry")
    postponed(env, duplicate)
    env.let_go()
    assert "done" == env.get(duplicate)
    env.finish(duplicate.id)
    assert [holder.id, duplicate.id] == [start["id"] for start in env.starts()]


def test_backoff(env: WorkerEnvironment) -> None:
    """The delay grows with each postponement, and after ``max_wait`` seconds the duplicate fails."""
    run_until_let_go(env, "growing")
    duplicate = send(env, "growing")
    assert isinstance(env.error(duplicate), DuplicateTask)
    lines = env.worker.lines(duplicate.id, " waits ")
    assert ["0.2", "0.4", "0.3"] == [line.partition(" waits ")[2].split()[0] for line in lines]


def test_own_headers_and_trace(env: WorkerEnvironment, integration: Integration) -> None:
    """A postponed run sees the headers of its caller and goes on with the caller's trace, as one that was not postponed."""
    control = env.other_tag("control")
    with integration.publisher():
        trace = integration.trace_id()
        expected = traced(env, send(env, "retry", control), control)
    assert trace == expected["trace"]
    assert OWN["x-own"] in expected["own"].values()

    run_until_let_go(env, "retry")
    with integration.publisher():
        trace = integration.trace_id()
        duplicate = send(env, "retry")
    postponed(env, duplicate)
    env.let_go()
    assert {**expected, "trace": trace} == traced(env, duplicate)


def test_counts(env: WorkerEnvironment) -> None:
    """Each postponement makes as many signals and spans as a plain task's own retry, and not one more."""
    before = sent(env)
    with locked(env.app.tasks["traced.retry"], env.tag):
        duplicate = send(env, "retry")
        postponed(env, duplicate)
    env.get(duplicate)
    env.finish(duplicate.id)
    ours, signals = sent(env) - before, told(env, duplicate.id)

    acts = (*("retry",) * signals["task_retry"], "return")
    control, before = env.other_tag("control"), sent(env)
    plain = send(env, "plain", control, acts=acts, seconds=0.2)
    env.get(plain)
    env.finish(plain.id)
    assert ours
    assert told(env, plain.id) == signals
    assert 1 == signals["task_success"]
    assert sent(env) - before == ours


def test_redelivery(env: WorkerEnvironment) -> None:
    """A message that is delivered twice at once runs once."""
    with env.captured_messages() as messages:
        result = run_until_let_go(env, "skip")
    env.redeliver(messages[0])
    env.worker.wait_for_lines(result.id, "redelivered while another delivery", count=2)
    env.let_go()
    env.worker.wait_for_lines(result.id, "dropped: another delivery of it")
    assert "held" == env.get(result)
    env.finish(result.id)
    assert [result.id] == [start["id"] for start in env.starts()]
    until(lambda: not env.app.backend.client.keys(f"*{env.key('skip')}*"), "nothing is left")
