"""Tests of the checker: made-up histories whose violations it must find, and faults that excuse some of them."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.faults.checker import check
from tests.faults.ledger import Event
from tests.faults.schedule import Fault, Limits

pytestmark = pytest.mark.harness

LIMITS = Limits(ttl=6.0, timeout=1.0, slack=0.3)  # a third of the TTL and the timeout: 3 s
KEY = "singleton:{job}:lock:1"


def body(
    run: str, start: float, end: float | None, how: str = "return", pid: int = 1, key: str = KEY, work: str = ""
) -> list[Event]:
    """Return the events of one body; without an end it still runs. By default each key is work of its own."""
    who = {"work": work or key, "key": key, "run": run, "pid": pid, "task_id": f"task-{run}"}
    begun = [{"what": "start", "at": start, **who}]
    return begun + ([] if end is None else [{"what": "end", "at": end, "how": how, **who}])


def event(what: str, at: float, **more: Any) -> Event:
    """Return one event."""
    return {"what": what, "at": at, "pid": 0, **more}


def lost(run: str, at: float) -> Event:
    """Return the event of a reported loss."""
    return event("lost", at, run=run, key=KEY)


def store(at: float, verb: str, run: str, does: str = "", ttl: float = 6.0) -> Event:
    """Return the event of a script call, with what the script did."""
    return event("store", at, verb=verb, run=run, key=KEY, does=[does] if does else [], ttl=ttl)


def found(events: list[Event], *faults: Fault) -> set[str]:
    """Return the kinds of violations."""
    return {violation.kind for violation in check(sorted(events, key=lambda e: e["at"]), faults, LIMITS)}


STOP = Fault("stop", 10, 30, frozenset({1}))
OUTAGE = Fault("outage", 10, 30)
EMPTY = Fault("empty", 10, 12)
UNLOCK = Fault("unlock", 10, 10.1)


def test_nothing_to_find() -> None:
    """The checker accepts bodies that run one after the other and hold their leases just as long."""
    events = body("a", 0, 5) + body("b", 5.1, 9, "Boom", pid=2)
    events += [event("sent", 0, task_id="task-a", expect="once"), event("sent", 0, task_id="task-b", expect="any")]
    events += [event("key", 0, run="a", key=KEY), event("gone", 5.1, run="a"), event("key", 5.1, run="b", key=KEY)]
    events += [event("gone", 9.5, run="b"), event("looked", 20)]
    events += [store(0, "acquire", "a", "take"), store(2, "renew", "a", "renew"), store(5, "release", "a", "free")]
    assert set() == found(events)


# -- overlaps --------------------------------------------------------------------------------------


def test_overlap() -> None:
    """The checker finds two bodies of one work that run concurrently."""
    assert {"overlap"} == found(body("a", 0, 5) + body("b", 4.9, 9, pid=2))


def test_end_without_a_start() -> None:
    """The end of a body without a recorded start does not end another body."""
    cut = body("b", 1, 2, "SystemExit")[1:]
    assert set() == found(body("a", 0, 5) + cut + body("c", 5.1, 9, pid=2))
    assert {"overlap"} == found(body("a", 0, 5) + cut + body("c", 4, 9, pid=2))


def test_overlap_with_a_body_without_end() -> None:
    """A body without an end overlaps every later body of its work."""
    assert {"overlap"} == found(body("a", 0, None) + body("b", 400, 409, pid=2))


def test_other_work() -> None:
    """Bodies of different work may run concurrently."""
    assert set() == found(body("a", 0, 5) + body("b", 1, 9, key="other"))


def test_overlap_under_another_key() -> None:
    """What the task tells of its work decides which bodies exclude each other, not the library's key."""
    events = body("a", 0, 5, work="job 1") + body("b", 4.9, 9, pid=2, key="other", work="job 1")
    assert {"overlap"} == found(events)
    events = body("a", 0, 5, work="job 1") + body("b", 4.9, 9, pid=2, work="job 2")
    assert set() == found(events)


@pytest.mark.parametrize(
    ("second", "pid", "verdict"), [(2, 1, {"reused", "overlap"}), (6, 1, {"reused"}), (6, 2, {"reused"})]
)
@pytest.mark.parametrize("expect", ["any", "run", "once", "one attempt"])
def test_two_bodies_under_one_lease(second: float, pid: int, verdict: set[str], expect: str) -> None:
    """The checker finds a second body under one lease, concurrent or later, in the same process or in another."""
    events = [event("sent", 0, task_id="task-a", expect=expect)]
    events += body("a", 1, 5) + body("a", second, 8, pid=pid)
    assert verdict | ({"runs"} if expect in ("once", "one attempt") else set()) == found(events)


def test_each_body_has_its_end() -> None:
    """The first end of two bodies under one lease does not end the other body."""
    events = [*body("a", 1, 3), *body("a", 2, 8), *body("b", 7, 9, pid=2)]
    texts = [v.text for v in check(sorted(events, key=lambda e: e["at"]), [], LIMITS) if v.kind == "overlap"]
    assert 2 == len(texts)


def test_a_death_is_an_end() -> None:
    """A killed body ends with the death of its process, which the probe may see a little late."""
    events = [*body("a", 0, None), event("death", 5, of=1)]
    assert set() == found(events + body("b", 5.1, 9, pid=2))
    assert set() == found(events + body("b", 4.8, 9, pid=2))
    assert {"overlap"} == found(events + body("b", 4.6, 9, pid=2))


@pytest.mark.parametrize("fault", [STOP, OUTAGE])
@pytest.mark.parametrize(("start", "verdict"), [(13.9, {"overlap"}), (14.1, set()), (29.9, set())])
def test_excused_from_expiry_on(fault: Fault, start: float, verdict: set[str]) -> None:
    """A fault excuses an overlap from the earliest expiry on, two thirds of a TTL after the fault began."""
    events = [*body("a", 0, 35), lost("a", 31), *body("b", start, 40, pid=2)]
    assert verdict == found(events, fault)


@pytest.mark.parametrize(
    ("fault", "last"), [(STOP, 30.0), (OUTAGE, 33.0), (EMPTY, 15.0)], ids=["stop", "outage", "empty"]
)
def test_excused_until(fault: Fault, last: float) -> None:
    """A stop excuses until its end; an outage until its end plus the time that a renewal needs."""
    before = [*body("a", 0, 60), lost("a", last + 0.3), *body("b", last + 0.2, 60, pid=2)]
    after = [*body("a", 0, 60), lost("a", last + 0.3), *body("b", last + 0.4, 60, pid=2)]
    assert set() == found(before, fault)
    assert {"overlap"} == found(after, fault)


def test_after_an_excused_overlap() -> None:
    """A body that continues after its loss does not excuse a later overlap of others, whether it was notified or not."""
    events = [*body("a", 0, 60), *body("b", 11, 14, pid=2), *body("c", 25, 30, pid=3)]
    assert {"overlap"} == found([*events, lost("a", 13)], EMPTY)
    assert {"overlap", "untold"} == found(events, EMPTY)
    assert set() == found([*body("a", 0, 13.1), *events[2:], lost("a", 13)], EMPTY)


@pytest.mark.parametrize(("again", "verdict"), [([13], {"overlap"}), ([], set()), ([10.5], set()), ([25], set())])
def test_after_it_was_taken_again(again: list[float], verdict: set[str]) -> None:
    """A holder that reacquired its lease excludes others from then on."""
    events = [*body("a", 0, 60), *body("b", 11, 12, pid=2), *body("c", 14, 20, pid=3), lost("a", 13.1)]
    events += [store(10.9, "acquire", "b", "take"), store(12, "release", "b", "free")]
    events += [store(at, "reacquire", "a", "take") for at in again]
    # The store resets keep the later acquires from counting as thefts.
    assert verdict == found([*events, event("store reset", 10.8), event("store reset", 24)], EMPTY)


def test_renewed_after_the_fault() -> None:
    """A lease that is renewed after a fault was not lost by that fault."""
    events = [*body("a", 0, 60), lost("a", 32), *body("b", 31, 40, pid=2)]
    assert set() == found([*events, store(9, "renew", "a", "renew"), store(30.9, "acquire", "b", "take")], OUTAGE)
    assert {"overlap"} == found([*events, store(30.5, "renew", "a", "renew")], OUTAGE)
    assert {"overlap"} == found([*events, store(27.5, "reacquire", "a", "take")], OUTAGE)


def test_taken_again_and_lost_again() -> None:
    """A second loss of data after a reacquire excuses an overlap like the first."""
    events = [*body("a", 0, 60), *body("b", 11, 12, pid=2), *body("c", 25, 30, pid=3), lost("a", 13.1)]
    events += [store(13, "reacquire", "a", "take"), event("store reset", 20)]
    assert {"overlap"} == found(events, EMPTY)
    assert set() == found(events, EMPTY, Fault("empty", 24, 24.5))


def test_unlocked() -> None:
    """After a revocation another body may run and the former holder must be notified; otherwise no other may run."""
    events = [*body("a", 0, 60), lost("a", 12), *body("b", 10.5, 40, pid=2)]
    assert set() == found(events, UNLOCK)
    assert {"untold"} == found([e for e in events if e["what"] != "lost"], UNLOCK)
    assert {"overlap"} == found([*events, *body("c", 41, 50, pid=3)], UNLOCK)
    assert {"overlap"} == found([*body("a", 0, 60), lost("a", 12), *body("b", 9.9, 40, pid=2)], UNLOCK)
    assert {"overlap"} == found([*body("a", 10.3, 60), *body("b", 11, 40, pid=2)], UNLOCK)
    assert {"overlap", "lost"} == found(events)


def test_unlocked_alone() -> None:
    """A revocation explains the loss of a lease that existed then, but not of a lease acquired later."""
    there = [event("key", 0, run="a", key=KEY), event("gone", 10.1, run="a"), event("looked", 70)]
    assert set() == found([*body("a", 0, 60), lost("a", 12), *there], UNLOCK)
    assert {"lost", "early"} == found([*body("a", 0, 60), lost("a", 12), *there])
    assert {"lost"} == found([*body("a", 10.3, 60), lost("a", 12)], UNLOCK)


def test_lost_data_excuse_at_once() -> None:
    """A loss of data excuses an overlap at once, because no lease has to expire first."""
    assert set() == found([*body("a", 0, 40), lost("a", 13), *body("b", 10.5, 40, pid=2)], EMPTY)


def test_stop_of_somebody_else() -> None:
    """A stop excuses only overlaps with a body of a stopped process."""
    events = [*body("a", 0, 35, pid=3), lost("a", 31), *body("b", 20, 40, pid=2)]
    assert {"overlap", "lost"} == found(events, STOP)


def test_stop_of_the_second() -> None:
    """A stop of the later body's process excuses no overlap."""
    assert {"overlap"} == found(body("a", 0, 35, pid=2) + body("b", 20, 40, pid=1), STOP)


def test_body_begun_after_the_fault() -> None:
    """A fault that ended before the first body began excuses nothing."""
    assert {"overlap"} == found(body("a", 30.5, 60) + body("b", 32, 60, pid=2), OUTAGE)


@pytest.mark.parametrize(
    ("fault", "first", "second", "verdict"),
    [
        (OUTAGE, 29.99, 32, {"overlap"}),  # its lease lives until 35.9
        (OUTAGE, 25, 28.9, {"overlap"}),
        (OUTAGE, 25, 29.1, set()),
        (OUTAGE, 28, 32.1, set()),
        (STOP, 27, 30.2, {"overlap"}),
        (STOP, 26, 30.1, set()),
        (EMPTY, 11.9, 12.1, set()),
    ],
)
def test_body_begun_within_the_fault(fault: Fault, first: float, second: float, verdict: set[str]) -> None:
    """A lease that was acquired within an outage or a stop must expire before another holder can acquire it."""
    events = [*body("a", first, 60), lost("a", second + 0.5), *body("b", second, 40, pid=2)]
    assert verdict == found(events, fault) - {"lost"}


def test_taken_before_a_stop() -> None:
    """The time of the grant counts, not the start of the body, because a worker may be stopped between the two."""
    grant = store(9.99, "acquire", "a", "take")
    later = [*body("a", 30.05, 60), lost("a", 31), *body("b", 16, 40, pid=2)]
    assert set() == found([grant, *later], STOP)
    assert {"overlap"} <= found(later, STOP)
    assert {"overlap"} <= found([store(15, "acquire", "a", "take"), event("store reset", 15.5), *later])
    soon = [*body("a", 30.05, 60), lost("a", 31), *body("b", 30.1, 40, pid=2)]
    assert set() == found([grant, *soon], STOP)
    assert {"overlap", "lost"} == found(soon, STOP)


def test_kill_is_no_excuse() -> None:
    """A kill excuses no overlap, because a killed body has ended."""
    assert {"overlap"} == found(
        body("a", 0, 35) + body("b", 20, 40, pid=2), Fault("kill", 10, math.inf, frozenset({1}))
    )


def test_untold() -> None:
    """The body that lost its lease in an excused overlap must itself be notified in time."""
    both = body("a", 0, 60) + body("b", 20, 60, pid=2)
    assert {"untold"} == found(both, STOP)
    assert {"untold"} == found([*both, lost("b", 31)], STOP) - {"lost"}
    assert "untold" in found([*both, lost("a", 45)], STOP)
    assert set() == found([*both, lost("a", 32)], STOP)


def test_nobody_left_to_tell() -> None:
    """A body that ends before it could be notified of its loss need not be notified."""
    assert set() == found(body("a", 0, 30.5) + body("b", 20, 60, pid=2), STOP)


# -- several at once -------------------------------------------------------------------------------


def several(*spans: tuple[str, float, float | None], limit: int = 3) -> list[Event]:
    """Return the events of bodies of one work that so many may run at once, each in its slot and its process."""
    events = []
    for number, (run, start, end) in enumerate(spans):
        for one in body(run, start, end, pid=number + 1, key=f"{KEY}:{number}" if number else KEY, work="job"):
            events.append({**one, "limit": limit})
    return events


def test_at_most_three() -> None:
    """Three bodies of work with a limit of 3 may run at once, and a fourth may not, whoever of them ends first."""
    three = [("a", 0, 10), ("b", 1, 5), ("c", 2, 6)]
    assert set() == found(several(*three, ("d", 5.1, 9), ("e", 6.1, 9)))
    assert {"overlap"} == found(several(*three, ("d", 4.9, 9)))
    assert {"overlap"} == found(several(*three, ("d", 5.1, 9), ("e", 5.9, 9)))
    assert {"overlap"} == found(several(("a", 0, None), ("b", 1, None), limit=1))


@pytest.mark.parametrize(
    ("told", "verdict"), [((), {"untold"}), (("a",), {"untold"}), (("a", "b"), set()), (("a", "b", "c"), set())]
)
def test_too_many_after_a_fault(told: tuple[str, ...], verdict: set[str]) -> None:
    """Of five bodies that run because a store lost its data, two must be notified; of the three others none need be."""
    events = several(("a", 0, 40), ("b", 1, 40), ("c", 2, 40), ("d", 12.5, 30), ("e", 12.6, 30))
    notes = [{**lost(run, 13), "key": f"{KEY}:{number}" if number else KEY} for number, run in enumerate("abc")]
    takes = [{**store(11, "acquire", "x", "take"), "key": f"{KEY}:{number}" if number else KEY} for number in range(3)]
    frees = [{**take, "at": 12, "does": ["free"], "verb": "release"} for take in takes]
    told_of = [note for note in notes if note["run"] in told]
    assert verdict == found([*events, *told_of, *takes, *frees, event("store reset", 10.5)], EMPTY)


def test_too_many_new_ones() -> None:
    """A fault excuses no more than the limit's number of bodies that began after it."""
    events = several(("a", 12.5, 40), ("b", 12.6, 40), ("c", 12.7, 40), ("d", 15, 30))
    assert {"overlap"} == found(events, EMPTY)


# -- the line --------------------------------------------------------------------------------------


def moves(at: float, does: str, ticket: str, key: str = KEY) -> Event:
    """Return the event of a message that joins or leaves a line."""
    return event("line", at, does=does, ticket=ticket, key=key)


def taken(at: float, run: str, ticket: str, key: str = KEY) -> Event:
    """Return the event of an acquire that asked the line."""
    return {**store(at, "acquire", run, "take"), "key": key, "ticket": ticket, "heir_of": ["own", "line"]}


def freed(at: float, run: str, key: str = KEY) -> Event:
    """Return the event of a release."""
    return {**store(at, "release", run, "free"), "key": key}


JOINED = [moves(1, "join", "t1"), moves(2, "join", "t2"), moves(3, "join", "t3")]


def test_in_order() -> None:
    """Messages start in the order in which they joined their line."""
    assert set() == found([*JOINED, taken(4, "a", "t1"), freed(5, "a"), taken(6, "b", "t2")])
    assert {"order"} == found([*JOINED, taken(4, "b", "t2")])
    assert {"order"} == found([*JOINED, taken(4, "a", "t1"), freed(5, "a"), taken(6, "c", "t3")])
    assert set() == found([*JOINED, taken(4, "x", "t9", key="another")])


def test_newcomer_before_the_line() -> None:
    """A message that never waited must not start while others wait, unless the lock is its own."""
    assert {"order"} == found([*JOINED, taken(4, "x", "")])
    assert set() == found([taken(0.5, "x", ""), *JOINED, taken(4, "x", "")])
    reserved = {**store(0.5, "acquire", "own", "take"), "reserved": True}
    assert set() == found([reserved, *JOINED, taken(4, "x", "")])


@pytest.mark.parametrize("does", ["leave", "superseded"])
def test_left_the_line(does: str) -> None:
    """A message that left the line is waited for no more, and has no place if it comes nevertheless."""
    gone = [*JOINED, moves(3.5, does, "t1")]
    assert set() == found([*gone, taken(4, "b", "t2")])
    assert set() == found([*gone, moves(3.6, "join", "t1"), taken(4, "b", "t2")])
    assert {"order"} == found([*gone, moves(3.6, "join", "t1"), taken(4, "a", "t1")])


@pytest.mark.parametrize(
    ("fault", "verdict"),
    [
        (None, {"order"}),
        (Fault("kill", 2, math.inf, frozenset({1})), set()),
        (Fault("kill", 0.5, math.inf, frozenset({1})), {"order"}),
        (Fault("stop", 0.5, 1.5, frozenset({1})), set()),
        (Fault("pause", 3, 4), set()),
        (Fault("stop", 10, 12, frozenset({1})), {"order"}),
    ],
)
def test_lost_its_place(fault: Fault | None, verdict: set[str]) -> None:
    """Only a fault may cost a message its place; then it must not start before the others."""
    lapsed = [*JOINED, moves(9, "lapse", "t1")]
    assert verdict == found([*lapsed, taken(10, "b", "t2")], *([fault] if fault else []))
    assert {"order"} == found([*lapsed, taken(10, "a", "t1")], Fault("pause", 3, 4))
    assert set() == found([moves(3.5, "turn", "t1"), *lapsed, taken(10, "a", "t1")], Fault("pause", 3, 4))
    again = [moves(3.5, "turn", "t1"), *lapsed, moves(9.5, "join", "t1"), moves(9.6, "lapse", "t1")]
    assert {"order"} == found([*again, taken(10, "a", "t1")], Fault("pause", 3, 4))


def test_line_that_the_probe_does_not_know() -> None:
    """After a gap of MONITOR, a message that may have joined in it, or before, is no newcomer."""
    reset = event("store reset", 4)
    late = [reset, moves(5, "join", "t4")]
    assert set() == found([*JOINED, *late, taken(6, "a", "t1")])
    assert {"order"} == found([*JOINED, *late, taken(6, "x", "")])
    assert set() == found([*JOINED, reset, taken(6, "x", "")])


def test_line_for_several() -> None:
    """With a limit of 3, a message may start before two that joined earlier, and not before three."""
    limited = several(("a", 0, 1))
    four = [*JOINED, moves(3.5, "join", "t4")]
    assert set() == found([*limited, *four, taken(4, "x", "t3", key=f"{KEY}:2")])
    assert {"order"} == found([*limited, *four, taken(4, "x", "t4", key=f"{KEY}:2")])


# -- losses ----------------------------------------------------------------------------------------


def test_lost_without_fault() -> None:
    """The checker finds a loss that no fault explains."""
    assert {"lost"} == found([*body("a", 0, 5), lost("a", 3)])


@pytest.mark.parametrize(("at", "verdict"), [(13.0, {"lost"}), (15.0, set()), (32.0, set()), (40.0, {"lost"})])
def test_lost_at_the_wrong_time(at: float, verdict: set[str]) -> None:
    """A fault explains losses from the earliest expiry until all holders must have been notified."""
    assert verdict == found([*body("a", 0, 60), lost("a", at)], STOP)


@pytest.mark.parametrize(
    ("fault", "start", "at", "verdict"),
    [
        (OUTAGE, 30.2, 31, {"lost", "early"}),  # the store was reachable again
        (STOP, 30.2, 31, {"lost", "early"}),
        (OUTAGE, 30.2, 34.5, {"lost", "early"}),
        (OUTAGE, 29.9, 31, {"lost", "early"}),  # it was granted just before
        (OUTAGE, 29.9, 34.5, {"lost", "early"}),
        (OUTAGE, 25, 28.9, {"lost", "early"}),
        (OUTAGE, 25, 29.1, set()),
        (OUTAGE, 25, 33, set()),
        (STOP, 9.9, 32, set()),
        (EMPTY, 12.4, 13, {"lost", "early"}),
        (EMPTY, 12.2, 13, set()),  # MONITOR missed the acquire before the fault
    ],
)
def test_lease_begun_after_the_fault(fault: Fault, start: float, at: float, verdict: set[str]) -> None:
    """A fault explains the loss of a lease that existed before it.

    It explains the loss of a lease acquired during it only after that lease could expire.
    """
    events = [*body("a", start, 60), *body("b", at - 0.2, at - 0.1, pid=2), lost("a", at)]
    seen = [event("key", start, run="a", key=KEY), event("gone", at, run="a"), event("looked", 70)]
    assert verdict == found([*events, *seen], fault) - {"overlap"}


def test_answered_slowly() -> None:
    """A lease existed during an outage if it was granted then, although its answer came later."""
    events = [*body("a", 30.05, 60), lost("a", 32)]
    assert set() == found([*events, store(25, "acquire", "a", "take")], OUTAGE)
    assert {"lost"} == found([*events, store(30.01, "acquire", "a", "take")], OUTAGE)


@pytest.mark.parametrize(
    ("other", "verdict"),
    [
        ([], {"lost"}),
        (body("b", 5, 9, pid=2), {"lost"}),
        (body("b", 11, 12, pid=2), set()),
        ([store(11, "acquire", "b", "take")], set()),
        (body("b", 11, 12, pid=2, key="another"), {"lost"}),
    ],
)
def test_lost_with_the_data(other: list[Event], verdict: set[str]) -> None:
    """A loss of data explains a lost lease only if another run acquired the lock before the holder reacquired it."""
    assert verdict == found([*body("a", 10, 60), lost("a", 13), *other], EMPTY)


@pytest.mark.parametrize(
    ("kill", "verdict"),
    [
        (Fault("kill", 10, 10, frozenset({1})), set()),
        (Fault("kill", 10.5, 10.5, frozenset({1})), {"overlap"}),
        (Fault("kill", 10, 10, frozenset({2})), {"overlap"}),
        (Fault("child stop", 10, 10, frozenset({1})), {"overlap"}),
    ],
)
def test_death_that_is_seen_late(kill: Fault, verdict: set[str]) -> None:
    """A killed body ends with the kill; any other death counts from when the probe saw it."""
    events = [*body("a", 0, None), event("death", 11, of=1), *body("b", 10.1, 20, pid=2)]
    assert verdict == found(events, kill)


@pytest.mark.parametrize(
    ("stop", "gone", "verdict"),
    [
        (Fault("stop", 5.2, 20, frozenset({1})), 11.2, set()),
        (Fault("stop", 5.2, 20, frozenset({1})), 11.5, {"leftover"}),
        (Fault("stop", 6, 20, frozenset({1})), 11.2, {"leftover"}),
        (Fault("stop", 5.2, 20, frozenset({2})), 11.2, {"leftover"}),
    ],
)
def test_stopped_before_the_release(stop: Fault, gone: float, verdict: set[str]) -> None:
    """A worker that is stopped between a body's end and its release may leave a lease until it expires."""
    events = [*body("a", 0, 5), event("key", 0, run="a", key=KEY), event("gone", gone, run="a"), event("looked", 30)]
    assert verdict == found(events, stop)


@pytest.mark.parametrize(
    ("pause", "verdict"),
    [
        (Fault("pause", 10, 13), set()),
        (Fault("pause", 10, 12.5), {"leftover"}),
        (Fault("pause", 11.6, 13), {"leftover"}),
    ],
)
def test_expiry_that_nobody_can_see(pause: Fault, verdict: set[str]) -> None:
    """A lease that expires during an outage may be seen until shortly after the store's return."""
    events = [*body("a", 0, None), event("death", 5, of=1), event("key", 0, run="a", key=KEY)]
    events += [event("gone", 13.1, run="a"), event("looked", 30)]
    assert verdict == found(events, Fault("kill", 4.9, 4.9, frozenset({1}), bound=6.5), pause)


# -- what was promised -----------------------------------------------------------------------------


@pytest.mark.parametrize("expect", ["run", "once"])
def test_never_run(expect: str) -> None:
    """The checker finds a message that was lost, or whose body never returned."""
    sent = event("sent", 0, task_id="task-a", expect=expect)
    assert {"never run"} == found([sent])
    assert {"never run"} == found([sent, *body("a", 1, 2, "Boom")])
    assert set() == found([sent, *body("a", 1, 2)])


def test_run_too_often() -> None:
    """The checker finds messages that run more often than expected."""
    twice = body("a", 1, 2) + [{**e, "run": "b"} for e in body("a", 3, 4)]
    assert {"runs"} == found([event("sent", 0, task_id="task-a", expect="once"), *twice])
    assert {"runs"} == found([event("sent", 0, task_id="task-a", expect="one attempt"), *twice])
    assert {"runs"} == found([event("sent", 0, task_id="task-a", expect="none"), *body("a", 1, 2)])


@pytest.mark.parametrize("expect", ["once in peace", "decided in peace"])
@pytest.mark.parametrize(
    ("fault", "verdict"),
    [
        (None, {"runs"}),
        (Fault("kill", 1.5, math.inf, frozenset({1})), set()),
        (Fault("kill", 0.5, math.inf, frozenset({1})), {"runs"}),  # the message was sent later
        (Fault("kill", 5, math.inf, frozenset({1})), {"runs"}),
        (Fault("stop", 0.5, 1.2, frozenset({1})), set()),
        (Fault("child stop", 3.5, 9, frozenset({1})), set()),
        (Fault("outage", 2, 2.5), set()),
        (Fault("empty", 2, 2.5), set()),
        (Fault("empty", 0.2, 0.5), {"runs"}),
        (Fault("pause", 2, 2.5), {"runs"}),
    ],
)
def test_run_again_in_peace(expect: str, fault: Fault | None, verdict: set[str]) -> None:
    """A message that no fault touched between its sending and its last end must run once."""
    sent = event("sent", 1, task_id="task-a", expect=expect)
    twice = body("a", 1.1, 2) + [{**e, "run": "b"} for e in body("a", 3, 4)]
    assert verdict == found([sent, *twice], *([fault] if fault else []))
    assert set() == found([sent, *body("a", 1.1, 2)])


def test_run_again_beside_itself() -> None:
    """The checker finds two bodies of one message, also if neither has ended or the second ends first."""
    sent = event("sent", 1, task_id="task-a", expect="once in peace")
    twice = body("a", 1.1, 9) + [{**e, "run": "b"} for e in body("a", 3, 4, pid=2)]
    assert {"runs", "overlap"} == found([sent, *twice])


def test_never_run_in_peace() -> None:
    """The checker finds a lost message whatever faults there were."""
    sent = event("sent", 1, task_id="task-a", expect="once in peace")
    assert {"never run"} == found([sent], Fault("kill", 1.5, math.inf, frozenset({1})))


def test_run_unless_killed() -> None:
    """A message of a task with early acknowledgement must run, unless it was lost with its worker; it must run once."""
    sent = event("sent", 1, task_id="task-a", expect="once unless killed")
    kill = Fault("kill", 3, math.inf, frozenset({1}))
    assert {"never run"} == found([sent])
    assert {"never run"} == found([sent, event("duplicate", 2, task_id="task-a")])
    assert {"never run"} == found([sent, *body("a", 2, 3, "Boom")])
    assert set() == found([sent, *body("a", 2, 3)])
    assert {"runs"} == found([sent, *body("a", 2, 3), *({**e, "run": "b"} for e in body("a", 4, 5))])
    died = [*body("a", 2, None), event("death", 3, of=1)]
    assert {"never run"} == found([sent, *died])
    assert set() == found([sent, *died], kill)
    assert set() == found([sent, event("received", 2.5, task_id="task-a") | {"pid": 1}], kill)


def test_run_after() -> None:
    """After each message some run of its work must start and come to its end."""
    sent = event("sent", 1, task_id="task-x", expect="run after", work=KEY)
    assert {"never run"} == found([sent])
    assert {"never run"} == found([sent, *body("a", 0.9, 2)])
    assert {"never run"} == found([sent, *body("a", 1.1, 2, "Boom")])
    assert {"never run"} == found([sent, *body("a", 1.1, 2, key="another")])
    assert set() == found([sent, *body("a", 1.1, 2)])


def test_never_decided() -> None:
    """A message that may be skipped must run or be a duplicate."""
    sent = event("sent", 1, task_id="task-a", expect="decided in peace")
    assert {"never run"} == found([sent])
    assert {"never run"} == found([sent, event("duplicate", 2, task_id="task-b")])
    assert set() == found([sent, event("duplicate", 2, task_id="task-a")])
    assert set() == found([sent, *body("a", 2, 3)])
    assert {"never run"} == found([sent, *body("a", 2, None)])
    died = [*body("a", 2, None), event("death", 3, of=1)]
    assert {"never run"} == found([sent, *died])
    assert set() == found([sent, *died], Fault("kill", 3, math.inf, frozenset({1})))


@pytest.mark.parametrize(
    ("pid", "at", "verdict"),
    [
        (7, 2.5, set()),  # its receiver
        (8, 2.5, set()),  # a child of its receiver
        (7, 1.5, {"never run"}),  # before it was received
        (7, 70, {"never run"}),  # long after
        (9, 2.5, {"never run"}),  # another worker
        (6, 2.5, {"never run"}),  # an earlier receiver
    ],
)
def test_lost_by_a_kill(pid: int, at: float, verdict: set[str]) -> None:
    """A kill explains a lost message only if it soon hit the message's last receiver."""
    kill = Fault("kill", at, math.inf, frozenset({pid}))
    sent = event("sent", 1, task_id="task-a", expect="decided in peace")
    other = [{**e, "parent": 7} for e in body("x", 0, 0.5, pid=8, key="x")]
    received = [
        event("received", 1.1, task_id="task-a") | {"pid": 6},
        event("received", 2, task_id="task-a") | {"pid": 7},
    ]
    assert verdict == found([sent, *other, *received], kill)
    assert {"never run"} == found([sent, *other], kill)


# -- leases ----------------------------------------------------------------------------------------


def test_leftover() -> None:
    """The checker finds a lease that exists long after its body, whether it disappears in the end or not."""
    there = [*body("a", 0, 5), event("key", 0, run="a", key=KEY)]
    assert {"leftover"} == found([*there, event("looked", 9)])
    assert {"leftover"} == found([*there, event("gone", 8, run="a"), event("looked", 9)])
    assert set() == found([*there, event("looked", 5.5)])


def test_leftover_that_was_taken_again() -> None:
    """The checker finds a lease that stays after its release, because it was acquired again."""
    freed = event("store", 5.01, verb="release", key=KEY, run="a", does=["free"])
    again = [
        event("key", 0, run="a", key=KEY),
        freed,
        event("gone", 5.05, run="a"),
        event("key", 5.1, run="a", key=KEY),
    ]
    assert {"leftover"} == found([*body("a", 0, 5), *again, event("looked", 30)])


def test_release_is_the_end_of_a_lease() -> None:
    """A release ends a lease even if the probe sees its end late."""
    there = [*body("a", 0, 5), event("key", 0, run="a", key=KEY)]
    assert set() == found([*there, store(5.1, "release", "a", "free"), event("gone", 9, run="a"), event("looked", 9)])


def test_leftover_of_nobody() -> None:
    """A lease without a body must disappear after its TTL."""
    there = [event("key", 0, run="x", key=KEY)]
    assert {"leftover"} == found([*there, event("looked", 8)])
    assert set() == found([*there, event("gone", 5, run="x"), event("looked", 8)])


@pytest.mark.parametrize(("gone", "verdict"), [(10.5, set()), (12.0, {"leftover"})])
def test_a_kill_has_its_bound(gone: float, verdict: set[str]) -> None:
    """The lease of a killed child may exist within the bound of the kill, and no longer."""
    events = [
        *body("a", 0, None),
        event("death", 5, of=1),
        event("key", 0, run="a", key=KEY),
        event("gone", gone, run="a"),
    ]
    assert verdict == found(events, Fault("kill", 5, math.inf, frozenset({1}), bound=6))
    assert {"leftover"} == found(events, Fault("kill", 5, math.inf, frozenset({2}), bound=6))


def test_leftover_of_an_outage() -> None:
    """The lease of a body that ended in an outage may exist for a TTL after it, because its process may have died too."""
    events = [*body("a", 0, 20), event("key", 0, run="a", key=KEY), event("gone", 28, run="a"), event("looked", 29)]
    assert set() == found(events, OUTAGE)
    assert {"leftover"} == found(events)


def test_a_short_pause_excuses_no_overlap() -> None:
    """A short pause may leave leases for a while, but excuses no overlap."""
    pause = Fault("pause", 10, 12)
    left = [*body("a", 0, 11), event("key", 0, run="a", key=KEY), event("gone", 17, run="a"), event("looked", 18)]
    assert set() == found(left, pause)
    assert {"overlap", "lost"} == found([*body("a", 0, 20), lost("a", 14), *body("b", 14, 20, pid=2)], pause)


@pytest.mark.parametrize(
    ("faults", "verdict"),
    [
        ([Fault("pause", 10, 14.1)], set()),
        ([Fault("pause", 10, 13.9)], {"early", "lost"}),
        ([Fault("pause", 10, 12), Fault("pause", 13.9, 15)], set()),
        ([Fault("pause", 10, 12), Fault("pause", 14.1, 15)], {"early", "lost"}),
        ([Fault("pause", 10, 12), Fault("empty", 13, 14.5)], set()),
        ([Fault("kill", 10, 15, frozenset({2}))], {"early", "lost"}),
    ],
)
def test_absence_that_became_long(faults: list[Fault], verdict: set[str]) -> None:
    """Pauses that lasted two thirds of a TTL, alone or in close succession, count as an outage."""
    there = [*body("a", 0, 25), event("key", 0, run="a", key=KEY), event("gone", 15, run="a"), lost("a", 15)]
    assert verdict == found([*there, event("looked", 30)], *faults)


def test_early() -> None:
    """The checker finds a lease that disappears before its body ends."""
    there = [*body("a", 0, 25), event("key", 0, run="a", key=KEY), event("gone", 15, run="a"), event("looked", 30)]
    assert {"early"} == found(there)
    assert set() == found(there, STOP)


def test_early_and_taken_again() -> None:
    """The checker finds an early end of a lease even if the lease was reacquired."""
    there = [*body("a", 0, 25), event("key", 0, run="a", key=KEY), event("gone", 9, run="a")]
    assert {"early"} == found([*there, event("key", 10, run="a", key=KEY), event("gone", 25, run="a")])


# -- the store -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verb", "does"), [("release", "free"), ("renew", "renew"), ("acquire", "take"), ("reacquire", "take")]
)
def test_theft(verb: str, does: str) -> None:
    """The checker finds a release, renewal or acquire of another holder's lease."""
    events = [store(0, "acquire", "a", "take"), store(3, verb, "b", does)]
    assert {"theft"} == found(events)
    assert set() == found([store(0, "acquire", "a", "take"), store(3, verb, "b")])


def test_unlock_of_the_schedule() -> None:
    """A scheduled revocation is no violation, and the lock is free afterwards."""
    events = [
        store(5, "acquire", "a", "take"),
        store(10.05, "revoke", "", "unlock"),
        store(10.2, "acquire", "b", "take"),
    ]
    assert set() == found(events, UNLOCK)
    assert {"theft"} == found(events)
    assert {"theft"} == found([events[0], events[2]], UNLOCK)


def test_script_that_is_not_known() -> None:
    """The checker reports a script that the probe does not know."""
    assert {"blind"} == found([event("unknown script", 1, digest="0123")])


def test_expired_and_taken() -> None:
    """A lease has no owner after it expired or the store was reset."""
    assert set() == found([store(0, "acquire", "a", "take"), store(6.1, "acquire", "b", "take")])
    assert {"theft"} == found([store(0, "acquire", "a", "take"), store(5.8, "acquire", "b", "take")])
    assert {"theft"} == found(
        [store(0, "acquire", "a", "take"), store(5, "renew", "a", "renew"), store(9, "acquire", "b", "take")]
    )
    assert set() == found([store(0, "acquire", "a", "take"), event("store reset", 1), store(2, "acquire", "b", "take")])


@pytest.mark.parametrize(("verb", "does"), [("renew", "renew"), ("acquire", "take"), ("reacquire", "take")])
def test_renewal_after_release(verb: str, does: str) -> None:
    """The checker finds a renewal or a reacquire of a released lease."""
    events = [store(0, "acquire", "a", "take"), store(3, "release", "a", "free"), store(3.1, verb, "a", does)]
    assert {"late renewal"} == found(events)


def test_reservation_again() -> None:
    """A reservation may be released and made again, because its token is that of a message, or of a line."""
    events = [store(0, "acquire", "q", "take"), store(3, "leave", "q", "free"), store(4, "acquire", "q", "take")]
    assert {"late renewal"} == found(events)
    assert set() == found([{**one, "reserved": True} for one in events])


def test_renewal_that_goes_on() -> None:
    """A renewal without effect may follow a release shortly; only a main process may repeat it for longer."""
    events = [store(0, "acquire", "a", "take"), store(3, "release", "a", "free")]
    assert set() == found([*events, store(3.1, "renew", "a")])
    assert {"late renewal"} == found([*events, store(7, "renew", "a")])
    assert set() == found([*events, {**store(7, "renew", "a"), "own": False}])
    assert {"late renewal"} == found([*events, {**store(7, "renew", "a", "renew"), "own": False}])


def test_short_run_after_a_loss_of_data() -> None:
    """A body that lost its lease must be notified, however short the other run was."""
    both = [*body("a", 0, 40), *body("b", 11, 13, pid=2)]
    assert {"untold"} == found(both, EMPTY)
    assert set() == found([*both, lost("a", 15)], EMPTY)


@pytest.mark.parametrize(("fault", "second", "told"), [(EMPTY, 11, 28), (OUTAGE, 15, 38)])
def test_mark_lostr_that_was_stopped(fault: Fault, second: float, told: float) -> None:
    """A stopped child must be notified soon after it continues."""
    stop = Fault("child stop", 5, told - 3.1, frozenset({1}))
    both = [*body("a", 0, 60), *body("b", second, second + 1, pid=2)]
    assert set() == found([*both, lost("a", told)], fault, stop)
    assert {"untold", "lost"} == found([*both, lost("a", told + 1)], fault, stop)
    assert {"untold", "lost"} == found([*both, lost("a", told)], fault, Fault("child stop", 5, 25, frozenset({3})))


# -- options of single tasks -----------------------------------------------------------------------


def option(run: str, start: float, end: float | None, how: str = "return", pid: int = 1, **own: Any) -> list[Event]:
    """Return the events of one body whose task has these options, and of its grant."""
    return [{**event, **own} for event in body(run, start, end, how, pid)] + [store(start, "acquire", run, "take")]


def test_cap() -> None:
    """A capped lease may be lost after its time, and gone a renewal later; a body that goes on is notified."""
    long = option("a", 10, 30, most=2.0)
    seen = [event("key", 10, run="a", key=KEY)]
    assert {"untold"} == found(long)
    assert set() == found([*long, lost("a", 12)])
    assert {"lost"} == found([*option("a", 10, 30, most=8.0), lost("a", 12)])
    assert {"early"} == found([*long, lost("a", 12), *seen, event("gone", 15, run="a"), event("looked", 31)])
    assert set() == found([*long, lost("a", 12), *seen, event("gone", 16.1, run="a"), event("looked", 31)])
    assert {"overlap", "theft"} == found([*long, lost("a", 12), *option("b", 15.5, 16, pid=2)])
    assert set() == found([*long, lost("a", 12), *option("b", 16.1, 17, pid=2)])


def test_cap_of_a_slow_acquire() -> None:
    """The cap counts from before the acquire was sent: where a pause delayed the reply, the lease is lost earlier."""
    events = [*option("a", 10, 11, most=2.0), lost("a", 11)]
    assert {"lost"} == found(events)
    assert set() == found(events, Fault("pause", 9, 9.9))


def test_cooldown() -> None:
    """No body starts within the cooldown of a success."""
    first, second = option("a", 10, 11, least=5.0), option("b", 14.9, 16, least=5.0)
    freed = store(11, "release", "a", "free")
    assert {"cooldown"} == found([*first, freed, *second])
    assert set() == found([*first, freed, *option("b", 15, 16, least=5.0)])
    assert set() == found([*option("a", 10, 11, "Boom", least=5.0), freed, *second])
    assert set() == found([*first, freed, *second], Fault("empty", 12, 13))


def test_starts() -> None:
    """After so many crashed starts as the option allows, no body starts, and a message is refused only then."""
    own: dict[str, Any] = {"starts": (1, 20.0)}
    died = [*option("a", 10, None, **own), event("death", 12, of=1)]
    refused = event("refused", 14, task_id="task-b", key=KEY)
    assert {"starts"} == found([*died, *option("b", 16.1, 17, pid=2, **own)])
    assert set() == found([*died, *option("b", 30.1, 31, pid=2, **own)])
    assert set() == found([*died, event("store reset", 13), *option("b", 16.1, 17, pid=2, **own)])
    assert set() == found([*died, refused])
    ended = [*option("a", 10, 12, **own), store(12, "release", "a", "free")]
    assert set() == found([*ended, *option("b", 16.1, 17, pid=2, **own)])
    assert {"starts"} == found([*ended, refused])
    sent = event("sent", 9, task_id="task-b", expect="decided in peace")
    assert {"never run"} == found([*died, sent])
    assert set() == found([*died, sent, refused])


@pytest.mark.parametrize(
    ("calls", "turn", "verdict"),
    [
        ([10.0], 10.5, {"quiet"}),
        ([10.0], 11.0, set()),
        ([10.0, 10.8], 11.0, {"quiet"}),
        ([10.0, 10.8, 11.6], 12.0, set()),  # the first call waits no longer
        ([10.0, 11.1], 11.0, set()),  # its turn came before the other call
    ],
)
def test_quiet(calls: list[float], turn: float, verdict: set[str]) -> None:
    """The lock is reserved for the next in line, or granted, after a second without a call, or two after the first call."""
    events = [{**store(call, "acquire", f"call-{call}"), "sent": True, "policy": "run_once_more"} for call in calls]
    events += [{**store(turn, "acquire", "line", "take"), "reserved": True}]
    events += [{**e, "heir_of": ["line"]} for e in option("a", turn + 0.2, 15, quiet=(1.0, 2.0))]
    assert verdict == found(events)
    assert set() == found([*events, event("store reset", turn - 0.1)])


@pytest.mark.parametrize(
    "first",
    [
        {**store(11.1, "acquire", "call"), "sent": True, "policy": "run_once_more"},  # between a turn and its start
        moves(11.1, "join", "t1"),  # a message comes again after an outage
    ],
)
def test_longest_quiet_time(first: Event) -> None:
    """Two seconds after the first message that waits, a new call does not prolong the wait."""
    call = {**store(13.2, "acquire", "call"), "sent": True, "policy": "run_once_more"}
    turns = [{**store(at, "acquire", "line", "take"), "reserved": True} for at in (11.0, 13.3)]
    starts = [*option("a", 11.2, 11.5, quiet=(1.0, 2.0)), *option("b", 13.4, 13.6, quiet=(1.0, 2.0))]
    events = [call, *turns, *({**start, "heir_of": ["line"]} for start in starts), freed(11.5, "a")]
    assert {"quiet"} == found(events)
    assert set() == found([first, *events])
