"""Locks in this process alone: for users' tests, and for an app that has one worker process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from celery_singleton_lock.errors import ConfigurationError
from celery_singleton_lock.holder import Holder
from celery_singleton_lock.store import protocol
from celery_singleton_lock.store.memory_line import Line
from celery_singleton_lock.store.memory_records import Record, Records
from celery_singleton_lock.store.protocol import (
    AcquireResult,
    AcquireStatus,
    Kept,
    LeaseRequest,
    Place,
    Released,
    RenewResult,
)
from celery_singleton_lock.store.records import RecordStore

#: Expired records are removed once in so many releases.
RELEASES_PER_CLEANUP = 1000


class MemoryStore(Records):
    """The `LockStore` verbs over a dict."""

    def acquire(self, wanted: LeaseRequest, timeout: float | None = None) -> AcquireResult:
        with self._mutex:
            if self._find(f"{wanted.base}:revoked:{wanted.token}"):
                return AcquireResult(AcquireStatus.REVOKED)
            completed = self._find(wanted.completed) if wanted.redelivered else None
            if completed and completed.token == "success":
                return AcquireResult(AcquireStatus.COMPLETED)
            slot = self._choose_slot(wanted) if wanted.limit else 0
            lock = wanted.slot_lock(slot)
            record = completed or self._find(lock)
            if wanted.place and wanted.place.stop and (status := self._is_replaced(wanted, record)):
                return self._refused(wanted, status)
            is_reserved = record is not None and record.token == protocol.queued_token(wanted.task_id) != wanted.token
            if is_reserved:
                record = self._records.pop(lock) and None
            if wanted.place and not completed and not is_reserved:
                answer = self._in_line(wanted, wanted.place, lock, record)
                if answer:
                    return answer
                record = self._find(lock)
            if record and record.token != wanted.token:
                record.redelivered = record.redelivered or record.task_id == wanted.task_id
                return AcquireResult(AcquireStatus.HELD, self._holder(record))
            if record is None and not self._start(wanted):
                return AcquireResult(AcquireStatus.TOO_MANY_STARTS)
            return AcquireResult(AcquireStatus.GRANTED, fence=self._grant(wanted, lock), slot=slot)

    def _in_line(self, wanted: LeaseRequest, place: Place, lock: str, record: Record | None) -> AcquireResult | None:
        """Answer a request for which the line counts, or return None if the lock is to be granted."""
        line = self._line(wanted)
        refused = line.refused(place)
        if refused:
            return self._refused(wanted, refused)
        asked, record = self._ask_to_stop(wanted, place, record)
        is_reserved = record is not None and record.token == protocol.LINE_TOKEN
        is_turn = self._is_turn(wanted, place, line, record)
        is_copy = wanted.token == protocol.LINE_TOKEN
        is_turn = is_turn and not (is_copy and record and record.named)
        if is_turn and is_copy and (record is None or is_reserved):
            line.keep_turn(wanted, place)
            if wanted.limit:  # it acquires no slot
                return AcquireResult(AcquireStatus.GRANTED)
        if record and is_reserved and is_turn:
            record = self._records.pop(lock) and None
        if (record is None and is_turn) or (record and record.token == wanted.token and not is_reserved):
            if not wanted.queued:
                line.use(place.ticket, str(place.copy))
                line.leave_twin(wanted.task_id)
                line.quiet_latest = line.quiet_latest if not place.quiet else 0.0
            return None
        if not place.room and line.is_outdated(place):
            return AcquireResult(AcquireStatus.DROPPED)
        if place.room:
            line.join(wanted, place)
        first = line.waiting.get(line.head())
        task_id, is_waiting = first.task_id if first else "", place.ticket in line.waiting
        waiting, ahead = len(line.waiting), line.ahead(place.ticket)
        if record and record.task_id == wanted.task_id:
            record.redelivered = True
        holder = self._holder(record) or Holder(task_id, state="queued")
        return AcquireResult(AcquireStatus.HELD, holder, 0, 0, waiting, task_id, is_waiting, line.quiet, asked, ahead)

    def _refused(self, wanted: LeaseRequest, status: AcquireStatus) -> AcquireResult:
        """Answer a message for which another one stands, naming the one that waits."""
        line = self._line(wanted)
        first = line.waiting.get(line.head()) if status is AcquireStatus.SUPERSEDED else None
        return AcquireResult(status, head=first.task_id if first else "")

    def _is_turn(self, wanted: LeaseRequest, place: Place, line: Line, record: Record | None) -> bool:
        """Tell whether this message may start once the lock or a slot is free: in its turn, or if it was published."""
        is_turn = line.head(place.ticket, place.replace) in ("", place.ticket)
        if wanted.limit and record is None:
            is_turn = line.is_turn(place.ticket, self._free_slots(wanted.slot_lock(0), wanted.limit))
        is_turn = is_turn or bool(place.ticket and not place.room and wanted.token != protocol.LINE_TOKEN)
        if place.quiet:
            is_reserved = record is not None and record.token == protocol.LINE_TOKEN and not line.quiet
            is_newcomer = not place.ticket or (place.room and not line.quiet_latest)
            if is_newcomer and not is_reserved and (record is None or record.token != wanted.token):
                line.disturb(place)
            is_turn = is_turn and not line.quiet
        return is_turn

    def leave(self, wanted: LeaseRequest, ticket: str, timeout: float | None = None) -> str:
        with self._mutex:
            line, record = self._line(wanted), self._find(wanted.lock)
            is_reserved = record is not None and record.token == protocol.LINE_TOKEN
            is_turn = record is not None and is_reserved and (not record.named or line.head() == ticket)
            line.use(ticket, "")
            if wanted.limit:
                return line.next_turn(self._free_slots(wanted.slot_lock(0), wanted.limit), wanted.ttl)
            return self._name_next(line, wanted.lock, wanted.ttl) if is_turn else ""

    def _name_next(self, line: Line | None, lock: str, ttl: float) -> str:
        """Reserve a lock for the head of the line and return its message, or delete it."""
        head = line.head_to_name() if line else ""
        record = self._records.pop(lock)
        if not (line and head):
            return ""
        self._records[lock] = replace(
            record,
            token=protocol.LINE_TOKEN,
            task_id=line.waiting[head].task_id,
            expires=self._clock() + ttl,
            state="queued",
            named=True,
            redelivered=False,
        )
        return line.take_message(head, ttl)

    def _grant(self, wanted: LeaseRequest, lock: str, fence: int | None = None) -> int:
        """Let this token own the lock; return the fence, a new one if none is given."""
        record = self._find(lock)
        if record is None:
            fence = self._note_fence(wanted.base, lock, wanted.ttl, fence)
            record = Record(wanted.token, 0, self._clock(), wanted.task_id, wanted.node, wanted.pid, fence=fence)
            record.state = "queued" if wanted.queued else record.state
            record.limit = wanted.limit
        record.expires = self._clock() + wanted.ttl
        self._records[lock] = record
        if wanted.supervised or (wanted.limit and not wanted.queued):
            self._put(wanted.attempt, lock, wanted.ttl)
        return record.fence

    def renew(self, leases: Sequence[LeaseRequest], timeout: float | None = None) -> list[RenewResult]:
        with self._mutex:
            return [self._renew(lease) for lease in leases]

    def _renew(self, lease: LeaseRequest) -> RenewResult:
        lock = self._lock_of(lease)
        record, attempt = self._find(lock), self._find(lease.attempt)
        if record and record.token == lease.token:
            lease.lock = lock
            for found in filter(None, (record, attempt)):
                found.expires = self._clock() + lease.ttl
            return RenewResult.STOP if lease.stoppable and record.stop == lease.token else RenewResult.RENEWED
        if self._find(f"{lease.base}:revoked:{lease.token}"):
            return RenewResult.REVOKED
        return RenewResult.NOT_OWNER if record else RenewResult.MISSING

    def reacquire(self, wanted: LeaseRequest, fence: int, timeout: float | None = None) -> tuple[RenewResult, bool]:
        with self._mutex:
            recent_key = f"{wanted.base}:recent:{wanted.lock}"
            record, recent = self._find(wanted.lock), self._find(recent_key)
            result = self._renew(wanted)
            if result in (RenewResult.REVOKED, RenewResult.NOT_OWNER):
                return result, False
            self._grant(wanted, wanted.lock, fence)
            if recent and recent.fence > fence:  # another held it in between, which a second call must find too
                self._records[recent_key] = recent
                return RenewResult.LOST, record is None
            return RenewResult.RENEWED, record is None

    def release(
        self, wanted: LeaseRequest, success: bool | None, timeout: float | None = None, kept: Kept | None = None
    ) -> Released:
        with self._mutex:
            self._end_starts(wanted, success)
            if wanted.is_continued:
                self._put(wanted.continued, "", protocol.CONTINUED_TTL)
            lock = self._lock_of(wanted)
            record, completed = self._find(lock), self._find(wanted.completed)
            finishing, message = f"finishing:{wanted.token}", ""
            if record and record.token == wanted.token:
                digest = lock.removeprefix(f"{wanted.base}:lock:").partition(":")[0]
                line = self._lines.get(f"{wanted.base}:{digest}")
                if kept:
                    expires = self._clock() + kept.ttl
                    self._records[lock] = replace(record, token=kept.token, state=kept.state, expires=expires)
                elif record.limit:
                    del self._records[lock]
                    free = self._free_slots(f"{wanted.base}:lock:{digest}", record.limit)
                    message = line.next_turn(free, wanted.ttl) if line else ""
                else:
                    message = self._name_next(line, lock, wanted.ttl)
                self._records.pop(wanted.attempt, None)
                self._releases += 1
                if self._releases % RELEASES_PER_CLEANUP == 0:
                    self._clean_up()
                waits = record.redelivered and bool(success)
            else:  # lost, or released before: the redelivery waits for another TTL
                waits = completed is not None and completed.token == finishing
            if waits:
                self._put(wanted.completed, finishing, wanted.ttl, task_id=wanted.task_id)
            return Released(waits, message)

    def record_outcome(self, wanted: LeaseRequest, success: bool, timeout: float | None = None) -> None:
        with self._mutex:
            self._put(wanted.completed, "success", protocol.COMPLETED_TTL if success else 0.0)

    def keep_continued(self, wanted: LeaseRequest) -> bool:
        with self._mutex:
            found = self._find(wanted.continued)
            if found:
                found.expires = self._clock() + protocol.CONTINUED_TTL
            return found is not None

    def holder(self, lock: str, slots: str = "") -> Holder | None:
        with self._mutex:
            return self._holder(self._find(self._oldest(lock) if slots else lock))

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
                ttl = max(2 * (record.expires - self._clock()), protocol.REVOKED_TTL)
                if record.state == "running":
                    self._put(f"{base}:revoked:{record.token}", "", ttl)
                self._note_fence(base, lock, ttl)
                del self._records[lock]
            return self._holder(record)

    def records(self) -> RecordStore:
        raise ConfigurationError("memory:// keeps no records of locks: use the URL of a Redis server")

    def check(self, base: str) -> None:
        """Do nothing: memory takes all locks."""

    def eviction_policy(self) -> str:
        return "noeviction"

    def clone(self) -> MemoryStore:
        return self

    def close(self) -> None:
        """Do nothing: there are no connections."""
