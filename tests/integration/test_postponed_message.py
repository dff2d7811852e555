"""A postponed run keeps everything that its message carried."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from celery import chain, states
from celery.result import AsyncResult

from tests.integration.environment import WorkerEnvironment
from tests.servers import until

#: Headers that Celery itself sets.
KNOWN_HEADERS = {
    *("lang", "task", "id", "shadow", "eta", "expires", "group", "group_index", "retries"),
    *("timelimit", "root_id", "parent_id", "argsrepr", "kwargsrepr", "origin", "ignore_result"),
    *("replaced_task_nesting", "stamped_headers", "stamps"),
}


def aside(env: WorkerEnvironment) -> str:
    """Return a second queue that the worker consumes."""
    queue = f"{env.worker.worker_queue}-aside"
    env.app.control.add_consumer(queue, destination=[env.worker.hostname()], reply=True)
    return queue


def send(env: WorkerEnvironment, tag: str, **options: Any) -> AsyncResult:
    """Send the inspected task with everything that a message can carry."""
    return env.app.tasks["inspected"].apply_async(
        (tag,),
        {"secret": "s3cret"},
        queue=aside(env),
        priority=7,
        headers={"x-mine": "of the caller", "x-number": 7},
        time_limit=170,
        soft_time_limit=160,
        expires=600,
        link=env.app.tasks["then"].si(env.other_tag(f"{tag}-linked")),
        link_error=env.app.tasks["errback"].s(env.other_tag(f"{tag}-error")),
        argsrepr="<redacted args>",
        kwargsrepr="<redacted kwargs>",
        shadow="another name",
        **options,
    )


def send_stamped(env: WorkerEnvironment, tag: str) -> AsyncResult:
    """Send the inspected task with stamps, which only signatures have."""
    signature = env.app.tasks["inspected"].si(tag)
    signature.stamp(visitor=None, append_stamps=False, customer="c-17")
    return signature.apply_async()


def details(env: WorkerEnvironment, tag: str, count: int = 1) -> dict[str, Any]:
    """Return the request of the ``count``-th run of a tag, without the tag itself."""
    seen = json.dumps(env.wait_for("start", tag, count)["details"])
    return json.loads(seen.replace(tag, "TAG"))  # type: ignore[no-any-return]


def postponed_details(env: WorkerEnvironment, send_it: Any) -> dict[str, Any]:
    """Return the request of a run that was postponed at least twice."""
    task = env.app.tasks["inspected"]
    task.delay(env.tag, hold=True)
    env.wait_for("start")
    send_it(env, env.tag)
    key = task.lock_key_for(env.tag)
    until(lambda: len(env.lock_signals(key, "duplicate")) >= 2, "postponed twice")
    env.let_go()
    return details(env, env.tag, count=2)


@pytest.mark.parametrize("ignore_result", [False, True])
def test_message_is_kept(env: WorkerEnvironment, ignore_result: bool) -> None:
    """A postponed run keeps queue, priority, headers, limits, expiry, links, reprs, shadow, ignore_result and retries."""
    control = env.other_tag("control")

    def send_it(env: WorkerEnvironment, tag: str) -> AsyncResult:
        return send(env, tag, ignore_result=ignore_result)

    send_it(env, control)
    expected = details(env, control)
    assert 7 == expected["priority"]
    assert expected["routing_key"] == aside(env)
    assert {"x-mine": "of the caller", "x-number": 7} == expected["own headers"]
    assert [170, 160] == expected["timelimit"]
    assert expected["ignore_result"] is ignore_result
    assert 0 == expected["retries"]
    assert expected == postponed_details(env, send_it)


def test_stamps_are_kept(env: WorkerEnvironment) -> None:
    """A postponed run keeps its stamps and their names."""
    control = env.other_tag("control")
    send_stamped(env, control)
    expected = details(env, control)
    assert expected["stamps"]["customer"] in ("c-17", ["c-17"])
    assert expected == postponed_details(env, send_stamped)


def test_chain_is_kept(env: WorkerEnvironment) -> None:
    """A postponed run keeps the remaining steps of its chain."""
    control = env.other_tag("control")

    def send_chain(env: WorkerEnvironment, tag: str) -> AsyncResult:
        steps = [env.app.tasks["then"].si(env.other_tag(f"{tag}-{n}")) for n in range(3)]
        return chain(env.app.tasks["inspected"].si(tag), *steps)()

    send_chain(env, control)
    expected = details(env, control)
    assert ["then"] * 3 == expected["chain"]
    assert expected == postponed_details(env, send_chain)


def test_callbacks_run_once_after_postponement(env: WorkerEnvironment) -> None:
    """A link is called once, however often its task was postponed."""
    postponed_details(env, send)
    linked = env.other_tag(f"{env.tag}-linked")
    env.wait_for("then", linked)
    assert 1 == len(env.events("then", linked))
    assert [] == env.events("errback", env.other_tag(f"{env.tag}-error"))


def test_expiry_passes_while_postponed(env: WorkerEnvironment) -> None:
    """A run that expires while it is postponed is revoked, like any expired message."""
    env.hold("retry")
    duplicate = env.job("retry").apply_async((env.tag,), expires=1.0)
    env.wait_for_state(duplicate, states.RETRY, states.REVOKED)
    env.wait_for_state(duplicate, states.REVOKED)
    env.let_go()
    env.finish(duplicate.id)
    assert 1 == len(env.starts())


def test_token_does_not_travel(env: WorkerEnvironment) -> None:
    """A message that is published again carries no token: each delivery gets a new one."""

    def send_plain(env: WorkerEnvironment, tag: str) -> AsyncResult:
        return env.app.tasks["inspected"].delay(tag)

    postponed_details(env, send_plain)
    assert [] == secrets_in(env.starts()[1])


def test_own_retry_carries_neither_token_nor_retry_state(env: WorkerEnvironment) -> None:
    """The message of a task's own retry carries no token and no retry state."""

    def send_retrying(env: WorkerEnvironment, tag: str) -> AsyncResult:
        return env.app.tasks["inspected"].delay(tag, retry=True)

    postponed_details(env, send_retrying)
    assert 1 == env.wait_for("start", count=3)["details"]["retries"]
    retried = env.starts()[2]
    assert [] == secrets_in(retried)
    assert [] == [name for name in retried["headers"] if "singleton" in name]


def secrets_in(start: dict[str, Any]) -> list[str]:
    """Return the texts that could be a token, from the headers of a run that Celery does not set."""
    values = [str(value) for name, value in start["headers"].items() if name not in KNOWN_HEADERS]
    return [found for value in values for found in re.findall(r"[0-9a-f-]{16,}", value)]
