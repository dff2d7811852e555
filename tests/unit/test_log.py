"""What the library logs about tasks: each record says in fields which task, message, lock and holder it is about."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from celery import Celery
from celery.app.task import Context

from celery_singleton_lock import Debounce, Holder, RetryLater, SingletonTask, StoreError, StoreUnavailable
from celery_singleton_lock.config.options import Settings
from celery_singleton_lock.config.task_config import config_for
from celery_singleton_lock.context import context_of
from celery_singleton_lock.delivery.retry_state import RETRY_STATE_HEADER, RetryState
from celery_singleton_lock.lease import LeaseState
from celery_singleton_lock.line.copies import Copies
from celery_singleton_lock.line.joining import terminate
from celery_singleton_lock.log import about, logger
from celery_singleton_lock.store.requests import LeaseSpec, Place
from celery_singleton_lock.testing import locked
from tests.servers import free_port, until
from tests.unit.conftest import attempt_with
from tests.unit.test_line_copies import kept
from tests.unit.test_request import received, start
from tests.unit.test_task import Singleton, deliver


@pytest.fixture
def records(caplog: pytest.LogCaptureFixture) -> Iterator[list[logging.LogRecord]]:
    """Collects what the library logs, at any level."""
    caplog.set_level(logging.DEBUG, logger=logger.name)
    found: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = found.append  # type: ignore[method-assign]
    logger.addHandler(handler)
    yield found
    logger.removeHandler(handler)


@pytest.fixture
def task(singleton: Singleton) -> Any:
    @singleton(name="x", on_duplicate="skip")
    def task() -> None: ...

    return task


def fields(record: Any) -> tuple[Any, ...]:
    return record.task, record.task_id, record.key, record.holder


def test_run(task: Any, records: list[logging.LogRecord]) -> None:
    """A run logs at DEBUG that its lock was acquired, with the fence, and that it was released."""
    key = task.lock_key_for()
    deliver(task, task_id="a")
    acquired, released = records
    assert acquired.getMessage().startswith(f"Task x[a] acquired {key} with fence ")
    assert released.getMessage() == f"Task x[a] released {key}"
    for record in (acquired, released):
        assert (record.levelno, *fields(record)) == (logging.DEBUG, "x", "a", key, None)


def test_duplicate(task: Any, records: list[logging.LogRecord]) -> None:
    """The record of a duplicate names its holder, and the function that logs it."""
    with locked(task) as holder:
        deliver(task, task_id="b")
    (skipped,) = (record for record in records if record.levelno == logging.INFO)
    assert skipped.getMessage() == f"Task x[b] skipped: {task.lock_key_for()} is held by {skipped_holder(skipped)}"
    assert fields(skipped)[:3] == ("x", "b", task.lock_key_for())
    assert fields(skipped)[3]["task_id"] == holder.task_id
    assert skipped.funcName == "skip"


def skipped_holder(record: logging.LogRecord) -> str:
    return record.getMessage().partition(" is held by ")[2]


# -- the key in the text ---------------------------------------------------------------------------


def locking_task(app: Celery, **options: Any) -> Any:
    """Return a task of this app."""

    @app.task(base=SingletonTask, name="x", shared=False, **options)
    def task() -> None: ...

    app.finalize()
    return app.tasks["x"]


def request_of(task: Any, name: str, **more: Any) -> LeaseSpec:
    """Return a request of another message for the task's lock."""
    config = config_for(task)
    return LeaseSpec(config.base, config.digest((), {}), name, 60.0, name, "node", 7, **more)


def after(task: Any, **state: Any) -> dict[str, Any]:
    """Return the headers of a message that was published again."""
    return {RETRY_STATE_HEADER: RetryState(**state)._asdict()}


def died(app: Celery) -> None:
    locking_task(app)
    app.conf.singleton_lock_url = "redis://127.0.0.1:1/0"
    start(app)
    received(app).log_death(4711)


def ran(app: Celery) -> None:
    deliver(locking_task(app))


def met_a_holder(app: Celery, **options: Any) -> None:
    task = locking_task(app, **options)
    with locked(task):
        deliver(task)


def ends_as_another(app: Celery) -> None:
    task = locking_task(app, on_duplicate="join")
    app.backend.mark_as_done("another", 5)
    deliver(task, headers=after(task, follows="another"))


def cannot_read_the_result(app: Celery) -> None:
    task = locking_task(app, on_duplicate="join")
    app.backend.get_task_meta = None
    with locked(task):
        deliver(task, headers=after(task, follows="another"))


def redelivered_after(status: str, app: Celery) -> None:
    task = locking_task(app, on_duplicate="replace")
    store, own = context_of(app).store, request_of(task, "id-1")
    store.acquire(own)
    place = Place("newer", room=1, replace=True, next_copy=1.0, due=60.0, stop=True)
    if status == "replaced":
        store.acquire(request_of(task, "newer", place=place))
    if status != "running":
        store.release(own, success=False)
    if status == "success":
        store.record_outcome(own, success=True)
    deliver(task, delivery_info={"redelivered": True})


def superseded(app: Celery) -> None:
    task = locking_task(app, on_duplicate="replace")
    with locked(task):
        for name in ("older", "newer"):
            place = Place(name, room=1, replace=True, next_copy=1.0, due=60.0)
            context_of(app).store.acquire(request_of(task, name, place=place))
        deliver(task, task_id="older", headers=after(task, ticket="older", copy=1.0))


def dropped(app: Celery) -> None:
    task = locking_task(app, on_duplicate="wait")
    for _ in range(2):
        deliver(task, headers=after(task, ticket="one", copy=1.0))
        deliver(task, headers=after(task, ticket="one", copy=2.0))


def did_not_stop(app: Celery) -> None:
    task = locking_task(app, on_duplicate="replace")
    terminate(attempt_with(task, Context(id="id-1"), request_of(task, "id-1")), Holder("older", "node"))


def without_store(app: Celery, **message: Any) -> None:
    app.conf.singleton_lock_url = f"redis://127.0.0.1:{free_port()}/0"
    task = locking_task(app, on_duplicate="wait")
    deliver(task, headers=after(task, **message))


def copy_without_store(app: Celery) -> None:
    app.conf.singleton_lock_url = f"redis://127.0.0.1:{free_port()}/0"
    copy, _ = kept(locking_task(app, on_duplicate="wait"))
    Copies(app).handle(copy)


def renewed(app: Celery) -> None:
    task = locking_task(app)
    state, events = LeaseState(request_of(task, "id-1"), task), context_of(app).events
    events.lost(state)
    events.replaced(state)
    events.reacquired(state)
    events.unreachable(state, StoreUnavailable("away"))
    events.loop_failed(StoreError("refused"), state.spec)
    done: list[bool] = []
    context_of(app).callbacks.call(lambda: done.append(True))
    until(lambda: done, "all is logged")


CASES: dict[str, Callable[[Celery], None]] = {
    "has died with pool process 4711": died,
    "released": ran,
    "skipped: ": met_a_holder,
    "failed as a duplicate": partial(met_a_holder, on_duplicate="raise"),
    "waits 5.0 s": partial(met_a_holder, on_duplicate=RetryLater(jitter=0)),
    "waits in line": partial(met_a_holder, on_duplicate="wait"),
    " s without another call": partial(met_a_holder, on_duplicate=Debounce(quiet=9, max_quiet=9)),
    "follows task held-by-test": partial(met_a_holder, on_duplicate="join"),
    "ends as task another did": ends_as_another,
    "could not read the result": cannot_read_the_result,
    "replaced": partial(redelivered_after, "replaced"),
    "redelivered while": partial(redelivered_after, "running"),
    "dropped: another delivery": partial(redelivered_after, "success"),
    "took its place": superseded,
    "dropped: another copy": dropped,
    "terminated, which did not stop": did_not_stop,
    "waits ": without_store,
    "could not ask for its place in line": copy_without_store,
    "reacquired its lock": renewed,
    "leaves it to expire": renewed,
}


@pytest.mark.parametrize("text", CASES)
def test_key_in_the_text(app: Celery, records: list[logging.LogRecord], text: str) -> None:
    """Each text about a lock shows its key, to be copied: nothing that could belong to the key stands directly behind it."""
    CASES[text](app)
    assert any(text in record.getMessage() for record in records)
    about_locks = [record for record in records if vars(record)["key"]]
    assert about_locks
    for record in about_locks:
        key = vars(record)["key"]
        assert re.search(rf"(^| |'){re.escape(key)}( |'|$)", record.getMessage()), record.getMessage()


def test_other_records_have_empty_fields(records: list[logging.LogRecord]) -> None:
    """A formatter that names the fields can format each record of this library."""
    logger.warning("The store of locks is unreachable: %s", "why")
    assert fields(records[-1]) == ("", "", "", None)
    assert (
        logging.Formatter("%(task)s|%(key)s|%(message)s").format(records[-1])
        == "||The store of locks is unreachable: why"
    )


def test_ids_are_escaped(task: Any, records: list[logging.LogRecord]) -> None:
    """A task id with control characters cannot forge a line."""
    about(task, "a\n2026 ERROR", "key").info("waits %s", "b\x1b")
    assert records[-1].getMessage() == "Task x[a\\n2026 ERROR] waits b\\x1b; key key"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:s3cret@host:6379/0", "redis://host:6379/0"),
        ("rediss://user:s3/cr@t;x@host/1?password=s3cret", "rediss://host/1"),
        ("sentinel://:s3cret@a:1;sentinel://:s3;cret@b:2", "sentinel://b:2"),
        ("unix:///run/redis.sock?password=s3cret@1", "unix://1"),
        ("memory://", "memory://"),
    ],
)
def test_url_without_login(url: str, shown: str) -> None:
    """No part of a password is shown, however odd the URL is."""
    assert Settings(url).shown_url == shown
