"""The verbs of a store as script calls on a Redis or Valkey server: one round trip each, unless the server lost its scripts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from redis.exceptions import NoScriptError

from celery_singleton_lock.holder import Holder
from celery_singleton_lock.store.protocol import (
    COMPLETED_TTL,
    REVOKED_TTL,
    AcquireResult,
    AcquireStatus,
    LeaseRequest,
    RenewResult,
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
        keys = (wanted.completed, *task_keys(wanted.base))
        parts = _start_parts(wanted) if wanted.max_starts is not None else ()
        call = _request_call("acquire", wanted, keys, "1" if wanted.redelivered else "", parts)
        answer, *more = self._run(call, timeout)
        if answer == "granted":
            return AcquireResult(AcquireStatus.GRANTED, fence=int(more[0]))
        return AcquireResult(AcquireStatus(answer), _holder(more) if more else None)

    def renew(self, leases: Sequence[LeaseRequest], timeout: float | None = None) -> list[RenewResult]:
        return [_RENEW_RESULTS[answer] for answer in self._run(_renewal_call(leases), timeout)]

    def reacquire(self, wanted: LeaseRequest, fence: int, timeout: float | None = None) -> tuple[RenewResult, bool]:
        answer, done = self._run(_request_call("reacquire", wanted, task_keys(wanted.base), str(fence)), timeout)
        return RenewResult(answer), bool(done)

    def release(
        self, wanted: LeaseRequest, success: bool | None, timeout: float | None = None, hold: float = 0.0
    ) -> bool:
        parts = _release_parts(wanted, success, hold) if hold > 0 or wanted.max_starts is not None else ()
        return bool(self._run(_release_call(wanted, "1" if success else "", parts), timeout))

    def record_outcome(self, wanted: LeaseRequest, success: bool, timeout: float | None = None) -> None:
        if success:
            self._command("SET", wanted.completed, "success", "PX", _ms(COMPLETED_TTL), timeout=timeout)
        else:
            self._command("DEL", wanted.completed, timeout=timeout)

    def holder(self, lock: str) -> Holder | None:
        reply = self._run(_call("holder", (lock,)))
        return _holder(reply) if reply else None

    def revoke(self, base: str, lock: str) -> Holder | None:
        reply = self._run(_call("revoke", (lock, *task_keys(base)), (_ms(REVOKED_TTL),)), once=True)
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
    verb: str, wanted: LeaseRequest, keys: Sequence[str], last: str, parts: Sequence[Part] = ()
) -> ScriptCall:
    who = (str(wanted.task_id), wanted.node, str(wanted.pid), "1" if wanted.supervised else "")
    return _call(verb, (wanted.lock, wanted.attempt, *keys), (wanted.token, _ms(wanted.ttl), *who, last), parts)


def _start_parts(wanted: LeaseRequest) -> Sequence[Part]:
    limit = wanted.max_starts
    return (Part("starts", (wanted.starts,), (str(limit.n), _ms(limit.per))),) if limit else ()


def _release_call(wanted: LeaseRequest, success: str, parts: Sequence[Part]) -> ScriptCall:
    keys = (_lock(wanted), wanted.attempt, wanted.completed)
    return _call("release", keys, (wanted.token, _ms(wanted.ttl), success), parts)


def _release_parts(wanted: LeaseRequest, success: bool | None, hold: float) -> Sequence[Part]:
    ended = wanted.ended_starts(success)
    hold_part = (Part("hold", (), (_ms(hold),)),) if hold > 0 else ()
    return (*hold_part, *((Part("starts", (wanted.starts,), (ended,)),) if ended else ()))


def _renewal_call(leases: Sequence[LeaseRequest]) -> ScriptCall:
    keys = [key for one in leases for key in (_lock(one), one.attempt, f"{one.base}:revoked")]
    return _call("renew", keys, [word for one in leases for word in (one.token, _ms(one.ttl))])


def _lock(wanted: LeaseRequest) -> str:
    """Return the key of the lock; where only the token is known, the attempt key, which names it."""
    return wanted.lock if wanted.digest else wanted.attempt


def _ms(seconds: float) -> str:
    return str(int(seconds * 1000))


def _holder(reply: Sequence[Any]) -> Holder:
    task_id, node, pid, age, remaining, fence, state = reply
    return Holder(
        task_id, node, int(pid), max(0, age) / 1000, max(0, remaining) / 1000, int(fence or 0), state or "running"
    )
