"""Options of one task that exclude each other: all pairs of values, and the tables in the documents."""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from celery_singleton_lock import ConfigurationError, Holder, MaxStarts, SingletonTask, StoreUnavailable
from celery_singleton_lock.config.exclusions import EXCLUSIONS
from celery_singleton_lock.config.options import TASK_OPTIONS, Options
from celery_singleton_lock.config.task_config import config_for
from celery_singleton_lock.delivery.decision import policy_of
from celery_singleton_lock.policies import KINDS, as_policy
from celery_singleton_lock.testing import assert_free, assert_held
from tests.pairs import NEEDS, PAIRS, VALUES, Pair, completed, options_of, refused_in
from tests.unit import test_execution
from tests.unit.fake_store import FakeStore
from tests.unit.test_execution import raising, renew_due
from tests.unit.test_task import deliver

clock, store = test_execution.clock, test_execution.store

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "options.md"


def body(tag: str, acts: str = "return") -> None: ...


def bound(app: Celery, values: tuple[str, ...]) -> Options:
    """Bind a task with these values; return its options."""
    app.task(base=SingletonTask, shared=False, name="sync", **options_of(values))(body)
    return config_for(app.tasks["sync"]).options


def names_both(text: str, pair: Pair) -> bool:
    """Tell whether a refusal names the options of a pair, and why."""
    one, other = (value.partition("=")[0] for value in pair)
    return any(re.match(rf"task sync: {a}=.* with {b}=.*: \w", text) for a, b in ((one, other), (other, one)))


def test_all_options_have_values() -> None:
    """The walk below covers each option and each policy."""
    assert TASK_OPTIONS.keys() == VALUES.keys()
    assert set(KINDS) <= {type(as_policy(value)) for value in VALUES["on_duplicate"].values()}


@pytest.mark.parametrize(("one", "other"), list(combinations(VALUES, 2)))
def test_pairs(app: Celery, one: str, other: str) -> None:
    """A pair of values is refused when the task is bound exactly if it is in the list, and the refusal names both options."""
    pairs = [pair for pair in PAIRS if pair[0].startswith(f"{one}=") and pair[1].startswith(f"{other}=")]
    assert pairs
    for pair in pairs:
        values = completed(pair)
        refused = refused_in(values)
        app.tasks.pop("sync", None)
        if not refused:
            bound(app, values)
            continue
        with pytest.raises(ConfigurationError) as caught:
            bound(app, values)
        assert any(names_both(str(caught.value), found) for found in refused), (pair, str(caught.value))


@pytest.mark.parametrize(("value", "needed"), list(NEEDS.items()))
def test_needs(app: Celery, value: str, needed: str) -> None:
    """A value that needs one of another option is refused alone, and the refusal names both options."""
    with pytest.raises(ConfigurationError) as caught:
        bound(app, (value,))
    assert names_both(str(caught.value), (value, needed))


def test_each_rule_is_met() -> None:
    """Each rule is met by one of the pairs or of the values that need another one."""
    met = set()
    for values in [*PAIRS, *((value,) for value in NEEDS)]:
        found: dict[str, Any] = {name: TASK_OPTIONS[name].checked(v, name) for name, v in options_of(values).items()}
        met |= {number for number, rule in enumerate(EXCLUSIONS) if rule[2](Options(**found))}
    assert set(range(len(EXCLUSIONS))) == met


def test_policy_that_a_callable_chooses(app: Celery) -> None:
    """A policy that a callable chooses is refused in the same way, when it is chosen."""

    def chosen(task: Any, holder: Holder) -> str:
        return "run_once_more"

    options = {"lock_group": "accounts", "lock_key": "{tag}", "on_duplicate": chosen}
    task = app.task(base=SingletonTask, shared=False, name="sync", **options)(body)
    assert config_for(app.tasks["sync"])
    with pytest.raises(
        ConfigurationError, match=r"task sync: lock_group='accounts' with on_duplicate=RunOnceMore\(.*: \w"
    ):
        policy_of(task, config_for(app.tasks["sync"]).options, Holder())


def test_run_without_a_store(singleton: Any, store: FakeStore) -> None:
    """A run without a lock, as the store is away, leaves no cooldown, counts as no start, and has no cap."""
    leases = []

    @singleton(
        name="x",
        bind=True,
        on_store_error="run",
        lock_at_least=60,
        lock_at_most=90,
        max_starts=MaxStarts(1, count="unsuccessful"),
    )
    def task(self: Any) -> str:
        leases.append(self.lease)
        return "ran"

    store.on_answer = [raising(StoreUnavailable("the answer was lost"))]
    assert "ran" == deliver(task, task_id="id-1").retval
    renew_due(task)
    assert_free(task)
    assert "ran" == deliver(task, task_id="id-2").retval
    assert [False, True] == [lease.protected for lease in leases]
    assert ("cooldown", "id-2") == (assert_held(task).state, assert_held(task).task_id)


def test_table_of_the_page() -> None:
    """The page lists the rules in order, each with both options and the reason."""
    text = PAGE.read_text(encoding="utf-8").partition("## Pairs that are refused\n")[2].partition("\n## ")[0]
    rows = [[*re.findall(r"`([a-z_]+)", row), row.split("|")[3].strip()] for row in re.findall(r"^\| `.*$", text, re.M)]
    assert [[one, other, reason] for one, other, _, reason in EXCLUSIONS] == [[row[0], row[1], row[-1]] for row in rows]
