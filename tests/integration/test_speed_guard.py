"""Speed as far as any machine can judge it: commands are counted, and times compared within one run, with a wide margin.

Of several rounds the best one of each counts: a busy machine spoils some, what has become slow spoils all. For figures, see
`benchmarks`.
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
    """A broker and a store that nobody else talks to."""
    with stage(quick=True) as made:
        yield made


def best(rounds: Rounds, name: str, reference: str) -> float:
    """The ratio of what each took in its best round."""
    return min(rounds.values[name]) / min(rounds.values[reference])


def test_commands(own_stage: Stage) -> None:
    """A run costs the store two commands, a duplicate one."""
    counted = commands.count(own_stage, Deliveries(own_stage), OURS)
    assert [2, 1] == [len(sent) for sent, _ in counted.values()], counted


def test_cycle(own_stage: Stage) -> None:
    """All around a body takes at most five times as long as the same two commands over a raw socket."""
    with own_stage.socket() as raw:
        found = cycle.candidates(own_stage, raw)
        compared = {name: median_of(found[name], 50) for name in (cycle.RAW, cycle.LIBRARY)}
        assert best(Rounds(compared, 10), cycle.LIBRARY, cycle.RAW) < 5


def test_frames(own_stage: Stage) -> None:
    """Around a body no more than 210 Python functions are called (175 with Python 3.11, Celery 5.7, redis-py 8.1, no hiredis)."""
    called: list[str] = []

    def look(frame: Any, event: str, _: object) -> None:
        if event == "call":
            called.append(frame.f_code.co_name)

    around_body(own_stage.tasks[OURS], SCALARS, supervised=True)  # makes plan, connection and scripts
    sys.setprofile(look)
    try:
        around_body(own_stage.tasks[OURS], SCALARS, supervised=True)
    finally:
        sys.setprofile(None)
    around = called[called.index("guarded") : called.index("pop")]
    assert nothing.__name__ in around
    assert 35 < len(around) <= 210, " ".join(around)


def test_key(own_stage: Stage) -> None:
    """The key of three scalars takes at most six times as long as `json.dumps` of them and its digest."""
    assert best(keys.measured(own_stage, SCALARS, 300, 10), OURS, keys.FLOOR) < 6


def test_sweep(own_stage: Stage) -> None:
    """Leases are renewed by hundreds, in at most four times what the same commands take over a raw socket."""
    found = sweep.swept(own_stage, 1000, 5)
    assert 10 == found.commands
    assert best(found.wall, sweep.LIBRARY, sweep.RAW) < 4
