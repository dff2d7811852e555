"""The verbs of a store as script calls on a Redis or Valkey server: one round trip each, unless the server lost its scripts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from redis.exceptions import NoScriptError

from celery_singleton_lock.holder import Holder
from celery_singleton_lock.store.protocol import (
    COMPLETED_TTL,
    COPY_TTL,
    REVOKED_TTL,
    AcquireResult,
    AcquireStatus,
    Kept,
    LeaseRequest,
    Place,
    RenewResult,
    Waiting,
    line_keys,
    replaced_key,
    task_keys,
)
from celery_singleton_lock.store.redis.connection import Command
from celery_singleton_lock.store.redis.pool import ConnectionPool
from celery_singleton_lock.store.redis.scripts import Part, script

_RENEW_RESULTS = {result.value: result for result in RenewResult}


class RedisStore:
    """The `LockStore` verbs on a Redis or Valkey server.

    Arguments:
        connect: makes a connection, not yet connected (see `connector`).
        timeout: seconds for a whole call.
        limit: how many calls, and so connections, there are at most at once; None: any number.
    """

    def __init__(self, connect: Callable[[], Any], timeout: float = 1.0, limit: int | None = None) -> None:
        self._connect = connect
        self._timeout = timeout
        self._pool = ConnectionPool(connect, limit)

    def acquire(self, wanted: LeaseRequest, timeout: float | None = None) -> AcquireResult:
        lock = wanted.slot_lock(0) if wanted.limit else wanted.lock
        keys, last = (wanted.completed, *task_keys(wanted.base)), "1" if wanted.redelivered else ""
        answer, *more = self._run(_request_call("acquire", wanted, lock, keys, last, _acquire_parts(wanted)), timeout)
        if answer == "granted":
            slot = int(more[1]) if wanted.limit else 0
            return AcquireResult(AcquireStatus.GRANTED, fence=int(more[0]), slot=slot)
        if not more:
            return AcquireResult(AcquireStatus(answer))
        count, head, rank, *times = more[7:] or (0, None, None)
        quiet, asked, *_ = *(time / 1000 for time in times), 0.0, 0.0
        ahead = rank - 1 if rank else count
        return AcquireResult(
            AcquireStatus.HELD, _holder(more[:7]), 0, 0, count, head or "", bool(rank), quiet, asked, ahead
        )

    def renew(self, leases: Sequence[LeaseRequest], timeout: float | None = None) -> list[RenewResult]:
        return [_RENEW_RESULTS[answer] for answer in self._run(_renewal_call(leases), timeout)]

    def reacquire(self, wanted: LeaseRequest, fence: int, timeout: float | None = None) -> tuple[RenewResult, bool]:
        call = _request_call("reacquire", wanted, wanted.lock, task_keys(wanted.base), str(fence))
        answer, done = self._run(call, timeout)
        return RenewResult(answer), bool(done)

    def release(
        self, wanted: LeaseRequest, success: bool | None, timeout: float | None = None, kept: Kept | None = None
    ) -> Waiting:
        return Waiting(self._run(_release_call(wanted, success, kept), timeout))

    def wake(self, wanted: LeaseRequest, timeout: float | None = None) -> str:
        line, waiting, _ = line_keys(wanted.base, wanted.digest)
        call = _call("wake", (wanted.lock, line, waiting), (_ms(wanted.ttl),))
        if wanted.limit:
            keys = (wanted.slot_lock(0), line, waiting, wanted.slots)
            call = _call("wake_slots", keys, (_ms(wanted.ttl), str(wanted.limit)))
        return str(self._run(call, timeout))

    def leave(self, wanted: LeaseRequest, ticket: str, timeout: float | None = None) -> None:
        keys = (*line_keys(wanted.base, wanted.digest), wanted.lock)
        self._run(_call("leave", keys, (ticket, _ms(COPY_TTL))), timeout)

    def record_outcome(self, wanted: LeaseRequest, success: bool, timeout: float | None = None) -> None:
        if success:
            self._command("SET", wanted.completed, "success", "PX", _ms(COMPLETED_TTL), timeout=timeout)
        else:
            self._command("DEL", wanted.completed, timeout=timeout)

    def holder(self, lock: str, slots: str = "") -> Holder | None:
        reply = self._run(_call("holder", (lock,), (), _oldest_parts(slots)))
        return _holder(reply) if reply else None

    def revoke(self, base: str, lock: str, slots: str = "", starts: str = "", task_id: str = "") -> Holder | None:
        parts = (*_oldest_parts(slots), *((Part("starts", (starts,)),) if starts else ()))
        call = _call("revoke", (lock, *task_keys(base)), (_ms(REVOKED_TTL), task_id), parts)
        reply = self._run(call, once=True)
        return _holder(reply) if reply else None

    def eviction_policy(self) -> str:
        lines = str(self._command("INFO", "memory")).splitlines()
        return next((line[17:].strip() for line in lines if line.startswith("maxmemory_policy:")), "")

    def clone(self) -> RedisStore:
        return RedisStore(self._connect, self._timeout)

    def close(self) -> None:
        self._pool.close()

    def _run(self, call: ScriptCall, timeout: float | None = None, once: bool = False) -> Any:
        deadline = self._deadline(timeout)
        try:
            return self._pool.execute(Command("EVALSHA", call.digest, *call.texts), deadline, once)
        except NoScriptError:
            return self._pool.execute(Command("EVAL", call.script, *call.texts), deadline, once)

    def _command(self, *words: str, timeout: float | None = None) -> Any:
        return self._pool.execute(Command(*words), self._deadline(timeout))

    def _deadline(self, timeout: float | None) -> float:
        return time.monotonic() + (self._timeout if timeout is None else min(timeout, self._timeout))


class ScriptCall(Command):
    """A script, and the words of its call that come after it."""

    def __init__(self, verb: str, parts: Sequence[Part], *words: str) -> None:
        super().__init__(*words)
        self.script, self.digest = script(verb, tuple(part.name for part in parts))


def _call(verb: str, keys: Sequence[str], arguments: Sequence[str] = (), parts: Sequence[Part] = ()) -> ScriptCall:
    if parts:
        keys = [*keys, *(key for part in parts for key in part.keys)]
        arguments = [*arguments, *(argument for part in parts for argument in part.arguments)]
    return ScriptCall(verb, parts, str(len(keys)), *keys, *arguments)


def _request_call(
    verb: str, wanted: LeaseRequest, lock: str, keys: Sequence[str], last: str, parts: Sequence[Part] = ()
) -> ScriptCall:
    is_noted = wanted.supervised or (wanted.limit and not wanted.queued)
    who = (str(wanted.task_id), wanted.node, str(wanted.pid), "1" if is_noted else "")
    return _call(verb, (lock, wanted.attempt, *keys), (wanted.token, _ms(wanted.ttl), *who, last), parts)


def _acquire_parts(wanted: LeaseRequest) -> Sequence[Part]:
    """Return the parts of an acquire for what few tasks use."""
    parts: list[Part] = []
    if wanted.limit:  # choose a slot, and answer which
        parts += [Part("limit", (wanted.slots,), (str(wanted.limit),)), Part("slot")]
    if wanted.queued:
        parts.append(Part("queued"))
    if wanted.max_starts is not None:
        limit = wanted.max_starts
        parts.append(Part("starts", (wanted.starts,), (str(limit.n), _ms(limit.per))))
        if wanted.limit and limit.count == "crashed":
            parts.append(Part("running"))
    if wanted.place:
        parts += _line_parts(wanted, wanted.place)
    return parts


def _oldest_parts(slots: str) -> Sequence[Part]:
    return (Part("limit", (slots,)),) if slots else ()


def _line_parts(wanted: LeaseRequest, place: Place) -> Sequence[Part]:
    room = "all" if place.replace else str(place.room or "")
    numbers = (place.ticket, _number(place.copy), _number(place.next_copy))
    arguments = (*numbers, room, _ms(place.due), place.message, _ms(COPY_TTL))
    parts = [Part("line", line_keys(wanted.base, wanted.digest), arguments)]
    if place.stop:
        parts += [Part("replaced", (replaced_key(wanted.base),)), Part("stop"), Part("asked")]
    if wanted.limit:
        parts += [Part("turns"), Part("named")]
    if place.quiet:
        quiet = (_ms(place.quiet), _ms(place.max_quiet))
        parts += [Part("quiet", (), quiet), Part("ripe"), Part("left")]
    if not wanted.queued:
        parts += [Part("started"), *([Part("calm")] if place.quiet else [])]
    return parts


def _release_call(wanted: LeaseRequest, success: bool | None, kept: Kept | None) -> ScriptCall:
    keys = (_lock(wanted), wanted.attempt, wanted.completed)
    parts: list[Part] = []
    if wanted.limit and wanted.queued:
        parts.append(Part("queued", (wanted.slots, wanted.slot_lock(0))))
    if kept:
        parts.append(Part("kept", (), (kept.token, kept.state, _ms(kept.ttl))))
    if wanted.limit:
        parts.append(Part("slot", (wanted.slots,)) if kept else Part("limit"))
    if wanted.max_starts is not None and (ended := wanted.ended_starts(success)):
        parts.append(Part("starts", (wanted.starts,), (ended,)))
    return _call("release", keys, (wanted.token, _ms(wanted.ttl), "1" if success else ""), parts)


def _renewal_call(leases: Sequence[LeaseRequest]) -> ScriptCall:
    keys = [key for one in leases for key in (_lock(one), one.attempt, f"{one.base}:revoked")]
    parts = [Part("limit")] if any(one.limit for one in leases) else []
    if any(one.stoppable for one in leases):
        parts.append(Part("stop", (), ("".join(str(int(one.stoppable)) for one in leases),)))
    return _call("renew", keys, [word for one in leases for word in (one.token, _ms(one.ttl))], parts)


def _lock(wanted: LeaseRequest) -> str:
    """Return the key of the lock; where only the token is known, the attempt key, which names it."""
    return wanted.attempt if wanted.by_token else wanted.lock


def _number(copy: float) -> str:
    return f"{copy:.6f}"


def _ms(seconds: float) -> str:
    return str(int(seconds * 1000))


def _holder(reply: Sequence[Any]) -> Holder:
    task_id, node, pid, age, remaining, fence, state = reply
    return Holder(
        task_id, node, int(pid), max(0, age) / 1000, max(0, remaining) / 1000, int(fence or 0), state or "running"
    )
