"""The main process of a prefork worker renews for its children, and frees what a dead child held.

It knows the attempt that each child has been given; the store knows what lock the attempt has, if any, and for when the store
has lost that, the child has written it down. So it needs no word from the child, which may hold the GIL, be stopped, or be dead.
"""

from __future__ import annotations

import math
import os
import select
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from celery_singleton_lock.board import Board
from celery_singleton_lock.clock import now
from celery_singleton_lock.errors import StoreError, StoreUnavailable
from celery_singleton_lock.log import logger
from celery_singleton_lock.renewal import BATCH
from celery_singleton_lock.stores import Claim, LockStore, Renewed

POLL = 0.5  # seconds between looks at children whose death cannot be waited for
LONGEST_WAIT = 3600.0  # seconds: `poll` cannot wait for more than some weeks


#: What a child was given: when, and `ttl`, `claim` and `going` of `Watcher.accepted`.
Given: TypeAlias = tuple[float, float, Callable[[int], Claim], Callable[[], bool]]


@dataclass
class Child:
    """A pool process and the attempt that it was last given.

    Arguments:
        pid: the process.
        handle: a file descriptor that can be read once the process is dead (`os.pidfd_open`), or -1.
        claim: the attempt; its digest may be empty.
        going: whether the pool still waits for the attempt's end.
        due: when the attempt's lease is to be renewed next; of a dead child, when freeing it is tried next.
        until: when its lease has expired, unless the child renewed it; of a dead child, when freeing it is given up.
        freed: whether an operator took the attempt's lock; then the child alone may find out.
        doubt: an attempt whose lease the store may have taken again, though it has not said so.
        given: what it was given last; replaced as a whole, without a lock.
        taken_up: of which of these the thread that watches has made the fields above.
    """

    pid: int
    handle: int
    claim: Claim
    going: Callable[[], bool]
    due: float
    until: float
    freed: bool = False
    doubt: Claim | None = None
    given: Given | None = None
    taken_up: Given | None = None


class Watcher:
    """Keeps an eye on the children of one main process.

    A lease is renewed while the pool waits for its attempt's end and the child counts on it, and freed when the child is dead. In
    between it is left alone: a pool is told that a time limit has ended an attempt before that is so, and what a child could not
    release it gives back later.

    Arguments:
        store: where the leases live.
        board: where children write down what they have; None: the store alone knows that.
        clock: gives the time in seconds.
    """

    def __init__(self, store: LockStore, board: Board | None = None, clock: Callable[[], float] = now) -> None:
        self._store = store
        self._board = board
        self._clock = clock
        self._children: dict[int, Child] = {}
        self._dead: list[Child] = []
        self._mutex = threading.Lock()
        self._thread: threading.Thread | None = None
        self._poll = select.poll()
        self._reader, self._writer = os.pipe()
        self._poll.register(self._reader, select.POLLIN)
        self._next = 0.0

    def accepted(self, pid: int, ttl: float, claim: Callable[[int], Claim], going: Callable[[], bool]) -> None:
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
                self._children[pid] = Child(pid, self._handle(pid), made, going, *_times(time, ttl))
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
        holding = [child for child in due if self._is_holding(child, time)]
        for start in range(0, len(holding), BATCH):
            self._renew(holding[start : start + BATCH], time)

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
        self._clear_doubt(child, time)
        child.claim, child.going, child.freed = claim(child.pid), going, False
        child.due, child.until = _times(time, ttl)

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

    def _is_holding(self, child: Child, time: float) -> bool:
        """Whether there is a lease to renew; if not, nothing is due for a while, or until the child is given another attempt."""
        claim, going = child.claim, child.going()
        digest = self._digest(child, claim)
        if going and not child.freed and digest != "":
            return True
        if digest == "":
            self._clear_doubt(child, time)
        child.due, child.until = _times(time, claim.ttl)
        if not going or child.freed:
            child.due = math.inf
        return False

    def _digest(self, child: Child, claim: Claim) -> str | None:
        """Of the lock on which a child counts; empty: it has none for this attempt; None: that is not known here."""
        return self._board.digest(child.pid, claim.token) if self._board else None

    def _clear_doubt(self, child: Child, time: float) -> None:
        """Give back what may have been taken again for an attempt whose body is over."""
        if (doubt := child.doubt) is not None:
            child.doubt = None
            self._dead.append(replace(child, claim=doubt, due=time, until=time + doubt.ttl))

    def _renew(self, children: Sequence[Child], time: float) -> None:
        claims = [child.claim for child in children]
        answers: Sequence[Renewed | None]
        try:
            answers = self._store.renew(claims, _patience(claims))
        except StoreError as error:
            _failed(error)
            answers = [None] * len(claims)
        away = False
        for child, claim, renewed in zip(children, claims, answers, strict=True):
            answer = renewed
            if renewed is Renewed.GONE:
                answer = None if away else self._take_again(child, claim, time)
                away = answer is None
            child.due = time + claim.ttl / (12 if answer in (None, Renewed.TAKEN) else 3)
            child.freed = answer is Renewed.FREED
            if answer is Renewed.DONE:
                child.until = time + claim.ttl
            elif answer in (Renewed.LOST, Renewed.TAKEN):
                child.until = time  # the child may not know: what is taken again stays lost

    def _take_again(self, child: Child, claim: Claim, time: float) -> Renewed | None:
        """Take again what the store has lost, for a child that counts on it and may have no chance itself; None: no answer."""
        digest = self._digest(child, claim)
        if not digest:
            return Renewed.GONE
        whole, expired = replace(claim, digest=digest), time >= child.until
        child.doubt = claim
        try:
            answer, taken = self._store.retake(whole, expired, _patience([whole]))
            if self._digest(child, claim) != digest:  # its body has ended meanwhile
                self._store.release(whole, success=False)
                taken = False
        except StoreError as error:
            _failed(error)
            return None if isinstance(error, StoreUnavailable) else Renewed.GONE
        child.doubt = None
        if taken:
            logger.warning(
                "Task %s on %s (pid %d): its lock %s was gone from the store, and was taken again for it",
                whole.task_id, whole.node, whole.pid, whole.lock,
            )  # fmt: skip
        return answer


def _times(time: float, ttl: float) -> tuple[float, float]:
    """When a lease that its child may begin to have within a third of a TTL is renewed first, and has expired."""
    return time + ttl / 3, time + ttl * 4 / 3


def _failed(error: StoreError) -> None:
    logger.debug("Locks of pool processes could not be renewed for now: %s", error)  # the child tells of it


def _patience(claims: Sequence[Claim]) -> float:
    """How long a call for these may take."""
    return min(claim.ttl for claim in claims) / 6
