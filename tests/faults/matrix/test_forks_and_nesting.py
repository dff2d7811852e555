"""Fault 31: forks after connecting, two apps in one process, and tasks that call tasks."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import textwrap

import pytest
import redis

from tests.faults.harness import WorkerEnvironment, since
from tests.faults.ledger import Event
from tests.faults.matrix import LATE
from tests.servers import RedisServer, until


@pytest.mark.parametrize("act", [["fork", 2.5], ["fork-through"]], ids=["fork", "fork-through"])
def test_fork_in_a_body(act: list[object]) -> None:
    """A process that a body forks neither releases nor renews the lease; the body keeps it for two renewals and more."""
    with WorkerEnvironment(ttl=3) as env:
        env.worker(concurrency=2)
        env.know_scripts()
        env.send("skip", "a", act, expect="run")
        body = env.body("a")
        until(lambda: _renewals(env, body)[1:], "renewed twice")
        env.go("a")
        end = env.end(body)
        assert "return" == end["how"]
        assert len(_renewals(env, body)) <= since(body, end["at"]) + 1, "one process alone renews every second"
        if act[0] == "fork":
            (forked,) = env.ledger.events("forked")
            assert 1 == forked["threads"], "a fork has a thread of its own"
        env.measured(f"31 {act[0]}: freed after the body", 1.0, since(end, env.gone(body)))
        assert "slept" == env.send("skip", "a", ["sleep", 4], expect="once").get(timeout=LATE)
        env.finish()


def _renewals(env: WorkerEnvironment, body: Event) -> list[Event]:
    return env.ledger.events("store", verb="renew", run=body["run"], own=True, sent=True)


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent", "solo"])
def test_call_within(pool: str) -> None:
    """A task that is called as a plain function acquires no lock and changes none, also when it calls itself."""
    with WorkerEnvironment(ttl=3) as env:
        env.worker(pool)
        assert "slept" == env.send("retry", "a", ["call", "other", "b"], expect="once").get(timeout=LATE)
        assert "slept" == env.send("retry", "a", ["call", "retry", "a"], expect="once").get(timeout=LATE)
        env.finish()


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent", "solo"])
def test_apply_within(pool: str) -> None:
    """An eager run inside a body never deadlocks: another task runs, and the task itself is a duplicate."""
    with WorkerEnvironment(ttl=3, singleton_lock_eager=True) as env:
        env.worker(pool)
        assert "SUCCESS" == env.send("retry", "a", ["apply", "other", "b"], expect="once").get(timeout=LATE)
        assert "FAILURE" == env.send("retry", "a", ["apply", "retry", "a"], expect="once").get(timeout=LATE)
        env.finish()


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_apply_within_without_locks(pool: str) -> None:
    """By default an eager run acquires no lock: a task that calls ``.apply()`` on itself succeeds."""
    with WorkerEnvironment(ttl=3) as env:
        env.worker(pool)
        result = env.send("retry", "a", ["apply", "retry", "a"], expect="once")
        assert "SUCCESS" == result.get(timeout=LATE)
        env.finish()


TWO_APPS = """
    import os, sys, time
    from celery import Celery
    from celery_singleton_lock import SingletonTask

    def app(url):
        app = Celery("same", set_as_current=False)
        app.conf.update(broker_url="memory://", singleton_lock_url=url, singleton_lock_eager=True)
        app.conf.singleton_lock_ttl = 1

        @app.task(name="job", base=SingletonTask, on_duplicate="raise", unique_on="who", bind=True, shared=False)
        def job(self, who, inner=None):
            found = inner and apps[1].tasks["job"].apply((who,)).get()
            time.sleep(1.5)  # longer than a lease lives unless it is renewed
            held = [other.tasks["job"].lock_holder(who) is not None for other in apps]
            return (who, held, found)

        return app

    def say(text):
        os.write(1, f"{text}\\n".encode())  # at once: two processes have the same output

    apps = [app(url) for url in sys.argv[1:]]
    for _ in range(2):
        say(apps[0].tasks["job"].apply(("both", "inner")).get())
    say([other.tasks["job"].lock_holder("both") for other in apps])
    pid = os.fork()
    who = "parent" if pid else "child"  # arguments of their own: neither is the other's duplicate
    say(apps[1].tasks["job"].apply((who,)).get())
    if pid:
        say(f"child ended {os.waitpid(pid, 0)[1]}")
"""


def test_two_apps() -> None:
    """Two apps of one process acquire, renew and release locks in their own stores, before and after a fork."""
    with RedisServer() as one, RedisServer() as two:
        command = [sys.executable, "-c", textwrap.dedent(TWO_APPS), one.url(), two.url()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        lines = done.stdout.splitlines()
        assert 0 == done.returncode, done.stderr
        assert ["('both', [True, False], ('both', [True, True], None))"] * 2 == lines[:2]
        assert "[None, None]" == lines[2]
        assert ["('child', [False, True], None)", "('parent', [False, True], None)"] == sorted(lines[3:5])
        assert ["child ended 0"] == lines[5:], done.stderr
        for server in (one, two):
            with contextlib.closing(redis.Redis.from_url(server.url())) as client:
                assert [] == client.keys("*:lock:*")
