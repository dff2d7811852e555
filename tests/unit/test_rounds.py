"""The intervals that benchmarks print."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from statistics import median

import pytest

from benchmarks.rounds import interval


def median_of(figures: Sequence[float]) -> Callable[[Sequence[int]], float]:
    return lambda rounds: median([figures[number] for number in rounds])


def test_figures_without_noise_leave_no_doubt() -> None:
    found = interval(median_of([3.0] * 20), 20)
    assert (found.median, found.low, found.high) == (3.0, 3.0, 3.0)


def test_most_intervals_hold_the_true_median_and_few_miss_it() -> None:
    noise = random.Random(7)
    found = [interval(median_of([noise.gauss(5, 1) for _ in range(60)]), 60, 200) for _ in range(100)]
    assert 85 <= sum(one.low <= 5 <= one.high for one in found) <= 99


def test_more_rounds_narrow_an_interval() -> None:
    noise = random.Random(7)
    few, many = ([noise.gauss(5, 1) for _ in range(rounds)] for rounds in (20, 320))
    widths = [one.high - one.low for one in (interval(median_of(few), 20), interval(median_of(many), 320))]
    assert widths[1] < widths[0] / 2


def test_a_statistic_of_two_series_keeps_their_rounds_together() -> None:
    """Noise that hits both alike is in no ratio of the two."""
    noise = random.Random(7)
    shared = [noise.uniform(1, 10) for _ in range(40)]
    found = interval(lambda rounds: median(2 * shared[n] / shared[n] for n in rounds), 40)
    assert (found.low, found.high) == pytest.approx((2.0, 2.0))
