"""Times and CPU times, compared within one run: nothing has become many times as slow.

Of many rounds the best one of each counts, and the rounds take seconds together, as a machine may be slow for a while. Even so, a
busy machine has made such a ratio 1.7 times as large. What has become twice as slow shows in `benchmarks`, and in the counts of
`tests/integration/test_speed_guard.py`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from benchmarks import cycle, keys, sweep
from benchmarks.rounds import Rounds, Sample, median_of
from benchmarks.stage import Stage, stage
from benchmarks.tasks import OURS, SCALARS


@pytest.fixture(scope="module")
def own_stage() -> Iterator[Stage]:
    """A broker and a store that nobody else talks to."""
    with stage(quick=True) as made:
        yield made


def best(rounds: Rounds, name: str, reference: str) -> float:
    """The ratio of what each took in its best round."""
    return min(rounds.values[name]) / min(rounds.values[reference])


def cpu_of(sample: Sample) -> Sample:
    """A sample of the CPU time of this thread: beside other processes, it waits longer for replies, and computes no more."""

    def used() -> float:
        begin = time.thread_time()
        sample()
        return time.thread_time() - begin

    return used


def test_cycle(own_stage: Stage) -> None:
    """All around a body uses 11 times the CPU time of the same two commands over a raw socket, and 33 times at most.

    Both also make a request; the former pushes it, too, and sends Celery's signal of the end.
    """
    with own_stage.socket() as raw:
        found = cycle.candidates(own_stage, raw)
        compared = {name: median_of(cpu_of(found[name]), 50) for name in (cycle.RAW, cycle.LIBRARY)}
        assert best(Rounds(compared, 30), cycle.LIBRARY, cycle.RAW) < 33


def test_key(own_stage: Stage) -> None:
    """The key of three scalars takes 4.5 times as long as `json.dumps` of them and its digest, and 14 times at most."""
    assert best(keys.measured(own_stage, SCALARS, 300, 300), OURS, keys.FLOOR) < 14


def test_sweep(own_stage: Stage) -> None:
    """To renew leases takes twice as long as the same commands over a raw socket, and six times at most."""
    assert best(sweep.swept(own_stage, 1000, 5).wall, sweep.LIBRARY, sweep.RAW) < 6
