"""The command `celery -A app singleton`. Celery imports this module at every call of `celery`, so it imports little.

No option is read from the environment: Kubernetes sets variables such as `CELERY_SINGLETON_…_PORT` for a service of that name.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import click

from celery_singleton_lock.errors import StoreError
from celery_singleton_lock.worker import control  # noqa: F401 - registers its command, so that `celery inspect` knows it

Command = TypeVar("Command", bound=Callable[..., Any])


def _flag(*names: str, **more: Any) -> Callable[[Command], Command]:
    return click.option(*names, is_flag=True, allow_from_autoenv=False, **more)


_as_json = _flag("--json", "as_json", help="Print JSON.")


@click.group()
def singleton(**_: Any) -> None:  # before Celery 5.7 it is given the app's own preload options
    """Show and release locks of singleton tasks."""


@singleton.command()
@click.argument("key")
@_as_json
@click.pass_context
def show(context: click.Context, key: str, as_json: bool) -> None:
    """Show who holds the lock with this KEY. Exits with 1 if nobody does."""
    from celery_singleton_lock import locks

    holder = _asked(locks.show, context, key)
    if as_json:
        click.echo(json.dumps(holder and holder.as_dict()))
    else:
        click.echo(f"held by {holder}" if holder else "free")
    context.exit(0 if holder else 1)


@singleton.command()
@click.argument("key")
@_flag("--force", help="Release it although its worker runs the task, or does not answer.")
@_flag("--dry-run", help="Ask, but release nothing.")
@_as_json
@click.pass_context
def release(context: click.Context, key: str, force: bool, dry_run: bool, as_json: bool) -> None:
    """Release the lock with this KEY, if its worker does not run the task any more. Exits with 1 if it is not released."""
    from celery_singleton_lock import locks

    done = _asked(locks.release, context, key, force=force, dry_run=dry_run)
    if as_json:
        holder = done.holder and done.holder.as_dict()
        click.echo(json.dumps({"outcome": done.outcome, "holder": holder, "answer": done.answer}))
    else:
        click.echo(done)
    context.exit(0 if done.released else 1)


@singleton.command()
@click.option(
    "--listen",
    default="127.0.0.1:9809",
    show_default=True,
    metavar="HOST:PORT",
    allow_from_autoenv=False,
    help="Where to listen; without HOST on all interfaces.",
)
@click.pass_context
def exporter(context: click.Context, listen: str) -> None:
    """Serve the metrics of all locks to Prometheus, until SIGTERM or Ctrl-C."""
    host, colon, port = listen.rpartition(":")
    if not (colon and port.isdecimal() and int(port) < 65536):
        raise click.BadParameter(f"{listen!r} is not HOST:PORT", param_hint="--listen")
    try:
        from celery_singleton_lock.contrib import prometheus
    except ModuleNotFoundError as error:
        raise click.ClickException(f'{error}; install the extra: "celery_singleton_lock[prometheus]"') from error
    try:
        prometheus.serve(
            context.obj.app, host.strip("[]") or "0.0.0.0", int(port), lambda url: click.echo(f"listens on {url}")
        )
    except OSError as error:
        raise click.ClickException(f"cannot listen on {listen}: {error}") from error


def _asked(call: Callable[..., Any], context: click.Context, *args: Any, **options: Any) -> Any:
    try:
        return call(context.obj.app, *args, **options)
    except StoreError as error:
        raise click.ClickException(f"the store of locks: {error}") from error
