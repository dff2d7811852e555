"""Measuring in rounds: all that is compared has its turn in each of them, so that a slow moment of the machine hits all alike."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from time import perf_counter

#: Runs something once and answers a figure, most often seconds.
Sample = Callable[[], float]


@dataclass(frozen=True)
class Spread:
    """Figures of several rounds: their median, and the quartiles around it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float], scale: float = 1.0) -> Spread:
        """The spread of these figures, each multiplied by `scale`."""
        scaled = [value * scale for value in values]
        if len(scaled) < 2:
            return cls(scaled[0], scaled[0], scaled[0])
        low, _, high = quantiles(scaled, n=4, method="inclusive")
        return cls(median(scaled), low, high)


def interval(
    statistic: Callable[[Sequence[int]], float], rounds: int, block: int = 10, resamples: int = 1000
) -> Spread:
    """A figure and its 95 % interval, by the bootstrap with moving blocks (Künsch, Annals of Statistics 17, 1989).

    Arguments:
        statistic: the figure of some of the rounds, by their numbers; one may come several times.
        rounds: how many there are.
        block: how many neighbours are drawn together, as a machine is slow for some rounds on end.
        resamples: how many draws of about as many rounds.
    """
    drawn, block = random.Random(1), min(block, max(1, rounds // 4))
    starts = range(rounds - block + 1)

    def resample() -> list[int]:
        return [at for start in drawn.choices(starts, k=rounds // block) for at in range(start, start + block)]

    cuts = quantiles([statistic(resample()) for _ in range(resamples)], n=40, method="inclusive")
    return Spread(statistic(range(rounds)), cuts[0], cuts[-1])


def shuffled(names: Sequence[str], rounds: int) -> list[list[str]]:
    """For each round the names in another order, so that none always comes after the same."""
    drawn = random.Random(1)
    return [drawn.sample(names, len(names)) for _ in range(rounds)]


class Rounds:
    """The figures of all candidates, round by round.

    Arguments:
        candidates: what is compared, by name.
        count: how many rounds, each in an order of its own.
    """

    def __init__(self, candidates: Mapping[str, Sample], count: int) -> None:
        names = list(candidates)
        self.values: dict[str, list[float]] = {name: [] for name in names}
        for order in shuffled(names, count):
            for name in order:
                self.values[name].append(candidates[name]())

    def spread(self, name: str, scale: float = 1.0) -> Spread:
        """A candidate's own figures."""
        return Spread.of(self.values[name], scale)

    def ratio(self, name: str, reference: str) -> Spread:
        """A candidate's figures, each divided by the reference's of the same round."""
        return Spread.of([a / b for a, b in self.pairs(name, reference)])

    def pairs(self, name: str, reference: str) -> list[tuple[float, float]]:
        """The figures of two candidates, round by round."""
        return list(zip(self.values[name], self.values[reference], strict=True))


def timed(call: Callable[[], object]) -> Sample:
    """A sample of the seconds that a call takes."""

    def sample() -> float:
        begin = perf_counter()
        call()
        return perf_counter() - begin

    return sample


def median_of(sample: Sample, repeats: int) -> Sample:
    """A sample that is the median of so many, after a few that warm up."""

    def several() -> float:
        for _ in range(5):
            sample()
        return median(sample() for _ in range(repeats))

    return several


def mean_of(call: Callable[[], object], repeats: int) -> Sample:
    """A sample of the seconds that one call takes, of so many in a row: for what is too short to be timed alone."""

    def several() -> float:
        begin = perf_counter()
        for _ in range(repeats):
            call()
        return (perf_counter() - begin) / repeats

    return several
