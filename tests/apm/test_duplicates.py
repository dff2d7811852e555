"""Beside an integration duplicates end as without it, and nothing of what it gives to a run is lost or counted twice."""

from __future__ import annotations

from collections import Counter
from typing import Any

from celery import states
from celery.result import AsyncResult

from celery_singleton_lock import DuplicateTask
from celery_singleton_lock.testing import hold
from tests.apm.integrations import Integration
from tests.integration.bench import Bench
from tests.integration.recorder import Event
from tests.servers import until

OWN = {"x-own": "of the caller"}


def send(bench: Bench, policy: str, tag: str | None = None, **kwargs: Any) -> AsyncResult:
    """Send a task with a header of its caller's."""
    return bench.app.tasks[f"traced.{policy}"].apply_async((tag or bench.tag,), kwargs, headers=OWN)


def run_until_let_go(bench: Bench, policy: str) -> AsyncResult:
    """Send a task and return once its body waits for `let_go`."""
    result = send(bench, policy, acts=("hold", "return"))
    bench.wait_for("start")
    return result


def postponed(bench: Bench, result: AsyncResult, count: int = 2) -> None:
    """Wait until a task was published again so often."""
    bench.worker.wait_for_lines(result.id, " waits ", count=count)


def traced(bench: Bench, result: AsyncResult, tag: str | None = None) -> Event:
    """Return what the body of a task saw."""
    bench.get(result)
    (seen,) = [event for event in bench.events("traced", tag) if event["id"] == result.id]
    return {name: seen[name] for name in ("own", "trace")}


def sent(bench: Bench) -> Counter[str]:
    """Return what the worker's integration would have sent, by kind, up to the end of what runs now."""
    bench.settle_node(bench.worker.worker_queue)
    return Counter(event["what"] for event in bench.recorder.events(f"sent-{bench.worker.worker_queue}"))


def told(bench: Bench, task_id: str) -> Counter[str]:
    """Return Celery's signals about a task."""
    return Counter(event["what"] for event in bench.signals(task_id))


def test_skip(bench: Bench) -> None:
    """A skipped duplicate is a SUCCESS without a value, and the integration is told of no error."""
    before = sent(bench)
    run_until_let_go(bench, "skip")
    duplicate = send(bench, "skip")
    assert bench.get(duplicate) is None
    assert states.SUCCESS == duplicate.state
    bench.let_go()
    assert 0 == (sent(bench) - before)["error"]
    assert 1 == len(bench.starts())


def test_raise(bench: Bench) -> None:
    """A refused duplicate is a FAILURE; as the error is one of the task's ``throws``, it is no incident."""
    before = sent(bench)
    run_until_let_go(bench, "raise")
    duplicate = send(bench, "raise")
    assert isinstance(bench.error(duplicate), DuplicateTask)
    bench.let_go()
    assert 0 == (sent(bench) - before)["error"]
    assert 1 == len(bench.starts())


def test_retry(bench: Bench) -> None:
    """A postponed duplicate runs once, after the holder."""
    holder = run_until_let_go(bench, "retry")
    duplicate = send(bench, "retry")
    postponed(bench, duplicate)
    bench.let_go()
    assert "done" == bench.get(duplicate)
    bench.settle(duplicate.id)
    assert [holder.id, duplicate.id] == [start["id"] for start in bench.starts()]


def test_backoff(bench: Bench) -> None:
    """The delay grows with each postponement, and after ``max_wait`` seconds the duplicate fails."""
    run_until_let_go(bench, "growing")
    duplicate = send(bench, "growing")
    assert isinstance(bench.error(duplicate), DuplicateTask)
    lines = bench.worker.lines(duplicate.id, " waits ")
    assert ["0.2", "0.4", "0.3"] == [line.partition(" waits ")[2].split()[0] for line in lines]


def test_own_headers_and_trace(bench: Bench, integration: Integration) -> None:
    """A postponed run sees the headers of its caller and goes on with the caller's trace, as one that was not postponed."""
    control = bench.other_tag("control")
    with integration.publisher():
        trace = integration.trace_id()
        expected = traced(bench, send(bench, "retry", control), control)
    assert trace == expected["trace"]
    assert OWN["x-own"] in expected["own"].values()

    run_until_let_go(bench, "retry")
    with integration.publisher():
        trace = integration.trace_id()
        duplicate = send(bench, "retry")
    postponed(bench, duplicate)
    bench.let_go()
    assert {**expected, "trace": trace} == traced(bench, duplicate)


def test_counts(bench: Bench) -> None:
    """Each postponement makes as many signals and spans as a plain task's own retry, and not one more."""
    before = sent(bench)
    with hold(bench.app.tasks["traced.retry"], bench.tag):
        duplicate = send(bench, "retry")
        postponed(bench, duplicate)
    bench.get(duplicate)
    bench.settle(duplicate.id)
    ours, signals = sent(bench) - before, told(bench, duplicate.id)

    acts = (*("retry",) * signals["task_retry"], "return")
    control, before = bench.other_tag("control"), sent(bench)
    plain = send(bench, "plain", control, acts=acts, seconds=0.2)
    bench.get(plain)
    bench.settle(plain.id)
    assert ours
    assert told(bench, plain.id) == signals
    assert 1 == signals["task_success"]
    assert sent(bench) - before == ours


def test_redelivery(bench: Bench) -> None:
    """A message that is delivered twice at once runs once."""
    with bench.captured_messages() as messages:
        result = run_until_let_go(bench, "skip")
    bench.redeliver(messages[0])
    bench.worker.wait_for_lines(result.id, "is running in another delivery of it", count=2)
    bench.let_go()
    bench.worker.wait_for_lines(result.id, "dropped: another delivery of it")
    assert "held" == bench.get(result)
    bench.settle(result.id)
    assert [result.id] == [start["id"] for start in bench.starts()]
    until(lambda: not bench.app.backend.client.keys(f"*{bench.key('skip')}*"), "nothing is left")
