"""Leases in this process alone: for users' tests, and for an app that has one worker process."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from celery_singleton_lock.clock import now
from celery_singleton_lock.holder import Holder
from celery_singleton_lock.native import native_lock
from celery_singleton_lock.store.protocol import (
    COMPLETED_TTL,
    REVOKED_TTL,
    AcquireResult,
    AcquireStatus,
    LeaseRequest,
    RenewResult,
)

FEW = 1000  # records that may be there, alive or not, before expired ones are looked for


@dataclass
class _Record:
    token: str
    expires: float
    since: float = 0.0
    task_id: str = ""
    node: str = ""
    pid: int = 0
    twin: bool = False
    fence: int = 0


class MemoryStore:
    """The `LockStore` verbs over a dict.

    Arguments:
        clock: gives the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = now) -> None:
        self._clock = clock
        self._mutex = native_lock()
        self._records: dict[str, _Record] = {}
        self._many = FEW

    def acquire(self, claim: LeaseRequest, timeout: float | None = None) -> AcquireResult:
        with self._mutex:
            if self._alive(claim.attempt, token=""):
                return AcquireResult(AcquireStatus.REVOKED)
            ended = self._alive(claim.ended) if claim.redelivered else None
            if ended and ended.token == "success":
                return AcquireResult(AcquireStatus.COMPLETED)
            record = ended or self._alive(claim.lock)
            if record and record.token != claim.token:
                record.twin = record.twin or record.task_id == claim.task_id
                return AcquireResult(AcquireStatus.HELD, self._holder(record))
            fence = record.fence if record else self._next_fence(claim.base, claim.lock, claim.ttl)
            self._grant(claim, fence)
            return AcquireResult(AcquireStatus.GRANTED, fence=fence)

    def _next_fence(self, base: str, lock: str, ttl: float) -> int:
        last = self._records.get(f"{base}:fence")
        fence = max(last.fence + 1 if last else 0, int(self._clock() * 1e6))
        self._remember(base, lock, ttl, fence)
        return fence

    def _remember(self, base: str, lock: str, ttl: float, fence: int) -> None:
        """Note the last fence of a task name, and for a TTL that of the lock."""
        self._records[f"{base}:fence"] = _Record("", math.inf, fence=fence)
        self._records[_recent(lock)] = _Record("", self._clock() + ttl, fence=fence)

    def _grant(self, claim: LeaseRequest, fence: int) -> None:
        time = self._clock()
        record = self._alive(claim.lock) or _Record(claim.token, 0, time, claim.task_id, claim.node, claim.pid)
        record.expires, record.fence = time + claim.ttl, fence
        self._records[claim.lock] = record
        if claim.supervised:
            self._records[claim.attempt] = _Record(claim.lock, record.expires)

    def renew(self, claims: Sequence[LeaseRequest], timeout: float | None = None) -> list[RenewResult]:
        with self._mutex:
            return [self._renew(claim) for claim in claims]

    def _renew(self, claim: LeaseRequest) -> RenewResult:
        if self._alive(claim.attempt, token=""):
            return RenewResult.REVOKED
        record = self._alive(self._lock_of(claim))
        if record is None:
            return RenewResult.MISSING
        if record.token != claim.token:
            return RenewResult.NOT_OWNER
        record.expires = self._clock() + claim.ttl
        attempt = self._alive(claim.attempt)
        if attempt:
            attempt.expires = record.expires
        return RenewResult.RENEWED

    def reacquire(self, claim: LeaseRequest, fence: int, timeout: float | None = None) -> tuple[RenewResult, bool]:
        with self._mutex:
            if self._alive(claim.attempt, token=""):
                return RenewResult.REVOKED, False
            record = self._alive(claim.lock)
            if record and record.token != claim.token:
                return RenewResult.NOT_OWNER, False
            recent = self._alive(_recent(claim.lock))
            lost = recent is not None and recent.fence > fence
            if record is None and not lost:
                last = self._records.get(f"{claim.base}:fence")
                self._remember(claim.base, claim.lock, claim.ttl, fence)
                self._records[f"{claim.base}:fence"].fence = max(fence, last.fence if last else 0)
            self._grant(claim, fence)
            return (RenewResult.LOST if lost else RenewResult.RENEWED), record is None

    def release(self, claim: LeaseRequest, success: bool, timeout: float | None = None) -> bool:
        with self._mutex:
            lock = self._lock_of(claim)
            record = self._alive(lock)
            if record is None or record.token != claim.token:
                note = self._alive(claim.ended, token=f"finishing:{claim.token}")
                if note:
                    note.expires = self._clock() + claim.ttl
                return note is not None
            del self._records[lock]
            self._records.pop(claim.attempt, None)
            self._tidy()
            if record.twin and success:
                self._records[claim.ended] = _Record(
                    f"finishing:{claim.token}", self._clock() + claim.ttl, task_id=claim.task_id
                )
            return record.twin and success

    def record_outcome(self, claim: LeaseRequest, success: bool, timeout: float | None = None) -> None:
        with self._mutex:
            self._records.pop(claim.ended, None)
            if success:
                self._records[claim.ended] = _Record("success", self._clock() + COMPLETED_TTL)

    def holder(self, lock: str) -> Holder | None:
        with self._mutex:
            record = self._alive(lock)
            return self._holder(record) if record else None

    def revoke(self, base: str, lock: str) -> Holder | None:
        with self._mutex:
            record = self._alive(lock)
            if record is None:
                return None
            del self._records[lock]
            freed_until = self._clock() + max(1.0, record.expires - self._clock()) * 2
            self._records[f"{base}:attempt:{record.token}"] = _Record("", max(freed_until, self._clock() + REVOKED_TTL))
            self._next_fence(base, lock, freed_until - self._clock())
            return self._holder(record)

    def eviction_policy(self) -> str:
        return "noeviction"

    def clone(self, limit: int) -> MemoryStore:
        return self

    def close(self) -> None:
        """Nothing to give up."""

    def _lock_of(self, claim: LeaseRequest) -> str:
        if claim.digest:
            return claim.lock
        attempt = self._alive(claim.attempt)
        return attempt.token if attempt else ""

    def _alive(self, key: str, token: str | None = None) -> _Record | None:
        record = self._records.get(key)
        if record and record.expires <= self._clock():
            del self._records[key]
            record = None
        return record if record and token in (None, record.token) else None

    def _tidy(self) -> None:
        """Drop what has expired, whenever there are twice as many records as the last time."""
        if len(self._records) > self._many:
            time = self._clock()
            self._records = {key: record for key, record in self._records.items() if record.expires > time}
            self._many = max(FEW, 2 * len(self._records))

    def _holder(self, record: _Record) -> Holder:
        time = self._clock()
        return Holder(record.task_id, record.node, record.pid, time - record.since, record.expires - time, record.fence)


def _recent(lock: str) -> str:
    """Key under which the fence of a lock's last grant is remembered for a TTL."""
    return ":recent:".join(lock.rsplit(":lock:", 1))
