"""The verbs of a store as script calls on a Redis or Valkey server: one round trip each, unless the server lost its scripts."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from typing import Any

from redis.exceptions import NoScriptError

from celery_singleton_lock.errors import StoreUnavailable
from celery_singleton_lock.holder import Holder
from celery_singleton_lock.store.access import Access
from celery_singleton_lock.store.keys import CHECK_TTL, COMPLETED_TTL, CONTINUED_TTL, begun_key, check_key
from celery_singleton_lock.store.protocol import AcquireResult, AcquireStatus, GracePeriod, Released, RenewResult
from celery_singleton_lock.store.redis.calls import (
    ScriptCall,
    acquire_call,
    give_back_call,
    leave_call,
    ms,
    oldest_of,
    reacquire_call,
    release_call,
    renewal_call,
    revoke_call,
    script_call,
)
from celery_singleton_lock.store.redis.connection import Batch, Command
from celery_singleton_lock.store.redis.pool import ConnectionPool, Generation
from celery_singleton_lock.store.redis.records import RedisRecords, told_of_pause
from celery_singleton_lock.store.requests import AfterRelease, LeaseSpec

#: Seconds by which `WAIT` may end late.
WAIT_MARGIN = 0.15

_RENEW_RESULTS = {result.value: result for result in RenewResult}


class RedisStore:
    """The `LockStore` verbs on a Redis or Valkey server.

    Arguments:
        connect: makes a connection, not yet connected (see `connector`).
        timeout: seconds for a whole call.
        limit: how many calls, and so connections, there are at most at once; None: any number.
        history: how many runs of each task name are kept; None: nothing is recorded.
        access: whether the server has accepted this process.
        replicas: how many replicas must have a lease and each renewal of it.
        grace: whether no new lease is granted for a TTL after the server may have lost data.
        generation: of the connections, which its clones share.
    """

    def __init__(
        self,
        connect: Callable[[], Any],
        timeout: float = 1.0,
        limit: int | None = None,
        history: int | None = None,
        access: Access | None = None,
        replicas: int = 0,
        grace: bool = False,
        generation: Generation | None = None,
    ) -> None:
        self._connect = connect
        self._timeout = timeout
        self._history = history
        self._access = access or Access()
        self._replicas, self._grace = replicas, grace
        self._generation = generation or Generation()
        self._pool = ConnectionPool(connect, limit, self._access, self._generation)
        self._run_lease = self._run_on_replicas if replicas else self.run

    def acquire(self, spec: LeaseSpec, timeout: float | None = None) -> AcquireResult:
        answer, *more = self._run_lease(acquire_call(spec, self._history, self._grace), timeout)
        self._access.accepted()
        if answer == "granted":
            slot = int(more[1]) if spec.limit else 0
            return AcquireResult(AcquireStatus.GRANTED, fence=int(more[0]), slot=slot)
        if answer == "grace":
            raise GracePeriod(int(more[0]) / 1000)
        if answer != "held":
            return AcquireResult(AcquireStatus(answer), head=more[0] if more else "")
        count, head, rank, quiet, asked, message, is_own, is_head = more[7:] or (0, None, None, 0, 0, "", True, False)
        ahead = rank - 1 if rank else count
        line = count, head or "", bool(rank), quiet / 1000, asked / 1000, ahead, message
        holder = _holder(more[:7])
        shares_id = holder.task_id == spec.task_id and not is_own
        return AcquireResult(AcquireStatus.REFUSED, holder, 0, 0, *line, shares_id, bool(is_head))

    def renew(self, leases: Sequence[LeaseSpec], timeout: float | None = None) -> list[RenewResult]:
        answers = self._run_lease(renewal_call(leases), timeout)
        return [_renewed(lease, answer) for lease, answer in zip(leases, answers, strict=True)]

    def reacquire(self, spec: LeaseSpec, fence: int, timeout: float | None = None) -> tuple[RenewResult, bool]:
        answer, done = self._run_lease(reacquire_call(spec, fence, self._history), timeout)
        return RenewResult(answer), bool(done)

    def release(
        self, spec: LeaseSpec, success: bool | None, timeout: float | None = None, kept: AfterRelease | None = None
    ) -> Released:
        waits, message = self.run(release_call(spec, success, kept, self._history), timeout)
        return Released(bool(waits), message)

    def leave(self, spec: LeaseSpec, ticket: str, timeout: float | None = None) -> str:
        return str(self.run(leave_call(spec, ticket), timeout))

    def give_back(self, spec: LeaseSpec, ticket: str, message: str) -> None:
        self.run(give_back_call(spec, ticket, message))

    def record_outcome(self, spec: LeaseSpec, success: bool, timeout: float | None = None) -> None:
        if success:
            self.command("SET", spec.completed, "success", "PX", ms(COMPLETED_TTL), timeout=timeout)
        else:
            self.command("DEL", spec.completed, timeout=timeout)

    def keep_continued(self, spec: LeaseSpec) -> bool:
        return bool(self.command("PEXPIRE", spec.continued, ms(CONTINUED_TTL)))

    def has_begun(self, spec: LeaseSpec) -> bool:
        return self.command("ZSCORE", begun_key(spec.base), str(spec.task_id)) is not None

    def holder(self, lock: str, slots: str = "") -> Holder | None:
        reply = self.run(script_call("holder", (lock,), (), oldest_of(slots)))
        if not reply:
            return None
        *told, ttl, unrenewed = reply
        return _holder(told).with_renewal(unrenewed / 1000, int(ttl or 0) / 1000)

    def revoke(self, base: str, lock: str, slots: str = "", starts: str = "", fence: int = 0) -> Holder | None:
        reply = self.run(revoke_call(base, lock, slots, starts, fence, self._history), once=not fence)
        return _holder(reply) if reply else None

    def records(self) -> RedisRecords:
        return RedisRecords(self, self._history or 0)

    def check(self, base: str) -> None:
        self._run_lease(script_call("check", (check_key(base),), (ms(CHECK_TTL),)), None)
        self._access.accepted()

    def eviction_policy(self) -> str:
        lines = str(self.command("INFO", "memory")).splitlines()
        return next((line[17:].strip() for line in lines if line.startswith("maxmemory_policy:")), "")

    def unsafe_replicas(self) -> int:
        found = dict(re.findall(r"^(\w+):(\d+)", str(self.command("INFO", "replication")), re.MULTILINE))
        return 0 if "min_slaves_good_slaves" in found else int(found.get("connected_slaves", 0))

    def clone(self) -> RedisStore:
        shared = self._history, self._access, self._replicas, self._grace, self._generation
        return RedisStore(self._connect, self._timeout, None, *shared)

    def close(self) -> None:
        self._pool.close()

    def run(self, call: ScriptCall, timeout: float | None = None, once: bool = False) -> Any:
        """Run a script; return the reply. `once`: it is not sent again after a connection broke."""
        deadline = self._deadline(timeout)
        try:
            return self._pool.execute(call, deadline, once)
        except NoScriptError:
            return self._pool.execute(call.with_text(), deadline, once)

    def _run_on_replicas(self, call: ScriptCall, timeout: float | None) -> Any:
        """Run a script, and wait until enough replicas have what it wrote; return the reply.

        Raises:
            StoreUnavailable: they do not have it in time. Maybe another server is the primary: connections are made anew.
        """
        deadline = self._deadline(timeout)
        try:
            reply, count = self._run_and_wait(call, deadline)
            if count is None or count < self._replicas:
                told = "the store refuses WAIT" if count is None else f"{count} replicas have its answer"
                raise StoreUnavailable(f"{told}, but singleton_lock_replicas is {self._replicas}")
        except StoreUnavailable:
            self._generation.end()
            raise
        return reply

    def _run_and_wait(self, call: ScriptCall, deadline: float) -> list[Any]:
        left = deadline - time.monotonic() - WAIT_MARGIN
        wait = Command("WAIT", str(self._replicas), ms(max(0.001, left)))
        wait.optional = True
        try:
            return self._run_all((call, wait), deadline)
        except NoScriptError:
            return self._run_all((call, wait), deadline, with_text=True)

    def run_all(self, calls: Sequence[Command]) -> list[Any]:
        """Run scripts and commands, all of which may be sent twice, in one round trip; return the replies."""
        deadline = self._deadline(None)
        try:
            return self._run_all(calls, deadline)
        except NoScriptError:
            return self._run_all(calls, deadline, with_text=True)

    def _run_all(self, calls: Sequence[Command], deadline: float, with_text: bool = False) -> list[Any]:
        if with_text:
            calls = [call.with_text() if isinstance(call, ScriptCall) else call for call in calls]
        replies: list[Any] = self._pool.execute(Batch(calls), deadline)
        return replies

    def command(self, *words: str, timeout: float | None = None) -> Any:
        """Send a command; return the reply."""
        return self._pool.execute(Command(*words), self._deadline(timeout))

    def _deadline(self, timeout: float | None) -> float:
        return time.monotonic() + (self._timeout if timeout is None else min(timeout, self._timeout))


def _renewed(lease: LeaseSpec, answer: str) -> RenewResult:
    """Return what became of a lease. If the answer is the key of its lock, it was renewed, and the key is noted."""
    if answer not in _RENEW_RESULTS:
        lease.lock = answer
        return RenewResult.RENEWED
    return _RENEW_RESULTS[answer]


def _holder(reply: Sequence[Any]) -> Holder:
    task_id, node, pid, age, remaining, fence, state = reply
    node, by, reason = ("", *told_of_pause(node)) if state == "paused" else (node, "", "")
    times = max(0, age) / 1000, max(0, remaining) / 1000
    return Holder(task_id, node, int(pid), *times, int(fence or 0), state or "running", by, reason)
