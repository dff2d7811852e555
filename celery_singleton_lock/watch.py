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

from celery_singleton_lock.board import Board
from celery_singleton_lock.clock import now
from celery_singleton_lock.errors import StoreError, StoreUnavailable
from celery_singleton_lock.log import logger
from celery_singleton_lock.renewal import BATCH
from celery_singleton_lock.stores import Claim, LockStore, Renewed

POLL = 0.5  # seconds between looks at children whose death cannot be waited for
LONGEST_WAIT = 3600.0  # seconds: `poll` cannot wait for more than some weeks


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
    """

    pid: int
    handle: int
    claim: Claim
    going: Callable[[], bool]
    due: float
    until: float
    freed: bool = False
    doubt: Claim | None = None


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

    def accepted(self, pid: int, claim: Claim, going: Callable[[], bool]) -> None:
        """A child has begun an attempt; what it was given before is over.

        Arguments:
            pid: the child.
            claim: the attempt; its digest may be empty.
            going: whether the pool still waits for the attempt's end.
        """
        time = self._clock()
        due, until = time + claim.ttl / 3, time + claim.ttl * 4 / 3  # it may begin to live until then
        with self._mutex:
            child = self._children.get(pid)
            if child is None:
                self._children[pid] = Child(pid, self._handle(pid), claim, going, due, until)
            else:
                self._clear_doubt(child, time)
                child.claim, child.going, child.due, child.until, child.freed = claim, going, due, until, False
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="singleton-watcher", daemon=True)
                self._thread.start()
        if child is None or due < self._next:
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
            return list(self._children.values())

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
        with self._mutex:
            if child.claim is claim:
                if digest == "":
                    self._clear_doubt(child, time)
                child.due = time + claim.ttl / 3 if going and not child.freed else math.inf
                child.until = time + claim.ttl * 4 / 3
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
            with self._mutex:
                if child.claim is claim:
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


def _failed(error: StoreError) -> None:
    logger.debug("Locks of pool processes could not be renewed for now: %s", error)  # the child tells of it


def _patience(claims: Sequence[Claim]) -> float:
    """How long a call for these may take."""
    return min(claim.ttl for claim in claims) / 6
