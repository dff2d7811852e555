"""`celery singleton list` answers quickly among many locks and very many other keys, and delays nobody else."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis
from celery import Celery

from celery_singleton_lock import locks
from celery_singleton_lock.store.redis.calls import acquire_call
from celery_singleton_lock.store.requests import LeaseSpec
from tests.servers import RedisServer

LOCKS, TASKS, OTHER_KEYS = 20_000, 20, 1_000_000
#: Seconds within which `list` answers. Client and server take turns, so on a machine that does nothing else this is their time on
#: the processor, which the tests measure. A slow or a busy machine may need three times as long.
TARGET, PATIENCE = 0.5, 3
#: Longest time (µs) for which one call may keep the server busy.
LONGEST_CALL = 5000
#: In how many runs a busy machine must leave each call alone once.
RUNS = 30
SET_MANY = "for i = 1, ARGV[2] do redis.call('SET', 'other:' .. ARGV[1] .. ':' .. i, i) end"


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    """Yield a server with other keys and with locks of several tasks, which logs the time of each call."""
    with RedisServer("--slowlog-log-slower-than", "0", "--slowlog-max-len", "100000") as found:
        with redis.Redis.from_url(found.url()) as client:
            for part in range(10):
                client.eval(SET_MANY, 0, part, OTHER_KEYS // 10)
            names = [f"job.{number}" for number in range(TASKS)]
            client.hset("singleton:tasks", mapping={name: name for name in names})
            acquire(client)
        yield found


def acquire(client: redis.Redis) -> None:
    calls = [acquire_call(request(number), 100) for number in range(LOCKS)]
    client.script_load(calls[0].script)
    pipeline = client.pipeline(transaction=False)
    for call in calls:
        pipeline.execute_command(*call.texts)
    assert {b"granted"} == {answer for answer, _ in pipeline.execute()}


def request(number: int) -> LeaseSpec:
    digest, task_id = f"{number:032x}", f"task-{number:031x}"
    base = f"singleton:{{job.{number % TASKS}}}"
    return LeaseSpec(base, digest, f"token-{number}", 600.0, task_id, "celery@worker-1", 4711)


@pytest.fixture
def app(server: RedisServer) -> Celery:
    return Celery("many", broker=server.url(), set_as_current=False)


@pytest.mark.parametrize("look", [lambda app: [*locks.find(app)], locks.stats])
def test_no_call_is_long(server: RedisServer, app: Celery, look: Callable[[Celery], Any]) -> None:
    """No call takes more than 5 ms of the server's time, and none looks at other keys.

    The calls of a run are the same in each run, since the locks do not change. So the shortest time of each call in several runs
    is its own, without what the machine did meanwhile.
    """
    shortest: list[int] = []
    with redis.Redis.from_url(server.url()) as client:
        look(app)  # loads the scripts
        client.config_resetstat()
        for _ in range(RUNS):
            client.slowlog_reset()
            look(app)
            entries = client.slowlog_get(100_000)
            times = [entry["duration"] for entry in entries if not entry["command"].startswith(b"SLOWLOG")]
            shortest = [*map(min, zip(shortest or times, times, strict=True))]
            if max(shortest) <= LONGEST_CALL:
                break
        assert not {"cmdstat_scan", "cmdstat_keys"} & set(client.info("commandstats"))
    assert max(shortest) <= LONGEST_CALL


def test_list_is_quick(server: RedisServer, app: Celery) -> None:
    """All locks are listed within half a second."""
    found = []
    needed = min(cpu_time(server, lambda: found.append([*locks.find(app)])) for _ in range(3))
    assert LOCKS == len({lock.key for lock in found[-1]})
    assert needed <= TARGET * PATIENCE


def test_command_is_quick(server: RedisServer, tmp_path: Path) -> None:
    """`celery singleton list` shows all locks within half a second after its start."""
    texts = []

    def command(*words: str) -> None:
        with run(tmp_path, server, *words) as process:
            texts.append(process.communicate(timeout=60)[0])
        assert 0 == process.returncode

    start = min(cpu_time(server, partial(command, "--version")) for _ in range(2))
    whole = min(cpu_time(server, partial(command, "singleton", "list")) for _ in range(2))
    assert LOCKS + 1 == len(texts[-1].splitlines())
    assert whole - start <= TARGET * PATIENCE


def cpu_time(server: RedisServer, look: Callable[[], None]) -> float:
    """Return the seconds that this process, its children and the server need on the processor."""

    def used() -> float:
        ours = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        theirs = psutil.Process(server.pid).cpu_times()
        return sum(one.ru_utime + one.ru_stime for one in ours) + float(theirs.user + theirs.system)

    before = used()
    look()
    return used() - before


def test_pipe_that_closes(server: RedisServer, tmp_path: Path) -> None:
    """A reader such as `head`, which does not read everything, makes no traceback."""
    with run(tmp_path, server, "singleton", "list", stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline().startswith("TASK ")
        process.stdout.close()
        assert "" == process.stderr.read()


def run(directory: Path, server: RedisServer, *words: str, **more: Any) -> subprocess.Popen[str]:
    (directory / "many.py").write_text(f"from celery import Celery\napp = Celery(broker={server.url()!r})\n")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(directory), *filter(None, sys.path)])}
    line = [sys.executable, "-m", "celery", "-A", "many", *words]
    return subprocess.Popen(line, cwd=directory, env=env, stdout=subprocess.PIPE, text=True, **more)
