"""What tells a message from another one with its task id."""

from __future__ import annotations

import uuid
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from celery.app.task import Context
from celery.exceptions import Retry
from kombu.message import Message

from celery_singleton_lock import SingletonTask
from celery_singleton_lock.config.call_options import LOCK_OPTIONS_HEADER
from celery_singleton_lock.delivery.attempt import ATTEMPT, Attempt
from celery_singleton_lock.delivery.properties import PROPERTY, Delivery, delivery_of, identity_of
from celery_singleton_lock.delivery.republish import signature_of
from celery_singleton_lock.delivery.retry_state import (
    RETRY_STATE_HEADER,
    RetryState,
    retry_state_of,
)
from celery_singleton_lock.worker import request as worker

BODY = b'[[1], {}, {"chain": null}]'
#: Of task id and body: it may not change between versions that work side by side.
IDENTITY = "d8cd56526e00df76"


@pytest.mark.parametrize("body", [BODY, BODY.decode(), bytearray(BODY), memoryview(BODY), memoryview(BODY + b"x")[:-1]])
def test_forms_of_a_body(body: Any) -> None:
    """However a transport gives a body, the identity is the same."""
    assert IDENTITY == identity_of("id-1", body)


@pytest.mark.parametrize(
    ("task_id", "body"),
    [
        ("id-2", BODY),
        ("id-1", BODY[:-1]),
        ("id-1" + BODY.decode()[0], BODY[1:]),
        ("id-1\udce9", BODY),
        ("id-1", "\udce9"),
    ],
    ids=ascii,
)
def test_other_messages(task_id: str, body: Any) -> None:
    """Another task id or body makes another identity, also one that is no valid text."""
    other = identity_of(task_id, body)
    assert 16 == len(other)
    assert IDENTITY != other


@pytest.mark.parametrize("body", [None, {}, [1], 5, object()], ids=lambda body: type(body).__name__)
def test_body_that_is_no_bytes(body: Any) -> None:
    """Nothing tells such a message from another one with its task id, as a transport of a user's may have it."""
    assert "" == identity_of("id-1", body)


def test_task_id_that_is_no_text() -> None:
    """Kombu's JSON gives a UUID back as one; a text of it is the same id."""
    task_id = uuid.uuid4()
    assert identity_of(task_id, BODY) == identity_of(str(task_id), BODY) != ""


# -- of a message that a worker receives -----------------------------------------------------------


def received(app: Celery, on_duplicate: Any = "wait", lock_limit: Any = None, **headers: Any) -> Any:
    """Return the request of a message that a worker has received."""

    @app.task(base=SingletonTask, name="x", shared=False, on_duplicate=on_duplicate, lock_limit=lock_limit)
    def run(number: int) -> None: ...

    task = app.tasks["x"]
    headers = {"id": "id-1", "task": "x", **headers}
    message = Message(headers=headers, body=BODY, content_type="application/json", content_encoding="utf-8")
    made = worker.request_class(task.Request, app, SimpleNamespace(pool=None))
    return made(message, app=app, task=task, hostname="h")


def test_message_of_a_line(app: Celery) -> None:
    """The main process makes the identity of the body that came, before anybody's code sees its arguments."""
    assert IDENTITY == delivery_of(Context(received(app).request_dict)).identity


def test_message_whose_options_a_call_gave(app: Celery) -> None:
    """A call may have other options than its task, so each message with some has an identity."""
    options = {LOCK_OPTIONS_HEADER: {"on_duplicate": "wait"}}
    assert IDENTITY == delivery_of(Context(received(app, on_duplicate="skip", **options).request_dict)).identity


@pytest.mark.parametrize("on_duplicate", ["skip", "retry", "raise", "join", lambda task, holder: "wait"])
def test_message_without_a_line(app: Celery, on_duplicate: Any) -> None:
    """Where no message waits in line, none needs an identity."""
    assert "" == delivery_of(Context(received(app, on_duplicate=on_duplicate).request_dict)).identity


def test_message_with_several_holders(app: Celery) -> None:
    """With a `lock_limit`, a message that waited for another one with its id would keep a slot from the others."""
    assert "" == delivery_of(Context(received(app, lock_limit=2).request_dict)).identity


@pytest.mark.parametrize(
    "headers",
    [{"retries": 1}, {"replaced_task_nesting": 1}, {RETRY_STATE_HEADER: RetryState(times=1)._asdict()}],
    ids=["own retry", "Task.replace", "published again"],
)
def test_successor(app: Celery, headers: dict[str, Any]) -> None:
    """What is published for an earlier message gets no identity of its own: it has that of the earlier one, or none."""
    assert "" == delivery_of(Context(received(app, **headers).request_dict)).identity


def test_task_that_cannot_be_used(app: Celery) -> None:
    """A message of a task with wrong options is refused when it starts; the worker goes on."""
    request = received(app, on_duplicate="nonsense")
    assert "" == delivery_of(Context(request.request_dict)).identity


# -- of what is published for it -------------------------------------------------------------------


def attempt_at(app: Celery, identity: str, **headers: Any) -> Attempt:
    """Return the attempt at a message that a worker has received."""
    if "x" not in app.tasks:

        @app.task(base=SingletonTask, name="x", shared=False)
        def run() -> None: ...

    properties = {PROPERTY: tuple(Delivery(identity=identity))}
    request = Context({"id": "id-1", "args": (), "kwargs": {}, "retries": 0, "properties": properties, **headers})
    return Attempt(app.tasks["x"], request)


def test_it_travels_with_the_message(app: Celery) -> None:
    """What is published again has the identity of the first, whatever its own body is, however often that happens."""
    first = attempt_at(app, IDENTITY)
    sent = signature_of(first, None, RetryState(times=1)).options["headers"]
    again = attempt_at(app, "", **sent)
    assert IDENTITY == again.identity
    assert IDENTITY == signature_of(again, None, RetryState(times=2)).options["headers"][RETRY_STATE_HEADER]["identity"]
    assert retry_state_of(again.request) == RetryState(times=1, identity=IDENTITY)


@pytest.mark.parametrize("given", [{}, {"headers": {"x": 2}}], ids=str)
def test_own_retry_carries_it_on(app: Celery, given: dict[str, Any]) -> None:
    """What the task publishes itself counts as the message that published it, and has no other past; a body does not see it."""
    attempt = attempt_at(app, IDENTITY, headers={"x": 1}, called_directly=False)
    setattr(attempt.request, ATTEMPT, attempt)
    attempt.task.request_stack.push(attempt.request)
    try:
        with pytest.raises(Retry) as caught:
            attempt.task.retry(countdown=1, **given)
    finally:
        attempt.task.request_stack.pop()
    sent = caught.value.sig.options["headers"]
    assert {"x": 2 if given else 1, RETRY_STATE_HEADER: {"identity": IDENTITY}} == sent
    assert {"x": 1} == attempt.request.headers
    assert IDENTITY == attempt_at(app, "", retries=1, **sent).identity
    assert retry_state_of(Context(sent)).is_first
