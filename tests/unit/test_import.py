"""Importing the package does nothing to a process."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]

#: Imported only by a worker that uses this pool.
POOLS = {"eventlet", "gevent", "greenlet"}
#: Used only where it is installed.
OPTIONAL = {"rich"}

PROBE = """
import importlib.util, socket, threading, signal, sys, _thread
import celery, celery.signals, celery.app.task
started, connected = [], []
begin = _thread.start_new_thread
_thread.start_new_thread = lambda *a, **k: (started.append(a), begin(*a, **k))
threading._start_new_thread = _thread.start_new_thread
socket.socket.connect = lambda *a, **k: connected.append(a)
named = [getattr(celery.signals, name) for name in celery.signals.__all__]
before = [len(one.receivers or ()) for one in named]
handlers = [signal.getsignal(number) for number in signal.valid_signals()]
call, defaults = celery.Task.__call__, dict(celery.Celery("x").conf)
import celery_singleton_lock
assert not started, started
assert not connected, connected
assert before == [len(one.receivers or ()) for one in named]
assert handlers == [signal.getsignal(number) for number in signal.valid_signals()]
assert call is celery.Task.__call__
assert 1 == threading.active_count()
assert "redis" not in sys.modules, "Redis client loaded"
{more}
late = ["worker.bootstep", "worker.execution", "worker.request", "line.copies", "store.memory", "store.redis"]
assert not [name for name in late if f"celery_singleton_lock.{{name}}" in sys.modules]
assert all(importlib.util.find_spec(f"celery_singleton_lock.{{name}}") for name in late[:5])
print("clean")
"""

PLAIN_APP = """
app = celery.Celery("plain", broker="memory://")
@app.task
def task(): ...
app.finalize()
assert not started
assert before == [len(one.receivers or ()) for one in named]
assert not app.steps["worker"]
"""

OWN_TASK = """
app = celery.Celery("own", broker="redis://127.0.0.1:1/0")
@app.task(base=celery_singleton_lock.SingletonTask)
def task(a): ...
app.finalize()
task.lock_key_for(1)
assert not started and not connected
"""


def probe(more: str) -> None:
    done = subprocess.run([sys.executable, "-c", PROBE.format(more=more)], capture_output=True, text=True, timeout=110)
    assert "clean" == done.stdout.strip(), done.stderr


def test_import_does_nothing() -> None:
    """Importing starts no thread, opens no connection, connects no signal, installs no handler, loads neither a Redis client
    nor what only a worker needs."""
    probe("")


def test_command_imports_little() -> None:
    """Celery imports the module of the command at each call of `celery`, also for a worker that has no singleton task."""
    probe("import celery_singleton_lock.cli; assert not {'redis', 'prometheus_client'} & set(sys.modules)")


def test_publisher_imports_no_worker() -> None:
    """A program that only publishes does not import what Celery's workers do."""
    probe("assert 'celery.worker.control' not in sys.modules")


def test_app_without_singletons_is_left_alone() -> None:
    """An app that has no singleton task is not changed by the import."""
    probe(PLAIN_APP)


def test_defining_tasks_connects_to_nothing() -> None:
    """Defining tasks and asking for a key needs no store and starts nothing."""
    probe(OWN_TASK)


def imported_by(file: Path) -> set[str]:
    """Return the top-level names of the modules that a file imports, in functions too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
    return {name.partition(".")[0] for name in names}


def test_imports_are_required() -> None:
    """The requirements name each package that the library imports, and no other."""
    setup = ConfigParser()
    setup.read(PROJECT / "setup.cfg")
    required = re.findall(r"^\w+", setup["options"]["install_requires"], re.MULTILINE)
    files = set((PROJECT / "celery_singleton_lock").rglob("*.py"))
    files -= set(
        (PROJECT / "celery_singleton_lock" / "contrib").rglob("*.py")
    )  # for those who have the other framework
    imported = set().union(*map(imported_by, files))

    assert sorted(imported - sys.stdlib_module_names - POOLS - OPTIONAL - {"celery_singleton_lock"}) == sorted(required)
