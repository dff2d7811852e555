"""The policy Join: which duplicates follow their holder, and for how long."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import WorkerLostError

from celery_singleton_lock import ConfigurationError, Holder, Join, RetryLater
from celery_singleton_lock.delivery.retry_state import RETRY_STATE_HEADER, RetryState
from celery_singleton_lock.policies.decisions import Duplicate, Fail, Follow
from celery_singleton_lock.worker.join import refuse_unreadable_results
from tests.unit.test_task import deliver


@pytest.mark.parametrize(("waited", "delay"), [(0.0, 0.2), (2.0, 0.5), (8.0, 2.0), (100.0, 5.0)])
def test_delay(waited: float, delay: float) -> None:
    """A delay is a quarter of the time waited so far, within bounds."""
    assert Follow(delay) == Join().decide(Duplicate(Holder("a"), waited=waited))


def test_max_wait() -> None:
    """The last look is when `max_wait` is over; then the duplicate fails."""
    policy = Join(max_wait=6.0)
    assert Follow(1.0) == policy.decide(Duplicate(Holder("a"), waited=5.0))
    assert Fail() == policy.decide(Duplicate(Holder("a"), waited=6.0))
    assert isinstance(Join(math.inf).decide(Duplicate(Holder("a"), waited=1e9)), Follow)


def test_own_retry() -> None:
    """A task's own retry is postponed as by `RetryLater()`."""
    decision = Join().decide(Duplicate(Holder("a"), own_retry=True))
    assert type(decision) is type(RetryLater().decide(Duplicate(Holder("a"), own_retry=True)))


@pytest.mark.parametrize("value", [-1, math.nan, "60", None, True])
def test_bad_values(value: Any) -> None:
    """A value out of range is refused."""
    with pytest.raises(ConfigurationError, match="max_wait"):
        Join(max_wait=value)


@pytest.mark.parametrize(
    ("backend", "store", "shown"),
    [
        (None, "memory://", "disabled://"),
        ("rpc://", "memory://", "rpc://"),
        ("cache+memory://", None, "cache+memory://"),
        ("cache+memory://", "memory://", ""),  # all is in one process
        ("redis://localhost/1", None, ""),
    ],
)
def test_result_backend(backend: str | None, store: str | None, shown: str) -> None:
    """A task whose results workers cannot read is refused, with its name and its backend, as users spell it."""
    app = Celery(broker="memory://", backend=backend, set_as_current=False, changes={"singleton_lock_url": store})

    @app.task(shared=False, name="report")
    def task() -> None: ...

    if not shown:
        return refuse_unreadable_results(task)
    with pytest.raises(ConfigurationError, match=rf"task report: .*, not {re.escape(shown)}$"):
        refuse_unreadable_results(task)


def test_worker_that_died(singleton: Callable[..., Any], app: Celery) -> None:
    """A task that died with its process has no result: the message that followed it runs."""

    @singleton(name="x", on_duplicate="join")
    def task() -> str:
        return "done"

    app.backend.mark_as_failure("holder", WorkerLostError("died"))
    follows = RetryState(follows="holder", was_free_before=True)
    assert "done" == deliver(task, headers={RETRY_STATE_HEADER: follows._asdict()}).retval
