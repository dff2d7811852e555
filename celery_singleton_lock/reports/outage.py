"""Reports an outage of the store once when it begins and once when it is over, however many calls fail meanwhile.

Each process reports its own outages. While one lasts, a thread asks the store each second whether it takes writes again: a
process may have no other reason to ask. The main process of a prefork worker also counts what its children tell it.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from celery_singleton_lock.clock import now
from celery_singleton_lock.errors import StoreError, StoreUnavailable
from celery_singleton_lock.lease import LeaseState
from celery_singleton_lock.log import logger
from celery_singleton_lock.native import native_lock
from celery_singleton_lock.store.protocol import GracePeriod
from celery_singleton_lock.store.records import VERBS

#: An outage of the store begins for a worker. Has `error`.
OUTAGE_BEGAN = "singleton-outage-began"
#: It is over. Has `seconds`, `store_errors` (calls that failed), `postponed` (tasks), `without_lock` (tasks) and `lost` (leases).
OUTAGE_ENDED = "singleton-outage-ended"
#: Seconds between two questions whether the store answers.
LOOK_INTERVAL = 1.0
#: Seconds for which it has to answer until an outage is over; the second number within a minute after another outage, so that a
#: store that comes and goes does not fill the log.
SETTLED, SETTLED_AGAIN = 1.0, 20.0
#: Seconds after that for which leases that were lost may find out whether another task had their lock.
_PATIENCE = 5.0
#: How many lost leases are named.
_NAMED = 5


class Outages:
    """The outages of one process's store. Any thread may use it.

    Arguments:
        where: the store's URL, without a login.
        probe: writes to the store.
        report: calls a callback in a thread that may log.
    """

    def __init__(
        self,
        where: str,
        probe: Callable[[], object],
        report: Callable[[Callable[[], object]], object],
        clock: Callable[[], float] = now,
    ) -> None:
        self._where, self._probe, self._report, self._clock = where, probe, report, clock
        self.wake: Callable[[float], object] = lambda at: None  # has `look` called at this time
        #: Tells the main process what this child counts: a name, and the error of a call.
        self.forward: Callable[[str, StoreError | None], object] = lambda name, error: None
        #: Tells others by an event with these fields; called in a thread that may log.
        self.tell: Callable[[str, Mapping[str, Any]], object] = lambda what, fields: None
        self._mutex = native_lock()
        self._began = self._answers_since = math.inf
        self._ended = self._grace_until = -math.inf
        self._counts: Counter[str] = Counter()  # in this outage
        self._errors: Counter[str] = Counter()  # since the process began
        self._error = ""  # that the outage began with
        self._is_told = False  # by a line in the log of this process
        self._lost: dict[str, tuple[str, str]] = {}  # token -> task, and who had its lock meanwhile

    def failed(self, error: StoreError, report: Callable[[Callable[[], object]], object] | None = None) -> None:
        """Note that a call got no answer: an outage begins, or goes on. `report` is for a thread that may log."""
        if self._begin(error, is_told=True):
            text = "The store of locks is unreachable at %s: %s. Until it answers, lines about single tasks have level DEBUG"
            (report or self._report)(partial(logger.warning, text, self._where, str(error).rstrip(".")))

    def heard(self, name: str, error: StoreError | None) -> None:
        """Note what a child has counted; its log tells of the outage."""
        if isinstance(error, StoreUnavailable):
            self._begin(error, is_told=False)
        self.count(name, error)

    def _begin(self, error: StoreError, is_told: bool) -> bool:
        with self._mutex:
            begins = self._began == math.inf
            self._began = min(self._began, self._clock())
            self._answers_since = math.inf
            if begins:
                self._error, self._is_told = str(error), is_told
        if begins:
            self._report(lambda: self.tell(OUTAGE_BEGAN, {"error": str(error)}))
            self.wake(self._clock() + LOOK_INTERVAL)
        return begins

    def log(self, log: Any, text: str, error: StoreError, *before: object) -> None:
        """Log a call that failed: at level DEBUG in an outage, as a WARNING if the store has refused it.

        Not for a native thread in a gevent or eventlet worker, which must not log. `before`: what is formatted before the error.
        """
        if isinstance(error, GracePeriod):
            self._in_grace(error)
            log.debug(text, *before, error)
        elif isinstance(error, StoreUnavailable):
            self.failed(error, lambda callback: callback())
            log.debug(text, *before, error)
        else:
            log.warning(text, *before, error)

    def _in_grace(self, error: GracePeriod) -> None:
        with self._mutex:
            is_known, self._grace_until = self._clock() < self._grace_until, self._clock() + error.left
        if not is_known:
            logger.warning("Tasks wait as singleton_lock_grace says: %s", error)

    def count(self, name: str, error: StoreError | None = None) -> None:
        """Count a call that failed, by its verb.

        In an outage, also a message that was `postponed` for it, a task or message `without` a lock, or a lease that was `lost`.
        """
        with self._mutex:
            if self._began < math.inf:
                self._counts[name] += 1
            if name in VERBS:
                self._errors[name] += 1
        self.forward(name, error)

    def status(self) -> dict[str, Any]:
        """Return how many calls have failed in this process and its children, by verb, and the outage of now, for JSON."""
        with self._mutex:
            lasts = self._clock() - self._began
            outage = None if lasts < 0 else {"since": time.time() - lasts, "error": self._error, **self._numbers()}
            return {"errors": {verb: self._errors[verb] for verb in VERBS}, "outage": outage}

    def _numbers(self) -> dict[str, int]:
        counts = self._counts
        errors = sum(counts[verb] for verb in VERBS)
        others = {"postponed": counts["postponed"], "without_lock": counts["without"], "lost": counts["lost"]}
        return {"store_errors": errors, **others}

    def lost(self, state: LeaseState) -> None:
        """Note a lease that was lost in the outage."""
        with self._mutex:
            if self._began == math.inf:
                return
            task = f"{getattr(state.task, 'name', state.task)}[{state.spec.task_id}]"
            self._lost[state.spec.token] = task, ""
        self.count("lost")

    def found(self, state: LeaseState, was_alone: bool) -> None:
        """Note whether another task had the lock of a lease that was lost in the outage."""
        with self._mutex:
            task, known = self._lost.get(state.spec.token, ("", ""))
            if task and not known:
                told = "nobody else had its lock" if was_alone else "another task had its lock meanwhile"
                self._lost[state.spec.token] = task, told

    def look(self) -> float:
        """Ask the store, and report the end of an outage; return when to do so again."""
        try:
            self._probe()
        except StoreUnavailable:
            self._answers_since = math.inf
        except StoreError:  # an answer
            self._note_answer()
        else:
            self._note_answer()
        with self._mutex:
            if not self._is_over():
                return self._clock() + LOOK_INTERVAL
            text, arguments = self._summary()
            ended = {"seconds": self._answers_since - self._began, **self._numbers()}
            is_told, self._ended, self._began = self._is_told, self._answers_since, math.inf
            self._counts, self._lost = Counter(), {}
        if is_told:
            self._report(partial(logger.warning, text, *arguments))
        self._report(lambda: self.tell(OUTAGE_ENDED, ended))
        return math.inf

    def _note_answer(self) -> None:
        with self._mutex:
            self._answers_since = min(self._answers_since, self._clock())

    def _is_over(self) -> bool:
        settled = SETTLED_AGAIN if self._began - self._ended < 60.0 else SETTLED
        is_open = any(not told for _, told in self._lost.values())
        return self._clock() - self._answers_since >= settled + (_PATIENCE if is_open else 0.0)

    def _summary(self) -> tuple[str, tuple[Any, ...]]:
        told = [f"{task} ({finding or 'its body has ended'})" for task, finding in self._lost.values()]
        names = ", ".join(told[:_NAMED]) + (f" and {len(told) - _NAMED} others" if len(told) > _NAMED else "")
        text = (
            "The store of locks answers again after %.1f s; tasks postponed: %d, tasks that went on without a lock: %d, "
            "leases lost: %d" + (", of %s" if told else "")
        )
        numbers = self._counts["postponed"], self._counts["without"], len(told)
        return text, (self._answers_since - self._began, *numbers, *([names] if told else []))


class Limit:
    """Allows a few lines a minute, as many leases may be lost, or be missing in the store, at once."""

    def __init__(self, lines: int = 5, per: float = 60.0, clock: Callable[[], float] = now) -> None:
        self._lines, self._per, self._clock = lines, per, clock
        self._written: list[float] = []

    def allows(self) -> bool:
        """Tell whether one more line may be written."""
        time = self._clock()
        self._written = [at for at in self._written if at > time - self._per]
        if len(self._written) >= self._lines:
            return False
        self._written.append(time)
        return True
