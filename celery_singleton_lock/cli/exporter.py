"""The command `exporter`."""

from __future__ import annotations

import logging
from typing import Any

import click

from celery_singleton_lock.cli.group import option, singleton


@singleton.command()
@option(
    "--listen",
    default="127.0.0.1:9809",
    show_default=True,
    metavar="HOST:PORT",
    help="Where to listen; without HOST on all interfaces, of IPv4 and IPv6.",
)
@click.pass_obj
def exporter(obj: Any, /, listen: str) -> None:
    """Serve the metrics of all locks to Prometheus, until SIGTERM or Ctrl-C; /health reads nothing."""
    host, colon, port = listen.rpartition(":")
    if not (colon and port.isdecimal() and int(port) < 65536):
        raise click.BadParameter(f"{listen!r} is not HOST:PORT", param_hint="--listen")
    try:
        from celery_singleton_lock.contrib.exporter import serve
    except ModuleNotFoundError as error:
        raise click.ClickException(f'{error}; install the extra: "celery_singleton_lock[prometheus]"') from error
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    try:
        serve(obj.app, host.strip("[]"), int(port), lambda url: click.echo(f"listens on {url}"))
    except OSError as error:
        raise click.ClickException(f"cannot listen on {listen}: {error}") from error
