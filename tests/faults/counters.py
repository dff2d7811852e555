"""Compares the counters that the scripts keep with the changes of locks that the probe has seen (`probes.Commands`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from celery_singleton_lock.store.records import Statistics
from tests.faults.ledger import Event


def disagreements(events: Sequence[Event], found: Sequence[Statistics]) -> list[str]:
    """Return what is wrong with the counters of tasks, since the store last lost its data.

    For each task, what began must have ended or exist. For tasks whose messages reserve no lock, the numbers of grants, releases
    and revocations must be those that the probe has seen; so the number of leases that expired is exact, too.
    """
    since = max((event["at"] for event in events if event["what"] == "store reset"), default=0.0)
    seen: Counter[tuple[str, str]] = Counter()
    for event in events:
        if event["what"] == "store" and event["at"] > since and not event.get("sent") and not event.get("reserved"):
            name = event["key"].partition("{")[2].partition("}")[0]
            seen[name, _counter(event)] += 1
    wrong = []
    for one in found:
        begun, ended = (
            one.sum("acquired") + one.sum("reacquired"),
            sum(map(one.sum, ("released", "expired", "revoked"))),
        )
        if begun != ended + one.held:
            wrong.append(f"{one.task}: {begun} began, {ended} ended, {one.held} exist")
        for name in ("acquired", "reacquired", "released", "revoked"):
            if not one.task.startswith("publish") and one.sum(name) != seen[one.task, name]:
                wrong.append(f"{one.task}: {name} {one.sum(name)}, seen {seen[one.task, name]}")
    return wrong


def _counter(event: Event) -> str:
    """Return the counter of a change of a lock, "" if it has none."""
    if event["does"] == ["take"] and event.get("new"):
        return {"acquire": "acquired", "reacquire": "reacquired"}.get(event["verb"], "")
    return {("free", "release"): "released", ("unlock", "revoke"): "revoked"}.get((event["does"][0], event["verb"]), "")
