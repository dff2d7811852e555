"""What a process has counted is written to the store some seconds later, also beside greenlets."""

from __future__ import annotations

import math
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from celery_singleton_lock import context
from celery_singleton_lock.config.options import Settings
from celery_singleton_lock.context import REPORT_INTERVAL, ProcessContext
from tests.servers import RedisServer

#: A body under gevent whose lease is renewed while its process reports each half second.
BODY = """
from gevent import monkey; monkey.patch_all()
import logging, sys, time
from celery import Celery
from celery_singleton_lock import SingletonTask, context, locks
from tests.unit.test_task import deliver
context.REPORT_INTERVAL = 0.5
logging.basicConfig(level=logging.ERROR, stream=sys.stdout)
app = Celery("greenlets", broker="memory://", backend="cache+memory://")
app.conf.update(singleton_lock_url=sys.argv[1], singleton_lock_prefix="reports")
@app.task(base=SingletonTask, name="x", lock_ttl=1)
def task():
    while locks.stats(app, "x")[0].counters.get("renewals", 0) < 12:
        time.sleep(0.1)
app.finalize()
print(deliver(app.tasks["x"]).info)
"""


def test_time_of_a_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written before its time, however often the loop looks; then all of it, once."""
    time, written = [100.0], []
    monkeypatch.setattr(context, "now", lambda: time[0])
    process: Any = ProcessContext(Settings("redis://127.0.0.1:1/0"))
    process._reporter = SimpleNamespace(wake=lambda at: None)
    process.report_counts = lambda: written.append(process.tally.take())
    process.tally.count("base", "renewals")
    process.tally.count("base", "renewals")
    assert (100 + REPORT_INTERVAL, []) == (process._look(), written)
    time[0] += REPORT_INTERVAL
    assert math.inf == process._look() == process._look()
    assert [{"base": {"renewals": 2}}] == written
    process.end()


def test_beside_greenlets(redis_server: RedisServer) -> None:
    """Renewals and reports of one process meet no error under gevent."""
    done = subprocess.run([sys.executable, "-c", BODY, redis_server.url()], capture_output=True, text=True, check=False)
    assert "None\n" == done.stdout, done.stdout + done.stderr
