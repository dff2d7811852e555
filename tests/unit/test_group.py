"""Tasks that share a lock: their keys, what is refused, and what happens to a duplicate by default."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery

from celery_singleton_lock import ConfigurationError, LockKeyError, RetryLater, RunOnceMore, SingletonTask, Skip, Wait
from celery_singleton_lock.config.exclusions import different_limits
from celery_singleton_lock.config.task_config import config_for, config_of_call, refuse_wrong
from celery_singleton_lock.testing import locked
from tests.unit.conftest import MakeApp
from tests.unit.test_task import deliver


def bill(customer: Any, month: int = 1) -> None: ...


def export(kind: str, client: Any = 7, page: int = 1) -> None: ...


def made(app: Celery, body: Callable[..., Any], **options: Any) -> Any:
    """Return a task with this body; in the group `money`, unless the options say otherwise."""
    app.task(**{"base": SingletonTask, "shared": False, "name": body.__name__, "lock_group": "money", **options})(body)
    app.finalize(auto=True)
    return app.tasks[options.get("name", body.__name__)]


# -- keys ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bills", "exports"),
    [
        ({"unique_on": "customer"}, {"unique_on": ["client"]}),
        ({"unique_on": ("customer", "month")}, {"unique_on": ["client", "page"]}),
        ({"lock_key": "c-{customer}"}, {"lock_key": "c-{client}"}),
        ({"lock_key": "{customer}{month}"}, {"unique_on": ["client", "page"]}),
        ({"lock_key": lambda customer: type(customer).__name__}, {"lock_key": lambda client: type(client).__name__}),
        ({"lock_key": lambda **_: "literal"}, {"lock_key": "literal"}),
        ({"unique_on": []}, {"unique_on": ()}),
        ({"unique_on": {"customer"}}, {"unique_on": frozenset({"client"})}),
    ],
)
def test_equal_values_have_one_key(app: Celery, bills: Any, exports: Any) -> None:
    """Tasks of one group have the same key for equal values, whatever their parameters are called."""
    one, other = made(app, bill, **bills), made(app, export, **exports)
    assert one.lock_key_for(7) == other.lock_key_for("csv", 7)
    assert one.lock_key_for(customer=[1, "x"], month=1) == other.lock_key_for("csv", page=1, client=[1, "x"])
    if bills["unique_on"] if "unique_on" in bills else not callable(bills["lock_key"]) and "{" in bills["lock_key"]:
        assert one.lock_key_for(7) != other.lock_key_for("csv", 8)
        assert one.lock_key_for(7) != other.lock_key_for("csv", "7")


def test_a_default_counts(app: Celery) -> None:
    """An argument equal to its default counts as any other, as another task may have another default, or none."""
    one, other = made(app, bill, unique_on="customer"), made(app, export, unique_on="client")
    assert one.lock_key_for(7) == other.lock_key_for("csv")
    assert one.lock_key_for(8) != other.lock_key_for("csv")


@pytest.mark.parametrize(
    ("bills", "exports"),
    [
        ({"lock_key": "c-{customer}"}, {"lock_key": "d-{client}"}),
        ({"lock_key": "{customer}"}, {"lock_key": lambda client: str(client)}),
        ({"unique_on": ["customer", "month"]}, {"unique_on": ["page", "client"]}),
        ({"unique_on": ["customer"]}, {"unique_on": ["client", "page"]}),
        ({"unique_on": "customer"}, {"unique_on": "client", "lock_group": "goods"}),
        ({"unique_on": "customer"}, {"unique_on": "client", "lock_group": None}),
        ({"unique_on": "customer"}, {"unique_on": "client", "lock_group": None, "name": "money"}),
        ({"lock_key": "x"}, {"lock_key": "x", "lock_group": None, "name": "money"}),
        ({"lock_key": lambda: "x"}, {"lock_key": lambda: "x", "lock_group": None, "name": "money"}),
        ({"unique_on": []}, {"unique_on": [], "lock_group": None, "name": "money"}),
        ({"unique_on": []}, {"unique_on": None, "lock_group": None, "name": "money"}),
    ],
)
def test_other_values_have_other_keys(app: Celery, bills: Any, exports: Any) -> None:
    """Other texts, another order, another group, or a task that has the name of the group: another key."""
    one, other = made(app, bill, **bills), made(app, export, **exports)
    assert one.lock_key_for(7) != other.lock_key_for("csv", 7)


def test_keys_are_readable(app: Celery) -> None:
    """A key starts with the prefix and the name of the group, escaped like the name of a task."""
    assert made(app, bill, unique_on="customer").lock_key_for(7).startswith("singleton:{money}:lock:")
    task = made(app, export, unique_on="client", lock_group="a {b}\n")
    assert task.lock_key_for("csv").startswith("singleton:{a%20%7Bb%7D%0A}:lock:")


def test_key_of_a_call_in_a_group(app: Celery) -> None:
    """The key of a call is one of the group."""
    one, other = made(app, bill, unique_on="customer"), made(app, export, lock_key="{client}")
    found = [config_of_call(task, {"lock_key": "customer-7"}) for task in (one, other)]
    assert found[0].base == found[1].base == config_for(one).base
    assert found[0].digest((1,), {}) == found[1].digest(("csv", 2), {}) != config_for(one).digest((1,), {})


def test_values_without_a_stable_form(app: Celery) -> None:
    """A value without a stable form is refused, as in a task of its own."""
    with pytest.raises(LockKeyError, match="'customer'"):
        made(app, bill, unique_on="customer").lock_key_for(object())


# -- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "bill: lock_group='money' with unique_on=None: give unique_on or lock_key too"),
        ({"lock_group": "", "unique_on": "customer"}, "bill: lock_group='' must be a non-empty text"),
        ({"lock_group": 7, "unique_on": "customer"}, "bill: lock_group=7 must be a non-empty text"),
        ({"lock_group": ["money"], "unique_on": "customer"}, r"bill: lock_group=\['money'\] must be"),
        ({"unique_on": {"customer", "month"}}, "bill: lock_group='money' with unique_on={.*give a list"),
        ({"unique_on": "client"}, "bill: unique_on=.*'client' is no parameter"),
        (
            {"unique_on": "customer", "on_duplicate": "run_once_more"},
            "bill: lock_group='money' with on_duplicate=RunOnceMore.*: another task of the group is other work",
        ),
    ],
)
def test_refused_when_bound(app: Celery, options: Any, text: str) -> None:
    """A group without a key of its own, or whose values have no order, is refused when the task is bound."""
    with pytest.raises(ConfigurationError, match=f"task {text}"):
        refuse_wrong(made(app, bill, **options))


def test_policy_of_a_call_or_a_callable(app: Celery) -> None:
    """A policy that lets another run stand for a duplicate is refused in a group, wherever it comes from."""
    task = made(app, bill, unique_on="customer")
    with pytest.raises(ConfigurationError, match="other work"):
        task.apply_async((7,), lock_options={"on_duplicate": RunOnceMore()})
    chosen = made(app, export, unique_on="client", on_duplicate=lambda task, holder: "run_once_more")
    with locked(task, 7):
        result = deliver(chosen, "csv", 7).info.retval
    assert isinstance(result, ConfigurationError)
    assert "lock_group='money' with on_duplicate=RunOnceMore" in str(result)


def limit_of(client: Any) -> int:
    return 3


@pytest.mark.parametrize(
    ("one", "other", "agree"),
    [
        (3, 3, True),
        (1, None, True),
        (3, 2, False),
        (3, None, False),
        (lambda customer: 3, lambda client: 3, True),
        (lambda customer: 3, 3, False),
        (1, limit_of, False),
    ],
)
def test_members_agree_on_the_limit(app: Celery, one: Any, other: Any, agree: bool) -> None:
    """Members of a group with different limits are refused together, by names and values; two callables are not compared."""
    tasks = [
        made(app, bill, unique_on="customer", lock_limit=one),
        made(app, export, unique_on="client", lock_limit=other),
        made(app, export, unique_on="client", lock_limit=7, name="z", lock_group="another"),
        made(app, export, unique_on="client", lock_limit=8, name="plain", singleton=False),
    ]
    options = {task.name: config_for(task).options for task in tasks}
    found = list(different_limits(options))
    if agree:
        assert not found
        return
    (text,) = found
    assert f"task bill: lock_limit={one!r}" in text
    assert f"task export: lock_limit={other or 1!r}" in text
    assert "lock_group='money'" in text


# -- settings and policies -----------------------------------------------------------------------


def test_setting(make_app: MakeApp) -> None:
    """The app setting puts all tasks into one group; a task without `unique_on` or `lock_key` is then refused."""
    app = make_app(singleton_lock_group="account", singleton_unique_on="customer")
    tasks = [made(app, body, lock_group=None) for body in (bill, export)]
    assert config_for(tasks[0]).base == "singleton:{account}"
    with pytest.raises(ConfigurationError, match="export: unique_on"):
        config_for(tasks[1])
    with pytest.raises(ConfigurationError, match="bill: lock_group='account' with unique_on=None: give unique_on"):
        config_for(made(make_app(singleton_lock_group="account"), bill, lock_group=None))


@pytest.mark.parametrize("setting", [None, "skip", "raise", lambda task, holder: "skip"])
def test_default_policy(make_app: MakeApp, setting: Any) -> None:
    """In a group a duplicate is other work. So it is not skipped unless its task says so, whatever the app setting is."""
    app = make_app(singleton_on_duplicate=setting)
    assert config_for(made(app, bill, unique_on="customer")).options.on_duplicate == Wait()
    own = made(app, export, unique_on="client", on_duplicate="skip")
    assert config_for(own).options.on_duplicate == Skip()
    assert config_of_call(own, {"on_duplicate": RetryLater(delay=1)}).options.on_duplicate == RetryLater(delay=1)


def test_members_exclude_each_other(app: Celery) -> None:
    """While one task of a group holds a customer, another waits for this customer, and runs for others."""
    one, other = made(app, bill, unique_on="customer"), made(app, export, unique_on="client")
    with locked(one, 7):
        waiting = deliver(other, "csv", 7)
        assert ("IGNORED", "waits in line") == (waiting.info.state, str(waiting.info.retval))
        assert deliver(other, "csv", 8).info is None
        assert other.lock_holder("csv", 7).task_id == one.lock_holder(7).task_id == "held-by-test"
