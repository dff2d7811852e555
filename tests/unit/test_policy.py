"""Policies only decide."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from celery_singleton_lock import ConfigurationError, Raise, RetryLater, Skip
from celery_singleton_lock.policies import as_policy


@pytest.mark.parametrize(("name", "policy"), [("skip", Skip()), ("retry", RetryLater()), ("raise", Raise())])
def test_names_stand_for_defaults(name: str, policy: Any) -> None:
    """The texts are shorthand for policies with defaults; a policy object stands for itself."""
    assert policy == as_policy(name)
    assert policy is as_policy(policy)


@pytest.mark.parametrize("value", ["Skip", "", None, 1, Skip, RetryLater, [], {}, ["skip"]])
def test_anything_else_is_no_policy(value: Any) -> None:
    """Other values are no policy, unhashable ones included."""
    assert as_policy(value) is None


def test_defaults() -> None:
    """The defaults are those that are documented."""
    assert RetryLater(delay=5.0, backoff=2.0, max_delay=60.0, jitter=0.2, max_wait=3600.0) == RetryLater()
    assert Skip(result=None) == Skip()


@pytest.mark.parametrize("name", ["delay", "backoff", "max_delay", "jitter", "max_wait"])
@pytest.mark.parametrize("value", [-1, math.nan, "5", None, True])
def test_bad_values_are_refused(name: str, value: Any) -> None:
    """A value that is out of range, or no number, is refused by name and value."""
    with pytest.raises(ConfigurationError) as refused:
        RetryLater(**{name: value})
    assert f"{name}={value!r}" in str(refused.value)


@pytest.mark.parametrize(("name", "value"), [("backoff", 0.5), ("jitter", 1.5)])
def test_ranges(name: str, value: float) -> None:
    """Delays never shrink, and are varied by no more than themselves."""
    with pytest.raises(ConfigurationError, match=name):
        RetryLater(**{name: value})


def test_delay_above_its_bound() -> None:
    """A first delay that is longer than the longest one is refused: nobody can mean both."""
    with pytest.raises(ConfigurationError, match="delay=90 must not be above max_delay=60"):
        RetryLater(delay=90)


numbers = st.floats(0.01, 1e6)


@example(5.0, 65536.0, 60.0, 0.2, 3600.0, 64, 0.0)
@given(numbers, st.floats(1, 1e12), numbers, st.floats(0, 1), st.floats(1, 1e6), st.integers(0, 10**6), st.floats(0, 1))
def test_delay_is_sane(
    delay: float, backoff: float, most: float, jitter: float, wait: float, times: int, share: float
) -> None:
    """Whatever was asked for, a delay is a number from 0, varied around its bound, and never past max_wait."""
    policy = RetryLater(min(delay, most), backoff, most, jitter, wait)
    waited = wait * share * 0.999
    found = policy.delay_for(times, waited)
    assert 0 <= found <= min(most * (1 + jitter), wait - waited) + 1e-6


def test_jitter_spreads() -> None:
    """Many duplicates do not come back at the same time."""
    policy = RetryLater(delay=10, jitter=0.2)
    delays = {policy.delay_for(0, 0.0) for _ in range(200)}
    assert len(delays) > 100
    assert all(8 <= delay <= 12 for delay in delays)
