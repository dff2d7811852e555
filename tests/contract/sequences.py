"""Random sequences of calls of a store's verbs, and what a store answers to each of them.

A sequence is a task's options and steps: what a worker, a supervisor, a publisher or an operator may send for three messages, in
any order, time that passes, and losses of all data. What a step sends follows from the answers before it.

Not in it, as the stores need not agree: operators' pauses and records, which `memory://` does not have; calls in the millisecond
of an expiry; a loss of single keys (see `acquire.lua`). Options that exclude each other do not come together.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from celery_singleton_lock.holder import Holder
from celery_singleton_lock.max_starts import MaxStarts
from celery_singleton_lock.store.keys import LINE_TOKEN, queued_token, starts_key
from celery_singleton_lock.store.protocol import AcquireResult, AcquireStatus, LockStore
from celery_singleton_lock.store.requests import AfterRelease, LeaseSpec, Place

#: The time at the beginning, in seconds since 1970.
BEGINNING = 1000.0
#: Seconds that pass with each step, so that nothing expires at the time of a call: no duration below is a multiple of it.
TICK = 0.125
TTL = 10.001
RESERVATION = 25.001
AT_LEAST = 7.001
DUE = 20.001
QUIET, MAX_QUIET = 3.001, 9.001
WINDOW = 60.001
LENGTH = 25
WAITS = (1.0, 4.0, 6.0, 11.0, 21.0, 3601.0)


class Setup(NamedTuple):
    """The options of the task."""

    limit: int = 0
    line: str = ""  # whether and how messages wait: "", "wait", "first", "latest" or "replace"
    quiet: bool = False
    max_starts: MaxStarts | None = None
    supervised: bool = False
    alone: bool = False  # whether the third message has another lock key


class Step(NamedTuple):
    """One call. Each verb uses what it needs of the rest."""

    verb: str
    message: int = 0
    delivery: int = 0  # of the message
    copy: int = 0
    flag: bool = False
    choice: int = 0

    @property
    def loses(self) -> bool:
        """Whether all data are lost: seldom, as there is not much left to differ."""
        return self.verb == "lose" and self.choice == 5

    @property
    def task_id(self) -> str:
        """Id of the message."""
        return f"task{self.message}"

    @property
    def token(self) -> str:
        """Token of the delivery."""
        return f"token{self.message}{self.delivery}"

    @property
    def ticket(self) -> str:
        """Ticket of the message: two deliveries of one message that both wait have two."""
        return f"{self.identity}.{self.message}{self.delivery}"

    @property
    def identity(self) -> str:
        """Identity of the message: the second delivery is of another one with its task id. That of the last is not known."""
        return f"{self.message}{self.delivery % 2}" if self.message < 2 else ""


MAX_STARTS = (MaxStarts(1, WINDOW), MaxStarts(2, WINDOW), MaxStarts(2, WINDOW, "unsuccessful"))
#: Methods of `Player`, as often as they are to come.
VERBS = (
    *("start", "start", "turn", "turn", "turn", "join", "join", "join", "copy", "copy", "join_copy", "reserve"),
    *("release", "release", "release", "release", "keep", "cancel", "free", "outcome", "leave", "give_back"),
    *("begun", "renew", "supervise", "reacquire", "revoke", "holder", "wait", "wait", "lose"),
)


def random_sequence(seed: str) -> tuple[Setup, list[Step]]:
    """Return a sequence, always the same one for a seed."""
    chance = random.Random(seed)
    limit = chance.choice((0, 0, 2))
    setup = Setup(
        limit,
        chance.choice(("", "wait", "first", "latest", *(() if limit else ("replace",)))),
        chance.random() < 0.3,
        chance.choice((None, None, None, *MAX_STARTS)),
        chance.random() < 0.5,
        chance.random() < 0.2,
    )
    return setup, [_random_step(chance) for _ in range(LENGTH)]


def _random_step(chance: random.Random) -> Step:
    return Step(
        chance.choice(VERBS),
        chance.randrange(3),
        chance.choice((0, 0, 0, 1, 2)),
        chance.randrange(3),
        chance.random() < 0.5,
        chance.randrange(6),
    )


class Player:
    """Sends the calls of a sequence to one store.

    Arguments:
        store: it is empty.
        set_time: sets its clock.
        lose: deletes its data.
        base: what all keys begin with.
        setup: the options.
    """

    def __init__(
        self, store: LockStore, set_time: Callable[[float], None], lose: Callable[[], None], base: str, setup: Setup
    ) -> None:
        self._store = store
        self._set_time = set_time
        self._lose_data = lose
        self._base = base
        self._setup = setup
        self._time = BEGINNING
        self._leases: dict[str, LeaseSpec] = {}  # token -> what was granted last
        self._fences: dict[str, int] = {}

    def play(self, step: Step) -> Any:
        """Take a step, and return the answer."""
        self._pass(TICK)
        return rounded(getattr(self, f"_{step.verb}")(step))

    def _pass(self, seconds: float) -> None:
        self._time += seconds
        self._set_time(self._time)

    def _request(self, step: Step, token: str, place: Place | None, ttl: float = TTL, **more: Any) -> LeaseSpec:
        setup, is_third = self._setup, step.message == 2
        spec = LeaseSpec(
            self._base,
            "other" if setup.alone and is_third else "digest",
            token,
            ttl,
            step.task_id,
            f"node{step.delivery}",
            1 + step.message,
            limit=setup.limit and setup.limit + is_third,  # a callable may return another one for each message
            place=place,
            **more,
        )
        if not spec.queued:
            spec.stoppable, spec.max_starts = setup.line == "replace", setup.max_starts
        return spec

    def _delivery(self, step: Step, place: Place | None) -> LeaseSpec:
        more = {"supervised": self._setup.supervised, "redelivered": step.choice > 2, "comes_again": step.message > 0}
        return self._request(step, step.token, place, **more)

    def _place(self, step: Step, ticket: str, copy: float, **more: Any) -> Place | None:
        setup = self._setup
        if not (setup.line or ticket):
            return None
        place = Place(ticket, copy, stop=setup.line == "replace", identity=step.identity, **more)
        return place._replace(quiet=QUIET, max_quiet=MAX_QUIET) if setup.quiet else place

    def _joining(self, step: Step, copy: float) -> Place | None:
        line = self._setup.line
        room, takes_place = 2 if line == "wait" else 1, line in ("latest", "replace") and step.choice % 3 > 0
        text = f"message {step.ticket}" if step.choice else ""
        more = {
            "gives_way": takes_place or step.choice == 3,
            "room": room,
            "replace": takes_place,
            "next_copy": copy + 1,
            "due": DUE,
            "message": text,
        }
        return self._place(step, step.ticket, copy, **more)

    def _acquire(self, spec: LeaseSpec) -> AcquireResult:
        result = self._store.acquire(spec)
        if result.status is AcquireStatus.GRANTED and spec.token != LINE_TOKEN:
            if spec.limit:
                spec.use_slot(result.slot)
            self._leases[spec.token], self._fences[spec.token] = spec, result.fence
        return result

    # -- Deliveries: of a message that has not waited, of one published in its turn, and the second call of one that waits.

    def _start(self, step: Step) -> Any:
        return self._acquire(self._delivery(step, self._place(step, "", 0.0)))

    def _turn(self, step: Step) -> Any:
        return self._acquire(self._delivery(step, self._place(step, step.ticket, step.copy + 0.5)))

    def _join(self, step: Step) -> Any:
        return self._acquire(self._delivery(step, self._joining(step, 0.0 if step.flag else step.copy + 0.5)))

    # -- Delayed copies: the first call, and the second one.

    def _copy(self, step: Step) -> Any:
        return self._acquire(
            self._request(step, LINE_TOKEN, self._place(step, step.ticket, step.copy + 1.0), queued=True)
        )

    def _join_copy(self, step: Step) -> Any:
        return self._acquire(self._request(step, LINE_TOKEN, self._joining(step, step.copy + 1.0), queued=True))

    # -- Reservations: of a publisher, and the end of one that no worker starts.

    def _reserve(self, step: Step) -> Any:
        return self._acquire(self._reservation(step, RESERVATION))

    def _cancel(self, step: Step) -> Any:
        return self._store.release(self._reservation(step, TTL), success=False)

    def _reservation(self, step: Step, ttl: float) -> LeaseSpec:
        place = Place() if self._setup.line else None
        return self._request(step, queued_token(step.task_id), place, ttl, queued=True)

    # -- Ends of a lease: by its process, as a cooldown or as the reservation of an own retry, and by a supervisor.

    def _release(self, step: Step) -> Any:
        return self._store.release(self._lease(step), (True, False, None)[step.choice % 3])

    def _keep(self, step: Step) -> Any:
        if step.flag and not self._setup.limit:
            return self._store.release(self._lease(step), True, kept=AfterRelease("cooldown", AT_LEAST))
        kept = AfterRelease("queued", RESERVATION, queued_token(step.task_id))
        return self._store.release(self._lease(step), False, kept=kept)

    def _free(self, step: Step) -> Any:
        return self._store.release(self._supervisors(step), success=False)

    def _outcome(self, step: Step) -> Any:
        return self._store.record_outcome(self._lease(step), step.flag)

    def _leave(self, step: Step) -> Any:
        return self._store.leave(self._request(step, LINE_TOKEN, None, queued=True), step.ticket)

    def _begun(self, step: Step) -> bool:
        return self._store.has_begun(self._delivery(step, None))

    def _give_back(self, step: Step) -> None:
        text = f"message {step.ticket} again"
        self._store.give_back(self._request(step, LINE_TOKEN, None, queued=True), step.ticket, text)

    def _lease(self, step: Step) -> LeaseSpec:
        return self._leases.get(step.token) or self._delivery(step, None)

    def _supervisors(self, step: Step) -> LeaseSpec:
        """Return the request of a supervisor, which does not know the lock."""
        limit = int(self._setup.limit > 0)
        return LeaseSpec(self._base, "", step.token, TTL, step.task_id, "node", 1, supervised=True, limit=limit)

    # -- Renewal.

    def _renew(self, step: Step) -> Any:
        leases = [one for one in self._leases.values() if not one.queued] if step.flag else [self._lease(step)]
        return self._store.renew(leases), [one.lock for one in leases]

    def _supervise(self, step: Step) -> Any:
        spec = self._supervisors(step)
        return self._store.renew([spec]), spec.lock

    def _reacquire(self, step: Step) -> Any:
        spec = self._leases.get(step.token)
        return spec and self._store.reacquire(spec, self._fences[step.token])

    # -- Operators.

    def _holder(self, step: Step) -> Any:
        return self._store.holder(*self._keys(step))

    def _revoke(self, step: Step) -> Any:
        starts = (
            starts_key(self._base, self._delivery(step, None).digest) if step.flag and self._setup.max_starts else ""
        )
        fence = self._fences.get(step.token, 1) if step.choice % 2 else 0
        return self._store.revoke(self._base, *self._keys(step), starts, fence)

    def _keys(self, step: Step) -> tuple[str, str]:
        spec = self._delivery(step, None)
        return spec.slot_lock(0), spec.slots if spec.limit else ""

    # -- Time, and losses of data.

    def _wait(self, step: Step) -> None:
        self._pass(WAITS[step.choice])

    def _lose(self, step: Step) -> None:
        if step.loses:
            self._lose_data()


def rounded(answer: Any) -> Any:
    """Return an answer with times to a hundredth of a second: a store may count whole milliseconds."""
    if isinstance(answer, AcquireResult):
        times = {name: round(getattr(answer, name), 2) for name in ("quiet", "asked")}
        return answer._replace(holder=rounded(answer.holder), **times)
    if isinstance(answer, Holder):
        renewed = None if answer.renewed is None else round(answer.renewed, 2)
        return answer._replace(age=round(answer.age, 2), remaining=round(answer.remaining, 2), renewed=renewed)
    return answer


def difference(players: Sequence[Player], sequence: Sequence[Step]) -> str:
    """Play a sequence on all stores; return the steps until they answer one differently, with the answers, or nothing."""
    told = []
    for step in sequence:
        answers = [player.play(step) for player in players]
        told.append(f"{step}: {answers[0]!r}")
        if any(answer != answers[0] for answer in answers):
            return "\n".join([*told, *(f"  or {answer!r}" for answer in answers[1:])])
    return ""
