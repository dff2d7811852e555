"""How a worker checks its store and settings when it starts."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from celery_singleton_lock import StoreError, StoreUnavailable
from tests.contract.test_logins import PASSWORD, DefaultUser, named
from tests.faults.failover import NAME, Replicated
from tests.integration.environment import SOON, WorkerEnvironment
from tests.integration.nodes import LocalWorkerNode, WorkerSpec, wait_for_end
from tests.servers import Process, RedisServer, free_port, until
from tests.store_login import login

NO_REDIS = {"broker_url": "memory://", "result_backend": "cache+memory://", "singleton_lock_url": None}


@pytest.mark.parametrize(
    ("pool_name", "conf", "words"),
    [
        ("solo", NO_REDIS, ["singleton_lock_url"]),
        ("prefork", {"singleton_lock_pool_limit": 0}, ["singleton_lock_pool_limit=0"]),
        ("prefork", {"singleton_lock_url": "memory://"}, ["singleton_lock_url='memory://'", "prefork"]),
        ("threads", {"singleton_lock_tll": 5}, ["singleton_lock_tll"]),
        ("gevent", {"singleton_lock_ttl": "30"}, ["singleton_lock_ttl='30' must be"]),
    ],
    ids=["store", "setting", "memory", "unknown", "option"],
)
def test_what_cannot_be_used(
    fresh_worker: Callable[..., LocalWorkerNode], pool_name: str, conf: dict[str, Any], words: list[str]
) -> None:
    """A worker with an unusable setting ends with one line that names it, and without a traceback."""
    worker = fresh_worker(WorkerSpec(pool_name, 1, conf=conf), ready=False)
    assert 1 == wait_for_end(worker.container, SOON)
    assert "Traceback" not in worker.logs()
    said = worker.lines("Error: ")
    assert len(said) == 1, worker.logs()
    assert said[0].startswith("Error: ")
    for word in words:
        assert word in said[0]


BAD_OPTION = """
from celery import Celery
from celery_singleton_lock import SingletonTask

app = Celery("shop", broker="memory://", backend="cache+memory://", changes={"singleton_lock_url": "memory://"})

@app.task(base=SingletonTask, name="sync", lock_ttl="30")
def sync(): ...
"""

BAD_GROUP = """
from celery import Celery
from celery_singleton_lock import SingletonTask

app = Celery("shop", broker="memory://", backend="cache+memory://", changes={"singleton_lock_url": "memory://"})

@app.task(base=SingletonTask, name="bill", lock_group="customer", unique_on="customer", lock_limit=3)
def bill(customer): ...

@app.task(base=SingletonTask, name="export", lock_group="customer", unique_on="client", lock_limit=2)
def export(client): ...
"""
UNEQUAL = (
    "task bill: lock_limit=3 with task export: lock_limit=2: tasks of lock_group='customer' must have the same limit"
)


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (BAD_OPTION, "task sync: lock_ttl='30' must be a number of seconds, from 1 to a year"),
        (BAD_GROUP, UNEQUAL),
    ],
    ids=["option", "group"],
)
def test_option_that_cannot_be_used(tmp_path: Path, module: str, text: str) -> None:
    """A bad option of a task that is bound at worker start, or a pair of tasks, ends the worker with one line that names it.

    Celery shows an error of an import with its traceback.
    """
    (tmp_path / "shop.py").write_text(module)
    command = [sys.executable, "-W", "ignore", "-m", "celery", "-A", "shop", "worker", "--pool", "solo"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert (1, "") == (done.returncode, done.stdout)
    assert [f"Error: {text}"] == done.stderr.splitlines()


NEWER_CELERY = """
import celery
from celery_singleton_lock import SingletonTask

celery.VERSION = celery.VERSION._replace(minor=99)
app = celery.Celery("shop", broker="memory://", backend="cache+memory://", changes={"singleton_lock_url": "memory://"})

@app.task(base=SingletonTask)
def sync(): ...
"""


def test_newer_celery(tmp_path: Path) -> None:
    """A worker with a Celery that is newer than the newest tested one warns of it, once, and starts."""
    (tmp_path / "shop.py").write_text(NEWER_CELERY)
    command = [sys.executable, "-W", "ignore", "-m", "celery", "-A", "shop", "worker", "--pool", "solo"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    worker = Process([*command, "--loglevel", "INFO"], tmp_path / "log", environment)
    worker.start()
    until(lambda: " ready." in worker.output() or not worker.running, "the worker is ready")
    worker.stop()
    said = [line for line in worker.output().splitlines() if "is newer than" in line]
    assert 1 == len(said), worker.output()
    assert ": WARNING/" in said[0]
    assert "Celery 5.99 is newer than 5.7, the newest that this version of celery_singleton_lock is tested" in said[0]


@pytest.mark.parametrize("pool_name", ["prefork", "threads", "gevent"])
def test_store_away(env: WorkerEnvironment, fresh_worker: Callable[..., LocalWorkerNode], pool_name: str) -> None:
    """A worker starts without its store, logs once that it is unreachable, and recovers by itself."""
    with RedisServer() as later:
        later.port = free_port()
        conf = {"singleton_lock_url": later.url()}
        worker = fresh_worker(WorkerSpec(pool_name, 2, conf=conf))
        time.sleep(1.0)
        said = worker.wait_for_lines(": WARNING/", "store")
        assert len(said) == 1, said
        later.start()
        job = env.job("store_retry")
        assert "done" == env.get(job.apply_async((env.tag,), queue=worker.worker_queue))


def test_eviction_policy(fresh_worker: Callable[..., LocalWorkerNode]) -> None:
    """A worker logs one WARNING at start about a store that may evict locks."""
    with RedisServer("--maxmemory-policy", "allkeys-lru") as careless:
        conf = {"singleton_lock_url": careless.url()}
        worker = fresh_worker(WorkerSpec("prefork", 2, conf=conf))
        said = worker.wait_for_lines(": WARNING/", "allkeys-lru")
        time.sleep(0.5)
        assert len(worker.lines(": WARNING/", "allkeys-lru")) == len(said) == 1


@pytest.mark.parametrize("conf", [{}, {"singleton_lock_replicas": 1}], ids=["without", "with"])
def test_replicas_that_nothing_waits_for(
    env: WorkerEnvironment, fresh_worker: Callable[..., LocalWorkerNode], conf: dict[str, Any]
) -> None:
    """By Sentinel, a worker logs one WARNING at its start if its store grants locks that its replicas may not have."""
    words = "The store of locks has replicas (1), and grants locks before they have them"
    with Replicated(replicas=1) as store:
        url = store.url + f"?master_name={NAME}"
        worker = fresh_worker(WorkerSpec("prefork", 2, conf={"singleton_lock_url": url, **conf}))
        job = env.job("store_raise")
        assert "done" == env.get(job.apply_async((env.tag,), queue=worker.worker_queue))
        assert len(worker.lines(": WARNING/", words)) == (0 if conf else 1)
        assert len(worker.lines(": WARNING/")) == (0 if conf else 1)


@pytest.mark.parametrize(
    ("conf", "source"),
    [
        ({}, "broker_url"),
        ({"broker_url": "memory://"}, "result_backend"),
        ({"singleton_lock_url": "redis://127.0.0.1:1/7"}, "singleton_lock_url"),
    ],
    ids=["broker", "backend", "own"],
)
def test_where_the_url_came_from(
    fresh_worker: Callable[..., LocalWorkerNode], conf: dict[str, Any], source: str
) -> None:
    """The first line about the store says which setting named it: a broker that moves takes the locks with it."""
    worker = fresh_worker(WorkerSpec("solo", 1, conf=conf), ready=False)
    (said,) = worker.wait_for_lines(": INFO/", "Singleton locks in")
    assert f" (from {source}): lock_ttl " in said


def test_sound_store(fresh_worker: Callable[..., LocalWorkerNode]) -> None:
    """A worker logs nothing about a store without problems."""
    worker = fresh_worker(WorkerSpec("prefork", 2))
    worker.wait_for_lines(": INFO/", "Singleton locks in")
    time.sleep(0.5)
    assert [] == worker.lines(": WARNING/")


@pytest.mark.parametrize("login", [":wr0ngpass@", ""])
def test_refused_login(env: WorkerEnvironment, fresh_worker: Callable[..., LocalWorkerNode], login: str) -> None:
    """A worker with a wrong password logs one ERROR without the password and runs on; its tasks fail under any setting."""
    with RedisServer("--requirepass", "right") as guarded:
        url = guarded.url().replace("redis://", f"redis://{login}")
        worker = fresh_worker(WorkerSpec("prefork", 2, conf={"singleton_lock_url": url}))
        for name in ("store_run", "store_retry", "store_raise"):
            error = env.error(env.job(name).apply_async((env.tag,), queue=worker.worker_queue))
            assert isinstance(error, StoreError)
            assert not isinstance(error, StoreUnavailable)
        assert [] == env.starts()
        said = worker.wait_for_lines(": ERROR/", "The store of locks refuses this worker", "singleton tasks will fail")
        assert len(said) == 1, said
        assert "wrong or missing password" in said[0]
        assert [] == worker.lines(": WARNING/", "The store of locks")
        assert "wr0ngpass" not in worker.logs()


def test_login_without_info(env: WorkerEnvironment, fresh_worker: Callable[..., LocalWorkerNode]) -> None:
    """The login of the documents is enough, also without INFO, and causes no WARNING."""
    with RedisServer() as guarded:
        redis.Redis.from_url(guarded.url()).execute_command(*login("pass"), "-info")
        url = f"redis://locks:pass@127.0.0.1:{guarded.port}/0"
        worker = fresh_worker(WorkerSpec("prefork", 2, conf={"singleton_lock_url": url}))
        job = env.job("store_raise")
        assert "done" == env.get(job.apply_async((env.tag,), queue=worker.worker_queue))
        assert [] == worker.lines(": ERROR/") + worker.lines(": WARNING/")
        (said,) = worker.wait_for_lines(": INFO/", "Singleton locks in")
        assert f"Singleton locks in redis://127.0.0.1:{guarded.port}/0 (from singleton_lock_url): lock_ttl " in said
        assert "store_raise" in said
        assert 1 == len(worker.wait_for_lines(": INFO/", "The store of locks does not show its maxmemory-policy"))


@pytest.mark.parametrize("pool_name", ["prefork", "threads"])
def test_credential_provider(
    env: WorkerEnvironment, fresh_worker: Callable[..., LocalWorkerNode], pool_name: str
) -> None:
    """All processes of a worker can use a store whose URL names a credential provider."""
    with RedisServer("--requirepass", PASSWORD) as guarded:
        url = f"{guarded.url()}?credential_provider={named(DefaultUser)}"
        worker = fresh_worker(WorkerSpec(pool_name, 2, conf={"singleton_lock_url": url}))
        job = env.job("store_raise")
        assert "done" == env.get(job.apply_async((env.tag,), queue=worker.worker_queue))
        assert env.starts()[0]["protected"] is True
        assert [] == worker.lines(": WARNING/")


def test_bad_credential_provider(fresh_worker: Callable[..., LocalWorkerNode]) -> None:
    """An unknown credential provider ends the worker at its start with a clear message."""
    conf = {"singleton_lock_url": "redis://127.0.0.1:1/0?credential_provider=no_such.Provider"}
    worker = fresh_worker(WorkerSpec("solo", 1, conf=conf), ready=False)
    assert wait_for_end(worker.container, SOON) not in (None, 0)
    assert "credential_provider=no_such.Provider cannot be used" in worker.logs()


@pytest.mark.parametrize("pool_name", ["prefork", "threads", "gevent"])
def test_copies_that_waited_for_a_worker(
    env: WorkerEnvironment, fresh_worker: Callable[..., LocalWorkerNode], pool_name: str
) -> None:
    """One of many duplicates that were published before any worker started runs; the others are skipped."""
    queue = f"late-{env.tag}"
    copies = [env.job("skip_value").apply_async((env.tag, "hold"), queue=queue) for _ in range(12)]
    fresh_worker(WorkerSpec(pool_name, 4, options=("--queues", queue)))
    holder = env.wait_for("start")["id"]
    assert ["already"] * 11 == [env.get(copy) for copy in copies if copy.id != holder]
    env.let_go()
    assert ["held"] == [env.get(copy) for copy in copies if copy.id == holder]
    assert 1 == len(env.starts())


TOO_LONG = "lock_ttl is longer"


@pytest.mark.parametrize(
    ("timeout", "spec"),
    [(700, []), (500, [TOO_LONG]), (100, ["RetryLater's delays are cut to 50 s", TOO_LONG])],
)
def test_visibility_timeout(fresh_worker: Callable[..., LocalWorkerNode], timeout: int, spec: list[str]) -> None:
    """A worker names the tasks whose delays or TTL do not fit the broker's visibility timeout, and no others."""
    conf = {"broker_transport_options": {"visibility_timeout": timeout}}
    worker = fresh_worker(WorkerSpec("solo", 1, conf=conf))
    worker.wait_for_lines(" ready.")
    found = [line for line in worker.lines(": WARNING/") if "are cut to" in line or TOO_LONG in line]
    assert len(spec) == len(found), found
    for words, line in zip(spec, found, strict=True):
        assert words in line
        assert ("job.retry_default" if "RetryLater" in words else "job.long") in line
        assert "job.skip_short" not in line


def test_short_visibility_timeout(fresh_worker: Callable[..., LocalWorkerNode]) -> None:
    """A worker warns if messages that wait in line are published again many times a minute, and names their tasks."""
    conf = {"broker_transport_options": {"visibility_timeout": 50}}
    worker = fresh_worker(WorkerSpec("solo", 1, conf=conf))
    (line,) = worker.wait_for_lines(": WARNING/", "waits in line is published again every 25 s")
    assert "job.wait_long" in line
    assert "job.skip" not in line


def test_results_that_expire_before_a_hold(fresh_worker: Callable[..., LocalWorkerNode]) -> None:
    """A worker warns if results expire before a hold whose duplicates end with them, and names the tasks."""
    worker = fresh_worker(WorkerSpec("solo", 1, conf={"result_expires": 60}))
    (line,) = worker.wait_for_lines(": WARNING/", "result_expires is 60 s")
    assert "job.join_throttled" in line
    assert "job.throttled" not in line
