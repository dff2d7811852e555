"""The app that ``celery -A tests.faults.worker_app`` loads, configured by the environment."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from celery.signals import task_postrun, task_prerun
from celery.utils.dispatch import Signal

from celery_singleton_lock import signals
from celery_singleton_lock.renewal.renewer import Renewer
from celery_singleton_lock.worker.supervisor import Supervisor
from tests.faults.tasks import ledger_of, make_app, record_signals
from tests.stacks import install

install()
conf = json.loads(os.environ["FAULTS_CONF"])
app = make_app(conf)
record_signals(app)


def _fail_at(signal: Signal) -> None:
    """Connect a receiver that fails and names its signal."""

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError(f"a receiver of {signal.name} that fails")

    signal.connect(fail, weak=False)


def _break(owner: type, step: str, what: str, kind: type[BaseException]) -> None:
    """Let every second call of a thread's step raise an unexpected error."""
    calls = 0
    right = getattr(owner, step)

    def broken(self: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls % 2:
            ledger_of(app).note(f"{what} broken", error=kind.__name__)
            raise kind("out of our own code")
        return right(self)

    setattr(owner, step, broken)


def _step_clock(path: Path) -> None:
    """Shift the wall clock of this process by the offset in a file."""
    right = time.time
    time.time = lambda: right() + float(path.read_text() or 0)


if conf.get("faults_clock"):
    _step_clock(Path(conf["faults_clock"]))
if conf.get("faults_receivers"):
    for name in ("lock_acquired", "lock_released", "lock_renewed", "lock_lost", "duplicate", "store_error"):
        _fail_at(getattr(signals, name))
    for signal in (task_prerun, task_postrun):
        _fail_at(signal)
ERRORS = {"RuntimeError": RuntimeError, "SystemExit": SystemExit}
if conf.get("faults_renewal"):
    _break(Renewer, "renew_due", "renewal", ERRORS[conf["faults_renewal"]])
if conf.get("faults_watch"):
    for owner, step in ((Supervisor, "watch_children"), (Renewer, "renew_due")):
        _break(owner, step, "watch", ERRORS[conf["faults_watch"]])
