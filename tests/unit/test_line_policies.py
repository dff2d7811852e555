"""What the policies of the line decide."""

from __future__ import annotations

import math
from typing import Any

import pytest

from celery_singleton_lock import ConfigurationError, Debounce, Holder, RunOnceMore, Wait
from celery_singleton_lock.policies import as_policy, portable_policy
from celery_singleton_lock.policies.decisions import Duplicate, Enqueue, Fail, RunLater, SkipRun

HOLDER = Holder("id-1", "node@host", 4711, 1.5, 28.5)


@pytest.mark.parametrize(("name", "policy"), [("wait", Wait()), ("run_once_more", RunOnceMore())])
def test_names_stand_for_defaults(name: str, policy: Any) -> None:
    """A name stands for the policy with its defaults."""
    assert policy == as_policy(name)


@pytest.mark.parametrize(
    "policy", [Wait(3, math.inf), RunOnceMore("latest"), Debounce(2, 3.5), Debounce(2, 3.5, "latest")], ids=repr
)
def test_policies_travel(policy: Any) -> None:
    """A message carries a policy as its class and the fields that differ from their defaults."""
    assert policy == portable_policy(policy.__json__())


@pytest.mark.parametrize(
    ("policy", "fields"),
    [
        *((Wait, {"max_waiting": value}) for value in (0, -1, 1.5, True, "3", None)),
        *((Wait, {"max_wait": value}) for value in (-1, math.nan, True, "3", None)),
        *((RunOnceMore, {"keep": value}) for value in ("last", None, 1)),
        *((Debounce, {"quiet": 1, "max_quiet": 2, "keep": value}) for value in ("last", None, 1)),
        *((Debounce, {"quiet": value, "max_quiet": 5}) for value in (0, -1, math.nan, math.inf, True, "3", None, 6)),
        *((Debounce, {"quiet": 1, "max_quiet": value}) for value in (None, 0.5, math.inf, True, "3")),
    ],
    ids=str,
)
def test_bad_values(policy: Any, fields: dict[str, Any]) -> None:
    """A value that is out of range is refused, naming the field."""
    with pytest.raises(ConfigurationError, match="|".join(fields)):
        policy(**fields)


def test_wait() -> None:
    """Wait enqueues, until the line is full or the message has waited too long; it is asked again at that time."""
    policy = Wait(max_waiting=2, max_wait=60.0)
    assert Enqueue(2, within=60.0) == policy.decide(Duplicate(HOLDER))
    assert Enqueue(2, within=60.0) == policy.decide(Duplicate(HOLDER, waiting=1))
    assert Fail() == policy.decide(Duplicate(HOLDER, waiting=2))
    assert Enqueue(2, within=1.0) == policy.decide(Duplicate(HOLDER, waiting=2, is_waiting=True, waited=59.0))
    assert Fail() == policy.decide(Duplicate(HOLDER, waiting=2, is_waiting=True, waited=60.0))


@pytest.mark.parametrize("keep", ["first", "latest"])
def test_run_once_more(keep: str) -> None:
    """One message waits; a message that waits goes on, and takes no newer one's place; a task's own retry is postponed."""
    policy = RunOnceMore(keep)
    is_latest = keep == "latest"
    assert Enqueue(1, replace=is_latest, gives_way=is_latest) == policy.decide(Duplicate(HOLDER))
    assert Enqueue(1, gives_way=is_latest) == policy.decide(
        Duplicate(HOLDER, waiting=1, head="own", is_waiting=True, has_waited=True)
    )
    assert isinstance(policy.decide(Duplicate(HOLDER, own_retry=True)), RunLater)


@pytest.mark.parametrize("keep", ["first", "latest"])
def test_debounce(keep: str) -> None:
    """What is decided is the same as under `RunOnceMore`."""
    policy = Debounce(1, 2, keep)
    for duplicate in (Duplicate(HOLDER), Duplicate(HOLDER, waiting=1, head="first")):
        assert RunOnceMore(keep).decide(duplicate) == policy.decide(duplicate)
    assert isinstance(policy.decide(Duplicate(HOLDER, own_retry=True)), RunLater)


def test_others_than_the_pending_one() -> None:
    """Keeping the first, later ones are skipped; keeping the latest, they take its place, but do not win it back."""
    assert SkipRun(pending="first") == RunOnceMore().decide(Duplicate(HOLDER, waiting=1, head="first"))
    latest, other = RunOnceMore("latest"), Duplicate(HOLDER, waiting=1, head="first")
    assert Enqueue(1, replace=True, gives_way=True) == latest.decide(other)
    assert SkipRun(pending="newer") == latest.decide(Duplicate(HOLDER, waiting=1, head="newer", has_waited=True))
