"""The store of the unit tests: the one in memory, which tells of its calls, and does what a test says during them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from celery_singleton_lock.clock import now
from celery_singleton_lock.store.memory import MemoryStore
from celery_singleton_lock.store.protocol import AcquireResult, Released, RenewResult
from celery_singleton_lock.store.requests import AfterRelease, LeaseSpec


class Renewal(NamedTuple):
    """A call that renewed leases."""

    at: float
    tokens: list[str]
    timeout: float


class FakeStore(MemoryStore):
    """A store that records its calls, whose calls take time, whose answers can be lost or late, and that can be unreachable.

    Arguments:
        clock: of the store; calls can only take time if it has `advance`.
    """

    def __init__(self, clock: Any = now) -> None:
        super().__init__(clock)
        self.clock = clock
        self.failure: Exception | None = None  # of `acquire`, `renew` and `release`, which are not executed then
        self.acquired: list[str] = []
        self.renewals: list[Renewal] = []
        self.released: list[str] = []
        self.release_takes = 0.0
        self.renewal_takes: Callable[[float], float] = lambda allowed: 0.0
        self.during_renewal: Callable[[], object] = lambda: None  # after it was executed
        self.on_answer: list[Callable[[], object]] = []  # one call after each execution of `acquire` and `reacquire`
        self.on_release: list[Callable[[], object]] = []  # one call before each `release`
        self.on_outcome: list[Callable[[], object]] = []  # one call before each `record_outcome`

    def acquire(self, spec: LeaseSpec, timeout: float | None = None) -> AcquireResult:
        self.acquired.append(spec.token)
        self._fail()
        result = super().acquire(spec, timeout)
        _call_next(self.on_answer)
        return result

    def renew(self, leases: Sequence[LeaseSpec], timeout: float | None = None) -> list[RenewResult]:
        assert timeout is not None  # else a lease could be lost while one call waits
        self.renewals.append(Renewal(self.clock(), [one.token for one in leases], timeout))
        answers = [] if self.failure else super().renew(leases, timeout)
        self.during_renewal()
        self._take(self.renewal_takes(timeout))
        self._fail()
        return answers

    def reacquire(self, spec: LeaseSpec, fence: int, timeout: float | None = None) -> tuple[RenewResult, bool]:
        answer = super().reacquire(spec, fence, timeout)
        _call_next(self.on_answer)
        return answer

    def release(
        self, spec: LeaseSpec, success: bool | None, timeout: float | None = None, kept: AfterRelease | None = None
    ) -> Released:
        self.released.append(spec.token)
        self._take(min(self.release_takes, math.inf if timeout is None else timeout))
        self._fail()
        _call_next(self.on_release)
        return super().release(spec, success, kept=kept)

    def record_outcome(self, spec: LeaseSpec, success: bool, timeout: float | None = None) -> None:
        _call_next(self.on_outcome)
        super().record_outcome(spec, success)

    def lose(self, *keys: str) -> None:
        """Delete these keys; without any, all, as a restart without persistence does."""
        for key in keys or list(self._records):
            del self._records[key]

    def prolong(self, lock: str, seconds: float) -> None:
        """Let a lock expire later, as if another process had renewed it."""
        self._records[lock].expires += seconds

    def _take(self, seconds: float) -> None:
        if seconds:
            self.clock.advance(seconds)

    def _fail(self) -> None:
        if self.failure:
            raise self.failure


def _call_next(calls: list[Callable[[], object]]) -> None:
    if calls:
        calls.pop(0)()
