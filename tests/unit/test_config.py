"""Options and settings: which value counts, what is refused, and that the documentation agrees."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest
from celery import Celery, Task
from celery.contrib.abortable import AbortableTask

import celery_singleton_lock
from celery_singleton_lock import ConfigurationError, MaxStarts, Raise, RetryLater, SingletonMixin, SingletonTask, Skip
from celery_singleton_lock.config.foreign import unknown_options
from celery_singleton_lock.config.options import TASK_OPTIONS
from celery_singleton_lock.config.settings import settings_of
from celery_singleton_lock.config.task_config import config_for, refuse_wrong
from celery_singleton_lock.context import context_of
from celery_singleton_lock.store.protocol import AcquireStatus
from celery_singleton_lock.store.requests import LeaseSpec
from docs.generate import default_of
from tests.unit.conftest import MakeApp


def body(account: int, kind: str = "full") -> None: ...


def bound(app: Celery, **options: Any) -> Any:
    """A task with these options, bound to the app."""
    app.task(**{"base": SingletonTask, "name": "sync", "shared": False, **options})(body)
    refuse_wrong(app.tasks["sync"])
    return app.tasks["sync"]


def options(task: Any) -> Any:
    return config_for(task).options


DEFAULTS = {
    "singleton": True,
    "unique_on": None,
    "lock_key": None,
    "lock_group": None,
    "lock_limit": 1,
    "on_duplicate": Skip(),
    "lock_from": "start",
    "lock_until": "finish",
    "lock_ttl": 30.0,
    "on_lock_lost": "warn",
    "on_store_error": "retry",
    "lock_at_least": 0.0,
    "lock_at_most": None,
    "max_starts": None,
}
#: For each option another good value for the task, and a third for the app.
GOOD: dict[str, tuple[Any, Any]] = {
    "unique_on": (["account"], ["kind"]),
    "lock_key": ("{account}", "{kind}"),
    "lock_limit": (3, lambda account: account),
    "on_duplicate": ("retry", "raise"),
    "lock_from": ("publish", "start"),
    "lock_ttl": (5, 60),
    "on_lock_lost": ("raise", "warn"),
    "on_store_error": ("run", "raise"),
    "lock_at_least": (5, 60),
    "lock_at_most": (5, 60),
    "max_starts": (MaxStarts(2, count="unsuccessful"), MaxStarts(3)),
}
READ = {"retry": RetryLater(), "raise": Raise()}


def read(name: str, value: Any) -> Any:
    """The form in which an option's value is used."""
    return READ.get(value, value) if name == "on_duplicate" else value


def test_defaults(make_app: MakeApp) -> None:
    """Without options and settings, the defaults count."""
    found = options(bound(make_app()))
    assert DEFAULTS == {name: getattr(found, name) for name in DEFAULTS}


@pytest.mark.parametrize("name", GOOD)
def test_order_task_setting_default(make_app: MakeApp, name: str) -> None:
    """A task's option counts before the app's setting, and that before the default."""
    own, apps = GOOD[name]
    app = make_app(**{f"singleton_{name}": apps})
    assert read(name, apps) == getattr(options(bound(app)), name)
    app = make_app(**{f"singleton_{name}": apps})
    assert read(name, own) == getattr(options(bound(app, **{name: own})), name)


@pytest.mark.parametrize("name", GOOD)
def test_option_of_a_base_class(make_app: MakeApp, name: str) -> None:
    """A subclass of SingletonTask passes its options on to its tasks and subclasses, which may have others."""
    own, other = GOOD[name]
    base = type("Base", (SingletonTask,), {name: own, "abstract": True})
    app = make_app(**{f"singleton_{name}": other})  # does not count: the base's option is the task's own
    app.task(base=base, name="one", shared=False)(body)
    app.task(base=base, name="two", shared=False, **{name: other})(body)
    app.task(base=type("Further", (base,), {"abstract": True}), name="three", shared=False)(body)
    found = [getattr(options(app.tasks[task]), name) for task in ("one", "two", "three")]
    assert [read(name, own), read(name, other), read(name, own)] == found


def test_settings_are_read_when_first_needed(make_app: MakeApp) -> None:
    """An app may be configured after its tasks were defined and bound."""
    app = make_app()
    task = bound(app)
    app.conf.update(singleton_lock_ttl=7, singleton_lock_prefix="late")
    assert task.lock_key_for(1).startswith("late:")
    assert 7.0 == options(task).lock_ttl


def test_namespace_as_in_django() -> None:
    """Settings under a namespace, as in a Django project, are found: CELERY_SINGLETON_LOCK_TTL."""

    class DjangoSettings:
        CELERY_SINGLETON_LOCK_TTL = 9
        CELERY_SINGLETON_LOCK_URL = "memory://"
        CELERY_SINGLETON_LOCK_PREFIX = "shop"
        CELERY_SINGLETON_ON_DUPLICATE = "raise"
        CELERY_BROKER_URL = "memory://"

    app = Celery("django", set_as_current=False)
    app.config_from_object(DjangoSettings, namespace="CELERY")
    task = bound(app)
    assert (9.0, Raise()) == (options(task).lock_ttl, options(task).on_duplicate)
    assert task.lock_key_for(1).startswith("shop:")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("singleton", "yes"),
        ("singleton", 1),
        ("lock_ttl", 0),
        ("lock_ttl", 0.99),
        ("lock_ttl", -5),
        ("lock_ttl", math.inf),
        ("lock_ttl", math.nan),
        ("lock_ttl", 1e17),
        ("lock_ttl", 10**400),
        ("lock_ttl", "30"),
        ("lock_ttl", True),
        *(("lock_at_least", value) for value in (-1, math.inf, math.nan, 1e17, "30", True, False)),
        *(("lock_at_most", value) for value in (0, 0.5, -1, math.inf, math.nan, 1e17, "30", True)),
        *(("max_starts", value) for value in (0, -1, 1.5, "3", True, MaxStarts)),
        ("on_duplicate", "ignore"),
        ("on_duplicate", 5),
        ("on_duplicate", ["skip"]),
        ("on_duplicate", Skip),
        ("on_duplicate", RetryLater),
        ("on_duplicate", Raise),
        ("on_lock_lost", "stop"),
        ("on_lock_lost", True),
        ("on_store_error", "skip"),
        ("on_store_error", []),
        ("unique_on", ["acount"]),
        ("unique_on", "acount"),
        ("unique_on", 5),
        ("lock_key", "{acount}"),
        ("lock_key", "{account.id}"),
        ("lock_key", "{account!r}"),
        ("lock_key", "{"),
        ("lock_key", ""),
        ("lock_key", len),
        ("lock_key", 5),
        ("lock_limit", 0),
        ("lock_limit", -1),
        ("lock_limit", 1.5),
        ("lock_limit", "3"),
        ("lock_limit", True),
        ("lock_limit", lambda acount: 3),
        ("lock_limit", len),
    ],
)
def test_bad_option_is_refused(make_app: MakeApp, name: str, value: Any) -> None:
    """A bad option is refused with task, option and value. A bad setting is refused, too, without the task if it fits none."""
    with pytest.raises(ConfigurationError) as refused:
        bound(make_app(), **{name: value})
    for part in ("sync", name, repr(value)):
        assert part in str(refused.value)
    task = bound(make_app(**{f"singleton_{name}": value}))
    with pytest.raises(ConfigurationError) as refused:
        config_for(task)
    for part in (name, repr(value)):
        assert part in str(refused.value)


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("lock_expiry", 'lock_at_least, with lock_from="publish"'),
        ("raise_on_duplicate", 'on_duplicate="raise" with lock_from="publish"'),
        ("once", 'unique_on, on_duplicate and lock_until="start" or lock_at_most, with lock_from="publish"'),
        ("heimdall", 'lock_at_least, with lock_from="publish"'),
        ("ttl", "lock_ttl"),
        ("unique", "unique_on"),
        ("unique_key", "lock_key"),
    ],
)
def test_names_of_other_plugins(make_app: MakeApp, name: str, ours: str) -> None:
    """An option of another plugin, or a guessed name, is refused, and the error names our options, with the lock at publish."""
    for value in (60, {"keys": ["a"]}, None):
        with pytest.raises(ConfigurationError) as refused:
            bound(make_app(), **{name: value})
        for part in ("sync", name, repr(value), ours):
            assert part in str(refused.value)


MISSPELT = {
    "lock_tll": "lock_ttl",
    "lock_": "",
    "on_lock_lots": "",
    "lock_timeout": "",
    "on_lock_": "",
    "unique_onn": "unique_on",
    "unique_n": "unique_on",
    "uniqueon": "unique_on",
    "unqiue_on": "unique_on",
    "on_duplicates": "on_duplicate",
    "on_dublicate": "on_duplicate",
    "onlock_lost": "on_lock_lost",
    "on_store_eror": "on_store_error",
    "singletons": "singleton",
}


@pytest.mark.parametrize("name", MISSPELT)
def test_misspelt_options(make_app: MakeApp, name: str) -> None:
    """An unknown attribute that resembles an option is refused, on the task and on its base class."""
    with pytest.raises(ConfigurationError) as refused:
        bound(make_app(), **{name: 3})
    for part in ("sync", f"{name}=3", f"do you mean {MISSPELT[name]}?" if MISSPELT[name] else ""):
        assert part in str(refused.value)
    base = type("Base", (SingletonTask,), {name: 3, "abstract": True})
    app = make_app()
    app.task(base=base, name="sync", shared=False)(body)
    with pytest.raises(ConfigurationError, match=name):
        refuse_wrong(app.tasks["sync"])


@pytest.mark.parametrize("value", [None, "raise", Skip(), Skip, ["a"]])
def test_misspelt_option_of_any_value(make_app: MakeApp, value: Any) -> None:
    """A misspelt option is refused whatever its value is, also a policy's class."""
    with pytest.raises(ConfigurationError, match="on_duplicates="):
        bound(make_app(), on_duplicates=value)


def test_users_own_names_pass(make_app: MakeApp) -> None:
    """Functions, methods and properties may have any name, and other attributes any name that resembles no option."""

    class Own(SingletonTask):
        name = "own"
        on_success_url = timeout = expires = key = lock = "x"
        unique_once = unlock_ttl = duplicate = singleton_name = "x"

        def lock_account(self) -> None: ...
        def on_progress(self) -> None: ...
        def on_duplicates(self) -> None: ...
        def once(self) -> None: ...
        def ttl(self) -> None: ...
        @staticmethod
        def lock_static() -> None: ...
        @classmethod
        def lock_class(cls) -> None: ...
        @property
        def lock_property(self) -> str:
            return "x"

        def run(self, account: int) -> None: ...

    assert DEFAULTS["lock_ttl"] == options(make_app().register_task(Own())).lock_ttl


def test_celerys_own_names_pass() -> None:
    """No attribute of Celery's task classes is refused as a misspelt option."""
    for cls in (Task, AbortableTask, SingletonTask):
        assert not list(unknown_options("x", dict.fromkeys(dir(cls)) if cls is not SingletonTask else vars(cls)))


def test_option_reset_with_none(make_app: MakeApp) -> None:
    """A subclass resets an option of its base with None. Then the app's setting counts, else the default."""
    base = type("Base", (SingletonTask,), {"abstract": True, "lock_ttl": 5, "unique_on": "account"})
    app = make_app(singleton_lock_ttl=60)
    app.task(base=base, name="sync", shared=False, lock_ttl=None, unique_on=None, lock_key="{kind}")(body)
    found = options(app.tasks["sync"])
    assert (60.0, None, "{kind}") == (found.lock_ttl, found.unique_on, found.lock_key)


def test_own_way_to_make_the_key_replaces_the_settings(make_app: MakeApp) -> None:
    """A task's own unique_on or lock_key counts instead of both settings; two settings exclude each other."""
    found = options(bound(make_app(singleton_unique_on=[]), lock_key="{account}"))
    assert (None, "{account}") == (found.unique_on, found.lock_key)
    found = options(bound(make_app(singleton_lock_key="{account}"), unique_on=[]))
    assert ([], None) == (found.unique_on, found.lock_key)
    with pytest.raises(ConfigurationError, match=r"sync.*unique_on=\[\].*lock_key='{account}'"):
        config_for(bound(make_app(singleton_unique_on=[], singleton_lock_key="{account}")))


def test_debounce_is_no_name(make_app: MakeApp) -> None:
    """Whoever gives "debounce" as a name is told how to write it."""
    with pytest.raises(ConfigurationError, match=r"on_duplicate='debounce' must .*Debounce\(quiet, max_quiet\)"):
        config_for(bound(make_app(), on_duplicate="debounce"))


def test_none_is_not_given(make_app: MakeApp) -> None:
    """None as a task's option or as its app setting means: not given."""
    app = make_app(**{f"singleton_{name}": None for name in DEFAULTS})
    found = options(bound(app, **dict.fromkeys(GOOD)))
    assert DEFAULTS == {name: getattr(found, name) for name in DEFAULTS}


def test_plain_task_needs_nothing(make_app: MakeApp) -> None:
    """``singleton=False`` needs no store, and its arguments no stable form."""
    app = make_app(singleton_lock_url=None)
    assert bound(app, singleton=False)(1) is None


@pytest.mark.parametrize(("option", "value"), [("lock_ttl", -1), ("unique_onn", "x"), ("on_duplicate", "nonsense")])
def test_options_of_a_plain_task(make_app: MakeApp, option: str, value: Any) -> None:
    """Options of a task with ``singleton=False`` have no effect, and are checked nevertheless."""
    with pytest.raises(ConfigurationError, match=option):
        bound(make_app(), singleton=False, **{option: value})


# -- settings of the store ---------------------------------------------------------------------


def settings(**given: Any) -> Any:
    app = Celery("settings", set_as_current=False)
    app.conf.update(given)
    return settings_of(app.conf)


def test_store_defaults_to_the_broker() -> None:
    """Without a URL, a Redis broker is the store, even where the result backend is Redis, too."""
    found = settings(broker_url="redis://broker/1", result_backend="redis://results/2")
    assert ("redis://broker/1", "singleton", 1.0, 10) == (
        found.url,
        found.prefix,
        found.store_timeout,
        found.pool_limit,
    )


@pytest.mark.parametrize("broker", ["amqp://rabbit//", "memory://", ["amqp://a//", "amqp://b//"], "sqs://"])
def test_store_defaults_to_the_result_backend(broker: Any) -> None:
    """If the broker is no Redis, the result backend is the store."""
    assert "redis://results/2" == settings(broker_url=broker, result_backend="redis://results/2").url


def test_credential_provider_of_the_result_backend() -> None:
    """Locks in the Redis of the result backend log in as Celery's result backend does."""
    given = {"result_backend": "redis://results/2", "redis_backend_credential_provider": "mine.Provider"}
    assert "mine.Provider" == settings(broker_url="amqp://x//", **given).options["credential_provider"]
    assert "credential_provider" not in settings(broker_url="redis://broker/1", **given).options


#: Celery's settings that hold transport and certificate options: the broker's, and the result backend's.
SOURCES = [
    ("broker_transport_options", "broker_use_ssl"),
    ("result_backend_transport_options", "redis_backend_use_ssl"),
]


@pytest.mark.parametrize(
    ("url", "with_options", "with_tls"),
    [
        ("redis://h/0", False, False),
        ("rediss://h/0", False, True),
        ("redis+socket:///run/x", False, False),
        ("sentinel://h:26379", True, True),
        ("redis+sentinel://h:26379,i/name/0", True, True),
        ("memory://", False, False),
    ],
)
@pytest.mark.parametrize(("options", "tls"), SOURCES, ids=["broker", "result_backend"])
def test_own_url_counts_first(url: str, with_options: bool, with_tls: bool, options: str, tls: str) -> None:
    """The setting's URL is the store, whatever the broker is. Celery's options are used where its scheme takes them."""
    given: dict[str, Any] = {"broker_url": "redis://broker/1", "result_backend": "redis://results/2"}
    given |= {options: {"master_name": "locks"}, tls: {"ssl_ca_certs": "a", "keyfile": "of another broker"}}
    found = settings(**given, singleton_lock_url=url)
    assert url == found.url
    assert ("locks" if with_options else None) == found.options.get("master_name")
    assert ({"ssl_ca_certs": "a"} if with_tls else None) == found.tls


@pytest.mark.parametrize(
    "given", [{}, {"broker_url": "amqp://x//"}, {"broker_url": "amqp://x//", "result_backend": "rpc://"}]
)
def test_no_store_is_refused(given: dict[str, Any]) -> None:
    """Without any store the refusal names the setting."""
    with pytest.raises(ConfigurationError, match="singleton_lock_url"):
        settings(**given)


@pytest.mark.parametrize(
    "given",
    [
        {"broker_url": "redis://a/0;redis://b/0"},
        {"broker_url": ["redis://a/0", "redis://b/0"]},
        {"broker_read_url": "redis://a/0", "broker_write_url": "redis://b/0"},
        {"broker_url": "redis://a/0", "broker_read_url": "redis://b/0"},
        {"broker_read_url": "redis://a/0", "broker_write_url": "amqp://b//"},
    ],
)
def test_several_brokers_are_no_default(given: dict[str, Any]) -> None:
    """A broker with several URLs is no store by default, so the setting is needed."""
    with pytest.raises(ConfigurationError, match="singleton_lock_url"):
        settings(**given)
    assert "redis://locks/0" == settings(**given, singleton_lock_url="redis://locks/0").url


@pytest.mark.parametrize("source", ["broker", "result_backend", "own"])
def test_sentinels_are_one_store(source: str) -> None:
    """Several Sentinel URLs name one store; Celery's transport options name the master."""
    url = "sentinel://a:26379;sentinel://b:26379"
    name = {"broker": "broker_url", "result_backend": "result_backend", "own": "singleton_lock_url"}[source]
    options = "result_backend_transport_options" if source == "result_backend" else "broker_transport_options"
    own = {"master_name": "locks", "sentinel_kwargs": {"password": "p"}}
    found = settings(**{"broker_url": "amqp://x//", name: url, options: own})
    assert (url, own) == (found.url, {name: value for name, value in found.options.items() if value is not None})


def test_memory_needs_no_replicas(make_app: MakeApp) -> None:
    """Settings for replicas and lost data have no meaning in memory, where tests may keep them: they are ignored."""
    app = make_app(singleton_lock_url="memory://", singleton_lock_replicas=2, singleton_lock_grace=True)
    granted = context_of(app).store.acquire(LeaseSpec("b:{x}", "d", "token", 30.0))
    assert granted.status is AcquireStatus.GRANTED


def test_transport_options_reach_the_store(make_app: MakeApp) -> None:
    """The store is made with Celery's transport options, and refused if they lack the master's name."""
    given = {"broker_url": "sentinel://a:26379", "singleton_lock_url": None}
    assert context_of(make_app(**given, broker_transport_options={"master_name": "locks"})).store
    with pytest.raises(ConfigurationError, match="master_name"):
        context_of(make_app(**given))


@pytest.mark.parametrize(
    "url", ["amqp://x//", "localhost", "", 5, "http://x", "unix:///run/x", ["redis://a/0"], "redis://a/0;redis://b/0"]
)
def test_bad_url(make_app: MakeApp, url: Any) -> None:
    """A URL that does not name one store is refused with the name of the setting."""
    app = make_app(singleton_lock_url=url)
    with pytest.raises(ConfigurationError, match="singleton_lock_url"):
        context_of(app)


def test_bad_url_shows_no_password() -> None:
    """The refusal of a URL does not show a password."""
    with pytest.raises(ConfigurationError) as refused:
        settings(singleton_lock_url="amqp://user:hunter2@x//")
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize("source", ["broker", "result_backend"])
def test_global_keyprefix(source: str) -> None:
    """The global_keyprefix of the URL's source comes before our prefix; the setting's URL has none."""
    given = {f"{source}_url" if source == "broker" else source: "redis://x/0"}
    given[f"{source}_transport_options"] = {"global_keyprefix": "tenant:"}  # type: ignore[assignment]
    assert "tenant:singleton" == settings(**given).prefix
    assert "singleton" == settings(**given, singleton_lock_url="redis://y/0").prefix


@pytest.mark.parametrize("prefix", ["a{b", "a}b", "{}", 5, b"x"])
def test_bad_prefix(prefix: Any) -> None:
    """A prefix with braces, which mark a cluster's hash tag, or one that is no text is refused with setting and value."""
    with pytest.raises(ConfigurationError) as refused:
        settings(singleton_lock_url="memory://", singleton_lock_prefix=prefix)
    assert f"singleton_lock_prefix={prefix!r}" in str(refused.value)


def test_bad_global_keyprefix() -> None:
    """Braces in a global_keyprefix are refused, too."""
    with pytest.raises(ConfigurationError, match="global_keyprefix"):
        settings(broker_url="redis://x/0", broker_transport_options={"global_keyprefix": "{x}"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("singleton_lock_store_timeout", 0),
        ("singleton_lock_store_timeout", -1),
        ("singleton_lock_store_timeout", math.inf),
        ("singleton_lock_store_timeout", 1e10),
        ("singleton_lock_store_timeout", "1"),
        ("singleton_lock_store_timeout", True),
        ("singleton_lock_replicas", -1),
        ("singleton_lock_replicas", True),
        ("singleton_lock_grace", 1),
        ("singleton_lock_pool_limit", 0),
        ("singleton_lock_pool_limit", 1.5),
        ("singleton_lock_pool_limit", "10"),
        ("singleton_lock_pool_limit", True),
        ("singleton_lock_eager", "no"),
        ("singleton_lock_eager", 1),
    ],
)
def test_bad_setting(name: str, value: Any) -> None:
    """A bad value of a setting is refused with setting and value."""
    with pytest.raises(ConfigurationError) as refused:
        settings(singleton_lock_url="memory://", **{name: value})
    assert f"{name}={value!r}" in str(refused.value)


def configured(how: str, given: dict[str, Any]) -> Celery:
    """An app that has its settings in one of Celery's ways."""
    app = Celery("settings", set_as_current=False)
    given = {"singleton_lock_url": "memory://", **given}
    if how == "update":
        app.conf.update(given)
    elif how == "attribute":
        for name, value in given.items():
            setattr(app.conf, name, value)
    elif how == "changes":
        app = Celery("settings", set_as_current=False, changes=given)
    elif how == "defaults":
        app.add_defaults(given)
    elif how == "dict":
        app.config_from_object(given)
    elif how == "object":
        app.config_from_object(type("Config", (), given))
    elif how == "module":
        module = ModuleType("settings_of_test")
        vars(module).update(given)
        app.config_from_object(module)
    elif how == "namespace":
        upper = {f"CELERY_{name.upper()}": value for name, value in given.items()}
        app.config_from_object(type("Config", (), upper), namespace="CELERY")
    return app


WAYS = ["update", "attribute", "changes", "defaults", "dict", "object", "module", "namespace"]


@pytest.mark.parametrize("how", WAYS)
def test_unknown_setting(how: str) -> None:
    """An unknown setting that resembles ours is refused wherever an app has it. Its value may be secret, so it is not shown."""
    with pytest.raises(ConfigurationError, match=r"(?i)singleton_lock_tll") as refused:
        settings_of(configured(how, {"singleton_lock_tll": "hunter2"}).conf)
    assert "hunter2" not in str(refused.value)
    assert "memory://" == settings_of(configured(how, {}).conf).url


SINGLETONS = {
    "singleton_backend_url": "singleton_lock_url",
    "singleton_backend_class": "singleton_lock_url",
    "singleton_backend_kwargs": "singleton_lock_url",
    "singleton_key_prefix": "singleton_lock_prefix",
    "singleton_raise_on_duplicate": 'singleton_on_duplicate="raise" with .*singleton_lock_from="publish"',
    "singleton_lock_expiry": 'singleton_lock_at_least, with .*singleton_lock_from="publish"',
}


@pytest.mark.parametrize("how", ["update", "namespace"])
@pytest.mark.parametrize("name", SINGLETONS)
def test_settings_of_celery_singleton(monkeypatch: pytest.MonkeyPatch, name: str, how: str) -> None:
    """A setting of celery-singleton is refused, and the error names ours. It passes while celery-singleton is imported."""
    conf = configured(how, {name: "redis://:hunter2@x"}).conf
    with pytest.raises(ConfigurationError, match=f"(?i){name}.*celery-singleton.*{SINGLETONS[name]}") as refused:
        settings_of(conf)
    assert "hunter2" not in str(refused.value)
    monkeypatch.setitem(sys.modules, "celery_singleton", ModuleType("celery_singleton"))
    assert "memory://" == settings_of(conf).url


@pytest.mark.parametrize(
    ("key", "namespace", "name"),
    [
        ("SINGLETON_LOCK_TTL", None, "singleton_lock_ttl"),
        ("CELERY_SINGLETON_LOCK_TTL", None, "singleton_lock_ttl"),
        ("SINGLETON_LOCK_TTL", "CELERY", "CELERY_SINGLETON_LOCK_TTL"),
        ("celery_singleton_lock_ttl", "CELERY", "CELERY_SINGLETON_LOCK_TTL"),
        ("CELERY_SINGLETON_LOCK_TTL", "SHOP", "SHOP_SINGLETON_LOCK_TTL"),
    ],
)
def test_setting_that_is_not_read(key: str, namespace: str | None, name: str) -> None:
    """A spelling that Celery does not read is refused and the right one named, unless the right one is given, too."""
    for more in ({}, {name: 6}):
        app = Celery("settings", set_as_current=False)
        app.config_from_object({key: 5, "singleton_lock_url": "memory://", **more}, namespace=namespace)
        if more:
            assert "memory://" == settings_of(app.conf).url
            assert 6 == app.conf.get("singleton_lock_ttl")
        else:
            with pytest.raises(ConfigurationError, match=f"{key} is not read.* {name}$"):
                settings_of(app.conf)


def test_what_else_a_configuration_has() -> None:
    """Other settings of a Django project pass, and so does what a configuration module imports or defines."""
    django = {"SINGLETON_SITE": 1, "MY_SINGLETON_LOCK": 2, "CELERY_SINGLETON_LOCK_URL": "memory://"}
    app = Celery("settings", set_as_current=False)
    app.config_from_object(django, namespace="CELERY")
    assert "memory://" == settings_of(app.conf).url
    imported = {"celery_singleton_lock": celery_singleton_lock, "singleton_session": body, "singleton_module": sys}
    assert "memory://" == settings_of(configured("module", imported).conf).url


def test_django_settings() -> None:
    """Unknown settings of a Django project are refused, too."""
    pytest.importorskip("django")
    from django.conf import LazySettings

    django = LazySettings()
    django.configure(CELERY_SINGLETON_LOCK_URL="memory://", CELERY_SINGLETON_LOCK_TLL=5, SINGLETON_SITE=1)
    app = Celery("settings", set_as_current=False)
    app.config_from_object(django, namespace="CELERY")
    with pytest.raises(ConfigurationError, match="CELERY_SINGLETON_LOCK_TLL"):
        settings_of(app.conf)


def test_certificates_of_celerys_settings() -> None:
    """The certificate options come from the same settings as the URL."""
    broker = settings(broker_url="rediss://x/0", broker_use_ssl={"ssl_ca_certs": "a"})
    assert {"ssl_ca_certs": "a"} == broker.tls
    backend = settings(
        result_backend="rediss://x/0", broker_url="amqp://x//", redis_backend_use_ssl={"ssl_ca_certs": "b"}
    )
    assert {"ssl_ca_certs": "b"} == backend.tls
    assert settings(broker_url="redis://x/0").tls is None


def test_two_apps_do_not_mix(make_app: MakeApp) -> None:
    """Two apps in one process have each their own settings and store."""
    one, other = make_app(singleton_lock_prefix="one"), make_app(singleton_lock_prefix="other")
    assert context_of(one).store is not context_of(other).store
    assert bound(one).lock_key_for(1) != bound(other).lock_key_for(1)
    assert context_of(one) is context_of(one)


def test_unhashable_and_odd_values_are_shown(make_app: MakeApp) -> None:
    """A bad value of any type is refused with a ConfigurationError that names the option."""
    for value in ({}, [], object(), {"a"}):
        with pytest.raises(ConfigurationError, match="on_lock_lost"):
            bound(make_app(), on_lock_lost=value)


def test_policy_function_that_cannot_be_called(make_app: MakeApp) -> None:
    """A function that chooses a policy takes task and holder; one that does not is refused when the task is bound."""

    class Method(SingletonTask):
        def on_duplicate(self, task: Any, holder: Any) -> None: ...

    def lonely(task: Any) -> None: ...

    for options in ({"on_duplicate": lonely}, {"base": Method}):
        with pytest.raises(
            ConfigurationError, match=r"task sync: on_duplicate=.* a callable that takes \(task, holder\)"
        ):
            bound(make_app(), **options)
    for accepted in (lambda task, holder: "skip", lambda *args: "raise", lambda task, holder, more=1: "skip"):
        bound(make_app(), on_duplicate=accepted)


@pytest.mark.parametrize("name", ["singleton_on_duplicate", "singleton_lock_ttl", "singleton_lock_url"])
def test_setting_as_an_option(make_app: MakeApp, name: str) -> None:
    """The name of a setting is no option of a task."""
    with pytest.raises(ConfigurationError, match=f"{name}='raise'.*no such option"):
        bound(make_app(), **{name: "raise"})


def test_misspelt_setting_is_named(make_app: MakeApp) -> None:
    """The setting that is meant is named."""
    with pytest.raises(ConfigurationError, match=r"singleton_lock_tll.* do you mean singleton_lock_ttl\?"):
        settings_of(make_app(singleton_lock_tll=5).conf)


# -- documentation -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["SingletonTask", "SingletonMixin"])
def test_help_shows_the_options(name: str) -> None:
    """`help` lists each option with its meaning and default. (A process of its own: `help` binds a task class to an app.)"""
    command = [sys.executable, "-m", "pydoc", f"celery_singleton_lock.{name}"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=110, check=True).stdout
    (text,) = re.findall(r"^ \|  Options:\n((?: \|      .*\n)+)", shown, re.MULTILINE)
    words = " ".join(text.replace(" |  ", "").split())
    expected = [f"{name}: {row.meaning}. Default: {default_of(row)}." for name, row in TASK_OPTIONS.items()]
    assert " ".join(expected) == words


def test_options_are_attributes() -> None:
    """Each option of the table, and nothing else, is a class attribute that is None until a task sets it."""
    assert dict.fromkeys(TASK_OPTIONS) == {name: vars(SingletonMixin)[name] for name in SingletonMixin.__annotations__}


def test_lock_until_start_needs_a_lock_at_publish(make_app: MakeApp) -> None:
    """A lock that is acquired at the start and released at the start locks nothing, so it is refused."""
    with pytest.raises(ConfigurationError, match="sync: lock_until='start' with lock_from='start'"):
        bound(make_app(), lock_until="start")
    assert "start" == options(bound(make_app(), lock_until="start", lock_from="publish")).lock_until
