"""Reports of renewal, with the receivers and log filters that users may have."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from celery_singleton_lock import Lease, StoreUnavailable, signals
from celery_singleton_lock.lease import LeaseState
from celery_singleton_lock.log import logger
from celery_singleton_lock.native import CallbackRunner
from celery_singleton_lock.renewal.body import BodyRenewal
from celery_singleton_lock.renewal.renewer import Renewer
from celery_singleton_lock.reports.events import EventLogger
from celery_singleton_lock.store.requests import LeaseSpec
from tests.servers import until
from tests.unit.conftest import Clock
from tests.unit.fake_store import FakeStore

WAIT = 60.0


class Task:
    """The sender of signals."""

    name = "app.sync"


TASK = Task()


@pytest.fixture
def events() -> Iterator[EventLogger]:
    callbacks = CallbackRunner()
    yield EventLogger(callbacks)
    callbacks.end()


@pytest.fixture
def on_lost() -> Iterator[Callable[[Callable[[], object]], None]]:
    """Connects a receiver of `lock_lost`."""
    receivers: list[Any] = []

    def connect(call: Callable[[], object]) -> None:
        def receive(**_: Any) -> None:
            call()

        receivers.append(receive)
        signals.lock_lost.connect(receive, weak=False)

    yield connect
    for receiver in receivers:
        signals.lock_lost.disconnect(receiver)


@pytest.fixture
def three(clock: Clock, events: EventLogger) -> tuple[Renewer[LeaseState], list[LeaseState]]:
    """Three leases that are due: the first was revoked and acquired by another delivery, the store has lost the second."""
    store = FakeStore(clock)
    handler = BodyRenewal(store, store, events, clock)
    renewer = Renewer(store, handler, events.loop_failed, clock)
    renewer._loop.wake = lambda at: None  # type: ignore[method-assign]
    leases = []
    for number in range(3):
        request = LeaseSpec("b:{x}", f"d{number}", f"t{number}", 12.0)
        lease = LeaseState(request, TASK)
        lease.granted(clock(), store.acquire(request).fence, handler.verify)
        renewer.add(lease)
        leases.append(lease)
    store.revoke("b:{x}", leases[0].spec.lock)
    store.acquire(LeaseSpec("b:{x}", "d0", "other", 60.0))
    store.lose(leases[1].spec.lock)
    clock.advance(4.0)
    return renewer, leases


def test_slow_receiver_delays_no_renewal(three: Any, clock: Clock, on_lost: Any) -> None:
    """While a receiver of one lease's loss is busy, the other leases are renewed."""
    go, seen = threading.Event(), []
    renewer, leases = three
    on_lost(lambda: seen.append(go.wait(WAIT)))
    renewer.renew_due()
    assert [] == seen
    assert [True, False, False] == [lease.lost for lease in leases]
    assert [clock() + 12.0] * 2 == [lease.deadline for lease in leases[1:]]
    go.set()
    until(lambda: seen == [True], timeout=WAIT)


def test_failing_receiver_delays_no_renewal(three: Any, clock: Clock, on_lost: Any) -> None:
    """A receiver that fails keeps no other lease of the same batch from being renewed."""
    seen = []

    def fail() -> None:
        seen.append(1)
        raise RuntimeError("a receiver of the user's")

    renewer, leases = three
    on_lost(fail)
    renewer.renew_due()
    assert [clock() + 12.0] * 2 == [lease.deadline for lease in leases[1:]]
    until(lambda: seen, timeout=WAIT)


@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_failing_log_delays_no_renewal(
    three: Any, clock: Clock, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """A log filter that fails keeps no lease from being renewed, and no receiver from being called."""

    def fail(record: logging.LogRecord) -> bool:
        raise error("a filter of the user's")

    monkeypatch.setattr(logger, "filters", [fail])
    renewer, leases = three
    renewer.renew_due()
    assert [clock() + 12.0] * 2 == [lease.deadline for lease in leases[1:]]


def test_outage_is_reported(events: EventLogger, caplog: pytest.LogCaptureFixture) -> None:
    """An outage is one WARNING, and the signal `store_error`. At level DEBUG, a line has task, key and error."""
    seen: list[dict[str, Any]] = []

    def receive(sender: Any, **named: Any) -> None:
        seen.append({"task": sender.name, **named})

    caplog.set_level(logging.DEBUG, logger=logger.name)
    state = LeaseState(LeaseSpec("b:{x}", "d", "secret", 30.0, "id-1", "node", 7), TASK)
    error = StoreUnavailable("away")
    signals.store_error.connect(receive)
    try:
        events.unreachable(state, error)
        until(lambda: seen, timeout=WAIT)
    finally:
        signals.store_error.disconnect(receive)
    (line,) = [record.getMessage() for record in caplog.records if "could not renew" in record.getMessage()]
    assert "Task app.sync[id-1] on node (pid 7) could not renew its lock: away; key b:{x}:lock:d" == line
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    begin = "The store of locks is unreachable at memory://: away."
    assert 1 == len([warning for warning in warnings if warning.startswith(begin)])
    assert ("app.sync", "b:{x}:lock:d", "id-1", error) == tuple(
        seen[0][name] for name in ("task", "key", "task_id", "error")
    )


def test_receiver_gets_the_lease(events: EventLogger, clock: Clock) -> None:
    """A receiver gets the lease as the body sees it."""
    seen: list[Lease] = []

    def receive(lease: Lease, **_: Any) -> None:
        seen.append(lease)

    state = LeaseState(LeaseSpec("b:{x}", "d", "secret", 30.0), TASK)
    state.lost = True
    signals.lock_lost.connect(receive)
    try:
        events.lost(state)
        until(lambda: seen, timeout=WAIT)
    finally:
        signals.lock_lost.disconnect(receive)
    assert (state.spec.lock, False, True) == (seen[0].key, seen[0].held, seen[0].protected)
