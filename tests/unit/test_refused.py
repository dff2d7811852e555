"""Tasks with wrong options: each use is refused, whatever came before it, and other tasks of the app are as without them."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from celery import Celery, group, shared_task

from celery_singleton_lock import ConfigurationError, SingletonMixin, SingletonTask
from celery_singleton_lock.config.settings import settings_of
from celery_singleton_lock.context import context_of
from celery_singleton_lock.errors import StoreError
from celery_singleton_lock.testing import locked
from celery_singleton_lock.worker.bootstep import SingletonStep
from celery_singleton_lock.worker.checks import check_store
from tests.unit.conftest import MakeApp
from tests.unit.test_task import deliver


def body(account: int) -> int:
    return account


#: Ways in which users make a task, each with what is wrong with it.
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "option": ({"base": SingletonTask, "lock_ttl": "30"}, "task wrong: lock_ttl='30' must be a number of seconds"),
    "name": ({"base": SingletonTask, "lock_tll": 30}, "task wrong: lock_tll=30: there is no such option"),
    "pair": ({"base": SingletonTask, "lock_until": "start"}, "task wrong: lock_until='start' with lock_from='start'"),
    "parameter": ({"base": SingletonTask, "unique_on": "acount"}, "task wrong: unique_on=.*: 'acount' is no parameter"),
    "plain": ({"base": SingletonTask, "singleton": False, "lock_ttl": 0}, "task wrong: lock_ttl=0 must be"),
    "mixin": ({"base": SingletonMixin}, "task wrong: SingletonMixin is no task class: use base=SingletonTask"),
}
USES: dict[str, Callable[[Any], object]] = {
    "delay": lambda task: task.delay(1),
    "apply_async": lambda task: task.apply_async((1,), countdown=5),
    "signature": lambda task: task.s(1).apply_async(),
    "group": lambda task: group(task.s(1), task.s(2)).apply_async(),
    "apply": lambda task: task.apply((1,)),
    "call": lambda task: task(1),
    "lock_key_for": lambda task: task.lock_key_for(1),
    "lock_holder": lambda task: task.lock_holder(1),
    "force_unlock": lambda task: task.force_unlock(1),
    "locked": lambda task: locked(task, 1).__enter__(),
}


@pytest.fixture(params=WRONG)
def case(request: pytest.FixtureRequest) -> tuple[dict[str, Any], str]:
    """The options of a wrong task, and what is wrong with them."""
    return WRONG[request.param]


@pytest.mark.parametrize("use", USES)
def test_each_use_is_refused(make_app: MakeApp, case: tuple[dict[str, Any], str], use: str) -> None:
    """A wrong option is refused at the first use of its task and at every later one, in the same words."""
    options, text = case
    wrong = make_app().task(name="wrong", shared=False, **options)(body)  # a proxy until it is used
    for _ in range(3):
        with pytest.raises(ConfigurationError, match=text):
            USES[use](wrong)


def test_worker_process_refuses_it(make_app: MakeApp, case: tuple[dict[str, Any], str]) -> None:
    """A delivery of a wrong task fails before its body, and before a `before_start` of the user's."""
    ran = []
    options, text = case
    app = make_app()

    def run(account: int) -> None:
        ran.append("body")

    app.task(name="wrong", shared=False, before_start=lambda *_: ran.append("before_start"), **options)(run)
    answer = deliver(app.tasks["wrong"], 1)
    assert isinstance(answer.info.retval, ConfigurationError)
    assert re.search(text, str(answer.info.retval))
    assert [] == ran


@pytest.mark.parametrize("decorator", ["app", "shared"])
def test_other_tasks_are_left_alone(make_app: MakeApp, case: tuple[dict[str, Any], str], decorator: str) -> None:
    """Tasks defined before and after a wrong one are registered and can be published, also when the app is finalized again."""
    options, text = case
    app = make_app()
    task: Any = shared_task if decorator == "shared" else app.task
    names = [f"right-{number}" for number in range(20)]  # Celery takes shared tasks in any order
    for name in names[:10]:
        task(name=name, base=SingletonTask)(body)
    task(name="wrong", **options)(body)
    for name in names[10:]:
        task(name=name, base=SingletonTask)(body)
    app.finalize()
    app.finalize()
    assert set(names) < set(app.tasks)
    with pytest.raises(ConfigurationError, match=text):
        app.tasks["wrong"].delay(1)
    for name in names:
        assert app.tasks[name].delay(1).duplicate is None


def test_task_made_after_the_app_was_finalized(make_app: MakeApp, case: tuple[dict[str, Any], str]) -> None:
    """A module with a wrong task can be imported after the app was finalized, as Django's checks do, too."""
    options, text = case
    app = make_app()
    app.finalize()
    wrong = app.task(name="wrong", shared=False, **options)(body)
    right = app.task(name="right", shared=False, base=SingletonTask)(body)
    assert right.delay(1).duplicate is None
    for _ in range(2):
        with pytest.raises(ConfigurationError, match=text):
            wrong.delay(1)


class Parent:
    """What a bootstep knows of its worker."""

    def __init__(self, app: Celery) -> None:
        self.app, self.pool_cls = app, object


def refusal_of_a_worker(app: Celery) -> list[str]:
    """The lines with which a worker of this app ends when it starts."""
    app.finalize()
    with pytest.raises(ConfigurationError) as refused:
        SingletonStep(Parent(app))
    return str(refused.value).splitlines()


def test_a_worker_refuses_it(make_app: MakeApp, case: tuple[dict[str, Any], str]) -> None:
    """A worker does not start, and says what is wrong in one line, however the task was wrong."""
    options, text = case
    app = make_app()
    app.task(name="wrong", shared=False, **options)(body)
    (line,) = refusal_of_a_worker(app)
    assert re.match(text, line)


def test_pool_that_would_run_tasks_unlocked(make_app: MakeApp) -> None:
    """celery-aio-pool calls tasks in a thread of its own, where they have no request: a worker with it does not start."""
    app = make_app()
    app.task(name="right", shared=False, base=SingletonTask)(body)
    app.finalize()
    parent = Parent(app)
    parent.pool_cls = type("AsyncIOPool", (), {"__module__": "celery_aio_pool.pool"})
    with pytest.raises(ConfigurationError, match=r"celery-aio-pool .* no task would be locked"):
        SingletonStep(parent)


def test_all_is_reported_at_once(make_app: MakeApp) -> None:
    """All wrong options of all tasks, and all wrong settings, are reported together, each in one line."""
    app = make_app(singleton_lock_tll=5, singleton_lock_eager="no", singleton_on_store_error="skip")
    app.task(base=SingletonTask, name="one", shared=False, lock_ttl=0, on_duplicate="ignore", lock_tll=7)(body)
    app.task(base=SingletonTask, name="two", shared=False, unique_on="acount", lock_until="start")(body)
    app.task(base=SingletonTask, name="three", shared=False)(body)
    found = refusal_of_a_worker(app)
    starts = [
        "setting singleton_lock_tll: there is no such setting",
        "singleton_lock_eager='no' must be",
        "singleton_on_store_error='skip' must be",
        "task one: lock_tll=7: there is no such option",
        "task one: on_duplicate='ignore' must be",
        "task one: lock_ttl=0 must be",
        "task two: lock_until='start' with lock_from='start'",
        "task two: unique_on=['acount']: 'acount' is no parameter",
    ]
    for start in starts:
        assert 1 == sum(line.startswith(start) for line in found), (start, found)
    assert len(starts) == len(found)


def test_settings_are_named_as_the_user_writes_them() -> None:
    """Under a namespace such as Django's, each refusal names the setting as it stands in the user's file."""

    def refusals(**given: Any) -> list[str]:
        app = Celery("django", set_as_current=False)
        app.config_from_object(type("Settings", (), given), namespace="CELERY")
        with pytest.raises(ConfigurationError) as refused:
            settings_of(app.conf)
        return str(refused.value).splitlines()

    assert refusals(CELERY_BROKER_URL="amqp://x//") == [
        "no store for locks: set CELERY_SINGLETON_LOCK_URL (neither broker nor result backend is Redis)"
    ]
    assert refusals(CELERY_BROKER_URL="redis://a;redis://b") == [
        "the broker has several URLs: set CELERY_SINGLETON_LOCK_URL to the one store of locks"
    ]
    tll, url, history, ttl = refusals(
        CELERY_SINGLETON_LOCK_URL="http://x",
        CELERY_SINGLETON_LOCK_TTL=-5,
        CELERY_SINGLETON_LOCK_TLL=5,
        CELERY_SINGLETON_LOCK_HISTORY=-1,
    )
    hint = "there is no such setting, do you mean CELERY_SINGLETON_LOCK_TTL?"
    assert tll == f"setting CELERY_SINGLETON_LOCK_TLL: {hint}"
    assert url.startswith("CELERY_SINGLETON_LOCK_URL must be memory:// or one of")
    assert history == "CELERY_SINGLETON_LOCK_HISTORY=-1 must be a whole number from 0"
    assert ttl == "CELERY_SINGLETON_LOCK_TTL=-5 must be a number of seconds, from 1 to a year"


@pytest.mark.parametrize("url", ["redis://x/name", "redis://x/0?no_option=1", "redis://x:port/0", "sentinel://x"])
def test_url_that_the_store_cannot_read(url: str) -> None:
    """The store's own refusal of a URL names the setting in the same way."""
    app = Celery("django", set_as_current=False)
    app.config_from_object(type("Settings", (), {"CELERY_SINGLETON_LOCK_URL": url}), namespace="CELERY")
    with pytest.raises(ConfigurationError, match=r"^CELERY_SINGLETON_LOCK_URL"):
        context_of(app)


def test_refusal_can_be_pickled() -> None:
    """The error crosses processes with all that it says."""
    error = pickle.loads(pickle.dumps(ConfigurationError("one", "two")))
    assert (("one", "two"), "one\ntwo") == (error.problems, str(error))


def test_concerns_are_told_though_another_cannot_be_looked_at(
    make_app: MakeApp, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker warns of the store's eviction policy, also if it may not ask for its replicas."""
    app = make_app()
    app.finalize()
    context = context_of(app)
    context.settings = replace(context.settings, url="sentinel://host:26379")

    def refuse() -> int:
        raise StoreError("NOPERM")

    monkeypatch.setattr(context.store, "eviction_policy", lambda: "allkeys-lru")
    monkeypatch.setattr(context.store, "unsafe_replicas", refuse)
    with caplog.at_level("INFO", "celery_singleton_lock"):
        check_store(context, {})
    assert "its maxmemory-policy is allkeys-lru" in caplog.text
    assert "does not show its replicas: NOPERM" in caplog.text
