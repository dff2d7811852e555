"""The main process of a prefork worker renews for its children, and releases what a dead child held.

It knows the attempt that each child was given, and the store knows which lock that attempt has. So it needs no word from the
child, which may keep the GIL, be stopped, or be dead. What the store has lost it cannot take again: the child does, when it can.
"""

from __future__ import annotations

import math
import os
import select
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from celery_singleton_lock.clock import now
from celery_singleton_lock.errors import StoreError
from celery_singleton_lock.log import logger
from celery_singleton_lock.renewal.renewer import BATCH
from celery_singleton_lock.store.protocol import LeaseRequest, LockStore, RenewResult

POLL = 0.5  # seconds between looks at children whose death cannot be waited for
LONGEST_WAIT = 3600.0  # seconds: `poll` cannot wait for more than some weeks


#: What a child was given: when, and `ttl`, `claim` and `going` of `Supervisor.accepted`.
Given: TypeAlias = tuple[float, float, Callable[[int], LeaseRequest], Callable[[], bool]]


@dataclass
class Child:
    """A pool process and the attempt that it was last given.

    Arguments:
        pid: the process.
        handle: a file descriptor that can be read once the process is dead (`os.pidfd_open`), or -1.
        claim: the attempt; its digest may be empty.
        going: whether the pool still waits for the attempt's end.
        due: when the attempt's lease is to be renewed next; of a dead child, when freeing it is tried next.
        until: of a dead child, when freeing it is given up.
        freed: whether an operator took the attempt's lock; then the child alone may find out.
        given: what it was given last; replaced as a whole, without a lock.
        taken_up: of which of these the thread that watches has made the fields above.
    """

    pid: int
    handle: int
    claim: LeaseRequest
    going: Callable[[], bool]
    due: float
    until: float = 0.0
    freed: bool = False
    given: Given | None = None
    taken_up: Given | None = None


class Supervisor:
    """Keeps an eye on the children of one main process.

    A lease is renewed while the pool waits for its attempt's end, and freed when the child is dead. In
    between it is left alone: a pool is told that a time limit has ended an attempt before that is so, and what a child could not
    release it gives back later.

    Arguments:
        store: where the leases live.
        clock: gives the time in seconds.
    """

    def __init__(self, store: LockStore, clock: Callable[[], float] = now) -> None:
        self._store = store
        self._clock = clock
        self._children: dict[int, Child] = {}
        self._dead: list[Child] = []
        self._mutex = threading.Lock()
        self._thread: threading.Thread | None = None
        self._poll = select.poll()
        self._reader, self._writer = os.pipe()
        self._poll.register(self._reader, select.POLLIN)
        self._next = 0.0

    def accepted(self, pid: int, ttl: float, claim: Callable[[int], LeaseRequest], going: Callable[[], bool]) -> None:
        """A child has begun an attempt; what it was given before is over.

        Little is done here, in the process that all tasks go through: most are over before anybody looks.

        Arguments:
            pid: the child.
            ttl: of the attempt's lease, in seconds.
            claim: makes its claim, whose digest may be empty, of the pid.
            going: whether the pool still waits for its end.
        """
        time = self._clock()
        given = time, ttl, claim, going
        child = self._children.get(pid)
        if child is not None:
            child.given = given
        if child is None or self._children.get(pid) is not child:  # it was buried meanwhile
            self._add(pid, given)
        elif time + ttl / 3 < self._next:
            self._ring()

    def _add(self, pid: int, given: Given) -> None:
        with self._mutex:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="singleton-watcher", daemon=True)
                thread.start()
                self._thread = thread
            if (child := self._children.get(pid)) is not None:  # another thread was faster
                child.given = given
            else:
                time, ttl, claim, going = given
                made = claim(pid)  # first: what fails must not leave a handle
                self._children[pid] = Child(pid, self._handle(pid), made, going, time + ttl / 3)
        self._ring()

    def _ring(self) -> None:
        os.write(self._writer, b"x")

    def close(self) -> None:
        """Give up the file descriptors, in a process that came of a fork."""
        for handle in (self._reader, self._writer, *(child.handle for child in self._children.values())):
            if handle >= 0:
                os.close(handle)

    def _handle(self, pid: int) -> int:
        try:
            handle = os.pidfd_open(pid)
        except (AttributeError, OSError):  # no such call here, or dead already: `_has_died` finds out
            return -1
        self._poll.register(handle, select.POLLIN)
        return handle

    def _run(self) -> None:
        while True:
            try:
                self._turn()
            except BaseException:  # whatever it is, leases must go on being renewed
                try:
                    threading.Event().wait(0.1)
                    logger.exception("Watching the pool's processes met an error and goes on")
                except BaseException:  # of a user's handler or filter, say
                    pass

    def _turn(self) -> None:
        """Wait until something is due, or a child dies; then see to it."""
        ready = {handle for handle, _ in self._poll.poll(self._timeout())}
        self._next = 0.0  # until the next wait, which looks at all children, nobody need ring
        if self._reader in ready:
            os.read(self._reader, 4096)
        time = self._clock()
        for child in self._snapshot():
            if self._has_died(child, ready):
                self._bury(child, time)
        for child in [child for child in self._dead if child.due <= time]:
            self._free(child, time)
        due = [child for child in self._snapshot() if child.due <= time + child.claim.ttl / 12]
        going = [child for child in due if self._is_going(child)]
        for start in range(0, len(going), BATCH):
            self._renew(going[start : start + BATCH], time)

    def _snapshot(self) -> list[Child]:
        with self._mutex:
            children = list(self._children.values())
        for child in children:
            self._take_up(child)
        return children

    def _take_up(self, child: Child) -> None:
        """What a child was given last is what counts from now on."""
        given = child.given
        if given is None or given is child.taken_up:
            return
        child.taken_up = given
        time, ttl, claim, going = given
        child.claim, child.going, child.freed, child.due = claim(child.pid), going, False, time + ttl / 3

    def _timeout(self) -> float | None:
        """Milliseconds until something is due; None: until a child dies or is added."""
        time = self._clock()
        self._next = math.inf  # whoever adds a child from now on rings
        watched = [child for child in self._snapshot() if child.due < math.inf]
        dues = [child.due for child in (*watched, *self._dead)]
        if any(child.handle < 0 for child in watched):
            dues.append(time + POLL)
        self._next = min(dues, default=math.inf)
        return min(max(0.0, self._next - time), LONGEST_WAIT) * 1000 + 1 if dues else None

    def _has_died(self, child: Child, ready: set[int]) -> bool:
        if child.handle >= 0:
            return child.handle in ready
        try:
            os.kill(child.pid, 0)
        except ProcessLookupError:
            return True
        return False

    def _bury(self, child: Child, time: float) -> None:
        """No more renewal for this one; its lease is freed, now that no code of it can run."""
        with self._mutex:
            del self._children[child.pid]
        if child.handle >= 0:
            self._poll.unregister(child.handle)
            os.close(child.handle)
        self._take_up(child)  # what it was given until now
        child.due, child.until = time, time + child.claim.ttl
        self._dead.append(child)

    def _free(self, child: Child, time: float) -> None:
        try:
            self._store.release(child.claim, success=False)
        except Exception as error:
            if time < child.until:
                child.due = time + POLL
                return
            logger.warning("The lock of pool process %d was left to expire: %s", child.pid, error)
        self._dead.remove(child)

    def _is_going(self, child: Child) -> bool:
        """Whether there may be a lease to renew; if not, nothing is due until the child is given another attempt."""
        if child.going() and not child.freed:
            return True
        child.due = math.inf
        return False

    def _renew(self, children: Sequence[Child], time: float) -> None:
        claims = [child.claim for child in children]
        answers: Sequence[RenewResult | None]
        try:
            answers = self._store.renew(claims, min(claim.ttl for claim in claims) / 6)
        except StoreError as error:
            # The child tells of it.
            logger.debug("Locks of pool processes could not be renewed for now: %s", error)
            answers = [None] * len(claims)
        for child, claim, answer in zip(children, claims, answers, strict=True):
            child.due = time + claim.ttl / (12 if answer in (None, RenewResult.NOT_OWNER) else 3)
            child.freed = answer is RenewResult.REVOKED
