"""What the library logs about tasks: each record says in fields which task, message, lock and holder it is about."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from celery_singleton_lock.log import about, logger
from celery_singleton_lock.testing import hold
from celery_singleton_lock.worker.bootstep import without_login
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
    assert acquired.getMessage().startswith(f"Task x[a] acquired {key}, fence ")
    assert released.getMessage() == f"Task x[a] released {key}"
    for record in (acquired, released):
        assert (record.levelno, *fields(record)) == (logging.DEBUG, "x", "a", key, None)


def test_duplicate(task: Any, records: list[logging.LogRecord]) -> None:
    """The record of a duplicate names its holder, and the function that logs it."""
    with hold(task) as holder:
        deliver(task, task_id="b")
    (skipped,) = (record for record in records if record.levelno == logging.INFO)
    assert skipped.getMessage() == f"Task x[b] skipped: {task.lock_key_for()} is held by {skipped_holder(skipped)}"
    assert fields(skipped)[:3] == ("x", "b", task.lock_key_for())
    assert fields(skipped)[3]["task_id"] == holder.task_id
    assert skipped.funcName == "_skip"


def skipped_holder(record: logging.LogRecord) -> str:
    return record.getMessage().partition(" is held by ")[2]


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
    assert records[-1].getMessage() == "Task x[a\\n2026 ERROR] waits b\\x1b"


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
    assert without_login(url) == shown
