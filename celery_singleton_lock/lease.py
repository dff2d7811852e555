"""A lease as the body sees it (`Lease`), and what this process knows of it (`LeaseState`)."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

from celery_singleton_lock.clock import now
from celery_singleton_lock.errors import LockLost
from celery_singleton_lock.store.requests import LeaseSpec

#: Longest time, in seconds, after which a task that can be replaced learns that it is to stop, while its store can be reached.
STOP_INTERVAL = 1.0


class LeaseState:
    """The state of one lease. Times are in seconds on `now`'s clock.

    `worker.execution` creates and ends it, renewal moves its deadline or marks it as lost or to be stopped. All three are final.
    """

    __slots__ = (
        "cap",
        "cooldown_until",
        "deadline",
        "due",
        "ended",
        "fence",
        "interrupt",
        "loss",
        "lost",
        "reacquired",
        "sends_events",
        "spec",
        "stopped",
        "task",
        "unreleased",
        "verify"
    )  # fmt: skip

    def __init__(self, spec: LeaseSpec, task: Any = None) -> None:
        self.spec = spec
        self.task = task
        self.fence = 0
        self.deadline = 0.0  # until then the lock is surely ours
        self.due = 0.0  # when the next renewal is due
        self.cap = math.inf  # the lease is neither renewed nor trusted from then on
        self.cooldown_until = 0.0  # the lock stays until then if the body succeeds
        self.sends_events = False  # the worker sends task events
        self.unreleased = True  # the store may have a lock of this token
        self.lost = False
        self.loss = ""  # why
        self.stopped = False  # a newer message asks the body to stop; the lock stays ours until it does
        self.ended = False  # the body is over
        self.reacquired = False  # a call to reacquire was sent, which the store may execute late
        self.interrupt: Any = None
        self.verify: Callable[[LeaseState], bool] = lambda state: False

    def granted(self, sent_at: float, fence: int, verify: Callable[[LeaseState], bool]) -> None:
        """Note a grant; `verify` asks the store whether it still holds."""
        self.fence = fence
        self.verify = verify
        self.renewed(sent_at)

    def renewed(self, sent_at: float) -> None:
        """Move the deadline: it counts from before the call that succeeded was sent."""
        self.deadline = sent_at + self.spec.ttl
        self.due = sent_at + self.shortened(self.spec.ttl / 3)
        if self.deadline > self.cap:
            self.deadline, self.due = self.cap, min(self.due, self.cap)

    def shortened(self, interval: float) -> float:
        """Return the time to the next renewal: this one, or less if the body can be asked to stop."""
        return min(interval, STOP_INTERVAL) if self.spec.stoppable else interval

    def is_active(self, time: float) -> bool:
        """Tell whether the lease is to be renewed, or reacquired."""
        return self.unreleased and not self.ended and time < self.cap

    def call_timeout(self, time: float) -> float:
        """Return how long a call to renew may take: a sixth of the TTL, and not past a deadline that lies ahead."""
        left = self.deadline - time
        return min(self.spec.ttl / 6, left) if left > 0 and not self.lost else self.spec.ttl / 6

    def is_stopped_by(self, error: LockLost) -> bool:
        """Tell whether this error stopped the body. An asynchronous exception comes without a key."""
        return self.stopped and error.key in ("", self.spec.lock)

    @property
    def held(self) -> bool:
        return self.unreleased and not (self.lost or self.stopped or self.ended) and now() < self.deadline


class Lease:
    """The lock of a task, as its body sees it: ``self.lease``."""

    __slots__ = ("_key", "_state")

    def __init__(self, key: str, state: LeaseState | None = None) -> None:
        self._key = key
        self._state = state

    def __repr__(self) -> str:
        return f"<Lease {self.key} {'held' if self.held else 'not held'}>"

    def __reduce__(self) -> tuple[type[Lease], tuple[str]]:
        """Copy and pickle the key alone: the lock belongs to one body."""
        return Lease, (self.key,)

    @property
    def key(self) -> str:
        """The lock key; empty outside a body."""
        return self._key

    @property
    def fence(self) -> int | None:
        """A number that only grows from one lease of the task name or group to the next; 0 where no lock was acquired.

        None with a `lock_limit` above 1 or a callable one: a fence would let the newest of several rightful holders alone write.
        """
        if self._state is None:
            return 0
        return None if self._state.spec.limit else self._state.fence

    @property
    def protected(self) -> bool:
        """Whether the body runs under a lock: not in a direct call or an eager run, nor with ``lock_until="start"``, nor after
        ``on_store_error="run"``.
        """
        return self._state is not None

    @property
    def held(self) -> bool:
        """Whether the body may go on under its lock. No I/O; false past the deadline, and for good once lost or asked to stop."""
        return self._state is not None and self._state.held

    @property
    def remaining(self) -> float:
        """Seconds until the deadline, unless the lease is renewed; 0 when it is not held."""
        return max(0.0, self._state.deadline - now()) if self._state and self._state.held else 0.0

    def ensure(self) -> None:
        """Return only while the lock is held; past the deadline, ask the store once. Does nothing where `protected` is false.

        Raises:
            LockLost: the lease has ended, or a newer message asks the body to stop.
        """
        state = self._state
        if state is None or state.held:
            return
        is_over = state.lost or state.stopped or state.ended or state.spec.pid != os.getpid()
        if is_over or not state.verify(state):
            raise LockLost(self.key)


#: Outside of a body with a lock.
NO_LEASE = Lease("")
