"""The order of rounds, and the intervals and verdicts that benchmarks print."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median

import pytest

from benchmarks.report import Target
from benchmarks.rounds import Spread, interval, shuffled

pytestmark = pytest.mark.harness


def median_of(figures: Sequence[float]) -> Callable[[Sequence[int]], float]:
    return lambda rounds: median([figures[number] for number in rounds])


def test_figures_without_noise_leave_no_doubt() -> None:
    found = interval(median_of([3.0] * 20), 20)
    assert (found.median, found.low, found.high) == (3.0, 3.0, 3.0)


def test_most_intervals_hold_the_true_median_and_few_miss_it() -> None:
    noise = random.Random(7)
    series = [[noise.gauss(5, 1) for _ in range(60)] for _ in range(100)]
    found = [interval(median_of(one), 60, block=1, resamples=200) for one in series]
    assert 85 <= sum(one.low <= 5 <= one.high for one in found) <= 99


def test_more_rounds_narrow_an_interval() -> None:
    noise = random.Random(7)
    few, many = ([noise.gauss(5, 1) for _ in range(rounds)] for rounds in (40, 640))
    widths = [one.high - one.low for one in (interval(median_of(few), 40), interval(median_of(many), 640))]
    assert widths[1] < widths[0] / 2


def test_slow_phases_of_a_machine_widen_an_interval() -> None:
    """Ten rounds of one phase are no ten independent figures."""
    noise = random.Random(7)
    phases = [noise.gauss(5, 1) for _ in range(24)]
    series = [phase + noise.gauss(0, 0.1) for phase in phases for _ in range(10)]
    alone, together = (interval(median_of(series), 240, block) for block in (1, 10))
    assert together.high - together.low > 1.5 * (alone.high - alone.low)


@pytest.mark.parametrize(
    ("measured", "verdict"),
    [
        (2.0, "met"),
        (3.0, "MISSED"),
        (Spread(1.5, 1, 2), "met"),
        (Spread(1.5, 1, 3), "open"),
        (Spread(4, 3, 5), "MISSED"),
    ],
)
def test_a_verdict_that_the_noise_allows(measured: float | Spread, verdict: str) -> None:
    assert Target("a figure", measured, 2.0).verdict == verdict


def test_none_always_comes_after_the_same() -> None:
    orders = shuffled("abcdef", 100)
    assert all(sorted(order) == list("abcdef") for order in orders)
    assert len({(first, then) for order in orders for first, then in pairwise(order)}) == 30


def test_a_statistic_of_two_series_keeps_their_rounds_together() -> None:
    """Noise that hits both alike is in no ratio of the two."""
    noise = random.Random(7)
    shared = [noise.uniform(1, 10) for _ in range(40)]
    found = interval(lambda rounds: median(2 * shared[n] / shared[n] for n in rounds), 40)
    assert (found.low, found.high) == pytest.approx((2.0, 2.0))


def test_blocks_draw_as_many_rounds() -> None:
    """Where rounds do not depend on each other, blocks say about the same as single rounds."""
    noise = random.Random(7)
    series = [noise.gauss(5, 1) for _ in range(240)]
    alone, together = (interval(median_of(series), 240, block) for block in (1, 10))
    assert 0.5 < (together.high - together.low) / (alone.high - alone.low) < 2
