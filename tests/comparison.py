"""What three libraries do in four cases, with real workers: ``python -m tests.comparison`` prints the table of the README.

With ``--check``, it fails if the README has another table. All libraries have their defaults, but for the time of the lock in the
second case, which each lets users set, and celery-once's `graceful`, without which a call that is refused raises.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

from redis import Redis

from tests.servers import NotInTime, Process, RedisServer, new_directory, until, warden

README = Path(__file__).resolve().parents[1] / "README.md"
APP = """
import os, time
from celery import Celery

url, kind, seconds = os.environ["REDIS"], os.environ["KIND"], int(os.environ.get("SECONDS_OF_LOCK", 0))
app = Celery("jobs", broker=url, backend=url)
app.conf.update(
    broker_connection_retry_on_startup=True,
    broker_transport_options={"visibility_timeout": 2, "unacked_restore_interval": 1, "unacked_restore_throttle": 1},
)
if kind == "celery-once":
    from celery_once import QueueOnce

    app.conf.ONCE = {"backend": "celery_once.backends.Redis", "settings": {"url": url}}
    options = {"base": QueueOnce, "once": {"graceful": True, **({"timeout": seconds} if seconds else {})}}
elif kind == "celery-singleton":
    from celery_singleton import Singleton

    app.conf.singleton_backend_url = url
    options = {"base": Singleton, **({"lock_expiry": seconds} if seconds else {})}
else:
    from celery_singleton_lock import SingletonTask

    options = {"base": SingletonTask, **({"lock_ttl": float(seconds)} if seconds else {})}

def note(word):
    with open("notes", "a") as file:
        file.write(word + "\\n")

def body():
    note("begin")
    end = time.monotonic() + 60
    while time.monotonic() < end and not os.path.exists("go"):
        time.sleep(0.05)
    note("end")

@app.task(**options)
def job():
    body()

@app.task(acks_late=True, **options)
def late():
    body()

@app.task(bind=True, **options)
def again(self):
    note("begin")
    if not self.request.retries:
        raise self.retry(countdown=1)
    note("end")
"""


class Case:
    """A worker of one library, in a directory and on a server of its own."""

    def __init__(self, kind: str, redis: RedisServer, seconds: int = 0) -> None:
        self.directory = new_directory("comparison")
        (self.directory / "jobs.py").write_text(APP)
        self._env = {**os.environ, "REDIS": redis.url(), "KIND": kind, "PYTHONPATH": str(self.directory)}
        self._env |= {"SECONDS_OF_LOCK": str(seconds)} if seconds else {}
        self.client = Redis.from_url(redis.url())
        celery = [sys.executable, "-m", "celery", "-A", "jobs", "--workdir", str(self.directory)]
        worker = [*celery, "worker", "--concurrency", "4", "--loglevel", "INFO"]
        self.worker = Process(worker, self.directory / "worker.log", self._env)

    def call(self, task: str) -> None:
        """Call a task; a library that raises for a duplicate has not published it."""
        code = f"import jobs\njobs.{task}.delay()"
        subprocess.run([sys.executable, "-c", code], env=self._env, cwd=self.directory, timeout=120, check=True)

    def notes(self, word: str) -> int:
        file = self.directory / "notes"
        return file.read_text().split().count(word) if file.exists() else 0

    def lock(self) -> str:
        """Return the key of the lock that exists."""
        return next(key.decode() for key in self.client.scan_iter() if is_lock(key))


def is_lock(key: bytes) -> bool:
    """Tell whether a key is a lock of one of the libraries."""
    return key.startswith((b"qo_", b"SINGLETONLOCK_")) or b":lock:" in key


@contextmanager
def case(kind: str, seconds: int = 0) -> Iterator[Case]:
    with RedisServer() as redis:
        made = Case(kind, redis, seconds)
        made.worker.start()
        until(lambda: " ready." in made.worker.output(), "the worker is ready")
        try:
            yield made
        finally:
            (made.directory / "go").touch()
            made.worker.kill()


def within(seconds: float, probe: Callable[[], bool]) -> bool:
    """Tell whether something is so within this time."""
    try:
        return until(probe, timeout=seconds)
    except NotInTime:
        return False


def killed(kind: str) -> str:
    """How long the lock stays after its worker was killed."""
    with case(kind) as one:
        one.call("job")
        until(lambda: one.notes("begin"), "the body runs")
        one.worker.kill()
        left = one.client.ttl(one.lock())
    return "never" if left < 0 else f"after {text_of(left)}"


def text_of(seconds: int) -> str:
    return f"{round(seconds / 60)} min" if seconds > 60 else f"{round(seconds, -1)} s"


def longer(kind: str) -> str:
    """How many bodies run at once after a second call, when the first body has run for longer than the time of the lock."""
    with case(kind, seconds=2) as one:
        one.call("job")
        until(lambda: one.notes("begin"), "the body runs")
        key = one.lock()
        within(4, lambda: not one.client.exists(key))
        one.call("job")
        return at_once(one)


def delivered_again(kind: str) -> str:
    """How many bodies run at once when the broker delivers the message of a body again that runs."""
    with case(kind) as one:
        one.call("late")
        until(lambda: one.worker.output().count("received") >= 2, "the message came again")
        return at_once(one)


def at_once(one: Case) -> str:
    """Return how many bodies have begun while the first one runs."""
    return "runs twice at once" if within(5, lambda: one.notes("begin") > 1) else "runs once"


def retried(kind: str) -> str:
    """Whether a task that retries itself runs again."""
    with case(kind) as one:
        one.call("again")
        until(lambda: one.notes("begin"), "the body runs")
        return "runs again" if within(10, lambda: bool(one.notes("end"))) else "is lost"


CASES: dict[str, Callable[[str], str]] = {
    "a killed worker's lock ends": killed,
    "a job longer than its lock": longer,
    "a job delivered again": delivered_again,
    "a job's own retry": retried,
}


def table() -> str:
    """Return the table in Markdown."""
    kinds = ["celery_singleton_lock", "celery-once", "celery-singleton"]
    names = [kinds[0], *(f"{kind} {metadata.version(kind)}" for kind in kinds[1:])]
    lines = [["", *names], ["---"] * 4, *([name, *map(measure, kinds)] for name, measure in CASES.items())]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> None:
    """Print the table, and compare it with that of the README."""
    found = table()
    print(found)
    warden.end()
    if "--check" in sys.argv and found not in README.read_text(encoding="utf-8"):
        sys.exit("the README has another table")


if __name__ == "__main__":
    main()
