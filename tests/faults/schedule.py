"""The faults of a run: what was done to which process or server, and from when to when."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.faults.ledger import now


@dataclass(frozen=True)
class Limits:
    """What bounds are counted with, in seconds.

    Arguments:
        ttl: ``lock_ttl``.
        timeout: ``singleton_lock_store_timeout``.
        slack: what a busy machine may add to a moment.
    """

    ttl: float
    timeout: float = 1.0
    slack: float = 0.3

    @property
    def heal(self) -> float:
        """From the return of a store until every renewer has been there."""
        return self.ttl / 3 + self.timeout


@dataclass
class Fault:
    """One thing that was done.

    Arguments:
        kind: ``kill``, ``stop`` (processes), ``outage`` (the store does not serve), ``empty`` (it also lost its data),
            ``pause`` (an outage too short to lose anything; what ended meanwhile may be there for a TTL, though fault 25 has
            a closer bound), ``child stop`` (of a prefork child alone),
            ``unlock`` (by an operator). Others excuse nothing.
        at: when it began.
        until: when it was over; infinity while it is not.
        pids: whom it concerns; nobody in particular: everybody.
        bound: how long after a holder's end its lease may still be there because of this.
    """

    kind: str
    at: float
    until: float = math.inf
    pids: frozenset[int] = frozenset()
    bound: float = 0.0

    def concerns(self, pid: int) -> bool:
        """Tell whether a body in this process has to do with it."""
        return not self.pids or pid in self.pids

    def endangers(self, limits: Limits) -> tuple[float, float]:
        """Return from when to when a lease that was held before can be taken by somebody else; never: an empty span."""
        earliest = self.at + limits.ttl * 2 / 3  # the last renewal was up to a third of a TTL before
        if self.kind == "stop":
            return earliest, self.until
        if self.kind == "outage":
            return earliest, self.until + limits.heal
        if self.kind in ("empty", "unlock"):
            return self.at, self.until + limits.heal
        return math.inf, -math.inf


@dataclass
class Schedule:
    """All faults of a run, in the order of their beginning."""

    faults: list[Fault] = field(default_factory=list)

    def __iter__(self) -> Iterator[Fault]:
        return iter(self.faults)

    def add(self, kind: str, pids: frozenset[int] = frozenset(), bound: float = 0.0) -> Fault:
        """Note a fault that begins now."""
        fault = Fault(kind, now(), pids=pids, bound=bound)
        self.faults.append(fault)
        return fault

    @contextmanager
    def during(self, kind: str, pids: frozenset[int] = frozenset(), bound: float = 0.0) -> Iterator[Fault]:
        """Note a fault that begins now and ends with the block."""
        fault = self.add(kind, pids, bound)
        try:
            yield fault
        finally:
            fault.until = now()
