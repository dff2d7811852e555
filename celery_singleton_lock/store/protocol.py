"""What a store of leases does: a few atomic verbs, each safe to send twice, because the owner's token goes with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from celery_singleton_lock.holder import Holder

#: How long it is remembered that an attempt ended in success while a copy of its message waited, in seconds.
COMPLETED_TTL = 3600.0
#: How long it is remembered at least that an operator took the lock from an attempt, in seconds.
REVOKED_TTL = 3600.0


@dataclass(slots=True)
class LeaseRequest:
    """One attempt's request for a lease.

    Arguments:
        base: what all keys of the task start with, a cluster's hash tag included.
        digest: what tells this signature from others of the task; empty where only the attempt is known.
        token: the attempt's secret.
        ttl: life of the lease in seconds.
        supervised: also note which lock the attempt has, for the worker's main process, which knows the attempt alone.
        redelivered: an earlier delivery of the same message may be running, or has run.
    """

    base: str
    digest: str
    token: str = field(repr=False)
    ttl: float
    task_id: str = ""
    node: str = ""
    pid: int = 0
    supervised: bool = False
    redelivered: bool = False
    #: Key of the lock.
    lock: str = field(init=False)
    #: Key under which the store remembers what the attempt has, or that an operator took it away.
    attempt: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.lock = f"{self.base}:lock:{self.digest}"
        self.attempt = f"{self.base}:attempt:{self.token}"

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Make every copy and pickle None: a copied request has nothing to release, and no token."""
        return type(None), ()

    @property
    def fence(self) -> str:
        """Key of the last fence of the task name."""
        return f"{self.base}:fence"

    @property
    def recent(self) -> str:
        """Key of the set of recent grants of the task name."""
        return f"{self.base}:recent"

    @property
    def ended(self) -> str:
        """Key under which the store remembers how the attempt ended, for a copy of its message that waits."""
        return f"{self.base}:ended:{self.digest}:{self.task_id}"


class AcquireStatus(Enum):
    """What became of a claim."""

    GRANTED = "granted"
    HELD = "held"
    #: Another attempt of the same task id has ended in success.
    COMPLETED = "completed"
    #: An operator took the lock from this very attempt.
    REVOKED = "revoked"


@dataclass(frozen=True)
class AcquireResult:
    """The answer to a claim, with the holder where it is held, and with the lease's fence where it is granted."""

    answer: AcquireStatus
    holder: Holder | None = None
    fence: int = 0


class RenewResult(Enum):
    """What became of a renewal."""

    RENEWED = 1
    MISSING = 0
    #: Another token is there.
    NOT_OWNER = -1
    #: An operator took the lock from this very attempt.
    REVOKED = -2
    #: Taken again; but another had it meanwhile.
    LOST = 2


class LockStore(Protocol):
    """The verbs. Each raises `StoreUnavailable` within its timeout, or `StoreError` where the store refuses."""

    def acquire(self, claim: LeaseRequest, timeout: float | None = None) -> AcquireResult:
        """Take the lock where it is free or this token's already, else tell who has it."""

    def renew(self, claims: Sequence[LeaseRequest], timeout: float | None = None) -> list[RenewResult]:
        """Put off the expiry of those that these tokens own."""

    def reacquire(self, claim: LeaseRequest, fence: int, timeout: float | None = None) -> tuple[RenewResult, bool]:
        """Take again what is gone while its body goes on, unless another token is there, or an operator took it.

        Answers what has become of it, never that it is gone, and whether this call has taken it. A newer fence than that of the
        lease shows that another had it meanwhile.
        """

    def release(self, claim: LeaseRequest, success: bool, timeout: float | None = None) -> bool:
        """Free the lock if this token owns it; true if a copy of the message waits to learn how it ended (see `record_outcome`).

        The copy waits for a TTL; a release sent again lets it wait for another.
        """

    def record_outcome(self, claim: LeaseRequest, success: bool, timeout: float | None = None) -> None:
        """Tell a waiting copy of the message whether this attempt ended in success, its result stored."""

    def holder(self, lock: str) -> Holder | None:
        """Who has this lock."""

    def revoke(self, base: str, lock: str) -> Holder | None:
        """Take the lock from whoever has it, who will find it lost; answers who that was."""

    def eviction_policy(self) -> str:
        """The store's eviction policy; ``noeviction`` keeps locks safe."""

    def clone(self, limit: int) -> LockStore:
        """A store on the same data with its own connections, at most so many."""

    def close(self) -> None:
        """Give up all connections."""
