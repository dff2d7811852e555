"""The example's run log has a row for each body that ran under a lock, and says how it ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from celery.signals import task_postrun
from sqlalchemy import select

from celery_singleton_lock import signals
from celery_singleton_lock.testing import locked
from tests.unit.test_task import Singleton, deliver


@pytest.fixture
def run_log(example: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, with an empty table, and its receivers connected."""
    found = example("run_log")
    monkeypatch.setenv(found.ledger.LEDGER_VARIABLE, str(tmp_path / "ledger.sqlite3"))
    found.on_init()
    signals.lock_acquired.connect(found.on_acquired)
    task_postrun.connect(found.on_end)
    yield found
    task_postrun.disconnect(found.on_end)
    signals.lock_acquired.disconnect(found.on_acquired)


@pytest.fixture
def task(singleton: Singleton) -> Any:
    @singleton(name="x", on_duplicate="skip", throws=(ValueError,), max_retries=3)
    def task(does: str = "") -> str:
        if does == "fail":
            raise ValueError("no rate for " + 200 * "x")
        if does == "retry":
            raise task.retry(countdown=60)
        return "done"

    return task


def rows(run_log: Any) -> list[Any]:
    with run_log.engine(run_log.ledger.path()).connect() as connection:
        return list(connection.execute(select(run_log.runs)))


@pytest.mark.parametrize(
    ("does", "status", "error"),
    [
        ("", "SUCCESS", None),
        ("fail", "FAILURE", f"ValueError: no rate for {76 * 'x'}"),
        ("retry", "RETRY", "Retry: Retry in 60s"),
    ],
)
def test_row(task: Any, run_log: Any, does: str, status: str, error: str | None) -> None:
    """A row has task, message, lock, host and process, and when and how the run ended."""
    deliver(task, does)
    (row,) = rows(run_log)
    assert ("x", "id-1", task.lock_key_for(does), "node") == (row.task, row.task_id, row.key, row.host)
    assert (status, error) == (row.status, row.error)
    assert row.end - row.start == pytest.approx(timedelta(seconds=row.seconds), abs=timedelta(seconds=0.1))
    assert abs(row.start - datetime.now(timezone.utc).replace(tzinfo=None)) < timedelta(seconds=30)


def test_duplicates_have_no_row(task: Any, run_log: Any) -> None:
    """A duplicate that is skipped did not run."""
    with locked(task, ""):
        deliver(task, "")
    assert [] == rows(run_log)


def test_run_without_an_end(task: Any, run_log: Any, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    """A body whose process was killed has a start alone; the command shows that."""
    deliver(task, "")
    task_postrun.disconnect(run_log.on_end)
    deliver(task, "", task_id="id-2")
    monkeypatch.setattr("sys.argv", ["run_log"])
    run_log.main()
    heading, ended, killed = capsys.readouterr().out.splitlines()
    assert heading.split() == ["start", "(UTC)", "seconds", "status", "task", "host", "error"]
    assert ended.split()[3:] == ["SUCCESS", "x", "node"]
    assert killed.split()[2:] == ["–", "–", "x", "node"]


def test_no_log(run_log: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    """A path that does not exist is told in one line, and no file is made."""
    path = tmp_path / "elsewhere.sqlite3"
    monkeypatch.setattr("sys.argv", ["run_log", str(path)])
    with pytest.raises(SystemExit):
        run_log.main()
    assert capsys.readouterr().err.endswith(f"error: there is no file {path}\n")
    assert not path.exists()
