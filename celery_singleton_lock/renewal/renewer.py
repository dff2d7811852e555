"""One thread in each process that runs bodies keeps all leases of that process alive.

A lease is renewed every third of its TTL. A renewal that fails is tried again so often that two more tries fit before the
deadline, which counts from before the last successful call was sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from celery_singleton_lock.clock import now
from celery_singleton_lock.errors import StoreError, StoreUnavailable
from celery_singleton_lock.lease import Lease
from celery_singleton_lock.log import logger
from celery_singleton_lock.native import CallbackRunner, NativeEvent, native_lock, start_native_thread
from celery_singleton_lock.store.protocol import LeaseRequest, LockStore, RenewResult

BATCH = 100
DOUBTS = 1000  # how many claims without an answer are kept in mind, and how many leases to be released; others expire
SOON = 2.5  # seconds at most between tries to give a claim back


class Listener(Protocol):
    """Who is told what becomes of leases, by way of a `CallbackRunner`."""

    def renewed(self, lease: Lease) -> None:
        """Its expiry was put off. Called by the renewal thread itself: must be quick and not fail."""

    def lost(self, lease: Lease) -> None:
        """It ended under its body. Told once."""

    def reacquired(self, lease: Lease) -> None:
        """It was gone from the store, nobody else had it, and it was taken again."""

    def unreachable(self, lease: Lease, error: StoreError) -> None:
        """It could not be renewed for now. Told once for each outage."""


class BackgroundLoop:
    """A native thread that sleeps until something is due, and outlives every error.

    Arguments:
        step: does what is due, and answers when the next thing is, as a time of `clock`; infinity where there is none.
        hub: where errors are logged.
        clock: gives the time in seconds.
    """

    def __init__(self, step: Callable[[], float], hub: CallbackRunner, clock: Callable[[], float] = now) -> None:
        self._step = step
        self._hub = hub
        self._clock = clock
        self._alarm = NativeEvent()
        self._mutex = native_lock()
        self._started = self._ended = False
        self._next = math.inf  # only spares needless alarms: each step finds out for itself what is due

    def wake(self, at: float) -> None:
        """See to it that the next step comes no later than that time."""
        if at >= self._next:
            return
        with self._mutex:
            if self._ended:
                return
            if not self._started:
                start_native_thread(self._run)
                self._started = True
        self._next = at
        self._alarm.set()

    def end(self) -> None:
        """End the thread for good, after the step that it may be at."""
        with self._mutex:
            self._ended = True
        self._alarm.set()

    def _run(self) -> None:
        while not self._ended:
            try:
                self.run_once()
            except BaseException as error:  # whatever it is, leases must go on being renewed
                self._next = 0.0  # at once, where not even the next lines come to their end, memory being short
                try:
                    self._next = self._clock() + 0.1
                    notify(
                        self._hub, partial(logger.error, "Renewal of locks met an error and goes on", exc_info=error)
                    )
                except BaseException:
                    pass

    def run_once(self) -> None:
        while (left := self._next - self._clock()) > 0:
            # No longer than a second: the wait does not count the time that a machine is suspended.
            if self._alarm.wait(None if left == math.inf else min(left, 1.0)):
                break
        if self._ended:
            return
        self._next = math.inf
        self._next = self._step()


def notify(hub: CallbackRunner, callback: Callable[[], object]) -> None:
    """Let a callback run that logs or sends signals; an error in a user's handler or filter must not hurt a lease."""
    with suppress(Exception):
        hub.call(callback)


@dataclass
class _Doubt:
    """A claim of nobody that the store may hold.

    Arguments:
        claim: to be given back.
        success: of a lease whose body is over, how that ended; None: the claim was never answered.
        due: when it is given back next.
        answered: whether the store has confirmed that once.
    """

    claim: LeaseRequest
    success: bool | None
    due: float
    answered: bool = False


class Renewer:
    """Renews the leases of one process.

    Arguments:
        store: where they live, for the renewal thread.
        body_store: the same for the threads of bodies; another connection where the renewal thread must not share one.
        hub: how the listener is called.
        listener: told what becomes of leases.
        clock: gives the time in seconds.
    """

    def __init__(
        self,
        store: LockStore,
        body_store: LockStore,
        hub: CallbackRunner,
        listener: Listener,
        clock: Callable[[], float] = now,
    ) -> None:
        self._store = store
        self._body_store = body_store
        self._hub = hub
        self._listener = listener
        self._clock = clock
        self._leases: dict[str, Lease] = {}
        self._doubts: dict[str, _Doubt] = {}
        self._finishing: dict[str, tuple[LeaseRequest, float]] = {}  # and when the store is told next that they are
        self._planned = math.inf  # when the thread looks next; infinity while it looks, or sleeps for good
        self._failing = False
        self._mutex = native_lock()
        self._loop = BackgroundLoop(self.renew_due, hub, clock)

    def add(self, lease: Lease) -> None:
        """Keep this lease alive from now on."""
        assert lease.claim is not None
        self._leases[lease.claim.token] = lease
        self._failing = False  # the store has just granted it, and a short task ends before a renewal tells so
        if lease.due < self._planned:
            self._loop.wake(lease.due)
            self._planned = lease.due

    def remove(self, lease: Lease) -> None:
        """Let go of a lease whose body is over. Waits for a call that is taking it again, so that nothing is left behind."""
        lease.closed = True
        assert lease.claim is not None
        self._leases.pop(lease.claim.token, None)
        if lease.retaking is not None:
            with lease.retaking:
                pass

    def doubt(self, claim: LeaseRequest, success: bool | None = None) -> None:
        """Give back what this claim may have, though the store has not said so: now, or as soon as it is back.

        Arguments:
            claim: of nobody.
            success: how its body ended; None: it has had none.
        """
        if len(self._doubts) < DOUBTS * (1 if success is None else 2):
            time = self._clock()
            self._doubts[claim.token] = _Doubt(claim, success, time)
            self._loop.wake(time)

    def finishing(self, claim: LeaseRequest) -> None:
        """Let a waiting copy of the message wait until `finished`: the body ended in success, its result is not stored yet."""
        due = self._clock() + claim.ttl / 3
        with self._mutex:
            self._finishing[claim.token] = claim, due
        self._loop.wake(due)

    def finished(self, claim: LeaseRequest) -> None:
        """The copy is told how the body ended."""
        with self._mutex:
            self._finishing.pop(claim.token, None)

    def verify(self, lease: Lease) -> bool:
        """Ask the store whether a lease past its deadline is still owned; if not, it is lost. Called by the body."""
        self._renew([lease], self._body_store, take_again=False)
        return lease.held

    def end(self) -> None:
        """Renew nothing from now on; the thread ends."""
        self._loop.end()

    def renew_due(self) -> float:
        """Renew what is due or nearly so; answers when the next is due."""
        time, planned = self._clock(), self._planned
        self._planned = math.inf  # whoever adds a lease from now on wakes the thread again
        due = [lease for lease in self._leases.copy().values() if lease.due <= time + lease.ttl / 12]
        for start in range(0, len(due), BATCH):
            self._renew(due[start : start + BATCH], self._store)
        # A plan is kept though its lease is gone: a stream of short tasks does not wake the thread for each of them.
        idle = planned if planned > time else math.inf
        self._planned = min([lease.due for lease in self._leases.copy().values()], default=idle)
        return min(self._planned, self._clear_doubts(), self._prolong_waits())

    def _prolong_waits(self) -> float:
        """Tell the store of those that are finishing; answers when that is due next."""
        for claim, due in list(self._finishing.values()):
            time = self._clock()
            if due > time:
                continue
            try:
                self._store.release(claim, True, max(0.01, min(claim.ttl / 6, self._planned - time)))
                due = time + claim.ttl / 3
            except StoreError:
                due = time + claim.ttl / 12
            with self._mutex:
                if claim.token in self._finishing:
                    self._finishing[claim.token] = claim, due
        return min((due for _, due in list(self._finishing.values())), default=math.inf)

    def _clear_doubts(self) -> float:
        """Release what is in doubt until a lease is due; answers when the next is.

        Twice each: a store that was stopped may come to the release, which has another connection, before the claim itself.
        """
        if self._failing and self._planned <= self._clock() + SOON:  # a renewal comes first, and finds out
            return math.inf
        for doubt in self._doubts.copy().values():
            time = self._clock()
            if time >= self._planned:
                return time
            if doubt.due > time:
                continue
            ttl = min(doubt.claim.ttl, 12 * SOON)
            try:
                self._give_back(doubt, max(0.01, min(ttl / 6, self._planned - time)))
            except StoreUnavailable:
                return self._clock() + ttl / 12
            except StoreError:  # it is left to expire
                doubt.answered = True
            else:
                self._failing = False
            if doubt.answered:
                self._doubts.pop(doubt.claim.token, None)
            doubt.answered, doubt.due = True, time + ttl / 12
        return min((doubt.due for doubt in self._doubts.copy().values()), default=math.inf)

    def _give_back(self, doubt: _Doubt, timeout: float) -> None:
        if self._store.release(doubt.claim, bool(doubt.success), timeout):
            self._store.record_outcome(doubt.claim, bool(doubt.success), timeout)

    def _renew(self, leases: Sequence[Lease], store: LockStore, take_again: bool = True) -> None:
        sent_at = self._clock()
        try:
            answers = store.renew([lease.claim for lease in leases if lease.claim], renewal_timeout(leases, sent_at))
        except StoreError as error:
            self._failed(leases, error, sent_at)
            return
        self._failing = False
        done, renewed = RenewResult.RENEWED, self._listener.renewed
        for lease, answer in zip(leases, answers, strict=True):
            if lease.closed:
                continue
            if answer is done:
                lease.renewed(sent_at)
                renewed(lease)
            else:
                self._refused(lease, answer, sent_at, take_again)

    def _refused(self, lease: Lease, answer: RenewResult, sent_at: float, take_again: bool) -> None:
        if answer is RenewResult.MISSING:
            if self._clock() >= lease.deadline:
                self._mark_lost(lease)
            if take_again:
                self._take_again(lease)
            return
        self._ended(lease, answer)

    def _ended(self, lease: Lease, answer: RenewResult) -> None:
        if answer is RenewResult.REVOKED:
            self._give_up(lease)
        elif answer is RenewResult.NOT_OWNER:  # its owner may be over soon: then it is taken again, so that others wait
            lease.due = self._clock() + lease.ttl / 12
        self._mark_lost(lease)

    def _take_again(self, lease: Lease) -> None:
        """The store has lost the lease and nobody has it: take it atomically, unless its body has ended meanwhile.

        By the renewal thread alone: a greenlet that holds this mutex over a call could stop its own hub.
        """
        assert lease.claim is not None
        with self._mutex:
            lease.retaking = lease.retaking or native_lock()
        with lease.retaking:
            if lease.closed:
                return
            sent_at = self._clock()
            try:
                answer, taken = self._store.reacquire(lease.claim, lease.fence, renewal_timeout([lease], sent_at))
            except StoreError as error:
                self._failed([lease], error, sent_at)
                return
            if answer in (RenewResult.RENEWED, RenewResult.LOST):
                lease.renewed(sent_at)
        if answer is not RenewResult.RENEWED:
            self._ended(lease, answer)
        if taken:
            notify(self._hub, partial(self._listener.reacquired, lease))

    def _failed(self, leases: Sequence[Lease], error: StoreError, sent_at: float) -> None:
        """Try again soon. The last try is sent past the deadline: a body that keeps the GIL may have eaten the time before.

        For the same reason a try proves nothing that took twice as long as it may, where the main process renews as well; unless
        that has gone on for a TTL.
        """
        time = self._clock()
        for lease in leases:
            kept_from_running = lease.supervised and time - sent_at > lease.ttl / 3
            if sent_at >= lease.deadline + (lease.ttl if kept_from_running else 0.0):
                self._mark_lost(lease)
            soon = time + lease.ttl / 12  # two more tries of ttl / 6 fit between a failure half way and the deadline
            lease.due = soon if lease.lost else min(soon, max(time, lease.deadline))
        if not self._failing:
            self._failing = True
            notify(self._hub, partial(self._listener.unreachable, leases[0], error))

    def _give_up(self, lease: Lease) -> None:
        lease.owned = False
        assert lease.claim is not None
        self._leases.pop(lease.claim.token, None)

    def _mark_lost(self, lease: Lease) -> None:
        with self._mutex:
            told, lease.lost = lease.lost or lease.closed, True
        if told:
            return
        if lease.interrupt is not None:
            lease.interrupt.fire()
        notify(self._hub, partial(self._listener.lost, lease))


def renewal_timeout(leases: Sequence[Lease], time: float) -> float:
    """How long a call for these leases may take: a sixth of a TTL, and no longer than until a deadline that lies ahead."""
    ahead = [lease.deadline - time for lease in leases if lease.deadline > time and not lease.lost]
    return max(0.01, min([lease.ttl / 6 for lease in leases] + ahead))
