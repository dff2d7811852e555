"""Compares the counters that the scripts keep with what the probe (`probes.Commands`) and the bodies have recorded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from celery_singleton_lock.store.records import Statistics
from tests.faults.checker import SEEN, Body, bodies_of
from tests.faults.ledger import Event
from tests.faults.schedule import Fault

Counts = Counter[tuple[str, str]]


def disagreements(events: Sequence[Event], faults: Iterable[Fault], found: Sequence[Statistics]) -> list[str]:
    """Return what is wrong with the counters of tasks, since the store last lost its data.

    For each task, what began must have ended or exist. For tasks whose messages reserve no lock, the numbers of grants, releases
    and revocations must be those that the probe has seen; so the number of leases that expired is exact, too.
    Releases by outcome and duplicates by policy must be within the bounds that the bodies and the signals give.
    """
    since = max((event["at"] for event in events if event["what"] == "store reset"), default=0.0)
    late = [event for event in events if event["at"] > since]
    seen = Counter((_name(event), _counter(event)) for event in _changes(late))
    outcomes, duplicates = _outcomes(late, bodies_of(events), faults), _duplicates(late)
    least, most = outcomes[0] + duplicates[0], outcomes[1] + duplicates[1]
    wrong = unbalanced(found)
    for one in found:
        for name in ("acquired", "reacquired", "released", "released_by_operator"):
            if "publish" not in one.task and one.sum(name) != seen[one.task, name]:
                wrong.append(f"{one.task}: {name} {one.sum(name)}, seen {seen[one.task, name]}")
        for name in sorted({name for task, name in most if task == one.task}.union(one.counters)):
            low, high, count = least[one.task, name], most[one.task, name], one.counters.get(name, 0)
            is_counted = name.startswith(("duplicates:", "released:"))
            is_counted = is_counted and not ("publish" in one.task and name == "released:other")  # of reservations, too
            if is_counted and not low <= count <= high:
                wrong.append(f"{one.task}: {name} {count}, seen {low} to {high}")
    return wrong


def unbalanced(found: Sequence[Statistics]) -> list[str]:
    """Return the tasks of whose leases some have neither ended nor exist, or have ended twice.

    A script writes all or nothing, and a replica has what its primary wrote up to some call. So this also holds after a failover.
    """
    wrong = []
    for one in found:
        begun = one.sum("acquired") + one.sum("reacquired")
        ended = sum(map(one.sum, ("released", "expired", "released_by_operator")))
        if begun != ended + one.held:
            wrong.append(f"{one.task}: {begun} began, {ended} ended, {one.held} exist")
    return wrong


def _name(event: Event) -> str:
    return str(event["key"].partition("{")[2].partition("}")[0])


def _changes(events: Iterable[Event]) -> Iterator[Event]:
    """Return the changes of leases, not those of reservations."""
    for event in events:
        if event["what"] == "store" and not event.get("sent") and not event.get("reserved"):
            yield event


def _counter(event: Event) -> str:
    """Return the counter of a change of a lock, "" if it has none."""
    if event["does"] == ["take"] and event.get("new"):
        return {"acquire": "acquired", "reacquire": "reacquired"}.get(event["verb"], "")
    return {("free", "release"): "released", ("unlock", "revoke"): "released_by_operator"}.get(
        (event["does"][0], event["verb"]), ""
    )


def _outcomes(events: Sequence[Event], bodies: Sequence[Body], faults: Iterable[Fault]) -> tuple[Counts, Counts]:
    """Return how many releases of each outcome there were, at least and at most.

    If a child was killed between the end of its body and the release, the release may be its main process's (`other`).
    """
    runs = {body.run: body for body in bodies}
    kills = [fault for fault in faults if fault.kind == "kill"]
    least, most = Counts(), Counts()
    for event in _changes(events):
        if _counter(event) != "released":
            continue
        body = runs.get(event["run"])
        ends = {_outcome(body)}
        if body and any(body.pid in f.pids and body.end - SEEN <= f.at <= event["at"] + SEEN for f in kills):
            ends.add("other")
        for end in ends:
            most[_name(event), f"released:{end}"] += 1
            least[_name(event), f"released:{end}"] += len(ends) == 1
    return least, most


def _outcome(body: Body | None) -> str:
    if body is None or body.how in ("died", "goes on", "SystemExit"):
        return "other"
    return "success" if body.how == "return" else "failure"


def _duplicates(events: Sequence[Event]) -> tuple[Counts, Counts]:
    """Return how many duplicates of each policy there were, at least and at most.

    At least those that a signal named, and whose first call the store answered. At most the first calls that were refused: a
    kill or a lost reply may have kept a process from sending the signal.
    """
    sent = {event["task_id"] for event in events if event["what"] == "sent"}
    failed = {event["task_id"] for event in events if event["what"] == "store error"}
    named = {
        (_name(event), f"duplicates:{event['policy']}", event["task_id"])
        for event in events
        if event["what"] == "duplicate" and event["task_id"] in sent - failed
    }
    most = Counts()
    calls: dict[str, Event] = {}  # the last one of each run: the second, to join the line, may be granted
    for event in events:
        if event["what"] == "store" and event["verb"] == "acquire" and event["does"] in ([], ["take"]):
            call = event if event.get("sent") else calls.get(event["run"], event)
            calls[call["run"]] = call
            if call.get("policy"):
                most[_name(call), f"duplicates:{call['policy']}"] += 1 if event is call else -1
    return Counts((name, counter) for name, counter, _ in named), most
