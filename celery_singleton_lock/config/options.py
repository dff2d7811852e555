"""The tables of task options and app settings: type, default, check and documentation of each.

The tables of the site and the docstring of `SingletonMixin` repeat the documentation; a test compares them.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple, get_args

from celery_singleton_lock.errors import ConfigurationError
from celery_singleton_lock.max_starts import MaxStarts
from celery_singleton_lock.policies import NAMED, Policy, as_policy

LockFrom = Literal["start", "publish"]
LockUntil = Literal["finish", "start"]
OnLockLost = Literal["warn", "raise"]
OnStoreError = Literal["retry", "run", "raise"]

LONGEST = 366 * 86400.0  # seconds: a year, which servers and sockets can express
SENTINEL_SCHEMES = ("sentinel", "redis+sentinel")
STORE_SCHEMES = ("redis", "rediss", "valkey", "valkeys", "redis+socket", *SENTINEL_SCHEMES)


class Option(NamedTuple):
    """A task option or an app setting."""

    default: Any
    is_valid: Callable[[Any], bool]
    must: str  # what an error says of a value that is not valid
    meaning: str  # what users read, in Markdown
    default_text: str = ""  # what users read instead of the default
    read: Callable[[Any], Any] = lambda value: value  # brings a valid value into the form used
    is_secret: bool = False  # a value may hold a password, so no error shows it

    def checked(self, value: Any, source: str) -> Any:
        """Return a value in the form used, the default for None; `source` names task and option in errors."""
        value = self.default if value is None else value
        if not self.is_valid(value):
            raise ConfigurationError(f"{source}{'' if self.is_secret else f'={value!r}'} must {self.must}")
        return self.read(value)


def _row(*args: Any, **kwargs: Any) -> Any:
    """Make the field of a table's class from the arguments of an `Option`."""
    option = Option(*args, **kwargs)
    return field(default=option.read(option.default), metadata={"option": option})


def spelling(conf: Any, name: str) -> str:
    """Return how users spell a setting in the configuration of an app: under a namespace such as Django's, in capitals."""
    prefix = str(conf.prefix or "")
    return (prefix + name).upper() if prefix.isupper() else prefix.lower() + name  # `celery.utils.text.match_case`


def scheme_of(url: Any) -> str:
    """Return the scheme of a URL, "" for anything else."""
    return url.partition("://")[0] if isinstance(url, str) else ""


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _is_seconds(value: Any) -> bool:
    return isinstance(value, (int, float)) and not _is_bool(value) and 0 < value <= LONGEST


def is_limit(value: Any) -> bool:
    """Tell whether a value can be a `lock_limit`."""
    return isinstance(value, int) and not _is_bool(value) and value >= 1


def _is_cooldown(value: Any) -> bool:
    return _is_seconds(value) or (value == 0 and not _is_bool(value))


def _is_max_starts(value: Any) -> bool:
    return value is None or is_limit(value) or isinstance(value, MaxStarts)


def _is_names(value: Any) -> bool:
    is_several = isinstance(value, (list, tuple, set, frozenset)) and all(isinstance(name, str) for name in value)
    return value is None or isinstance(value, str) or is_several


def _is_policy(value: Any) -> bool:
    if isinstance(value, type) or not callable(value):
        return as_policy(value) is not None
    try:
        inspect.signature(value).bind(None, None)
    except TypeError:
        return False
    except ValueError:
        return True  # a callable that is written in C may not say what it takes
    return True


def _is_store(value: Any) -> bool:
    is_one = scheme_of(value) in STORE_SCHEMES and (";" not in value or scheme_of(value) == "sentinel")
    return is_one or value in (None, "memory://")


# fmt: off
@dataclass(frozen=True)
class Options:
    """The options of one task. The app setting of each is ``singleton_`` and its name."""

    singleton: bool = _row(
        True, _is_bool, "be True or False",
        "`False` makes a plain task; Celery's own `celery.*` tasks are always plain, "
        "so `Celery(task_cls=SingletonTask)` works")
    unique_on: Collection[str] | None = _row(
        None, _is_names, "be names of parameters",
        'names of the parameters that make the lock key; `[]`: the task name alone; `"x"` means `["x"]`',
        "all arguments", lambda value: [value] if isinstance(value, str) else value)
    lock_key: str | Callable[..., str] | None = _row(  # noqa: RUF009
        None, lambda value: value is None or callable(value) or (isinstance(value, str) and value != ""),
        "be a template or a callable",
        'makes the lock key instead of `unique_on`: a template with plain parameter names (`"{account}"`), '
        "or a callable that gets the arguments by name, defaults filled in, and returns a `str` of at most 1 KiB",
        "none")
    lock_group: str | None = _row(
        None, lambda value: value is None or (isinstance(value, str) and value != ""), "be a non-empty text",
        "a name instead of the task name in the key: tasks of one group with equal values of `unique_on` or `lock_key`, "
        "one of which is needed, exclude each other", "none")
    lock_limit: int | Callable[..., int] = _row(  # noqa: RUF009
        1, lambda value: callable(value) or is_limit(value), "be a whole number from 1, or a callable",
        "how many tasks with one lock key may run at once, from 1; or a callable that gets the arguments as `lock_key` does, "
        "and returns that number")
    on_duplicate: Policy | Callable[..., Any] = _row(  # noqa: RUF009
        "skip", _is_policy,
        f"be {', '.join(map(repr, NAMED))}, a policy object, as Skip() or Debounce(quiet, max_quiet), "
        "or a callable that takes (task, holder)",
        ', '.join(f'`"{name}"`' for name in NAMED) + ', a policy object, or a callable `(task, holder) -> policy`',
        read=lambda value: as_policy(value) or value)
    lock_from: LockFrom = _row(  # noqa: RUF009
        "start", get_args(LockFrom).__contains__, "be one of 'start', 'publish'",
        'when the lock is acquired: at the `"start"` of the body, or at `"publish"`')
    lock_until: LockUntil = _row(  # noqa: RUF009
        "finish", get_args(LockUntil).__contains__, "be one of 'finish', 'start'",
        'when the lock is released: at the `"finish"` of the body, or at its `"start"` '
        '(only with `lock_from="publish"`)')
    lock_ttl: float = _row(
        30.0, lambda value: _is_seconds(value) and value >= 1, "be a number of seconds, from 1 to a year",
        "seconds that a lease outlives a vanished holder, from 1 to a year; it is renewed every third of that",
        read=float)
    lock_at_least: float = _row(
        0.0, _is_cooldown, "be a number of seconds, from 0 to a year",
        "seconds for which a success keeps the lock held, counted from the start of the body", read=float)
    lock_at_most: float | None = _row(
        None, lambda value: value is None or (_is_seconds(value) and value >= 1),
        "be a number of seconds, from 1 to a year",
        "seconds after which the lease of a body that still runs is lost, from 1 to a year; above `lock_at_least`",
        "none", read=lambda value: None if value is None else float(value))
    on_lock_lost: OnLockLost = _row(  # noqa: RUF009
        "warn", get_args(OnLockLost).__contains__, "be one of 'warn', 'raise'",
        '`"warn"`, or `"raise"`: `LockLost` is raised inside the body')
    on_store_error: OnStoreError = _row(  # noqa: RUF009
        "retry", get_args(OnStoreError).__contains__, "be one of 'retry', 'run', 'raise'",
        'if the store is unreachable when a task starts: `"retry"` later, for an hour in all, `"run"` unprotected '
        'with a warning, or `"raise"`')
    max_starts: MaxStarts | None = _row(  # noqa: RUF009
        None, _is_max_starts, "be a whole number from 1 or a MaxStarts",
        "a number of crashed starts a day, or a `MaxStarts`, after which a delivery fails with `TooManyStarts`",
        "none", read=lambda value: MaxStarts(value) if isinstance(value, int) else value)

    @property
    def is_limited(self) -> bool:
        """Whether several tasks may hold one lock at once. A callable `lock_limit` counts as that."""
        return self.lock_limit != 1


@dataclass(frozen=True)
class Settings:
    """The settings of one app that are no task options. The name of each starts with ``singleton_lock_``."""

    url: str = _row(
        None, _is_store, f"be memory:// or one of {', '.join(f'{scheme}://' for scheme in STORE_SCHEMES)}",
        "the store: `redis://`, `rediss://`, `redis+socket://` or `sentinel://`, with the TLS and Sentinel options of "
        "Celery's settings; `redis+sentinel://host,host/name/db` also names the primary; `valkey://` and `valkeys://` mean the "
        "first two; `memory://` is for one process only",
        "the broker's URL if it is Redis, else the result backend's if it is", is_secret=True)
    prefix: str = _row(
        "singleton", lambda value: isinstance(value, str) and value != "" and not set(value) & set("{}"),
        "be a non-empty text without braces",
        "first part of every key, after the `global_keyprefix` of the broker or result backend whose URL is used")
    eager: bool = _row(False, _is_bool, "be True or False", "acquire locks in eager mode too")
    store_timeout: float = _row(
        1.0, _is_seconds, "be a number of seconds above 0 and at most a year",
        "seconds for a whole store call, connecting included "
        "(not counted: name resolution, and with TLS the loading of certificates); "
        "a renewal waits `lock_ttl / 6` at most", read=float)
    replicas: int = _row(
        0, lambda value: is_limit(value) or (value == 0 and not _is_bool(value)), "be a whole number from 0",
        "how many replicas must have a lease, and each renewal, before it counts; a server with fewer grants and renews nothing")
    grace: bool = _row(
        False, _is_bool, "be True or False",
        "after another server became the primary, a restart or a FLUSHALL, no new lease for `lock_ttl`, while living holders "
        "reacquire theirs; the first run of a task name waits, too")
    queue_ttl: float = _row(
        3600.0, _is_seconds, "be a number of seconds above 0 and at most a year",
        'seconds that a published message keeps its lock before it starts, with `lock_from="publish"`; '
        "its countdown or ETA comes on top, and it never exceeds `expires`", read=float)
    stats: bool = _row(
        True, _is_bool, "be True or False",
        "the store keeps a list of the locks that exist, counters and the last runs, for `celery singleton` and the exporter")
    history: int = _row(
        100, lambda value: is_limit(value) or (value == 0 and not _is_bool(value)), "be a whole number from 0",
        "how many runs are kept for each task name; 0: none")
    max_message: int = _row(
        1024 * 1024, is_limit, "be a whole number from 1",
        "bytes up to which the store keeps a message that waits in line; a longer one starts late, and a WARNING says so")
    pool_limit: int = _row(
        10, is_limit, "be a number from 1",
        "connections that a threads, gevent or eventlet worker may open for bodies and renewals, at least 2, and one for its "
        "line; a prefork child and a main process open one or two each")
    options: Mapping[str, Any] = field(default_factory=dict)  # Celery's transport options that go with the URL
    tls: Mapping[str, Any] | None = None  # Celery's certificate options that go with the URL
    url_name: str = "singleton_lock_url"  # the setting that the URL comes from, as the user spells it

    @property
    def shown_url(self) -> str:
        """The URL without user, password and options; of several servers, the last one that has a login."""
        return re.sub(r"//.*@", "//", self.url).partition("?")[0]

    @property
    def is_by_sentinel(self) -> bool:
        """Whether Sentinels tell which server is the store."""
        return scheme_of(self.url) in SENTINEL_SCHEMES
# fmt: on


def _table(cls: Any, prefix: str = "") -> Mapping[str, Option]:
    return {prefix + row.name: row.metadata["option"] for row in fields(cls) if row.metadata}


TASK_OPTIONS = _table(Options)
APP_SETTINGS = _table(Settings, "singleton_lock_")
SETTING_NAMES = {f"singleton_{name}" for name in TASK_OPTIONS} | APP_SETTINGS.keys()
