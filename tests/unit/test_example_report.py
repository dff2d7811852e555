"""The demo's report on made-up events and ledgers: what it must report as a fault, and what it must not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from celery.backends.cache import CacheBackend
from celery.result import AsyncResult
from redis.exceptions import NoPermissionError

from celery_singleton_lock import DuplicateTask

Import = Callable[[str], Any]
Edit = Callable[[dict[str, Any]], object]

A, B = "prefork@demo", "threads@demo"
IMPORT_KEY, SYNC_KEY = "the import's key", "the sync's key"


@pytest.fixture(autouse=True)
def _own_ledger(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Remove the demo's environment variables after the test, and use a ledger of the test."""
    monkeypatch.setenv("EXAMPLE_LEDGER", str(tmp_path / "ledger.sqlite3"))
    monkeypatch.setenv("EXAMPLE_REDIS_URL", "redis://127.0.0.1:1/0")
    monkeypatch.setenv("EXAMPLE_KEY_PREFIX", "unit:")


def clean() -> dict[str, Any]:
    """What a demo without a fault looks like: worker A dies at 4 s under an import and a sync, worker B takes over.

    A run is: task, work, key, node, start, end.
    """
    return {
        "runs": {
            "first": ["import_rates", "import rates", IMPORT_KEY, A, 2.0, None],
            "next": ["import_rates", "import rates", IMPORT_KEY, B, 7.5, 12.5],
            "sync": ["sync_account", "sync acme", SYNC_KEY, A, 3.5, None],
            "synced": ["sync_account", "sync acme", SYNC_KEY, B, 7.8, 8.8],
            "other": ["sync_account", "sync globex", "another key", B, 3.0, 8.0],
        },
        "events": [
            (2.5, "Skip", "import_rates", IMPORT_KEY, B, A),
            (3.1, "RetryLater", "sync_account", "another key", B, B),
        ],
        "gone": {IMPORT_KEY: 6.9, SYNC_KEY: 7.0},
        "renewed": [],
        "missing": [],
        "late": "",
    }


def told(example: Import, record: dict[str, Any]) -> Any:
    """The record as the story that the demo makes of it."""
    story = example("story")
    runs = [story.Run(*words[:3], name, words[3], 1, *words[4:]) for name, words in record["runs"].items()]
    events = [story.Event(*words) for words in record["events"]]
    kill = story.Kill(A, 4.0, record["gone"], record["renewed"], record["late"])
    return story.Story(20.0, (A, B), runs, events, kill)


def end(example: Import, directory: Path, story: Any, missing: list[str]) -> tuple[int, list[str]]:
    """The exit code of a demo with that story, and the lines that it says."""
    demo, display = example("demo"), example("display")
    lines: list[str] = []
    screen = display.Plain()
    screen.say = lines.append
    options = demo.Options(20.0, True, True, directory / "picture.svg")
    running = demo.Demo(options, directory, screen)
    try:
        return running._conclude(story, missing), lines
    finally:
        running.fleet.close()


def test_clean_story(example: Import, tmp_path: Path) -> None:
    """One run at a time, the dead worker's keys gone in time, the next runs soon after: exit code 0, and the figures."""
    code, lines = end(example, tmp_path, told(example, clean()), [])

    assert 0 == code, lines
    assert [] == [line for line in lines if line.startswith("FAULT")]
    assert "import_rates    2     1      –        –          –        0         3.50 s" in lines
    assert "sync_account    3     –      1        –          –        0         3.80 s" in lines
    assert f"import rates: key gone 2.90 s after the kill, next run 3.50 s after it on {B}" in lines


def set_run(name: str, **changes: Any) -> Edit:
    """Another node, start or end of a run."""
    places = {"node": 3, "started": 4, "ended": 5}

    def edit(record: dict[str, Any]) -> None:
        for field, value in changes.items():
            record["runs"][name][places[field]] = value

    return edit


def lose_the_lease(record: dict[str, Any]) -> None:
    """The other sync is told that its lease was lost."""
    record["events"].append((5.0, "lost", "sync_account", "another key", B, ""))


def overlap(record: dict[str, Any]) -> None:
    """The restarted worker starts an import before the other's is over."""
    record["runs"]["twin"] = ["import_rates", "import rates", IMPORT_KEY, A, 12.4, 17.4]


def overlap_under_another_key(record: dict[str, Any]) -> None:
    """Two bodies do the same work at once, each under a lock of its own."""
    record["runs"]["twin"] = ["sync_account", "sync globex", "a wrong key", A, 3.2, 3.9]


def gone_late(record: dict[str, Any]) -> None:
    """The import's key outlives its worker by more than lock_ttl and the slack."""
    record["gone"][IMPORT_KEY] = 7.51
    set_run("next", started=8.0)(record)


def no_import(record: dict[str, Any]) -> None:
    """Nothing was imported, and nobody held an import when the worker was killed."""
    del record["runs"]["first"], record["runs"]["next"]


@pytest.mark.parametrize(
    ("edit", "fault"),
    [
        (overlap, "overlap: import rates on threads@demo and prefork@demo at 12.40 s"),
        (overlap_under_another_key, "overlap: sync globex on threads@demo and prefork@demo at 3.20 s"),
        (lose_the_lease, "lease lost: sync_account on threads@demo at 5.00 s"),
        (set_run("other", ended=None), "never ended: sync globex on threads@demo"),
        (no_import, "no import came to its end"),
        (gone_late, "import rates: the dead worker's key was not gone within 3.5 s of the kill"),
        (
            lambda record: record["gone"].pop(SYNC_KEY),
            "sync acme: the dead worker's key was not gone within 3.5 s of the kill",
        ),
        (
            lambda record: record["renewed"].append(SYNC_KEY),
            "sync acme: the lease was renewed after its worker had been killed",
        ),
        (
            lambda record: record.update(late="sync acme"),
            f"late write: sync acme of {A} was written under an old fence",
        ),
        (lambda record: record["runs"].pop("synced"), "sync acme: never run again after the kill"),
        (
            set_run("next", started=9.5),
            "import rates: the next run came 2.60 s after the key had gone, not within 2 s",
        ),
        (
            set_run("synced", started=9.5, ended=10.5),
            "sync acme: the next run came 2.50 s after the key had gone, not within 1.8 s",
        ),
        (lambda record: record["missing"].append("payment 1 was never posted"), "payment 1 was never posted"),
    ],
)
def test_fault(example: Import, tmp_path: Path, edit: Edit, fault: str) -> None:
    """Whatever breaks a promise is named, alone, and the exit code is 1."""
    record = clean()
    edit(record)
    code, lines = end(example, tmp_path, told(example, record), record["missing"])

    assert [f"FAULT {fault}"] == [line for line in lines if line.startswith("FAULT")]
    assert "FAILED" == lines[-1]
    assert 1 == code


def test_no_kill(example: Import) -> None:
    """A demo that was to kill a worker and found none to kill has shown nothing; one that was not to has."""
    story, report = example("story"), example("report")
    runs = [story.Run("import_rates", "import rates", IMPORT_KEY, "1", A, 1, 2.0, 7.0)]
    calm = story.Story(20.0, (A, B), runs, [], None)

    assert ["no moment came to kill a worker that held the import"] == report.faults(calm, True)
    assert [] == report.faults(calm, False)


def test_key_seen_gone_late(example: Import) -> None:
    """A key that was looked at just after the next body had started had gone before it, and is no fault; any later is."""
    record = clean()
    set_run("next", started=7.4)(record)
    record["gone"][IMPORT_KEY] = 7.6
    assert [] == example("report").faults(told(example, record), True)

    record["gone"][IMPORT_KEY] = 7.7
    assert 1 == len(example("report").faults(told(example, record), True))


def test_story_of_the_ledger(example: Import) -> None:
    """Two runs in the ledger that overlap, and a lost lease, are read back as such."""
    ledger, story = example("ledger"), example("story")
    ledger.create()
    with ledger.transaction() as connection:
        for started, ended in ((102.0, 107.0), (106.5, None)):
            row = ("import_rates", "import rates", IMPORT_KEY, "1", A, 1, started, ended)
            connection.execute(
                "INSERT INTO runs (task, work, key, task_id, node, pid, started, ended) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                row,
            )
    ledger.note("lost", task="import_rates", key=IMPORT_KEY, node=A)
    read = story.Story(20.0, (A, B), story.runs(100.0), story.events(100.0), None)

    assert [(2.0, 7.0), (6.5, None)] == [(run.started, run.ended) for run in read.runs]
    assert [(read.runs[0], read.runs[1])] == read.overlaps()
    assert [("lost", "import_rates", A)] == [(event.kind, event.task, event.node) for event in read.events]


def state_total(ledger: Any, cents: int) -> None:
    """Write a statement."""
    with ledger.transaction() as connection:
        connection.execute("INSERT INTO statements VALUES (?)", (cents,))


def test_nothing_missing(example: Import) -> None:
    """Payments that are posted and make the balance, and a closed book, are not missed."""
    ledger, traffic = example("ledger"), example("traffic").Traffic(6.0)
    ledger.create()
    ledger.post_payment(ledger.add_payment("acme", 250), "acme", 250, 1)
    state_total(ledger, 250)
    traffic.books.append("2026-Q1")
    with ledger.transaction() as connection:
        connection.execute("INSERT INTO books VALUES ('2026-Q1', 5)")

    assert [] == traffic.missing()


def test_missing_work(example: Import) -> None:
    """A payment whose sync was lost, one that a second body overwrote, and a book that stayed open are named."""
    ledger, traffic = example("ledger"), example("traffic").Traffic(6.0)
    ledger.create()
    ledger.add_payment("globex", 100)
    first, second = ledger.add_payment("acme", 250), ledger.add_payment("acme", 975)
    ledger.post_payment(first, "acme", 250, 1)
    ledger.post_payment(second, "acme", 975, 2)  # read the balance before the first was posted
    state_total(ledger, 250)
    traffic.books.append("2026-Q1")

    assert [
        "payment 1 of globex was never posted",
        "acme has 975 cents, its payments make 1225",
        "book 2026-Q1 was never closed",
        "the last statement says 250 cents",
    ] == traffic.missing()


def test_missing_reports(example: Import, monkeypatch: pytest.MonkeyPatch) -> None:
    """A report that never ended or failed is named; one that was refused as a duplicate, or done, is answered."""
    ledger, module = example("ledger"), example("traffic")
    ledger.create()
    backend = CacheBackend(app=module.app, url="memory://")
    monkeypatch.setattr(module.app, "AsyncResult", partial(AsyncResult, backend=backend, app=module.app))
    backend.store_result("done", 1225, "SUCCESS")
    backend.store_result("refused", DuplicateTask("key"), "FAILURE")
    backend.store_result("failed", ValueError("no"), "FAILURE")
    traffic = module.Traffic(6.0)
    traffic._reports += ["done", "refused", "failed", "waiting"]

    assert ["report failed failed: ValueError('no')", "report waiting is still PENDING"] == traffic.missing()


def test_server_that_refuses_is_no_broken_promise(
    example: Import, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A server whose user may not do what the demo needs: it could not run, and says why."""

    def refused(*_: object) -> int:
        raise NoPermissionError("this user has no permissions to run 'client|list'")

    monkeypatch.setattr(sys, "argv", ["example_project"])
    monkeypatch.setattr(example("interrupts"), "listen", lambda: None)
    monkeypatch.setattr(example("demo"), "run", refused)
    assert 2 == example("__main__").main()
    assert "client|list" in capsys.readouterr().err


def test_picture_that_could_not_be_written(
    example: Import, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A picture without a directory to be in is refused before anything starts, not after half a minute."""
    monkeypatch.setattr(sys, "argv", ["example_project", "--timeline", str(tmp_path / "absent" / "timeline.svg")])
    with pytest.raises(SystemExit) as ended:
        example("__main__").options()
    assert 2 == ended.value.code
    assert "there is no directory" in capsys.readouterr().err
