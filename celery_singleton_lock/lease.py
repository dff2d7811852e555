"""One attempt's right to run one signature."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from celery_singleton_lock.clock import now
from celery_singleton_lock.errors import LockLost
from celery_singleton_lock.store.protocol import LeaseRequest


class Lease:
    """What a body sees of its lock, as ``self.lease``.

    It is used once: what ends it (release, or loss) is final. All times are in seconds.
    """

    __slots__ = (
        "_verify", "claim", "closed", "deadline", "due", "fence", "interrupt", "key", "lost", "owned", "retaking", "task",
        "ttl",
    )  # fmt: skip

    def __init__(self, key: str, claim: LeaseRequest | None = None, task: Any = None) -> None:
        #: Key of the lock.
        self.key = key
        self.claim = claim  # None: there is no lock to lose
        self.task = task
        #: How long the lease outlives its last renewal.
        self.ttl = claim.ttl if claim else 0.0
        #: Number that only grows from one lease of the task name to the next; 0: there is no lock. For the resource to check.
        self.fence = 0
        self.owned = False  # the store may have this token: there may be something to give back
        self.lost = False
        self.closed = False  # the body is over
        self.deadline = self.due = 0.0
        self.retaking: Any = None  # a mutex, once the lease has had to be taken again
        self.interrupt: Any = None
        self._verify: Callable[[Lease], bool] = _never

    def __repr__(self) -> str:
        return f"<Lease {self.key} {'held' if self.held else 'not held'}>"

    def __reduce__(self) -> tuple[type[Lease], tuple[str]]:
        """Return how to make a copy or a pickle: of the key alone, with no lock, as the lock belongs to one body."""
        return Lease, (self.key,)

    def granted(self, sent_at: float, fence: int, verify: Callable[[Lease], bool]) -> None:
        """The store said yes to a call that was sent then; `verify` asks it whether that still holds."""
        self._verify = verify
        self.fence = fence
        self.owned = True
        self.renewed(sent_at)

    def renewed(self, sent_at: float) -> None:
        """The store put the expiry off by a call that was sent then."""
        self.deadline = sent_at + self.ttl
        self.due = sent_at + self.ttl / 3

    @property
    def protected(self) -> bool:
        """Whether there is a lock at all: not in a direct call or an eager run, nor after ``on_store_error="run"``."""
        return self.claim is not None

    @property
    def supervised(self) -> bool:
        """Whether the worker's main process renews the lease as well."""
        return self.claim is not None and self.claim.supervised

    @property
    def held(self) -> bool:
        """Whether the lock is surely still this task's. Asks nobody; false past the deadline, and for good once lost."""
        return self.owned and not self.lost and not self.closed and now() < self.deadline

    @property
    def remaining(self) -> float:
        """Seconds until the lease is in doubt unless it is renewed; 0 when it is not held."""
        return max(0.0, self.deadline - now()) if self.held else 0.0

    def ensure(self) -> None:
        """Go on only while the lock is held; past the deadline, ask the store once.

        Raises:
            LockLost: the lease has ended. Never where there was no lock to lose (see `protected`).
        """
        if self.protected and not self.held and not self._still_owned():
            raise LockLost(self.key)

    def _still_owned(self) -> bool:
        over = self.lost or self.closed or (self.claim is not None and self.claim.pid != os.getpid())
        return not over and self._verify(self)


def _never(lease: Lease) -> bool:
    return False
