"""Speed as far as any machine can judge it in a run with other tests beside it: commands and calls are counted.

`tests/speed` compares times, and `benchmarks` makes figures.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from benchmarks import commands, sweep
from benchmarks.deliveries import Deliveries
from benchmarks.stage import Stage, stage
from benchmarks.tasks import OURS, SCALARS, declare, make_app, nothing
from benchmarks.tracer import around_body
from celery_singleton_lock import SingletonTask


@pytest.fixture(scope="module")
def own_stage() -> Iterator[Stage]:
    """A broker and a store that nobody else talks to."""
    with stage(quick=True) as made:
        yield made


def test_commands(own_stage: Stage) -> None:
    """A run costs the store two commands, a duplicate one."""
    counted = commands.count(own_stage, Deliveries(own_stage), OURS)
    assert [2, 1] == [len(sent) for sent, _ in counted.values()], counted


def calls(work: Callable[[], object]) -> list[str]:
    """Return the names of the Python functions that are called."""
    called: list[str] = []

    def look(frame: Any, event: str, _: object) -> None:
        if event == "call":
            called.append(frame.f_code.co_name)

    sys.setprofile(look)
    try:
        work()
    finally:
        sys.setprofile(None)
    return called


def test_declaration() -> None:
    """A process may have hundreds of tasks: each is declared with 700 Python calls at most (514 with Python 3.11, Celery 5.7)."""
    app = make_app("memory://", "memory://")
    declare(app, "first", SingletonTask, nothing)
    app.finalize()
    called = calls(lambda: declare(app, "second", SingletonTask, nothing))
    assert "benchmarks.second" in app.tasks
    assert 100 < len(called) <= 700, Counter(called).most_common(10)


def test_frames(own_stage: Stage) -> None:
    """Around a body no more than 255 Python functions are called (246 with Python 3.11, Celery 5.7, redis-py 8.1, no hiredis)."""
    cycle = partial(around_body, own_stage.tasks[OURS], SCALARS, supervised=True)
    cycle()  # makes plan, connection and scripts
    called = calls(cycle)
    around = called[called.index("wrapper") : called.index("pop")]
    assert nothing.__name__ in around
    assert 35 < len(around) <= 255, " ".join(around)


def test_key(own_stage: Stage) -> None:
    """The key of three scalars is made with 45 Python calls at most (37 with Python 3.11)."""
    key = partial(own_stage.tasks[OURS].lock_key_for, *SCALARS)
    key()  # makes the plan of the task
    called = calls(key)
    assert 10 < len(called) <= 45, " ".join(called)


def test_sweep(own_stage: Stage) -> None:
    """Leases are renewed by hundreds, each with 36 Python calls at most (30 with Python 3.11, redis-py 8.1, no hiredis)."""
    with sweep.leases(own_stage, 300, sweep.FAR, by_thread=False) as (renewer, held):

        def work() -> None:
            for lease in held:
                lease.due = 0.0
            renewer.renew_due()

        work()  # loads the script
        assert 3 == len(own_stage.sent(work))
        called = calls(work)
    assert 10 < len(called) / 300 <= 36, Counter(called).most_common(20)
