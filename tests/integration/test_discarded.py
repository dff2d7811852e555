"""Messages that were published with their lock, and that no worker will run: their lock is free at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import celery
import pytest
from celery import Celery, uuid
from celery.canvas import StampingVisitor
from celery.result import AsyncResult

from celery_singleton_lock import SingletonTask
from tests.integration.environment import WorkerEnvironment
from tests.integration.tasks import make_app
from tests.servers import until


@pytest.fixture(scope="module", params=["prefork", "threads", "gevent"])
def pool(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Spoiled:
    """A producer that changes what it publishes."""

    def __init__(self, producer: Any, change: Callable[[dict[str, Any]], Any]) -> None:
        self._producer, self._change = producer, change

    def __getattr__(self, name: str) -> Any:
        return getattr(self._producer, name)

    def publish(self, body: Any, **options: Any) -> Any:
        body = self._change(options) or body
        return self._producer.publish(body, **options)


def undecodable(options: dict[str, Any]) -> str:
    options.update(serializer=None, content_type="application/json", content_encoding="utf-8")
    return "{"


def refused(options: dict[str, Any]) -> None:
    options["serializer"] = "pickle"


def invalid(options: dict[str, Any]) -> None:
    options["headers"]["eta"] = "at some time"


def too_late(options: dict[str, Any]) -> None:
    options["headers"]["eta"] = "9999-12-31T23:59:59-12:00"  # which no clock can show


def no_task(options: dict[str, Any]) -> None:
    options["headers"]["task"] = "job.nobody_knows"


@pytest.fixture
def other(env: WorkerEnvironment) -> Iterator[Celery]:
    """Yield an app that has tasks which the worker does not know."""
    app = make_app({**dict(env.app.conf), "task_default_queue": env.worker.worker_queue})

    @app.task(shared=False, name="job.stranger", base=SingletonTask, lock_from="publish", unique_on=["tag"])
    def stranger(tag: str) -> None: ...

    two = {"unique_on": ["tag"], "lock_limit": 2}

    @app.task(shared=False, name="job.strangers", base=SingletonTask, lock_from="publish", **two)
    def strangers(tag: str) -> None: ...

    yield app
    app.close()


def is_free(task: Any, *args: Any) -> bool:
    return task.lock_holder(*args) is None


@pytest.mark.parametrize("change", [undecodable, refused, invalid, too_late, no_task], ids=lambda one: one.__name__)
def test_message_that_a_worker_discards(env: WorkerEnvironment, change: Callable[[dict[str, Any]], Any]) -> None:
    """A message that its worker cannot read, or must not, frees its lock there. The next call is published and runs."""
    if change is too_late and celery.VERSION < (5, 7):
        pytest.skip("this Celery rejects the message and runs it nevertheless, under its lock")
    job = env.job("publish")
    with env.app.producer_or_acquire() as producer:
        first = job.apply_async((env.tag,), producer=Spoiled(producer, change))
    until(lambda: is_free(job, env.tag), "the reservation ends")
    second = job.delay(env.tag)
    assert second.id != first.id
    assert "done" == env.get(second)
    assert 1 == len(env.starts())


def test_task_that_the_worker_does_not_know(env: WorkerEnvironment, other: Celery) -> None:
    """A worker frees the lock of an unknown task's message, though it knows none of its options."""
    task = other.tasks["job.stranger"]
    for _ in range(2):
        result = task.delay(env.tag)
        env.worker.wait_for_lines("Received unregistered task of type 'job.stranger'")
        until(lambda: is_free(task, env.tag), "the reservation ends")
        assert result.duplicate is None


def test_slot_of_an_unknown_task(env: WorkerEnvironment, other: Celery) -> None:
    """With a `lock_limit`, the message's own slot becomes free, and not another one."""
    task = other.tasks["job.strangers"]
    kept = task.apply_async((env.tag,), queue=f"nowhere-{env.tag}")
    task.delay(env.tag)
    until(lambda: task.delay(env.tag).duplicate is None, "a slot becomes free")
    assert kept.id == task.lock_holder(env.tag).task_id
    task.force_unlock(env.tag)


def stamped(env: WorkerEnvironment, stamp: str) -> AsyncResult:
    class Stamp(StampingVisitor):
        def on_signature(self, sig: Any, **headers: Any) -> dict[str, Any]:
            return {"tenant": stamp}

    signature = env.job("publish").s(env.tag)
    signature.stamp(Stamp())
    return signature.apply_async(countdown=600)


@pytest.mark.parametrize("how", ["id", "stamp"])
def test_revoked_while_it_waits_for_its_countdown(env: WorkerEnvironment, how: str) -> None:
    """A message with a countdown of minutes frees its lock as soon as it is revoked; the next call is published."""
    job, stamp = env.job("publish"), uuid()
    first = stamped(env, stamp) if how == "stamp" else job.apply_async((env.tag,), countdown=600)
    env.worker.wait_for_lines(first.id, "received")
    found = job.lock_holder(env.tag)  # type: ignore[attr-defined]
    assert first.id == found.task_id
    node = [env.worker.hostname()]
    if how == "stamp":
        env.app.control.revoke_by_stamped_headers({"tenant": [stamp]}, destination=node)
    else:
        env.app.control.revoke(first.id, destination=node)
    until(lambda: is_free(job, env.tag), "the reservation ends")
    second = job.delay(env.tag)
    assert second.id != first.id
    assert "done" == env.get(second)


def test_revoked_while_it_waits_for_a_process(env: WorkerEnvironment) -> None:
    """A message that is revoked while all processes are busy frees its lock before one of them is free."""
    job = env.job("publish")
    busy = [env.hold("plain", env.other_tag(f"busy-{n}")) for n in range(env.worker.container.spec.concurrency)]
    first = job.delay(env.tag)
    env.worker.wait_for_lines(first.id, "received")
    env.app.control.revoke(first.id, destination=[env.worker.hostname()])
    until(lambda: is_free(job, env.tag), "the reservation ends")
    env.let_all_go()
    assert ["held"] * len(busy) == [env.get(one) for one in busy]


def test_own_retry_that_is_revoked(env: WorkerEnvironment) -> None:
    """The lock that a task keeps for its own retry is free as soon as that is revoked, also if no publisher has named it."""
    job = env.job("publish")
    for number, task_id in enumerate((None, uuid())):
        tag = env.other_tag(str(number))
        first = job.apply_async((tag,), {"acts": "retry", "seconds": 600}, task_id=task_id)
        env.worker.wait_for_lines(first.id, "received", count=2)
        until(lambda job=job, tag=tag: "queued" == job.lock_holder(tag).state, "the lease becomes a reservation")  # type: ignore[misc]
        env.app.control.revoke(first.id, destination=[env.worker.hostname()])
        until(partial(is_free, job, tag), "the reservation ends")


def test_message_that_is_known_to_have_ended(env: WorkerEnvironment) -> None:
    """A call that meets the lock of a message with a final state is published, though nobody has freed the lock."""
    job, nowhere = env.job("publish"), f"nowhere-{env.tag}"
    first = job.apply_async((env.tag,), queue=nowhere)
    waiting = job.apply_async((env.tag,), queue=nowhere)
    assert first.id == waiting.id
    env.app.backend.mark_as_revoked(first.id)
    second = job.delay(env.tag)
    assert second.id != first.id
    assert second.duplicate is None
    assert "done" == env.get(second)


def test_ended_message_under_raise(env: WorkerEnvironment) -> None:
    """Under "raise", the caller gets no `DuplicateTask` for a message with a final state."""
    job = env.job("publish_raise")
    first = job.apply_async((env.tag,), queue=f"nowhere-{env.tag}")
    env.app.backend.mark_as_revoked(first.id)
    assert "done" == env.get(job.delay(env.tag))
