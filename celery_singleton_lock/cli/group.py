"""The group of commands, and what their options have in common.

No option is read from the environment: Kubernetes sets variables such as `CELERY_SINGLETON_…_PORT` for a service of that name.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, TypeVar

import click

from celery_singleton_lock import locks
from celery_singleton_lock.cli.duration import DURATION
from celery_singleton_lock.context import context_of
from celery_singleton_lock.errors import ConfigurationError, StoreError
from celery_singleton_lock.locks.health import UNKNOWN
from celery_singleton_lock.texts import printable

Command = TypeVar("Command", bound=Callable[..., Any])


class _NoAnswer(click.ClickException):
    exit_code = UNKNOWN


class _Group(click.Group):
    def invoke(self, context: click.Context) -> Any:
        """Run a command; tell in one line if the store cannot be asked, or if there is none."""
        try:
            return super().invoke(context)
        except (ConfigurationError, StoreError) as error:
            raise in_one_line(context, error) from error


def in_one_line(context: click.Context, error: Exception) -> click.ClickException:
    """Return the error that says in one line why there is no answer."""
    text = str(error)
    if isinstance(error, StoreError):
        text = f"the store of locks: {error}"
    elif isinstance(error, ConfigurationError) and not context.find_root().params.get("app"):
        text = f"{error}; no app was given: celery -A APP singleton …"
    return _NoAnswer(text)


@click.group(cls=_Group)
def singleton(**_: Any) -> None:  # before Celery 5.7 it is given the app's own preload options
    """Show and release locks of singleton tasks, and pause tasks."""
    gc.freeze()  # Celery's many objects are not looked through again while thousands of locks are read


def option(*names: str, **more: Any) -> Callable[[Command], Command]:
    """Return a decorator that adds an option."""
    return click.option(*names, allow_from_autoenv=False, **more)


def flag(*names: str, **more: Any) -> Callable[[Command], Command]:
    """Return a decorator that adds an option without a value."""
    return option(*names, is_flag=True, **more)


def task_option(words: str) -> Callable[[Command], Command]:
    """Return a decorator that adds the option `--task`."""
    return option("--task", default="", metavar="NAME", help=f"{words} this task, or lock group.")


def node_option(words: str) -> Callable[[Command], Command]:
    """Return a decorator that adds the option `--node`."""
    return option("--node", default="", metavar="NAME", help=f"{words} this worker node, for example celery@host.")


def as_json(command: Command) -> Command:
    """Add the option `--json`."""
    return flag("--json", "as_json", help="Print JSON.")(command)


def lock_filters(command: Command) -> Command:
    """Add the options that choose locks, and sort them."""
    for add in (
        option("--sort", type=click.Choice([*SORTS]), default="age", show_default=True, help="Numbers: highest first."),
        option(
            "--min-age", type=DURATION, default="0", help="Only locks held for so long: 45s, 30m, 2h, 1d; and pauses."
        ),
        node_option("Only locks held on"),
        task_option("Only locks of"),
    ):
        command = add(command)
    return command


#: What locks can be sorted by.
SORTS: dict[str, Callable[[Any], Any]] = {
    "age": lambda lock: -lock.holder.age,
    "task": lambda lock: lock.task,
    "key": lambda lock: lock.key,
    "node": lambda lock: lock.holder.node,
    "state": lambda lock: lock.holder.state,
    "ttl": lambda lock: -lock.holder.remaining,
    "duplicates": lambda lock: -lock.duplicates,
    "waiting": lambda lock: -lock.waiting,
}


def chosen_locks(app: Any, task: str, node: str, min_age: float, sort: str) -> list[Any]:
    """Return the locks that the options of `lock_filters` choose, operators' pauses first."""
    found = locks.find(app, task, node, min_age)
    return sorted(found, key=lambda lock: (lock.holder.state != "paused", SORTS[sort](lock)))


def keeps_records(app: Any) -> bool:
    """Tell whether the app's settings say that records are kept."""
    return bool(context_of(app).settings.stats)


def refuse_unknown(app: Any, task: str, found: object, node: str = "") -> None:
    """Raise an error if nothing was found and a name is probably misspelt; else warn as `warn_if_unknown`.

    Raises:
        _NoAnswer: no worker has registered the task.
        Exit: the node has no locks.
    """
    if not found and task and (known := locks.tasks(app)) and task not in known:
        raise _NoAnswer(f"no worker has registered a task or lock group {task!r}")
    warn_if_unknown(app, task)
    if not found and node:
        nodes = sorted({lock.holder.node for lock in locks.find(app)} - {""})
        listed = printable(", ".join(nodes)) or "none"
        click.echo(f"no locks on node {printable(node)}; nodes with locks: {listed}", err=True)
        raise click.exceptions.Exit(1)


def warn_if_unknown(app: Any, task: str) -> None:
    """Warn of a name that is probably misspelt, or of a store that knows no names, as it has lost its data."""
    known = locks.tasks(app)
    if not known:
        click.echo("Warning: no worker has registered a task in this store yet; each does so every minute", err=True)
    elif task and task not in known:
        click.echo(f"Warning: no worker has registered a task or lock group {task!r}", err=True)
