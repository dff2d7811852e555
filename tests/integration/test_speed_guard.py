"""Speed as far as any machine can judge it in a run with other tests beside it: commands and calls are counted.

`tests/speed` compares times, and `benchmarks` makes figures.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks import commands
from benchmarks.deliveries import Deliveries
from benchmarks.stage import Stage, stage
from benchmarks.tasks import OURS, SCALARS, nothing
from benchmarks.tracer import around_body


@pytest.fixture(scope="module")
def own_stage() -> Iterator[Stage]:
    """A broker and a store that nobody else talks to."""
    with stage(quick=True) as made:
        yield made


def test_commands(own_stage: Stage) -> None:
    """A run costs the store two commands, a duplicate one."""
    counted = commands.count(own_stage, Deliveries(own_stage), OURS)
    assert [2, 1] == [len(sent) for sent, _ in counted.values()], counted


def test_frames(own_stage: Stage) -> None:
    """Around a body no more than 245 Python functions are called (238 with Python 3.11, Celery 5.7, redis-py 8.1, no hiredis)."""
    called: list[str] = []

    def look(frame: Any, event: str, _: object) -> None:
        if event == "call":
            called.append(frame.f_code.co_name)

    around_body(own_stage.tasks[OURS], SCALARS, supervised=True)  # makes plan, connection and scripts
    sys.setprofile(look)
    try:
        around_body(own_stage.tasks[OURS], SCALARS, supervised=True)
    finally:
        sys.setprofile(None)
    around = called[called.index("wrapper") : called.index("pop")]
    assert nothing.__name__ in around
    assert 35 < len(around) <= 245, " ".join(around)
