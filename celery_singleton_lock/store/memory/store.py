"""Locks in this process alone: for users' tests, and for an app that has one worker process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from celery_singleton_lock.errors import ConfigurationError
from celery_singleton_lock.holder import Holder
from celery_singleton_lock.store.keys import (
    BEGUN_TTL,
    COMPLETED_TTL,
    CONTINUED_TTL,
    LINE_TOKEN,
    REVOKED_TTL,
    begun_key,
    queued_token,
)
from celery_singleton_lock.store.memory.records import Record
from celery_singleton_lock.store.memory.turns import Turns
from celery_singleton_lock.store.protocol import AcquireResult, AcquireStatus, Released, RenewResult
from celery_singleton_lock.store.records import RecordStore
from celery_singleton_lock.store.requests import AfterRelease, LeaseSpec

#: Expired records are removed once in so many releases.
RELEASES_PER_CLEANUP = 1000


class MemoryStore(Turns):
    """The `LockStore` verbs over a dict."""

    def acquire(self, spec: LeaseSpec, timeout: float | None = None) -> AcquireResult:
        with self._mutex:
            if self._find(f"{spec.base}:revoked:{spec.token}"):
                return AcquireResult(AcquireStatus.REVOKED)
            completed = self._find(spec.completed) if spec.redelivered else None
            if completed and completed.token == "success":
                return AcquireResult(AcquireStatus.COMPLETED)
            if completed:
                remaining = completed.expires - self._clock()
                return AcquireResult(AcquireStatus.REFUSED, Holder(spec.task_id, remaining=remaining))
            slot = self._choose_slot(spec) if spec.limit else 0
            lock = spec.slot_lock(slot)
            before = self._find(lock)
            answer = self._in_line(spec, spec.place, lock) if spec.place else self._is_held(spec, lock)
            if answer:
                return answer
            record = self._find(lock)
            if (record is None or record.token != spec.token) and not self._start(spec):
                self._records.pop(lock, None)  # a reservation of this message
                if before and before.token == LINE_TOKEN:  # for the next in line, when this message leaves it
                    self._records[lock] = replace(before, state="queued", named=False, redelivered=False, stop="")
                return AcquireResult(AcquireStatus.TOO_MANY_STARTS)
            fence = self._grant(spec, lock)
            if spec.comes_again and not spec.queued:
                self._put(_begun(spec), "", BEGUN_TTL)
            if spec.place and not spec.queued:
                self._records[lock].line = self._line(spec).start(spec, spec.place)
            return AcquireResult(AcquireStatus.GRANTED, fence=fence, slot=slot)

    def _is_held(self, spec: LeaseSpec, lock: str) -> AcquireResult | None:
        """Answer a request for which no line counts, or return None if the lock is to be granted."""
        record = self._find(lock)
        if record is None or record.token in (spec.token, queued_token(spec.task_id)):
            return None
        record.redelivered = record.redelivered or record.task_id == spec.task_id
        return AcquireResult(AcquireStatus.REFUSED, self._holder(record))

    def _grant(self, spec: LeaseSpec, lock: str, fence: int | None = None) -> int:
        """Let this token own the lock; return the fence, a new one if none is given."""
        record, is_reacquired = self._find(lock), fence is not None
        if record is None or record.token != spec.token:  # a reservation of this message
            line, identity = (record.line, record.identity) if record else (False, "")
            if fence is None:
                fence = self._new_fence(spec.base)
                self._note_fence(spec.base, lock, fence, spec.ttl, oldest=fence - spec.ttl * 1e6)
            record = Record(spec.token, 0, self._clock(), spec.task_id, spec.node, spec.pid, fence=fence)
            record.state, record.line = "queued" if spec.queued else record.state, line
            record.limit, record.ttl, record.identity = spec.limit, spec.ttl, identity
        if spec.place and not is_reacquired:
            record.identity = spec.place.identity
        record.expires = self._clock() + spec.ttl
        self._records[lock] = record
        if spec.supervised or (spec.limit and not spec.queued):
            self._put(spec.attempt, lock, spec.ttl)
        return record.fence

    def renew(self, leases: Sequence[LeaseSpec], timeout: float | None = None) -> list[RenewResult]:
        with self._mutex:
            return [self._renew(lease) for lease in leases]

    def _renew(self, lease: LeaseSpec) -> RenewResult:
        lock = self._lock_of(lease)
        record, attempt = self._find(lock), self._find(lease.attempt)
        if record and record.token == lease.token:
            lease.lock = lock
            for found in filter(None, (record, attempt)):
                found.expires = self._clock() + lease.ttl
            if not lease.by_token:  # a supervisor tells nothing of the body
                record.renewed = self._clock()
            return RenewResult.STOP if lease.stoppable and record.stop == lease.token else RenewResult.RENEWED
        if self._find(f"{lease.base}:revoked:{lease.token}"):
            return RenewResult.REVOKED
        return RenewResult.NOT_OWNER if record else RenewResult.MISSING

    def reacquire(self, spec: LeaseSpec, fence: int, timeout: float | None = None) -> tuple[RenewResult, bool]:
        with self._mutex:
            record, recent = self._find(spec.lock), self._recent_fences(spec.base).get(spec.lock, 0)
            result = self._renew(spec)
            if result in (RenewResult.REVOKED, RenewResult.NOT_OWNER):
                return result, False
            self._grant(spec, spec.lock, fence)
            if recent > fence:  # another held it in between, which a second call must find too
                return RenewResult.LOST, record is None
            if record is None:
                self._note_fence(spec.base, spec.lock, fence, spec.ttl)
            return RenewResult.RENEWED, record is None

    def release(
        self, spec: LeaseSpec, success: bool | None, timeout: float | None = None, kept: AfterRelease | None = None
    ) -> Released:
        with self._mutex:
            self._end_starts(spec, success)
            if spec.comes_again and not spec.is_unfinished:
                self._records.pop(_begun(spec), None)
            if spec.is_continued:
                self._put(spec.continued, "", CONTINUED_TTL)
            lock = self._lock_of(spec)
            record, completed = self._find(lock), self._find(spec.completed)
            finishing, message = f"finishing:{spec.token}", ""
            if record and record.token == spec.token:
                digest = lock.removeprefix(f"{spec.base}:lock:").partition(":")[0]
                line = self._line_of(spec.base, digest)
                if kept:
                    expires = self._clock() + kept.ttl
                    self._records[lock] = replace(record, token=kept.token, state=kept.state, expires=expires)
                elif record.limit:
                    del self._records[lock]
                    free = self._free_slots(f"{spec.base}:lock:{digest}", record.limit)
                    message = line.next_turn(free, spec.ttl)
                elif record.line:
                    message = self._name_next(line, lock, spec.ttl)
                else:
                    del self._records[lock]
                self._records.pop(spec.attempt, None)
                self._releases += 1
                if self._releases % RELEASES_PER_CLEANUP == 0:
                    self._clean_up()
                waits = record.redelivered and bool(success)
            else:  # lost, or released before: the redelivery waits for another TTL
                waits = completed is not None and completed.token == finishing
            if waits:
                self._put(spec.completed, finishing, spec.ttl, task_id=spec.task_id)
            return Released(waits, message)

    def record_outcome(self, spec: LeaseSpec, success: bool, timeout: float | None = None) -> None:
        with self._mutex:
            self._put(spec.completed, "success", COMPLETED_TTL if success else 0.0)

    def keep_continued(self, spec: LeaseSpec) -> bool:
        with self._mutex:
            found = self._find(spec.continued)
            if found:
                found.expires = self._clock() + CONTINUED_TTL
            return found is not None

    def has_begun(self, spec: LeaseSpec) -> bool:
        with self._mutex:
            return self._find(_begun(spec)) is not None

    def holder(self, lock: str, slots: str = "") -> Holder | None:
        with self._mutex:
            record = self._find(self._oldest(lock) if slots else lock)
            holder = self._holder(record)
            if not (record and holder):
                return None
            return holder.with_renewal(self._clock() - max(record.since, record.renewed), record.ttl)

    def _oldest(self, lock: str) -> str:
        held = self._held_slots(lock)
        slot = min(held, key=lambda slot: held[slot].fence, default=0)
        return f"{lock}:{slot}" if slot else lock

    def revoke(self, base: str, lock: str, slots: str = "", starts: str = "", fence: int = 0) -> Holder | None:
        with self._mutex:
            self._records.pop(starts, None)
            lock = self._oldest(lock) if slots else lock
            record = self._find(lock)
            if record and fence not in (0, record.fence):
                return None
            if record:
                ttl = max(2 * (record.expires - self._clock()), REVOKED_TTL)
                if record.state == "running":
                    self._put(f"{base}:revoked:{record.token}", "", ttl)
                known = self._find(f"{base}:recent")
                lasts = max(ttl, known.expires - self._clock() if known else 0.0)
                self._note_fence(base, lock, self._new_fence(base), lasts)
                del self._records[lock]
            return self._holder(record)

    def records(self) -> RecordStore:
        raise ConfigurationError("memory:// keeps no records of locks: use the URL of a Redis server")

    def check(self, base: str) -> None:
        """Do nothing: memory takes all locks."""

    def eviction_policy(self) -> str:
        return "noeviction"

    def unsafe_replicas(self) -> int:
        return 0

    def clone(self) -> MemoryStore:
        return self

    def close(self) -> None:
        """Do nothing: there are no connections."""


def _begun(spec: LeaseSpec) -> str:
    return f"{begun_key(spec.base)}:{spec.task_id}"
