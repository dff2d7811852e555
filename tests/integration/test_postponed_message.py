"""A postponed run is the run that was asked for: all that its message carried is still there."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from celery import chain, states
from celery.result import AsyncResult

from tests.integration.bench import Bench
from tests.servers import until

#: Headers that Celery itself sets.
KNOWN_HEADERS = {
    *("lang", "task", "id", "shadow", "eta", "expires", "group", "group_index", "retries"),
    *("timelimit", "root_id", "parent_id", "argsrepr", "kwargsrepr", "origin", "ignore_result"),
    *("replaced_task_nesting", "stamped_headers", "stamps"),
}


def aside(bench: Bench) -> str:
    """Return a queue that the worker takes messages from besides its default one."""
    queue = f"{bench.worker.worker_queue}-aside"
    bench.app.control.add_consumer(queue, destination=[bench.worker.hostname()], reply=True)
    return queue


def send(bench: Bench, tag: str, **options: Any) -> AsyncResult:
    """Send the inspected task with everything that a message can carry."""
    return bench.app.tasks["inspected"].apply_async(
        (tag,),
        {"secret": "s3cret"},
        queue=aside(bench),
        priority=7,
        headers={"x-mine": "of the caller", "x-number": 7},
        time_limit=170,
        soft_time_limit=160,
        expires=600,
        link=bench.app.tasks["then"].si(bench.other_tag(f"{tag}-linked")),
        link_error=bench.app.tasks["errback"].s(bench.other_tag(f"{tag}-error")),
        argsrepr="<redacted args>",
        kwargsrepr="<redacted kwargs>",
        shadow="another name",
        **options,
    )


def send_stamped(bench: Bench, tag: str) -> AsyncResult:
    """Send it with stamps, which only signatures have."""
    signature = bench.app.tasks["inspected"].si(tag)
    signature.stamp(visitor=None, append_stamps=False, customer="c-17")
    return signature.apply_async()


def details(bench: Bench, tag: str, count: int = 1) -> dict[str, Any]:
    """Return what the ``count``-th run of a tag saw in its request, without the tag itself."""
    seen = json.dumps(bench.wait_for("start", tag, count)["details"])
    return json.loads(seen.replace(tag, "TAG"))  # type: ignore[no-any-return]


def postponed_details(bench: Bench, send_it: Any) -> dict[str, Any]:
    """Return what a run saw that was postponed at least twice."""
    task = bench.app.tasks["inspected"]
    task.delay(bench.tag, hold=True)
    bench.wait_for("start")
    send_it(bench, bench.tag)
    key = task.lock_key_for(bench.tag)
    until(lambda: len(bench.lock_signals(key, "duplicate")) >= 2, "postponed twice")
    bench.let_go()
    return details(bench, bench.tag, count=2)


@pytest.mark.parametrize("ignore_result", [False, True])
def test_message_is_kept(bench: Bench, ignore_result: bool) -> None:
    """Queue, priority, headers, limits, expiry, links, reprs, shadow, ignore_result, retries."""
    control = bench.other_tag("control")

    def send_it(bench: Bench, tag: str) -> AsyncResult:
        return send(bench, tag, ignore_result=ignore_result)

    send_it(bench, control)
    expected = details(bench, control)
    assert 7 == expected["priority"]
    assert expected["routing_key"] == aside(bench)
    assert {"x-mine": "of the caller", "x-number": 7} == expected["own headers"]
    assert [170, 160] == expected["timelimit"]
    assert expected["ignore_result"] is ignore_result
    assert 0 == expected["retries"]
    assert expected == postponed_details(bench, send_it)


def test_stamps_are_kept(bench: Bench) -> None:
    """Stamps and their names."""
    control = bench.other_tag("control")
    send_stamped(bench, control)
    expected = details(bench, control)
    assert expected["stamps"]["customer"] in ("c-17", ["c-17"])
    assert expected == postponed_details(bench, send_stamped)


def test_chain_is_kept(bench: Bench) -> None:
    """The remaining steps of a chain."""
    control = bench.other_tag("control")

    def send_chain(bench: Bench, tag: str) -> AsyncResult:
        steps = [bench.app.tasks["then"].si(bench.other_tag(f"{tag}-{n}")) for n in range(3)]
        return chain(bench.app.tasks["inspected"].si(tag), *steps)()

    send_chain(bench, control)
    expected = details(bench, control)
    assert ["then"] * 3 == expected["chain"]
    assert expected == postponed_details(bench, send_chain)


def test_callbacks_run_once_after_postponement(bench: Bench) -> None:
    """A link is called once, however often its task was postponed."""
    postponed_details(bench, send)
    linked = bench.other_tag(f"{bench.tag}-linked")
    bench.wait_for("then", linked)
    assert 1 == len(bench.events("then", linked))
    assert [] == bench.events("errback", bench.other_tag(f"{bench.tag}-error"))


def test_expiry_passes_while_postponed(bench: Bench) -> None:
    """A run that expires while it is postponed is revoked, as any expired message is."""
    bench.hold("retry")
    duplicate = bench.job("retry").apply_async((bench.tag,), expires=1.0)
    bench.wait_for_state(duplicate, states.RETRY, states.REVOKED)
    bench.wait_for_state(duplicate, states.REVOKED)
    bench.let_go()
    bench.settle(duplicate.id)
    assert 1 == len(bench.starts())


def test_attempt_id_does_not_travel(bench: Bench) -> None:
    """What names an attempt is made at each delivery: a postponed message carries no such id."""

    def send_plain(bench: Bench, tag: str) -> AsyncResult:
        return bench.app.tasks["inspected"].delay(tag)

    postponed_details(bench, send_plain)
    assert [] == secrets_in(bench.starts()[1])


def test_attempt_id_does_not_travel_with_own_retries(bench: Bench) -> None:
    """Nor does the message of a task's own retry carry one, and nothing of how often its run was postponed before."""

    def send_retrying(bench: Bench, tag: str) -> AsyncResult:
        return bench.app.tasks["inspected"].delay(tag, retry=True)

    postponed_details(bench, send_retrying)
    assert 1 == bench.wait_for("start", count=3)["details"]["retries"]
    retried = bench.starts()[2]
    assert [] == secrets_in(retried)
    assert [] == [name for name in retried["headers"] if "singleton" in name]


def secrets_in(start: dict[str, Any]) -> list[str]:
    """Return what looks like an id in those headers of a run that Celery does not set."""
    values = [str(value) for name, value in start["headers"].items() if name not in KNOWN_HEADERS]
    return [found for value in values for found in re.findall(r"[0-9a-f-]{16,}", value)]
