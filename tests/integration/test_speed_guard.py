"""Speed limits that hold on any machine: counts of commands, and ratios of times within one run, with a wide margin.

The best of several rounds counts: a busy machine slows some rounds, a regression slows all. For figures, see `benchmarks`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks import commands, cycle, keys, sweep
from benchmarks.deliveries import Deliveries
from benchmarks.rounds import Rounds, median_of
from benchmarks.stage import Stage, stage
from benchmarks.tasks import OURS, SCALARS, nothing
from benchmarks.tracer import around_body


@pytest.fixture(scope="module")
def own_stage() -> Iterator[Stage]:
    """Yield an app whose broker and store have no other clients."""
    with stage(quick=True) as made:
        yield made


def best(rounds: Rounds, name: str, reference: str) -> float:
    """Return the ratio of the best times of both."""
    return min(rounds.values[name]) / min(rounds.values[reference])


def test_commands(own_stage: Stage) -> None:
    """A run sends the store two commands, a duplicate one."""
    counted = commands.count(own_stage, Deliveries(own_stage), OURS)
    assert [2, 1] == [len(sent) for sent, _ in counted.values()], counted


def test_cycle(own_stage: Stage) -> None:
    """The code around a body takes at most five times as long as the same two commands over a raw socket."""
    with own_stage.socket() as raw:
        found = cycle.candidates(own_stage, raw)
        compared = {name: median_of(found[name], 50) for name in (cycle.RAW, cycle.LIBRARY)}
        assert best(Rounds(compared, 10), cycle.LIBRARY, cycle.RAW) < 5


def test_frames(own_stage: Stage) -> None:
    """At most 160 Python functions are called around a body; 132 with Python 3.11, Celery 5.7 and redis-py 8.1."""
    called: list[str] = []

    def look(frame: Any, event: str, _: object) -> None:
        if event == "call":
            called.append(frame.f_code.co_name)

    around_body(own_stage.tasks[OURS], SCALARS, supervised=True)  # creates the plan, the connection and the scripts
    sys.setprofile(look)
    try:
        around_body(own_stage.tasks[OURS], SCALARS, supervised=True)
    finally:
        sys.setprofile(None)
    around = called[called.index("guarded") : called.index("pop")]
    assert nothing.__name__ in around
    assert 35 < len(around) <= 160, " ".join(around)


def test_key(own_stage: Stage) -> None:
    """The key of three scalars takes at most six times as long as `json.dumps` of them and its digest."""
    assert best(keys.measured(own_stage, SCALARS, 300, 10), OURS, keys.FLOOR) < 6


def test_sweep(own_stage: Stage) -> None:
    """Renewals of 100 leases at a time take at most four times as long as the same commands over a raw socket."""
    found = sweep.swept(own_stage, 1000, 5)
    assert 10 == found.commands
    assert best(found.wall, sweep.LIBRARY, sweep.RAW) < 4
