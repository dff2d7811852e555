"""The recipes on three pages: each promise is shown by their own code in a real worker. Two real beats publish the schedule."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery, states
from celery.exceptions import TaskRevokedError

from celery_singleton_lock import LockLost, TooManyStarts
from celery_singleton_lock.store.keys import record_keys
from tests.in_time import in_time
from tests.integration.conftest import forget_results
from tests.integration.environment import SOON, WorkerEnvironment
from tests.integration.nodes import LocalWorker, WorkerSpec
from tests.integration.recorder import Event, Recorder
from tests.overlap.recipes_app import BLOCKS, HOUR, run_page
from tests.overlap.test_limit import most_at_once
from tests.overlap.test_line import in_line
from tests.overlap.test_replace import reason
from tests.servers import Process, until

pytestmark = pytest.mark.long
#: Webhooks in a storm. Each costs three deliveries, so the 10,000 of `tox -e storm` take minutes.
EVENTS = int(os.environ.get("STORM_EVENTS", "1000"))
#: Seconds in which their messages are handled. All took 86 s at a load of 20 on two cores.
HANDLED = 60 + EVENTS * 0.25
#: The id of a task in a line of a log.
TASK_ID = re.compile(r"\[([0-9a-f-]{36})\]")
#: Seconds of the quiet time of `update_customer`.
QUIET = HOUR / 3


@pytest.fixture(scope="module")
def worker_specs() -> Sequence[WorkerSpec]:
    """Two workers, which run the page's code; the second one does one thing at a time."""
    program = ("-m", "celery", "-A", "tests.overlap.recipes_app")
    return [WorkerSpec(program=program), WorkerSpec("solo", 1, program=program, log_level="WARNING")]


@pytest.fixture
def own_queue(local_workers: list[LocalWorker]) -> str:
    """The queue of the second worker, where a test delays no message of the beats, and messages start in order."""
    return local_workers[1].worker_queue()


@pytest.fixture(scope="module")
def extra_conf() -> dict[str, Any]:
    """Short leases, so that a revocation is known soon."""
    return {"singleton_lock_ttl": 6.0}


@pytest.fixture(scope="module")
def page(local_workers: list[LocalWorker]) -> Iterator[SimpleNamespace]:
    """The names of the page, with an app that publishes to the worker."""
    names = run_page(local_workers[0].conf)
    yield SimpleNamespace(**names)
    forget_results(names["app"])
    names["app"].close()


@pytest.fixture(scope="module")
def celery_setup_app(page: SimpleNamespace) -> Celery:
    """The app of the page."""
    return page.app


@pytest.fixture(scope="module", autouse=True)
def beats_since(
    page: SimpleNamespace, local_workers: list[LocalWorker], run_directory: Path, celery_worker_cluster: Any
) -> Iterator[int]:
    """The hour in which two beats with the page's schedule began; they run during all tests of this module."""
    program = [sys.executable, "-m", "celery", "-A", "tests.overlap.recipes_app", "beat", "--pidfile="]
    places = [run_directory / f"{local_workers[0].name}-beat{number}" for number in range(2)]
    beats = [
        Process([*program, f"--schedule={place}"], Path(f"{place}.log"), local_workers[0].process.env)
        for place in places
    ]
    for beat in beats:
        beat.start()
    yield page.this_hour()
    for beat in beats:
        beat.stop()


def starts(recorder: Recorder, tag: str) -> list[Event]:
    """Return the starts of a stand-in."""
    return recorder.events(tag, "start")


def is_over(env: WorkerEnvironment, task: Any, queue: str) -> bool:
    """Tell whether no message is left in a queue and its worker, and no lock and no line of a task in the store.

    Keys without an expiry are those that a task name has once.
    """
    worker = next(node for node in env.setup.worker_cluster if node.worker_queue == queue).hostname()
    base, _, digest = task.lock_key_for(env.tag, 0).partition(":lock:")
    with contextlib.closing(env.store()) as client:
        if client.exists(queue, f"{base}:lock:{digest}", f"{base}:line:{digest}"):
            return False
        inspect = env.app.control.inspect([worker], timeout=SOON)
        left = [(ask() or {worker: [None]})[worker] for ask in (inspect.scheduled, inspect.reserved, inspect.active)]
        fields = set(client.hkeys(f"{base}:waiting:{digest}"))
        lasting = {key.decode() for key in client.keys(f"{base}*") if client.ttl(key) < 0}
    once = {f"{base}:fence", *record_keys(base)}
    return not any(left) and fields <= {b"quiet_until", b"quiet_latest"} and lasting <= once


def skipped(env: WorkerEnvironment, task: Any, *args: Any) -> None:
    """Call a task, and check that it is skipped."""
    result = task.delay(*args)
    assert env.get(result) is None
    env.worker.wait_for_lines(f"[{result.id}]", "skipped")


class TestHourlyReport:
    def test_once(self, env: WorkerEnvironment, page: SimpleNamespace, recorder: Recorder) -> None:
        """Messages of one hour run once, during the first one and after it; another hour is other work."""
        tag = f"send_report-{env.tag}"
        recorder.raise_flag(f"{tag}.hold")
        first = page.hourly_report.delay(env.tag)
        until(lambda: starts(recorder, tag), "the report starts")
        skipped(env, page.hourly_report, env.tag)
        recorder.lower_flag(f"{tag}.hold")
        env.get(first)
        skipped(env, page.hourly_report, env.tag)
        env.get(page.hourly_report.delay(f"{env.tag}-next"))
        assert [1, 1] == [len(starts(recorder, tag)), len(starts(recorder, f"{tag}-next"))]

    def test_made_up_for(self, env: WorkerEnvironment, page: SimpleNamespace, recorder: Recorder) -> None:
        """After a failure another message of the hour does the work at once, and the first one's own retry does not repeat it."""

        def attempt(number: float) -> list[bool] | None:
            hour, sent = f"{env.tag}-{number:g}", time.monotonic()
            tag = f"send_report-{hour}"
            recorder.raise_flag(f"{tag}.fail")
            first = page.hourly_report.delay(hour)
            env.wait_for_state(first, states.RETRY, states.SUCCESS, states.FAILURE)
            recorder.lower_flag(f"{tag}.fail")
            second = page.hourly_report.delay(hour)
            ends = [result.get(timeout=SOON, propagate=False) for result in (second, first)]
            ran = starts(recorder, tag)
            if ran[1]["at"] > sent + HOUR / 4:  # when the own retry may come
                return None
            assert [None, None] == ends
            return [start["id"] for start in ran] == [first.id, second.id]

        assert in_time(attempt)

    def test_own_retry(self, env: WorkerEnvironment, page: SimpleNamespace, recorder: Recorder) -> None:
        """After a failure the task's own retry does the work if no other message comes."""
        tag = f"send_report-{env.tag}"
        recorder.raise_flag(f"{tag}.fail")
        only = page.hourly_report.delay(env.tag)
        env.wait_for_state(only, states.RETRY)
        recorder.lower_flag(f"{tag}.fail")
        assert env.get(only) is None
        assert 2 == len(starts(recorder, tag))

    def test_three_tries(self, env: WorkerEnvironment, page: SimpleNamespace, recorder: Recorder) -> None:
        """Three starts of an hour fail, on retries of whichever message; the fourth is refused, and so are later messages."""
        tag = f"send_report-{env.tag}"
        recorder.raise_flag(f"{tag}.fail")
        assert isinstance(env.error(page.hourly_report.delay(env.tag)), TooManyStarts)
        assert isinstance(env.error(page.hourly_report.delay(env.tag)), TooManyStarts)
        assert 3 == len(starts(recorder, tag))

    def test_stale(self, env: WorkerEnvironment, page: SimpleNamespace, recorder: Recorder) -> None:
        """A message that was received too late does not run."""
        late = page.hourly_report.apply_async((env.tag,), expires=0.2, countdown=0.5)
        env.wait_for_state(late, states.REVOKED)
        assert [] == starts(recorder, f"send_report-{env.tag}")


def test_refresh_rates(env: WorkerEnvironment, page: SimpleNamespace, recorder: Recorder) -> None:
    """After a failure the next call runs at once, after a success only once the cooldown has ended."""
    recorder.raise_flag("download_rates.fail")
    assert isinstance(env.error(page.refresh_rates.delay()), OSError)
    assert page.refresh_rates.lock_holder() is None
    recorder.lower_flag("download_rates.fail")
    sent = time.monotonic()
    env.get(page.refresh_rates.delay())
    skipped(env, page.refresh_rates)
    until(lambda: page.refresh_rates.lock_holder() is None, "the cooldown has ended")
    env.get(page.refresh_rates.delay())
    times = [start["at"] for start in starts(recorder, "download_rates")]
    assert 3 == len(times)
    assert times[2] > sent + 2 * HOUR


def test_rebuild_index(env: WorkerEnvironment, page: SimpleNamespace, recorder: Recorder) -> None:
    """One of many calls during a rebuild runs after it; the others end as skipped."""
    recorder.raise_flag("build_index.hold")
    first = page.rebuild_index.delay()
    until(lambda: starts(recorder, "build_index"), "the first rebuild")
    pending = page.rebuild_index.delay()
    env.worker.wait_for_lines(f"[{pending.id}]", "waits in line")
    for _ in range(5):
        skipped(env, page.rebuild_index)
    recorder.lower_flag("build_index.hold")
    env.get(pending)
    assert [first.id, pending.id] == [start["id"] for start in starts(recorder, "build_index")]


class TestUpdateCustomer:
    @pytest.mark.timeout(HANDLED + 60)
    def test_storm(self, env: WorkerEnvironment, page: SimpleNamespace, recorder: Recorder, own_queue: str) -> None:
        """Of many events at most one runs for each quiet time, at the end the last one, and nothing is left of the others."""
        begun = time.monotonic()
        for event in range(EVENTS):
            page.update_customer.apply_async((env.tag, event), queue=own_queue)
        until(lambda: is_over(env, page.update_customer, own_queue), "all is over", HANDLED, 0.2)
        runs = starts(recorder, f"write_to_books-{env.tag}")
        events = [run["args"][1] for run in runs]
        assert EVENTS - 1 == events[-1]
        assert sorted(set(events)) == events
        assert len(runs) <= 1 + (runs[-1]["at"] - begun) / QUIET

    def test_trickle(self, env: WorkerEnvironment, page: SimpleNamespace, recorder: Recorder) -> None:
        """Events that never stop do not postpone the run for ever, and it has one of the last."""
        tag, begun = f"write_to_books-{env.tag}", time.monotonic()
        events = itertools.count()

        def runs() -> list[Event]:
            page.update_customer.delay(env.tag, next(events))
            return starts(recorder, tag)

        first, *_ = until(runs, "a run", every=0.1)
        assert first["at"] > begun + QUIET
        assert first["args"][1] > 1


class TestPreview:
    def test_newer_version(self, env: WorkerEnvironment, page: SimpleNamespace, recorder: Recorder) -> None:
        """A newer version stops the older one, and runs after it; the older one is revoked, and shows nothing."""
        drawn, shown = f"draw-{env.tag}", f"show-{env.tag}"
        recorder.raise_flag(f"{drawn}.hold")
        results = []
        for version in range(3):
            results.append(page.preview.delay(env.tag, version))
            until(lambda: len(starts(recorder, drawn)) > version, f"version {version} is drawn")  # noqa: B023
        recorder.lower_flag(f"{drawn}.hold")
        assert env.get(results[2]) is None
        assert [f"replaced by task {newer.id}" for newer in results[1:]] == [reason(env, one) for one in results[:2]]
        assert isinstance(env.error(results[0]), TaskRevokedError)
        assert [0, 1, 2] == [start["args"][1] for start in starts(recorder, drawn)]
        assert [2] == [start["args"][1] for start in starts(recorder, shown)]


def test_exports(env: WorkerEnvironment, page: SimpleNamespace, recorder: Recorder) -> None:
    """Of seven exports by two tasks three run at once, and all run; those of another customer do not wait."""
    tag, other = f"write_file-{env.tag}", env.other_tag("customer")
    recorder.raise_flag(f"{tag}.hold")
    results = []
    for year in range(2020, 2027):
        results.append(page.export_orders.delay(env.tag, year) if year % 2 else page.export_invoices.delay(env.tag))
    until(lambda: in_line(env, page.export_invoices.name) == 4, "four wait")
    env.get(page.export_orders.delay(other, 2020))
    env.get(page.export_invoices.delay(other))
    assert 3 == len(starts(recorder, tag))
    recorder.lower_flag(f"{tag}.hold")
    for result in results:
        env.get(result)
    assert (3, 7) == (most_at_once(env, tag), len(starts(recorder, tag)))


def test_deploy(env: WorkerEnvironment, page: SimpleNamespace, recorder: Recorder) -> None:
    """Versions of one service start in order, also after a failure; another service does not wait."""
    tag = f"roll_out-{env.tag}"
    recorder.raise_flag(f"{tag}.hold")
    recorder.raise_flag(f"{tag}-0.fail")
    results = []
    for version in range(4):
        results.append(page.deploy.delay(env.tag, version))
        env.worker.wait_for_lines(f"[{results[-1].id}]", "waits in line" if version else "received")
        until(lambda: starts(recorder, tag), "the first one starts")
    env.get(page.deploy.delay(f"{env.tag}-other", 0))
    assert 1 == len(starts(recorder, tag))
    recorder.lower_flag(f"{tag}.hold")
    assert isinstance(env.error(results[0]), OSError)
    env.get(results[-1])
    assert [0, 1, 2, 3] == [start["args"][1] for start in starts(recorder, tag)]


class TestImportFile:
    def test_progress(self, env: WorkerEnvironment, page: SimpleNamespace, recorder: Recorder) -> None:
        """The state tells how far the import is."""
        tag = f"save-{env.tag} 1"
        recorder.raise_flag(f"{tag}.hold")
        result = page.import_file.delay(env.tag)
        env.wait_for_state(result, "PROGRESS")
        assert {"done": 1, "of": 3} == result.info
        recorder.lower_flag(f"{tag}.hold")
        assert 3 == env.get(result)

    @pytest.mark.parametrize("cause", ["cap", "revoked"])
    def test_lost(self, env: WorkerEnvironment, page: SimpleNamespace, recorder: Recorder, cause: str) -> None:
        """After an hour, or once the lock is revoked, the import writes nothing more, and another one may start."""
        tag = f"save-{env.tag} 1"
        recorder.raise_flag(f"{tag}.hold")
        sent = time.monotonic()
        result = page.import_file.delay(env.tag)
        until(lambda: starts(recorder, tag), "the second line")
        if cause == "revoked":
            assert page.import_file.force_unlock(env.tag)
        key = page.import_file.lock_key_for(env.tag)
        (lost,) = until(lambda: env.lock_signals(key, "lock_lost"), "the loss is known")
        assert cause == "revoked" or lost["at"] > sent + HOUR
        assert env.worker.wait_for_lines(
            "WARNING", result.id, "(lock_at_most)" if cause == "cap" else "(released_by_operator)"
        )
        recorder.lower_flag(f"{tag}.hold")
        assert isinstance(env.error(result), LockLost)
        assert [] == starts(recorder, f"save-{env.tag} 2")
        assert 3 == env.get(page.import_file.delay(env.tag))


def test_report_for(env: WorkerEnvironment, page: SimpleNamespace, recorder: Recorder) -> None:
    """A second click while a report is made gets the first one's report; a click after that makes another one."""
    tag = f"render_report-{env.tag}"
    recorder.raise_flag(f"{tag}.hold")
    first = page.report_for.delay(env.tag)
    until(lambda: starts(recorder, tag), "the report is made")
    second = page.report_for.delay(env.tag)
    env.worker.wait_for_lines(f"[{second.id}]", f"follows task {first.id}")
    recorder.lower_flag(f"{tag}.hold")
    assert [tag, tag] == [env.get(first), env.get(second)]
    assert tag == env.get(page.report_for.delay(env.tag))
    assert 2 == len(starts(recorder, tag))


@pytest.mark.timeout(200)
def test_convert(env: WorkerEnvironment, page: SimpleNamespace, recorder: Recorder) -> None:
    """A file that kills its process is tried three times, and then its message fails."""
    tag = f"render-{env.tag}"
    recorder.raise_flag(f"{tag}.die")
    result = page.convert.delay(env.tag)
    env.wait_for_state(result, states.FAILURE, timeout=100)  # Celery may need some seconds to notice each death
    assert isinstance(result.result, TooManyStarts)
    assert 3 == len(starts(recorder, tag))


def test_two_beats(env: WorkerEnvironment, page: SimpleNamespace, recorder: Recorder, beats_since: int) -> None:
    """An hour has one report, though both beats ask for it; of the clean-up, the second beat publishes no message.

    Messages are counted by their ids, as a broker may deliver one twice, and a beat that has lost a reply sends one again.
    """

    def messages(task: str, words: str) -> set[str]:
        return {found[1] for line in env.worker.lines(task, words) if (found := TASK_ID.search(line))}

    def clean_ups() -> set[str]:
        return {start["id"] for start in starts(recorder, "delete_old_rows")}

    def reports() -> list[int]:
        hours = range(beats_since, page.this_hour() + 1)
        return [len(starts(recorder, f"send_report-{hour}")) for hour in hours]

    until(lambda: sum(reports()) >= 3, "some hours")
    assert 1 == max(reports())
    until(lambda: len(messages("hourly_report", "skipped")) >= 2, "some are skipped")
    until(lambda: len(clean_ups()) >= 3, "some clean-ups")
    received, ran = messages("clean_up", "received"), clean_ups()
    assert len(received - ran) <= 1  # the last one may not have started
    assert len(ran) <= 1 + (page.this_hour() + 1 - beats_since) * 2  # its lock is held for half an hour


def test_each_task() -> None:
    """Each task of the page is called by a test, or published by the beats."""
    tasks = re.findall(r"^@app\.task\(.*?^def (\w+)", "\n".join(BLOCKS), re.MULTILINE | re.DOTALL)
    source = Path(__file__).read_text(encoding="utf-8")
    assert tasks
    assert [] == [name for name in tasks if f"page.{name}." not in source and f'"{name}"' not in source]
