"""The faults of a run: their kinds, their processes or servers, and their times."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.faults.ledger import now


@dataclass(frozen=True)
class Limits:
    """The values from which bounds are computed, in seconds.

    Arguments:
        ttl: ``lock_ttl``.
        timeout: ``singleton_lock_store_timeout``.
        slack: the delay that a busy machine may add.
    """

    ttl: float
    timeout: float = 1.0
    slack: float = 0.3

    @property
    def heal(self) -> float:
        """The time from the store's return until each renewer has reached it."""
        return self.ttl / 3 + self.timeout


@dataclass
class Fault:
    """One fault.

    Arguments:
        kind: ``kill``, ``stop`` (processes), ``outage`` (the store is unreachable), ``empty`` (it also lost its data),
            ``pause`` (an outage too short to lose a lease; leases of ended bodies may exist for a TTL, though fault 25 has
            a closer bound), ``child stop`` (of one prefork child),
            ``unlock`` (by an operator), ``reply`` (to a release, lost: the message that it named may lose its place). Other
            kinds excuse nothing.
        at: when it began.
        until: when it ended; infinity before that.
        pids: of the processes that it affects; empty for all.
        bound: seconds for which a lease may exist after its holder's end because of this fault.
    """

    kind: str
    at: float
    until: float = math.inf
    pids: frozenset[int] = frozenset()
    bound: float = 0.0

    def concerns(self, pid: int) -> bool:
        """Tell whether the fault affects a body in this process."""
        return not self.pids or pid in self.pids

    def endangers(self, limits: Limits) -> tuple[float, float]:
        """Return the span in which another holder can acquire a lease that was held before; an empty span if none can."""
        earliest = self.at + limits.ttl * 2 / 3  # the last renewal was up to a third of a TTL earlier
        if self.kind == "stop":
            return earliest, self.until
        if self.kind == "outage":
            return earliest, self.until + limits.heal
        if self.kind in ("empty", "unlock"):
            return self.at, self.until + limits.heal
        return math.inf, -math.inf


@dataclass
class Schedule:
    """All faults of a run, in the order of their start."""

    faults: list[Fault] = field(default_factory=list)

    def __iter__(self) -> Iterator[Fault]:
        return iter(self.faults)

    def add(self, kind: str, pids: frozenset[int] = frozenset(), bound: float = 0.0) -> Fault:
        """Record a fault that begins now."""
        fault = Fault(kind, now(), pids=pids, bound=bound)
        self.faults.append(fault)
        return fault

    @contextmanager
    def during(self, kind: str, pids: frozenset[int] = frozenset(), bound: float = 0.0) -> Iterator[Fault]:
        """Record a fault that begins now and ends with the block."""
        fault = self.add(kind, pids, bound)
        try:
            yield fault
        finally:
            fault.until = now()
