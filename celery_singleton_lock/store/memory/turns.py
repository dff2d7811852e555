"""Verbs of the store in memory for messages that wait in line."""

from __future__ import annotations

from dataclasses import replace

from celery_singleton_lock.holder import Holder
from celery_singleton_lock.store.keys import LINE_TOKEN, queued_token
from celery_singleton_lock.store.memory.line import Line, identity_in
from celery_singleton_lock.store.memory.records import Record, Records, is_own
from celery_singleton_lock.store.protocol import AcquireResult, AcquireStatus
from celery_singleton_lock.store.requests import LeaseSpec, Place


class Turns(Records):
    """Answers a message for which the line counts, and takes it out of the line."""

    def _in_line(self, spec: LeaseSpec, place: Place, lock: str) -> AcquireResult | None:
        """Answer a request for which the line counts, or return None if the lock is to be granted."""
        line, record = self._line(spec), self._find(lock)
        if status := self._ends(spec, place, line, record):
            return self._refused(spec, status)
        head = line.head(place.ticket, spec.task_id if place.replace else "")
        asked, record = self._ask_to_stop(spec, place, record)
        is_reserved = record is not None and record.token == LINE_TOKEN
        is_turn = self._is_turn(spec, place, line, head, record)
        if is_turn and spec.token == LINE_TOKEN:
            line.keep_turn(spec, place)
            if spec.limit and record is None:  # it acquires no slot
                return AcquireResult(AcquireStatus.GRANTED)
        if is_turn:
            self._records.pop(lock, None)
            return None
        if record and not is_reserved and record.token in (spec.token, queued_token(spec.task_id)):
            return None
        if not place.room and line.is_outdated(place):
            return AcquireResult(AcquireStatus.DROPPED)
        if spec.token == LINE_TOKEN and not place.room and not (is_reserved and head == place.ticket):
            line.keep_place(place)
        if place.room and line.join(spec, place):
            head = head or place.ticket
            if record:
                record.line = True
        return self._waits(spec, place, line, head, record, asked)

    def _ends(self, spec: LeaseSpec, place: Place, line: Line, record: Record | None) -> AcquireStatus | None:
        """Tell whether a message ends, or a copy is dropped: as it has started, or another message has replaced it."""
        if status := line.refused(place):
            return status
        if spec.token == LINE_TOKEN and record and record.state == "running" and is_own(spec, record):
            return AcquireStatus.DROPPED
        return self._is_replaced(spec, record) if place.stop else None

    def _waits(
        self, spec: LeaseSpec, place: Place, line: Line, head: str, record: Record | None, asked: float
    ) -> AcquireResult:
        """Answer a message that does not start: who holds the lock, and the line."""
        task_id = line.waiting[head].task_id if head else ""
        is_head = line.is_of(head, spec, place)
        same = is_own(spec, record) if record else is_head
        if record and same:
            record.redelivered = True
        holder = self._holder(record) or Holder(task_id, state="queued")
        quiet, is_waiting = line.quiet if place.quiet else 0.0, place.ticket in line.waiting
        waiting, ahead = len(line.waiting), line.ahead(place.ticket)
        message = "" if record or (spec.queued and spec.token != LINE_TOKEN) else self._call(spec, place, line)
        return AcquireResult(
            AcquireStatus.REFUSED,
            holder,
            waiting=waiting,
            head=task_id,
            is_waiting=is_waiting,
            quiet=quiet,
            asked=asked,
            ahead=ahead,
            message=message,
            shares_id=holder.task_id == spec.task_id and not same,
            is_head=is_head,
        )

    def _call(self, spec: LeaseSpec, place: Place, line: Line) -> str:
        """Name the first in its turn whom nobody has named, as the section `dispatch` of `acquire.lua` does."""
        free = self._free_slots(spec.slot_lock(0), spec.limit) if spec.limit else 1
        ticket, message = line.call(place.ticket, free, spec.ttl)
        if ticket and not spec.limit:
            until, task_id = self._clock() + spec.ttl, line.waiting[ticket].task_id
            reserved = Record(LINE_TOKEN, until, self._clock(), task_id, state="queued", named=True, line=True)
            reserved.identity = identity_in(ticket)
            self._records[spec.slot_lock(0)] = reserved
        return message

    def _refused(self, spec: LeaseSpec, status: AcquireStatus) -> AcquireResult:
        """Answer a message for which another one stands, naming the one that waits."""
        line = self._line(spec)
        first = line.waiting.get(line.newest) if status is AcquireStatus.SUPERSEDED else None
        return AcquireResult(status, head=first.task_id if first else "")

    def _is_turn(self, spec: LeaseSpec, place: Place, line: Line, head: str, record: Record | None) -> bool:
        """Tell whether this message may start: in its turn, or if it was published, once the lock or a slot is free."""
        owner, is_copy = record and record.token, spec.token == LINE_TOKEN
        if place.quiet:
            is_newcomer = not place.ticket or (place.room and not line.quiet_latest)
            if is_newcomer and owner != spec.token and (owner != LINE_TOKEN or line.quiet):
                line.disturb(place, head)
        if owner not in (None, LINE_TOKEN):
            return False
        is_turn = head in ("", place.ticket) and not (record and is_copy and record.named)
        if spec.limit and record is None:
            is_turn = line.is_turn(place.ticket, self._free_slots(spec.slot_lock(0), spec.limit))
        is_turn = is_turn or bool(place.ticket and not place.room and not is_copy)
        return is_turn and not (place.quiet and line.quiet)

    def leave(self, spec: LeaseSpec, ticket: str, timeout: float | None = None) -> str:
        with self._mutex:
            line, record = self._line(spec), self._find(spec.lock)
            is_reserved = record is not None and record.token == LINE_TOKEN
            is_turn = record is not None and is_reserved and (not record.named or line.head() == ticket)
            line.use(ticket)
            if spec.limit:
                return line.next_turn(self._free_slots(spec.slot_lock(0), spec.limit), spec.ttl)
            return self._name_next(line, spec.lock, spec.ttl) if is_turn else ""

    def give_back(self, spec: LeaseSpec, ticket: str, message: str) -> None:
        with self._mutex:
            record = self._find(spec.lock)
            is_first = self._line(spec).give_back(ticket, message)
            if record and record.token == LINE_TOKEN and is_first:
                del self._records[spec.lock]

    def _name_next(self, line: Line, lock: str, ttl: float) -> str:
        """Reserve a lock for the head of the line and return its message, or delete it."""
        head, record = line.head_to_name(), self._records.pop(lock)
        if not head:
            return ""
        self._records[lock] = replace(
            record,
            token=LINE_TOKEN,
            task_id=line.waiting[head].task_id,
            expires=self._clock() + ttl,
            state="queued",
            named=True,
            redelivered=False,
            identity=identity_in(head),
        )
        return line.take_message(head, ttl)
