"""Policies decide and do nothing else."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from celery_singleton_lock import ConfigurationError, Holder, Policy, Raise, RetryLater, Skip
from celery_singleton_lock.policies import as_policy
from celery_singleton_lock.policies.decisions import Decision, Duplicate, Fail, RunLater, SkipRun

HOLDER = Holder("id-1", "node@host", 4711, 1.5, 28.5)


def delay_of(policy: RetryLater, times: int = 0, waited: float = 0.0) -> float:
    """Return the delay that a policy decides for."""
    decision = policy.decide(Duplicate(HOLDER, times, waited))
    assert isinstance(decision, RunLater)
    return decision.delay


@pytest.mark.parametrize(("name", "policy"), [("skip", Skip()), ("retry", RetryLater()), ("raise", Raise())])
def test_names_stand_for_defaults(name: str, policy: Any) -> None:
    """A name stands for the policy with its defaults; a policy object stands for itself."""
    assert policy == as_policy(name)
    assert policy is as_policy(policy)


@pytest.mark.parametrize("value", ["Skip", "", None, 1, Skip, RetryLater, [], {}, ["skip"]])
def test_other_values_are_no_policy(value: Any) -> None:
    """Other values are no policy, not even a policy's class or a value without a hash."""
    assert as_policy(value) is None


def test_defaults() -> None:
    """The defaults are the documented ones."""
    assert RetryLater(delay=5.0, backoff=2.0, max_delay=60.0, jitter=0.2, max_wait=3600.0) == RetryLater()
    assert Skip(result=None, own_retries=False) == Skip()


@pytest.mark.parametrize("policy", [Skip({"a": 1}), RetryLater(2, max_wait=math.inf), Raise()], ids=repr)
def test_policies_are_values(policy: Policy) -> None:
    """A policy equals its copies, survives pickle, shows its options, and cannot be changed."""
    assert policy == pickle.loads(pickle.dumps(policy)) == copy.deepcopy(policy)
    assert policy == eval(repr(policy), {"inf": math.inf, **{one.__name__: one for one in (Skip, RetryLater, Raise)}})
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.result = 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("can_run_later", [True, False])
def test_decisions(can_run_later: bool) -> None:
    """Skip skips with its result, Raise fails, and RetryLater retries until max_wait has passed."""
    duplicate = Duplicate(HOLDER, 3, 15.0, can_run_later)
    assert SkipRun("already") == Skip("already").decide(duplicate)
    assert Fail() == Raise().decide(duplicate)
    assert RunLater(8.0) == RetryLater(delay=1, jitter=0).decide(duplicate)
    assert RunLater(2.0) == RetryLater(delay=1, jitter=0, max_wait=17).decide(duplicate)
    assert Fail() == RetryLater(delay=1, jitter=0, max_wait=15).decide(duplicate)


def test_own_retry_is_not_skipped() -> None:
    """Skip postpones a task's own retry as RetryLater() does, and skips it only if asked to. Others make no difference."""
    own = Duplicate(HOLDER, 0, 0.0, own_retry=True)
    assert all(4 <= delay <= 6 for delay in (Skip().decide(own).delay for _ in range(50)))  # type: ignore[union-attr]
    assert Fail() == Skip("x").decide(own._replace(waited=3600.0))
    assert SkipRun("x") == Skip("x", own_retries=True).decide(own)
    assert SkipRun("x") == Skip("x").decide(Duplicate(HOLDER, 5, 3600.0))
    assert Fail() == Raise().decide(own)
    assert RunLater(1.0) == RetryLater(delay=1, jitter=0).decide(own)


@pytest.mark.parametrize("value", [1, None, "yes"])
def test_own_retries_is_a_bool(value: Any) -> None:
    """Another value is refused, and shown."""
    with pytest.raises(ConfigurationError, match=f"Skip: own_retries={value!r}"):
        Skip(own_retries=value)


def test_policy_of_a_user() -> None:
    """A subclass of Policy is a policy; one that cannot decide cannot be made."""

    class Patient(Policy):
        def decide(self, duplicate: Duplicate) -> Decision:
            return RunLater(1.0) if duplicate.can_run_later else SkipRun()

    policy = Patient()
    assert policy is as_policy(policy)
    assert RunLater(1.0) == policy.decide(Duplicate(HOLDER))
    with pytest.raises(TypeError, match="decide"):
        type("Undecided", (Policy,), {})()


@pytest.mark.parametrize("name", ["delay", "backoff", "max_delay", "jitter", "max_wait"])
@pytest.mark.parametrize("value", [-1, math.nan, "5", None, True])
def test_bad_values_are_refused(name: str, value: Any) -> None:
    """A value that is out of range or no number is refused; the error shows its name and the value."""
    with pytest.raises(ConfigurationError) as refused:
        RetryLater(**{name: value})
    assert f"{name}={value!r}" in str(refused.value)


@pytest.mark.parametrize(("name", "value"), [("backoff", 0.5), ("jitter", 1.5)])
def test_ranges(name: str, value: float) -> None:
    """Delays never shrink, and vary by at most their own length."""
    with pytest.raises(ConfigurationError, match=name):
        RetryLater(**{name: value})


def test_delay_above_its_bound() -> None:
    """A first delay above the longest delay is refused, as they contradict each other."""
    with pytest.raises(ConfigurationError, match="delay=90 must not be above max_delay=60"):
        RetryLater(delay=90)


numbers = st.floats(0.01, 1e6)


@example(5.0, 65536.0, 60.0, 0.2, 3600.0, 64, 0.0)
@given(numbers, st.floats(1, 1e12), numbers, st.floats(0, 1), st.floats(1, 1e6), st.integers(0, 10**6), st.floats(0, 1))
def test_delay_stays_in_its_range(
    delay: float, backoff: float, most: float, jitter: float, wait: float, times: int, share: float
) -> None:
    """A delay is never negative, never above max_delay with its jitter, and never ends after max_wait."""
    policy = RetryLater(min(delay, most), backoff, most, jitter, wait)
    waited = wait * share * 0.999
    assert 0 <= delay_of(policy, times, waited) <= min(most * (1 + jitter), wait - waited) + 1e-6


def test_delay_grows_up_to_its_bounds() -> None:
    """The delay grows with each retry up to max_delay, and the last one ends when max_wait has passed."""
    policy = RetryLater(delay=1, backoff=2, max_delay=5, jitter=0, max_wait=10)
    assert [1, 2, 4, 5, 5] == [delay_of(policy, times) for times in range(5)]
    assert 0.5 == delay_of(policy, 3, 9.5)


@pytest.mark.parametrize("remaining", [0.5, 7.0, 1800.0])
def test_comes_back_after_a_cooldown(remaining: float) -> None:
    """A retry comes back no earlier than a cooldown ends, unless max_wait ends before; it then fails."""
    held = Holder("id-1", remaining=remaining, state="cooldown")
    for _ in range(50):
        decision = RetryLater(delay=5, jitter=0.2).decide(Duplicate(held))
        assert isinstance(decision, RunLater)
        assert max(remaining, 4) <= decision.delay <= max(remaining, 6)
    assert RunLater(3.0) == RetryLater(delay=5, jitter=0, max_wait=3).decide(Duplicate(held))
    running = Holder("id-1", remaining=remaining)
    assert RunLater(5.0) == RetryLater(delay=5, jitter=0).decide(Duplicate(running))


def test_jitter_spreads() -> None:
    """Many duplicates do not return at the same time."""
    policy = RetryLater(delay=10, jitter=0.2)
    delays = {delay_of(policy) for _ in range(200)}
    assert len(delays) > 100
    assert all(8 <= delay <= 12 for delay in delays)
