"""The clock of deadlines also counts the time that a machine is suspended."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from celery_singleton_lock import clock
from tests.unit.test_task import deliver

boottime = pytest.mark.skipif(not hasattr(time, "CLOCK_BOOTTIME"), reason="no clock here counts suspended time")


class Machine:
    """Pretends that this machine was suspended: only CLOCK_BOOTTIME counts that time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.suspended = 0.0
        self._read = time.clock_gettime
        monkeypatch.setattr(time, "clock_gettime", self._clock_gettime)

    def _clock_gettime(self, clock_id: int) -> float:
        return self._read(clock_id) + (self.suspended if clock_id == time.CLOCK_BOOTTIME else 0.0)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


@boottime
def test_clock_counts_suspended_time(machine: Machine) -> None:
    """An hour of suspension counts as an hour."""
    before = clock.now()
    machine.suspended = 3600.0
    assert 3600 <= clock.now() - before < 3610


@boottime
def test_lease_ends_while_the_machine_is_suspended(singleton: Callable[..., Any], machine: Machine) -> None:
    """After a suspension longer than the TTL, `lease.held` is false without a call to the store."""

    @singleton(name="x", bind=True, lock_ttl=30)
    def task(self: Any) -> list[bool]:
        seen = []
        for machine.suspended in (0.0, 20.0, 31.0):
            seen.append(self.lease.held)
        return seen

    assert [True, True, False] == deliver(task).retval


def test_clock_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a clock that counts suspended time, the clock is the monotonic one."""
    monkeypatch.setitem(sys.modules, "time", SimpleNamespace(monotonic=lambda: 12.0))
    names: dict[str, Any] = {}
    exec(Path(clock.__file__).read_text(), names)
    assert 12.0 == names["now"]()
