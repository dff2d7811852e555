"""The native threads of a gevent or eventlet process keep away from what belongs to its greenlets.

Each test runs in a process of its own, as gevent and eventlet patch a whole process.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

PATCHES = {
    "gevent": "import gevent.monkey; gevent.monkey.patch_all(os=False)",
    "eventlet": "import eventlet; eventlet.monkey_patch()",
}

#: `Garbage` notes in which thread its finalizer runs. `run_step` blocks the loop until a native thread has run a step.
PREPARED = """
import gc, math, os, sys
from celery_singleton_lock.native import NativeEvent, _unpatched
from celery_singleton_lock.renewal.loop import BackgroundLoop

ident = _unpatched("get_ident")
finalized, kept, during = [], [], []

class Garbage:
    def __init__(self):
        self.me = self
    def __del__(self):
        finalized.append(ident())

def run_step(step):
    threads, steps = [], []
    def once():
        threads.append(ident())
        if len(threads) == 1:
            step()
        steps.append(1)
        return math.inf
    loop = BackgroundLoop(once, lambda error: steps.append(1))
    loop.wake(0.0)
    while not steps or not waits(loop, threads[0]):
        pass

def waits(loop, thread):
    return loop._wakeup._lock.locked() and sys._current_frames()[thread].f_code is NativeEvent.wait.__code__
"""

FINALIZERS = """
gc.collect()
gc.disable()
garbage = [Garbage() for _ in range(50)]
del garbage
gc.enable()

def allocate():
    kept.extend([] for _ in range(20_000))
    during.append(gc.isenabled())

run_step(allocate)
gc.collect()
print(len(finalized), {ident()} == set(finalized), during, gc.isenabled())
"""

DISABLED = """
gc.disable()
run_step(lambda: during.append(gc.isenabled()))
print(during, gc.isenabled())
"""

ERROR = """
def fail():
    raise ValueError

run_step(fail)
print(gc.isenabled())
"""

FORKED = """
def fork():
    child = os.fork()
    if not child:
        os._exit(0 if gc.isenabled() else 3)
    _, status = os.waitpid(child, 0)
    during.append(os.waitstatus_to_exitcode(status))

run_step(fork)
print(during)
"""


def run(library: str, code: str) -> str:
    """Return what a process prints in which this library has patched everything."""
    command = [sys.executable, "-W", "ignore", "-c", f"{PATCHES[library]}\n{PREPARED}{code}"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.parametrize("library", PATCHES)
class TestGarbage:
    """Finalizers of garbage, as of Celery's results and redis-py's connections, use sockets and locks of greenlets."""

    def test_finalizers(self, library: str) -> None:
        """They never run in a native thread of the library."""
        assert "50 True [False] True\n" == run(library, FINALIZERS)

    def test_disabled_collector(self, library: str) -> None:
        """A collector that the user has switched off stays off."""
        assert "[False] False\n" == run(library, DISABLED)

    def test_error(self, library: str) -> None:
        """An error of a thread does not leave the collector off."""
        assert "True\n" == run(library, ERROR)

    def test_fork(self, library: str) -> None:
        """A process that is forked meanwhile collects its garbage."""
        assert "[0]\n" == run(library, FORKED)
