"""However a task is written, its body is locked; and what was careless still is."""

from __future__ import annotations

from typing import Any

import pytest
from celery import chord, states

from celery_singleton_lock import DuplicateTask
from tests.integration.bench import Bench

SHAPES = [
    *("skip", "unbound", "class_based", "shared", "django", "tests.integration.tasks.Nameless"),
    *("rude_call", "rude_before_start", "rude_run", "rude_all"),
]


@pytest.fixture(scope="module", params=["prefork", "threads"])
def pool(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def job_or_skip(bench: Bench, name: str) -> Any:
    if name == "django" and "job.django" not in bench.app.tasks:
        pytest.skip("Django is not installed")
    return bench.job(name)


@pytest.mark.parametrize("name", SHAPES)
def test_duplicate_is_skipped(bench: Bench, name: str) -> None:
    """bind or not, class-based, shared, Django's class; __call__, before_start, run overridden."""
    job = job_or_skip(bench, name)
    holder = bench.hold(name)
    duplicate = job.apply_async((bench.tag,))
    assert bench.get(duplicate) is None
    assert [holder.id] == [start["id"] for start in bench.starts()]
    bench.let_go()
    assert "held" == bench.get(holder)
    assert "done" == bench.get(job.apply_async((bench.tag, "return")))
    assert not bench.events("wrong run")


@pytest.mark.parametrize("name", ["rude_before_start", "rude_all"])
def test_no_user_code_runs_for_a_duplicate(bench: Bench, name: str) -> None:
    """before_start ran for the holder alone, and with the lease in its hands."""
    bench.hold(name)
    bench.get(bench.job(name).apply_async((bench.tag,)))
    assert 1 == len(bench.events("before_start"))


@pytest.mark.parametrize("name", SHAPES)
def test_lease_is_there_in_the_body(bench: Bench, name: str) -> None:
    """The body can look at its lease, in every shape of task."""
    job = job_or_skip(bench, name)
    bench.get(job.apply_async((bench.tag,)))
    (start,) = bench.starts()
    assert start["held"] is True
    assert start["protected"] is True
    assert start["key"] == job.lock_key_for(bench.tag)


def test_autoretry_never_retries_a_duplicate(bench: Bench) -> None:
    """autoretry_for=(Exception,) does not turn DuplicateTask into a retry."""
    bench.hold("auto")
    duplicate = bench.job("auto").delay(bench.tag)
    assert isinstance(bench.error(duplicate), DuplicateTask)
    bench.settle(duplicate.id)
    assert 1 == len(bench.lock_signals(bench.key("auto"), "duplicate"))
    assert 1 == len(bench.signals(duplicate.id, "task_prerun"))
    assert [] == bench.signals(duplicate.id, "task_retry")


def test_autoretry_retries_the_body(bench: Bench) -> None:
    """The body's own errors are retried as ever, and each retry is granted."""
    result = bench.job("auto").delay(bench.tag, ["raise", "raise", "return"])
    assert "done" == bench.get(result)
    assert [0, 1, 2] == [start["retries"] for start in bench.starts()]


def test_spellings_of_one_call_meet(bench: Bench) -> None:
    """Positional, keyword and default spellings are the same work; another value is not."""
    job = bench.job("all_arguments")
    held = job.delay(bench.tag, "hold")
    bench.wait_for("start")
    for args, kwargs in (
        ((bench.tag,), {"acts": "hold"}),
        ((), {"tag": bench.tag, "acts": "hold", "note": "x"}),
        ((bench.tag, "hold", "x"), {}),
    ):
        assert isinstance(bench.error(job.apply_async(args, kwargs)), DuplicateTask)
    assert "done" == bench.get(job.delay(bench.tag, "return"))
    bench.let_go()
    assert "held" == bench.get(held)


def test_not_locked_directly(bench: Bench) -> None:
    """A direct call takes no lock and finds none in its way; its lease protects nothing."""
    bench.hold("skip")
    assert "done" == bench.job("skip")(bench.tag, "return")
    direct = bench.starts()[1]
    assert direct["protected"] is False


def test_map_items_are_not_locked(bench: Bench) -> None:
    """Items of a starmap, and of chunks, are direct calls inside other tasks: none is skipped."""
    bench.hold("skip")
    items = [(bench.tag, "return")] * 3
    assert ["done"] * 3 == bench.get(bench.job("skip").starmap(items).apply_async())
    assert [["done"] * 2, ["done"]] == bench.job("skip").chunks(items, 2).apply_async().get(timeout=20)
    assert [True] + [False] * 6 == [start["protected"] for start in bench.starts()]


def test_mixed_chord(bench: Bench) -> None:
    """A chord of a class-based task and a shared one, as with plain tasks."""
    header = [bench.job("class_based").s(bench.other_tag("a")), bench.job("shared").s(bench.tag)]
    result = chord(header)(bench.app.tasks["collect"].s(bench.other_tag("collected")))
    assert ["done", "done"] == bench.get(result)
    assert states.SUCCESS == result.state
