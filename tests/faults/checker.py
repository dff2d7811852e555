"""Reads the events and the faults of a run, and finds violations of the promise.

The checker does not use the library. Bodies report their start and end, and a probe reports the leases in the store. MONITOR
reports each change of a lease, and the schedule lists the faults.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from tests.faults.ledger import Event
from tests.faults.schedule import Fault, Limits

#: Seconds within which the probe sees a death on a busy machine.
SEEN = 0.3
#: Kinds of faults after which a message may run again.
DISTURBING = ("kill", "stop", "child stop", "outage", "empty")
#: Seconds within which a worker decides on a message: it may be postponed, or wait for a running one.
HOLDUP = 60.0


#: Fields of a body that its task's options set.
OPTIONS = ("limit", "least", "most", "starts", "quiet")


@dataclass(frozen=True)
class Violation:
    """A violation of the promise.

    Arguments:
        kind: its name.
        text: its description, with times.
    """

    kind: str
    text: str


@dataclass
class Body:
    """One run of a body under one lease; the death of its process is also its end.

    Arguments:
        work: as its task reports it; no more bodies of the same work than its limit may run concurrently.
        key: of its lock, as the library reports it.
        taken: when MONITOR saw that its lease was acquired, else its start.
        limit: how many bodies of its work may run at once.
        least: seconds from ``taken`` for which a success keeps the lock held.
        most: seconds from ``taken`` after which its lease is lost.
        starts: how many starts may crash, and for how many seconds each counts.
        quiet: seconds without another call before it starts, and after the first call at the latest.
    """

    work: str
    key: str
    run: str
    task_id: str
    pid: int
    start: float
    taken: float
    limit: int = 1
    least: float = 0.0
    most: float = math.inf
    starts: Sequence[float] = (math.inf, 0.0)
    quiet: Sequence[float] = (0.0, 0.0)
    end: float = math.inf
    how: str = "goes on"

    @property
    def cap(self) -> float:
        """When its lease is lost at the latest."""
        return self.taken + self.most

    def __str__(self) -> str:
        return f"{self.run} of {self.task_id[:8]} in {self.pid}, {self.start:.2f} to {self.end:.2f} ({self.how})"


def check(events: Sequence[Event], faults: Iterable[Fault], limits: Limits) -> list[Violation]:
    """Return all violations.

    Arguments:
        events: of a ledger.
        faults: of the schedule.
        limits: from which the bounds are computed.
    """
    faults = list(faults)
    faults += _absences(faults, limits)
    bodies = bodies_of(events)
    _kill(bodies, faults)
    lost = [event for event in events if event["what"] == "lost"]
    told = [*lost, *(event for event in events if event["what"] == "stopped")]
    found = [
        *_reused(bodies),
        *_overlaps(events, bodies, told, faults, limits),
        *_lost_without_fault(events, bodies, lost, faults, limits),
        *_promises(events, bodies, faults),
        *_leases(events, bodies, faults, limits),
        *_store(events, faults, limits),
        *_lines(events, bodies, faults),
        *_caps(bodies, lost, faults, limits),
        *_cooldowns(bodies, faults, limits),
        *_starts(events, bodies, limits),
        *_quiet(events, bodies),
    ]
    return found


def _absences(faults: Iterable[Fault], limits: Limits) -> list[Fault]:
    """Return outages that were planned as something shorter: on a busy machine pauses last longer, or follow each other.

    Faults that are less than a third of a TTL apart leave no time for a renewal and its retry, so they count as one.
    """
    stretches: list[Fault] = []
    for fault in sorted((f for f in faults if f.kind in ("pause", "outage", "empty")), key=lambda fault: fault.at):
        if stretches and fault.at - stretches[-1].until < limits.ttl / 3:
            stretches[-1].until = max(stretches[-1].until, fault.until)
        else:
            stretches.append(Fault("outage", fault.at, fault.until))
    return [stretch for stretch in stretches if stretch.until - stretch.at > limits.ttl * 2 / 3]


def bodies_of(events: Sequence[Event]) -> list[Body]:
    """Return the runs of bodies, in the order of their start."""
    bodies: list[Body] = []
    going: dict[tuple[str, int], list[Body]] = {}
    taken = {run: times[0] for run, times in _seen(events, "take").items()}
    for event in events:
        if event["what"] == "start":
            start, run = event["at"], event["run"]
            who = (event["work"], event["key"], run, event["task_id"], event["pid"], start)
            own = {name: event[name] for name in OPTIONS if name in event}
            bodies.append(Body(*who, min(start, taken.get(run, start)), **own))
            going.setdefault((run, event["pid"]), []).append(bodies[-1])
        elif event["what"] == "end" and (begun := going.get((event["run"], event["pid"]))):
            body = begun.pop(0)  # without a start, the body was ended before it could report it
            body.end, body.how = event["at"], event["how"]
    for event in events:
        if event["what"] == "death":
            _die(bodies, event)
    return sorted(bodies, key=lambda body: body.start)


def _seen(events: Iterable[Event], *does: str) -> dict[str, list[float]]:
    """Return the times at which MONITOR saw these actions, by run."""
    seen: dict[str, list[float]] = {}
    for event in events:
        if any(did in does for did in event.get("does", ())):
            seen.setdefault(event["run"], []).append(event["at"])
    return seen


def _die(bodies: Iterable[Body], death: Event) -> None:
    for body in bodies:
        if body.pid == death["of"] and body.start <= death["at"] < body.end:
            body.end, body.how = death["at"], "died"


def _kill(bodies: Iterable[Body], faults: Iterable[Fault]) -> None:
    """End bodies at the kill of their process, because a busy machine may see the death much later."""
    for body in bodies:
        kills = [f.at for f in faults if f.kind == "kill" and body.pid in f.pids and body.start <= f.at <= body.end]
        if body.how == "died" and kills:
            body.end = min(body.end, min(kills) + SEEN)


def crowds(bodies: Sequence[Body]) -> Iterator[tuple[list[Body], Body]]:
    """Return each body that started while so many of its work ran as its limit allows, or more, after these others."""
    before: dict[str, list[Body]] = {}
    for second in bodies:
        # The time of a death is when a polling probe saw it.
        same = [
            first
            for first in before.get(second.work, ())
            if second.start < first.end - (SEEN if first.how == "died" else 0.0)
        ]
        if len(same) >= second.limit:
            yield same, second
        before[second.work] = [*same, second]


def _reused(bodies: Iterable[Body]) -> Iterator[Violation]:
    """Find leases under which more than one body ran, in any process."""
    begun: dict[str, Body] = {}
    for body in bodies:
        if body.run in begun:
            yield Violation("reused", f"{body.key}: {begun[body.run]} and {body} under one lease")
        begun[body.run] = body


def _overlaps(
    events: Sequence[Event], bodies: Sequence[Body], told: Sequence[Event], faults: list[Fault], limits: Limits
) -> Iterator[Violation]:
    had = _seen(events, "take", "renew")
    for others, newest in crowds(bodies):
        unexcused, untold = [], []
        for other in others:
            first, second = sorted(
                (other, newest), key=lambda body: body.taken
            )  # a worker may be stopped before its body
            held = max([first.taken, *(at for at in had.get(first.run, ()) if at <= second.taken)])
            excuse = _excuse(first, second, held, faults, limits)
            if excuse is None:
                unexcused.append(f"{first.work}, {first.key}: {first} and {second}")
            elif not _knows(first, second, excuse, told, faults, limits):
                untold.append(f"{first.work}, {first.key}: {first} was never told of {second}")
        room = newest.limit - 1  # for others beside it
        yield from (Violation("overlap", text) for text in (unexcused if len(unexcused) > room else ()))
        room = max(0, room - len(unexcused))
        yield from (Violation("untold", text) for text in (untold if len(untold) > room else ()))


def _excuse(first: Body, second: Body, held: float, faults: list[Fault], limits: Limits) -> Fault | None:
    if second.start >= first.cap + limits.ttl * 2 / 3:  # the last renewal was up to a third of a TTL before the cap
        return Fault("cap", first.cap, first.cap)
    for fault in faults:
        begin, end = _endangered(held, fault, limits)
        if fault.concerns(first.pid) and begin <= second.start <= end + limits.slack:
            return fault
    return None


def _endangered(held: float, fault: Fault, limits: Limits) -> tuple[float, float]:
    """Return the span in which another holder can acquire a lease because of a fault; an empty span if none can.

    Arguments:
        held: when its owner certainly had it. A fault that ended before that has not ended the lease.
    """
    begin, end = fault.endangers(limits)
    if held > fault.until:
        return math.inf, -math.inf
    if fault.kind in ("stop", "outage") and held > fault.at:
        begin = held + limits.ttl * 2 / 3
        if begin > end + limits.slack:  # the lease outlives the fault and is renewed
            return math.inf, -math.inf
    return begin, end


def _knows(
    first: Body, second: Body, excuse: Fault, told: Sequence[Event], faults: list[Fault], limits: Limits
) -> bool:
    by = _awake(first.pid, max(excuse.until, second.start), faults) + limits.heal + limits.slack
    return first.end < by or any(event["run"] == first.run and event["at"] <= by for event in told)


def _awake(pid: int, at: float, faults: list[Fault]) -> float:
    """Return when a process can next be notified: a stopped child cannot."""
    stops = [f.until for f in faults if f.kind == "child stop" and f.concerns(pid) and f.at <= at]
    return max([at, *stops])


def _lost_without_fault(
    events: Sequence[Event], bodies: Sequence[Body], lost: Sequence[Event], faults: list[Fault], limits: Limits
) -> Iterator[Violation]:
    runs = {body.run: body for body in bodies}
    begun = [(body.key, body.run, body.start, body.end) for body in bodies]
    begun += [(e["key"], e["run"], e["at"], e["at"]) for e in events if "take" in e.get("does", ())]

    def explains(fault: Fault, body: Body, at: float) -> bool:
        """Tell whether a fault explains a loss; lost data explain it only if another run had the lock."""
        others = [start <= at + limits.slack and fault.at <= end for key, run, start, end in begun
                  if key == body.key and run != body.run]  # fmt: skip
        return _explains(fault, body, at, faults, limits) and (fault.kind != "empty" or any(others))

    for event in lost:
        body = runs.get(event["run"])
        early = limits.slack if body and _in_peace(body, body.taken, faults, limits) else limits.ttl
        if body and event["at"] >= body.cap - early:  # the cap counts from before the acquire was sent
            continue
        if body is None or not any(explains(fault, body, event["at"]) for fault in faults):
            yield Violation("lost", f"{event.get('key')} of {body or event['run']}: at {event['at']:.2f}, by no fault")


def _explains(fault: Fault, body: Body, at: float, faults: list[Fault], limits: Limits) -> bool:
    # MONITOR ends with the store, so it may miss an acquire just before.
    unseen = limits.slack if fault.kind == "empty" and body.taken == body.start else 0.0
    begin, end = _endangered(body.taken - unseen, fault, limits)
    by = _awake(body.pid, max(begin, end), faults) + limits.heal + limits.slack
    return fault.concerns(body.pid) and begin <= at <= by


def _promises(events: Sequence[Event], bodies: Sequence[Body], faults: list[Fault]) -> Iterator[Violation]:
    """Find messages that did not run as often as expected: at least once, exactly once, or never."""
    pending = {event["task_id"] for event in unfinished(events, bodies, faults)}
    for event in events:
        if event["what"] != "sent":
            continue
        runs = [body for body in bodies if body.task_id == event["task_id"]]
        done = sum(body.how == "return" for body in runs)
        once = len(runs) <= 1 or _disturbed(event["at"], runs, faults)
        fits = {
            "run": True,
            "once": done == 1,
            "once in peace": once,
            "once unless killed": once,
            "decided in peace": once,
            "run after": once,
            "one attempt": len(runs) == 1,
            "none": not runs,
            "any": True,
        }
        never = event["task_id"] in pending
        if never or not fits[event["expect"]]:
            text = f"{event['task_id'][:8]}: spec {event['expect']!r}; {len(runs)} began, {done} came to their end"
            text += "".join(f"; {body.key}: {body}" for body in runs)
            yield Violation("never run" if never else "runs", text)


def _disturbed(sent: float, runs: Sequence[Body], faults: list[Fault]) -> bool:
    """Tell whether a fault touched a message between its sending and the end of its last body."""
    over = max(body.end for body in runs) + SEEN
    return any(f.kind in DISTURBING and f.at <= over and sent <= _until(f) + SEEN for f in faults)


def _until(fault: Fault) -> float:
    return fault.at if fault.kind == "kill" else fault.until  # a dead process does nothing more


def unfinished(events: Sequence[Event], bodies: Sequence[Body], faults: Iterable[Fault]) -> list[Event]:
    """Return the messages of which more must come: a run to its end, or a decision.

    Arguments:
        events: of a ledger, with the main process that received each message that a kill can lose, and the parent of each body.
        bodies: of these events.
        faults: of the schedule.
    """
    kills = [fault for fault in faults if fault.kind == "kill"]
    killed = {pid for fault in kills for pid in fault.pids}
    duplicates = {event["task_id"] for event in events if event["what"] == "duplicate"}
    returned = [body for body in bodies if body.how == "return"]
    done = {body.task_id for body in returned}
    ended = {body.task_id for body in bodies if body.how not in ("goes on", "died")}
    cut = {body.task_id for body in bodies if body.pid in killed}
    latest: dict[str, float] = {}
    for body in returned:
        latest[body.work] = max(latest.get(body.work, 0.0), body.start)
    lost = _lost_by(kills, events)
    refused = {event["task_id"] for event in events if event["what"] == "refused"}
    decided = duplicates | ended | cut | refused
    enough: dict[str, Callable[[Event], bool]] = {
        **dict.fromkeys(("run", "once", "once in peace"), lambda event: event["task_id"] in done),
        "once unless killed": lambda event: event["task_id"] in done | cut or lost(event["task_id"]),
        "decided in peace": lambda event: event["task_id"] in decided or lost(event["task_id"]),
        "run after": lambda event: latest.get(event["work"], 0.0) >= event["at"],
    }
    sent = [event for event in events if event["what"] == "sent" and event["expect"] in enough]
    return [event for event in sent if not enough[event["expect"]](event)]


def _lost_by(kills: list[Fault], events: Sequence[Event]) -> Callable[[str], bool]:
    received = {event["task_id"]: event for event in events if event["what"] == "received"}
    parents = {event["pid"]: event.get("parent") for event in events if event["what"] == "start"}

    def lost(task_id: str) -> bool:
        """Tell whether its last receiver, or a child of that process, was killed soon after."""
        last = received.get(task_id)
        return last is not None and any(
            last["pid"] in {*fault.pids, *(parents.get(pid) for pid in fault.pids)}
            and last["at"] - SEEN <= fault.at <= last["at"] + HOLDUP
            for fault in kills
        )

    return lost


def _leases(
    events: Sequence[Event], bodies: Sequence[Body], faults: list[Fault], limits: Limits
) -> Iterator[Violation]:
    """Find leases that the probe saw disappear before the end of their body, or stay long after it."""
    runs = {body.run: body for body in bodies}
    there: dict[str, Event] = {}
    freed = {event["run"]: event["at"] for event in events if "free" in event.get("does", ())}
    for event in events:
        if event["what"] == "key":
            there.setdefault(event["run"], event)
        elif event["what"] == "gone" and event["run"] in there:
            seen = there.pop(event["run"])
            yield from _gone(seen, _last_there(seen, event["at"], freed), runs.get(event["run"]), faults, limits)
    last = max((event["at"] for event in events if event["what"] == "looked"), default=0.0)
    for run, event in there.items():
        yield from _kept(event, _last_there(event, last, freed), runs.get(run), faults, limits)


def _last_there(seen: Event, at: float, freed: dict[str, float]) -> float:
    """Return the latest time at which a lease existed; its release is more precise than the probe on a busy machine."""
    known = freed.get(seen["run"], at)
    return known if seen["at"] <= known < at else at


def _gone(seen: Event, at: float, body: Body | None, faults: list[Fault], limits: Limits) -> Iterator[Violation]:
    yield from _kept(seen, at, body, faults, limits)
    if (
        body
        and at < min(body.end - (SEEN if body.how == "died" else 0.05), body.cap + limits.ttl * 2 / 3)
        and not any(_explains(fault, body, at, faults, limits) for fault in faults)
    ):
        yield Violation("early", f"{seen['key']} of {body}: gone at {at:.2f}")


def _kept(seen: Event, until: float, body: Body | None, faults: list[Fault], limits: Limits) -> Iterator[Violation]:
    over = body.end if body else seen["at"]
    if until > over + _bound(body, over, faults, limits):
        yield Violation("leftover", f"{seen['key']} of {body or seen['run']}: {until - over:.2f} s after its end")


def _bound(body: Body | None, over: float, faults: list[Fault], limits: Limits) -> float:
    """Return how long after the end of a body its lease may exist."""
    bound = (
        1.0 + limits.slack if body else limits.ttl + 2 * limits.slack
    )  # without a body, its owner never received the grant
    for fault in faults:
        begin, pid = (body.start, body.pid) if body else (over, 0)
        if (body is None or fault.concerns(pid)) and fault.at <= over + limits.slack and begin <= fault.until:
            reaches = fault.kind in ("outage", "empty", "pause") and over <= fault.until + limits.heal
            away = (
                max(0.0, fault.until - over) + limits.ttl + limits.heal
            )  # no process reaches the store before its return
            bound = max(bound, fault.bound if body else 0.0, away if reaches else 0.0)
        if (
            body
            and fault.kind == "stop"
            and fault.concerns(pid)
            and over - limits.slack <= fault.at <= over + limits.slack
        ):
            bound = max(bound, limits.ttl + limits.slack)  # stopped between the end of the body and its release
    for fault in sorted(faults, key=lambda fault: fault.at):  # no process reaches an absent store
        if fault.kind in ("outage", "empty", "pause") and fault.at <= over + bound < fault.until:
            bound = fault.until - over + limits.slack
    return bound


# -- changes in the store ------------------------------------------------------------------------


@dataclass
class _Lock:
    owner: str
    expires: float


def _store(events: Sequence[Event], faults: list[Fault], limits: Limits) -> Iterator[Violation]:
    """Find changes of a lock by a run that did not own it, from what the scripts did."""
    locks: dict[str, _Lock] = {}
    released: dict[str, float] = {}
    for event in events:
        if event["what"] == "store reset":
            locks.clear()
        elif event["what"] == "unknown script":
            yield Violation("blind", f"a script at {event['at']:.2f} that the probe does not know: {event['digest']}")
        elif event["what"] == "store" and event["verb"] == "revoke":
            yield from _unlocked(event, locks, faults, limits)
        elif event["what"] == "store":
            yield from _step(event, locks, released, limits)


def _unlocked(event: Event, locks: dict[str, _Lock], faults: list[Fault], limits: Limits) -> Iterator[Violation]:
    """Find revoked locks outside the times at which the schedule revokes."""
    at = event["at"]
    if not any(f.kind == "unlock" and f.at - limits.slack <= at <= f.until + limits.slack for f in faults):
        yield Violation("theft", f"{event['key']}: unlocked by nobody at {at:.2f}")
    locks.pop(event["key"], None)


def _step(event: Event, locks: dict[str, _Lock], released: dict[str, float], limits: Limits) -> Iterator[Violation]:
    verb, who, at = event["verb"], event["run"], event["at"]
    reserved = event.get("reserved", False)  # its token is used again
    # A main process renews by token until the task has ended, which may be long after the body.
    own = event.get("own", True)
    if verb == "renew" and own and at > released.get(who, math.inf) + limits.ttl / 3 + limits.timeout:
        yield Violation("late renewal", f"{who} is still renewed {at - released[who]:.2f} s after its release")
    if verb in ("renew", "acquire", "reacquire") and event["does"] and at > released.get(who, math.inf):
        yield Violation("late renewal", f"{event['key']}: {verb} by {who} {at - released[who]:.2f} s after its release")
    for does in event["does"]:
        lock = locks.get(event["key"])
        alive = lock is not None and at < lock.expires - 0.05
        if alive and lock is not None and lock.owner not in (who, *event.get("heir_of", ())):
            yield Violation("theft", f"{event['key']} of {lock.owner}: {verb} ({does}) by {who} at {at:.2f}")
        if does == "free":
            locks.pop(event["key"], None)
            if not reserved:
                released[who] = at
        else:
            locks[event["key"]] = _Lock(who, at + event.get("ttl", limits.ttl))


# -- lines ---------------------------------------------------------------------------------------


@dataclass
class _Line:
    """The messages that wait for a lock.

    Arguments:
        waiting: ticket -> when it joined, in this order.
        lapsed: tickets that have lost their place.
        called: tickets whose turn has come. A message that has spent its turn in a busy queue may start once the lock is free.
    """

    waiting: dict[str, float] = field(default_factory=dict)
    lapsed: set[str] = field(default_factory=set)
    called: set[str] = field(default_factory=set)

    def rank(self, ticket: str) -> int:
        """Return how many messages came before the one with this ticket; those that joined unseen may be the first."""
        if ticket and ticket not in self.waiting and (ticket not in self.lapsed or ticket in self.called):
            return 0
        return list(self.waiting).index(ticket) if ticket in self.waiting else len(self.waiting)


def _lines(events: Sequence[Event], bodies: Sequence[Body], faults: list[Fault]) -> Iterator[Violation]:
    """Find messages that were granted a lock before others that had joined its line earlier, or that lost their place.

    The order of joining is that in which MONITOR shows it. With a limit, so many messages may be about to start.
    """
    most = {_without_slot(body.key): body.limit for body in bodies}
    lines: dict[str, _Line] = {}
    owners: dict[str, str] = {}
    for event in events:
        if event["what"] == "store reset":
            lines.clear()
            owners.clear()
        elif event["what"] == "line":
            yield from _move(event, lines.setdefault(event["key"], _Line()), faults)
        elif event["what"] == "store" and event["does"] in (["take"], ["free"]):
            key = _without_slot(event["key"])
            if "ticket" in event and owners.get(event["key"]) not in (event["run"], event["heir_of"][0]):
                line = lines.setdefault(key, _Line())
                if line.rank(event["ticket"]) >= most.get(key, 1):
                    text = f"{key}: {event['run']} at {event['at']:.2f}, before {len(line.waiting)} that wait"
                    yield Violation("order", text)
            if "ticket" in event and key in lines:
                lines[key].waiting.pop(event["ticket"], None)
            owners[event["key"]] = event["run"] if event["does"] == ["take"] else ""


def _move(event: Event, line: _Line, faults: list[Fault]) -> Iterator[Violation]:
    ticket, at = event["ticket"], event["at"]
    if event["does"] == "join":
        line.waiting[ticket] = at
        line.lapsed.discard(ticket)
        line.called.discard(ticket)
        return
    if event["does"] == "turn":
        line.called.add(ticket)
        return
    joined = line.waiting.pop(ticket, at)
    if event["does"] == "lapse":
        line.lapsed.add(ticket)
        if not any(
            f.at <= at and joined - SEEN <= _until(f) for f in faults if f.kind in (*DISTURBING, "pause", "reply")
        ):
            yield Violation(
                "order", f"{event['key']}: a message lost its place of {joined:.2f} at {at:.2f}, by no fault"
            )


def _without_slot(key: str) -> str:
    """Return the key of a lock without the number of a slot."""
    return re.sub(r"(:lock:[^:]+):\d+$", r"\1", key)


# -- options of single tasks -----------------------------------------------------------------------


def _in_peace(body: Body, until: float, faults: list[Fault], limits: Limits) -> bool:
    """Tell whether no fault touched a body from a TTL before its grant, when its acquire may have been sent, to then."""
    near = [f for f in faults if f.at <= until and body.taken - limits.ttl <= _until(f) + SEEN]
    return not any(f.concerns(body.pid) for f in near if f.kind in (*DISTURBING, "pause"))


def _caps(bodies: Sequence[Body], lost: Sequence[Event], faults: list[Fault], limits: Limits) -> Iterator[Violation]:
    """Find bodies that outlived ``lock_at_most`` and were not notified."""
    told = {event["run"]: event["at"] for event in lost}
    for body in bodies:
        by = body.cap + limits.heal + limits.slack
        if min(body.end, told.get(body.run, math.inf)) > by and _in_peace(body, by, faults, limits):
            yield Violation("untold", f"{body.key}: {body} outlived its cap of {body.cap:.2f}")


def _cooldowns(bodies: Sequence[Body], faults: list[Fault], limits: Limits) -> Iterator[Violation]:
    """Find bodies that started within ``lock_at_least`` of a success."""
    before: dict[str, Body] = {}
    for second in sorted(bodies, key=lambda body: body.taken):
        first = before.get(second.work)
        before[second.work] = second
        held = first and first.how == "return" and second.taken < first.taken + first.least - 0.05
        if first and held and _in_peace(first, second.taken, faults, limits):
            yield Violation("cooldown", f"{second.key}: {second} in the cooldown of {first}")


def _starts(events: Sequence[Event], bodies: Sequence[Body], limits: Limits) -> Iterator[Violation]:
    """Find starts after so many that crashed as ``max_starts`` allows, and messages that were refused after fewer."""
    counted = {body.run: body for body in bodies if body.starts[0] < math.inf}
    grants = [event for event in events if event.get("does") == ["take"] and event.get("verb") == "acquire"]
    released = {event["run"]: event["at"] for event in events if event.get("verb") == "release"}
    resets = [event["at"] for event in events if event["what"] == "store reset"]

    def has_crashed(run: str, at: float) -> bool:
        return run in counted and counted[run].how == "died" and counted[run].end < at - SEEN

    def may_have_crashed(run: str, at: float) -> bool:
        """Tell whether a start may count: its body has not ended, or the store has not been told in time."""
        body = counted.get(run)
        return body is None or body.how == "died" or max(body.end, released.get(run, math.inf)) > at - 1.0

    def number(crashed: Callable[[str, float], bool], key: str, at: float, per: float) -> int:
        since = max([at - per, *(reset for reset in resets if reset < at)])
        runs = [event["run"] for event in grants if event["key"] == key and since < event["at"] < at]
        return sum(crashed(run, at) for run in runs)

    for body in counted.values():
        n, per = body.starts
        if (count := number(has_crashed, body.key, body.taken, per - limits.slack)) >= n:
            yield Violation("starts", f"{body.key}: {body} after {count} that crashed")
    for event in (event for event in events if event["what"] == "refused"):
        n, per = next((body.starts for body in counted.values() if body.key == event["key"]), (1, math.inf))
        if (count := number(may_have_crashed, event["key"], event["at"], per + 1.0)) < n:
            yield Violation("starts", f"{event['key']}: refused at {event['at']:.2f} after {count} that crashed")


def _quiet(events: Sequence[Event], bodies: Sequence[Body]) -> Iterator[Violation]:
    """Find locks that were granted, or reserved for the next in line, too soon after a call.

    A message that comes again after an outage also begins the time after which nobody waits for quiet: its joining shows it.
    """
    quiet = {body.key: body.quiet for body in bodies if body.quiet[0]}
    came: dict[str, list[tuple[float, bool]]] = {}  # when, and whether it was a call
    turns: dict[str, float] = {}
    for event in events:
        key, at = event.get("key", ""), event["at"]
        is_call = event["what"] == "store" and bool(event.get("policy"))
        if event["what"] == "store reset":
            came, turns = {}, {}
        elif key in quiet and (is_call or (event["what"] == "line" and event["does"] == "join")):
            came.setdefault(key, []).append((at, is_call))
        elif event["what"] == "store" and event["does"] == ["take"] and event["verb"] != "reacquire" and key in quiet:
            turn = turns.setdefault(key, at)
            if not event.get("reserved"):
                before = [one for one in came.get(key, ()) if one[0] <= turn]
                came[key] = came.get(key, [])[len(before) :]
                del turns[key]
                calls = [when for when, is_call in before if is_call]
                if calls and turn < min(calls[-1] + quiet[key][0], before[0][0] + quiet[key][1]) - 0.05:
                    yield Violation("quiet", f"{key}: turn at {turn:.2f}, calls from {calls[0]:.2f} to {calls[-1]:.2f}")


def table(violations: Iterable[Violation]) -> str:
    """Return the violations as text, one line each."""
    return "\n".join(f"{violation.kind}: {violation.text}" for violation in violations)


def figures(events: Sequence[Event]) -> dict[str, int]:
    """Return the counts for the report of a run."""
    bodies = bodies_of(events)
    return {
        "bodies": len(bodies),
        "overlaps": sum(len(others) + 1 - newest.limit for others, newest in crowds(bodies)),
        "lost": sum(event["what"] == "lost" for event in events),
        "duplicates": sum(event["what"] == "duplicate" for event in events),
        "sent": sum(event["what"] == "sent" for event in events),
        "joined a line": sum(event.get("does") == "join" for event in events),
    }
