"""What a store in memory keeps: records that expire, and the lines, slots and starts of lock keys."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from celery_singleton_lock.clock import now
from celery_singleton_lock.holder import Holder
from celery_singleton_lock.native import native_lock
from celery_singleton_lock.store.keys import COPY_TTL, LINE_TOKEN, queued_token, replaced_key
from celery_singleton_lock.store.memory.line import Line, is_same
from celery_singleton_lock.store.protocol import AcquireStatus
from celery_singleton_lock.store.requests import LeaseSpec, Place


@dataclass
class Record:
    """A lock, or a note whose text is its `token`."""

    token: str
    expires: float
    since: float = 0.0
    task_id: str = ""
    node: str = ""
    pid: int = 0
    redelivered: bool = False
    fence: int = 0
    state: str = "running"
    stop: str = ""  # token of the holder that is asked to stop
    asked: float = 0.0  # since when
    line: bool = False  # whether messages wait in line for its end
    identity: str = ""  # of its message, where a line counts
    named: bool = False  # reserved for a head of the line whose message was published
    limit: int = 0  # how many may hold the lock
    ttl: float = 0.0
    renewed: float = 0.0  # when the process of the body last renewed it; 0: not since the grant
    fences: dict[str, int] | None = None  # lock -> fence, in the record of recent grants
    starts: dict[str, float] | None = None  # token -> when it started, in the record of a lock key's starts


class Records:
    """The data of a store, and how it is found. Methods are called with the mutex held."""

    def __init__(self, clock: Callable[[], float] = now) -> None:
        self._clock = clock
        self._mutex = native_lock()
        self._records: dict[str, Record] = {}
        self._releases = 0
        self._lines: dict[str, Line] = {}
        self._used: dict[str, dict[str, tuple[float, str]]] = {}

    def _clean_up(self) -> None:
        """Remove what has expired."""
        self._records = {key: one for key, one in self._records.items() if one.expires > self._clock()}
        self._lines = {key: line for key, line in self._lines.items() if line.expires > self._clock()}
        for used in self._used.values():
            for ticket in [ticket for ticket, (until, _) in used.items() if until <= self._clock()]:
                del used[ticket]

    def _start(self, spec: LeaseSpec) -> bool:
        """Note a start if it is counted; return False if there were too many."""
        limit = spec.max_starts
        if limit is None:
            return True
        time = self._clock()
        starts = {token: at for token, at in self._starts_of(spec).items() if at > time - limit.per}
        # With several holders, starts that still run are no crashes.
        runs = self._runs if spec.limit and limit.count == "crashed" else lambda base, token: False
        if sum(not runs(spec.base, token) for token in starts) >= limit.n and spec.token not in starts:
            return False
        self._put(spec.starts, "", limit.per, starts={**starts, spec.token: time})
        return True

    def _runs(self, base: str, token: str) -> bool:
        return self._find(f"{base}:attempt:{token}") is not None

    def _end_starts(self, spec: LeaseSpec, success: bool | None) -> None:
        """Forget the starts that count no more."""
        if not (ended := spec.ended_starts(success)):
            return
        starts = self._starts_of(spec)
        starts.pop(spec.token, None)
        if ended == "all" or not starts:
            self._records.pop(spec.starts, None)

    def _starts_of(self, spec: LeaseSpec) -> dict[str, float]:
        found = self._find(spec.starts)
        return (found.starts if found else None) or {}

    def _line(self, spec: LeaseSpec) -> Line:
        return self._line_of(spec.base, spec.digest)

    def _line_of(self, base: str, digest: str) -> Line:
        line = self._lines.get(f"{base}:{digest}")
        if line is None or line.expires <= self._clock():
            line = self._lines[f"{base}:{digest}"] = Line(self._clock, self._used.setdefault(base, {}))
        return line

    def _is_replaced(self, spec: LeaseSpec, holder: Record | None) -> AcquireStatus | None:
        """Tell whether another message has replaced this one, as the section `stop` of `acquire.lua` does."""
        if holder and holder.task_id == spec.task_id:
            return None
        key = f"{replaced_key(spec.base)}:%s:{spec.task_id}"
        if self._find(key % "queued"):
            return AcquireStatus.SUPERSEDED
        return AcquireStatus.REPLACED if spec.redelivered and self._find(key % "running") else None

    def _ask_to_stop(self, spec: LeaseSpec, place: Place, holder: Record | None) -> tuple[float, Record | None]:
        """Ask a holder to stop, as `acquire.lua` does; return for how many seconds it is asked, and who has the lock now."""
        if holder is None or not place.stop:
            return 0.0, holder
        asked = self._clock() - holder.asked if holder.stop and holder.stop == holder.token else 0.0
        is_own = holder.token == spec.token or holder.task_id == spec.task_id
        if not place.room or is_own or holder.token == LINE_TOKEN or holder.state == "cooldown":
            return asked, holder
        ttl = max(COPY_TTL, holder.expires - self._clock())
        self._put(f"{replaced_key(spec.base)}:{holder.state}:{holder.task_id}", "", ttl)
        if holder.state == "queued":
            del self._records[spec.lock]
            return 0.0, None
        if holder.stop != holder.token:
            holder.stop, holder.asked = holder.token, self._clock()
        return asked, holder

    def _choose_slot(self, spec: LeaseSpec) -> int:
        """Return the slot that a request concerns, as `acquire.lua` does."""
        held = self._held_slots(spec.slot_lock(0))
        for slot, record in sorted(held.items(), key=lambda item: (item[1].token != spec.token, item[0])):
            if record.token == spec.token or record.task_id == spec.task_id:
                return slot
        if len(held) >= spec.limit:
            return min(held, key=lambda slot: held[slot].fence)
        return next(slot for slot in range(spec.limit) if slot not in held)

    def _held_slots(self, lock: str) -> dict[int, Record]:
        """Return the records of all held slots, of which this lock is the first."""
        keys = [key for key in self._records if key == lock or key.startswith(f"{lock}:")]
        return {int(key[len(lock) + 1 :] or 0): record for key in keys if (record := self._find(key))}

    def _free_slots(self, lock: str, limit: int) -> int:
        return limit - len(self._held_slots(lock))

    def _lock_of(self, spec: LeaseSpec) -> str:
        if not spec.by_token:
            return spec.lock
        if spec.queued:  # a reservation
            held = self._held_slots(spec.slot_lock(0))
            return next((spec.slot_lock(slot) for slot, one in held.items() if one.token == spec.token), "")
        attempt = self._find(spec.attempt)
        return attempt.token if attempt else ""

    def _new_fence(self, base: str) -> int:
        return max(self._last_fence(base) + 1, int(self._clock() * 1e6))

    def _last_fence(self, base: str) -> int:
        return self._records.get(f"{base}:fence", Record("", 0)).fence

    def _recent_fences(self, base: str) -> dict[str, int]:
        """Return the fences of the recent grants of a task name, by their locks."""
        found = self._find(f"{base}:recent")
        return (found.fences if found else None) or {}

    def _note_fence(self, base: str, lock: str, fence: int, ttl: float, oldest: float = -1.0) -> None:
        """Store the fence of a grant, and the recent ones for a TTL, but for those that are not newer than `oldest`."""
        self._put(f"{base}:fence", "", math.inf, fence=max(fence, self._last_fence(base)))
        recent = self._recent_fences(base)
        recent.pop(lock, None)
        recent[lock] = fence  # the latest is the last one, so that the oldest ones are found at once
        while recent[first := next(iter(recent))] <= oldest:
            del recent[first]
        self._put(f"{base}:recent", "", ttl, fences=recent)

    def _put(self, key: str, token: str, ttl: float, **fields: Any) -> None:
        self._records[key] = Record(token, self._clock() + ttl, **fields)

    def _find(self, key: str) -> Record | None:
        record = self._records.get(key)
        return record if record and record.expires > self._clock() else None

    def _holder(self, record: Record | None) -> Holder | None:
        if record is None:
            return None
        age, remaining = self._clock() - record.since, record.expires - self._clock()
        return Holder(record.task_id, record.node, record.pid, age, remaining, record.fence, record.state)


def is_own(spec: LeaseSpec, record: Record) -> bool:
    """Tell whether another delivery of this message has the lock, and not another message with its task id."""
    is_certain = record.token in (spec.token, queued_token(spec.task_id))
    return record.task_id == spec.task_id and (is_certain or is_same(spec.place, record.identity))
