"""The README and the other documents: their Python runs as it stands there, and their names, links and commands exist."""

from __future__ import annotations

import configparser
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import group

from celery_singleton_lock import Holder, Lease, LockLost, Raise, SingletonMixin, SingletonTask, Skip, signals
from celery_singleton_lock.policies import NAMED
from celery_singleton_lock.testing import locked, memory_store
from tests.servers import until
from tests.unit.conftest import MakeApp

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
TEXT = README.read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
DOCUMENTS = [README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
FIRST, LEASE, PUBLISH = "app = Celery(", "def export", "report.delay"
CALL, GROUP = "lock_options=", "lock_group="


class Names(dict[str, Any]):
    """The names of the README's blocks, and stand-ins for a reader's own functions, which record their calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        super().__init__(
            __name__="shop.tasks",
            pages=lambda account: [f"{account}, page {number}" for number in (1, 2)],
            store=lambda page: self.calls.append(("store", page)) or 1,
            fetch=lambda customer: self.calls.append(("fetch", customer)),
            download_rates=lambda: "rates",
            download_account=lambda account: f"account {account}",
            page_someone=lambda words: self.calls.append(("page_someone", words)),
        )

    def run(self, *marks: str) -> None:
        """Run the first block, and each block that contains one of these marks."""
        for mark in (FIRST, *marks):
            (block,) = (block for block in BLOCKS if mark in block)
            exec(compile(block, str(README), "exec"), self)


def count(item: int) -> int:
    """Return the item: the body of the tests' own tasks."""
    return item


def environments() -> set[str]:
    """Return the names of the environments in tox.ini, generated ones included."""
    parser = configparser.ConfigParser(interpolation=None)
    parser.read(ROOT / "tox.ini", encoding="utf-8")
    names = {"py", *parser["tox"]["env_list"].split()}
    for section in parser.sections():
        name = section.removeprefix("testenv:")
        stem, _, rest = name.partition("{")
        names |= {stem + factor for factor in rest.partition("}")[0].split(",")} if rest else {name}
    return names


@pytest.fixture
def names() -> Iterator[Names]:
    """Names for the blocks to define and use; the app of the first block is closed after the test."""
    own = Names()
    yield own
    if "app" in own:
        own["app"].close()


def test_blocks(names: Names) -> None:
    """Each block is run by one of the tests below."""
    marks = (
        *(FIRST, LEASE, "lock_limit=", "DjangoTask", "def by_age", "lock_lost.connect", "memory_store"),
        *(PUBLISH, CALL, GROUP, "rebuild_index", "quiet=", 'on_duplicate="join"', "def preview", "max_starts="),
    )
    names.run()

    assert [1] * len(BLOCKS) == [sum(mark in block for mark in marks) for block in BLOCKS]


def test_first_block(names: Names) -> None:
    """A second import is skipped while one runs. A second sync of an account, whatever its reason, has to wait."""
    names.run()
    app, sync, import_rates = names["app"], names["sync"], names["import_rates"]

    with memory_store(app), locked(import_rates), locked(sync, 42, reason="one"):
        assert ("SUCCESS", None) == (import_rates.apply().state, import_rates.apply().result)
        assert "DuplicateTask" == type(sync.apply((42, "another")).result).__name__
        assert [] == names.calls
        assert "SUCCESS" == sync.apply((43,)).state
    assert [("store", "account 43")] == names.calls
    with memory_store(app):
        assert 1 == import_rates.apply().result


def test_first_block_is_short() -> None:
    """The first block has at most ten lines of code, and it is the first."""
    assert FIRST in BLOCKS[0]
    assert 10 >= sum(bool(line.strip()) for line in BLOCKS[0].splitlines())


def test_max_starts(names: Names) -> None:
    """The report fails three times, and is not tried a fourth time."""
    names["report"] = lambda: names.calls.append(("report",)) or 1 / 0
    names.run("max_starts=")
    app, hourly_report = names["app"], names["hourly_report"]

    with memory_store(app):
        ends = [type(hourly_report.apply().result).__name__ for _ in range(4)]
    assert ["ZeroDivisionError"] * 3 + ["TooManyStarts"] == ends
    assert [("report",)] * 3 == names.calls


def test_lease(names: Names) -> None:
    """A body that asks between its steps stores all pages while it holds its lock, and stops after a revocation."""
    names.run(LEASE)
    app, export = names["app"], names["export"]
    app.conf.singleton_lock_ttl = 6.0
    with memory_store(app):
        assert "SUCCESS" == export.apply((42,)).state
        assert [("store", "42, page 1"), ("store", "42, page 2")] == names.calls

        def lose(page: str) -> None:
            names.calls.append(("store", page))
            export.force_unlock(42)
            until(lambda: not export.lease.held, "the loss is known")

        names["store"] = lose
    names.calls.clear()
    with memory_store(app):
        assert LockLost is type(export.apply((42,)).result)
    assert [("store", "42, page 1")] == names.calls


def test_publish(names: Names, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second call publishes nothing, and returns the result of the first, with its holder."""
    names.run()
    sent = []

    def send_task(name: str, *args: Any, task_id: str = "", **options: Any) -> Any:
        sent.append(name)
        return names["app"].AsyncResult(task_id)

    monkeypatch.setattr(names["app"], "send_task", send_task)
    with memory_store(names["app"]):
        names["build_report"] = str
        (block,) = (block for block in BLOCKS if PUBLISH in block)
        exec(compile(block, str(README), "exec"), names)
    assert ["shop.tasks.report"] == sent
    assert names["result"].id == names["again"].id == names["again"].duplicate.task_id
    assert "queued" == names["again"].duplicate.state


def test_options_for_one_call(names: Names) -> None:
    """Both calls of the block pass their checks, and the one with a key of its own does not wait for the account."""
    names.run()
    app, (block,) = names["app"], [block for block in BLOCKS if CALL in block]
    app.conf.task_always_eager = True
    with memory_store(app), locked(names["sync"], 42), locked(names["sync"], 43):
        exec(compile(block, str(README), "exec"), names)
    assert [("store", "account 43")] == names.calls


def test_tasks_that_share_a_lock(names: Names) -> None:
    """An account is not closed while it is billed; another one is."""
    names.run(GROUP)
    with memory_store(names["app"]), locked(names["bill"], 42):
        assert "DuplicateTask" == type(names["close"].apply((42, "moved")).result).__name__
        assert "SUCCESS" == names["close"].apply((43,)).state
    assert [("store", "account 43 closed")] == names.calls


def test_run_once_more(names: Names) -> None:
    """The block's task runs; what an eager duplicate does is what it does under "raise"."""
    names.run("rebuild_index")
    with memory_store(names["app"]):
        assert "SUCCESS" == names["rebuild_index"].apply().state
        with locked(names["rebuild_index"]):
            assert "DuplicateTask" == type(names["rebuild_index"].apply().result).__name__


def test_debounce(names: Names) -> None:
    """The block's task has a quiet time, for which an eager run does not wait."""
    names.run("quiet=")
    with memory_store(names["app"]):
        assert "SUCCESS" == names["refresh"].apply((42, "paid")).state
    assert [("fetch", 42)] == names.calls
    assert (5, 60) == (names["refresh"].on_duplicate.quiet, names["refresh"].on_duplicate.max_quiet)


def test_replace(names: Names) -> None:
    """The block's task stores all pages while nobody replaces it, and without a lock."""
    names.run("def preview")
    with memory_store(names["app"]):
        assert "SUCCESS" == names["preview"].apply(("a", 1)).state
    assert [("store", "a, page 1"), ("store", "a, page 2")] == names.calls
    names["preview"]("b", 1)
    assert [("store", "b, page 1"), ("store", "b, page 2")] == names.calls[2:]


def test_django(names: Names) -> None:
    """The task class for Django makes a locked task that keeps `delay_on_commit`."""
    pytest.importorskip("django")
    pytest.importorskip("celery.contrib.django.task", reason="Celery 5.3 has no task class for Django")
    names.run("DjangoTask")
    task = names["close_books"]

    assert isinstance(task, SingletonMixin)
    assert callable(task.delay_on_commit)
    assert callable(task.apply_async_on_commit)
    with memory_store(names["app"]), locked(task, 1):
        assert [None, 1] == [task.apply((item,)).get() for item in (1, 2)]


def test_policy_case_by_case(names: Names) -> None:
    """The function works as a policy: it raises if the holder is old, and skips otherwise."""
    names.run("def by_age")

    assert Raise() == names["by_age"](None, Holder(age=3601.0))
    assert Skip() == names["by_age"](None, Holder(age=3600.0))
    task = names["app"].task(base=names["SingletonTask"], on_duplicate=names["by_age"])(count)
    with memory_store(names["app"]), locked(task, 1):
        assert [None, 2] == [task.apply((item,)).result for item in (1, 2)]


def test_limit_of_each_call(names: Names) -> None:
    """One task of a customer with the free plan runs at once, and three with the paid one."""
    names.run("lock_limit=")
    render = names["render"]

    with memory_store(names["app"]), locked(render, 7, "paid"):
        assert "DuplicateTask" == type(render.apply((7,)).result).__name__
        assert 1 == render.apply((8,)).result
        with locked(render, 7, "paid"):
            assert 1 == render.apply((7, "paid")).result
            with locked(render, 7, "paid"):
                assert "DuplicateTask" == type(render.apply((7, "paid")).result).__name__


def test_alarm(names: Names) -> None:
    """A lost lease calls the receiver with task and key."""
    names.run("lock_lost.connect")

    def body(self: Any) -> None:
        self.force_unlock()
        until(lambda: names.calls, "the alarm")

    options = {"base": names["SingletonTask"], "name": "shop.lost", "lock_ttl": 1.0, "bind": True}
    lost = names["app"].task(**options)(body)
    try:
        with memory_store(names["app"]):
            assert "SUCCESS" == lost.apply().state
    finally:
        signals.lock_lost.disconnect(names["alarm"])
    assert [("page_someone", f"shop.lost lost {lost.lock_key_for()}")] == names.calls


def test_tests(names: Names) -> None:
    """The tests in the README pass."""
    names.run("memory_store")
    shown = [name for name in names if name.startswith("test_")]

    assert shown
    for name in shown:
        names[name]()


@pytest.mark.parametrize("name", ["test_a_second_import_is_skipped", "test_one_sync_for_each_account"])
def test_tests_of_a_body_that_fails(names: Names, name: str) -> None:
    """The tests in the README do not pass with a body that raises, such as NameError."""
    names.run("memory_store")

    def store(page: str) -> int:
        raise NameError("no such name")

    names["store"] = store
    with pytest.raises((NameError, AssertionError)):
        names[name]()


def test_results_without_a_duplicate(make_app: MakeApp) -> None:
    """The README says which results have the attribute `duplicate`, and which have not."""
    app = make_app()
    sync = app.task(base=SingletonTask, name="shop.tasks.sync", shared=False)(count)
    for result in (sync.delay(1), sync.apply_async((2,)), sync.s(3).apply_async()):
        assert result.duplicate is None
    others = [app.send_task("shop.tasks.sync", (1,)), *group(sync.s(1), sync.s(2)).apply_async(), sync.AsyncResult("1")]
    assert not [result for result in others if hasattr(result, "duplicate")]


@pytest.mark.parametrize("policy", NAMED.values(), ids=lambda policy: type(policy).__name__)
def test_policy_defaults(policy: object) -> None:
    """The table of policies shows each policy with its defaults."""
    assert f"| `{policy!r}` |" in TEXT


def test_lease_attributes() -> None:
    """Each attribute in the table of the lease exists."""
    section = TEXT.partition("## In the body")[2].partition("\n## ")[0]
    shown = re.findall(r"^\| `\.(\w+)", section, re.MULTILINE)

    assert ["held", "ensure", "remaining", "key", "fence", "protected"] == shown
    assert [] == [name for name in shown if not hasattr(Lease, name)]


def test_signals() -> None:
    """The README names all signals."""
    names = [name for name, value in vars(signals).items() if isinstance(value, signals.Signal)]

    assert names
    assert [] == [name for name in names if f"`{name}`" not in TEXT]


def test_extras() -> None:
    """Each extra in an install command exists."""
    setup = configparser.ConfigParser(interpolation=None)
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    wanted = set(re.findall(r'pip install "[\w.]+\[(\w+)\]"|pip install "\.\[(\w+)\]"', TEXT))

    assert wanted
    assert {name for pair in wanted for name in pair if name} <= set(setup["options.extras_require"])


def test_versions() -> None:
    """The versions of Celery and Python in the README are those that tox.ini tests."""
    matrix = (ROOT / "tox.ini").read_text(encoding="utf-8")
    celery, python = (
        sorted({int(digits) for digits in re.findall(rf"{word}(\d+)-", matrix)}) for word in ("celery", "py")
    )

    assert f"Celery 5.{celery[0] - 50} to 5.{celery[-1] - 50}" in TEXT
    assert f"Python 3.{python[0] - 300} to 3.{python[-1] - 300}" in TEXT


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_links(document: Path) -> None:
    """Each relative link leads to a file, and to a heading in it."""
    text = document.read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!https?://)([^)#]*)(?:#([^)]+))?\)", text)
    for path, heading in links:
        target = document.parent / path if path else document
        assert target.exists(), path
        if heading:
            headings = re.findall(r"^#+ (.+)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            assert heading in [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in headings], heading


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_commands(document: Path) -> None:
    """Each tox environment that a document names exists."""
    wanted = re.findall(r"tox -e ([\w,-]+)", document.read_text(encoding="utf-8"))

    assert set() == {name for names in wanted for name in names.split(",")} - environments()


def test_picture() -> None:
    """The picture is small, and shows neither a path nor a host."""
    picture = ROOT / "docs" / "images" / "timeline.svg"

    assert 300_000 > picture.stat().st_size
    text = picture.read_text(encoding="utf-8")
    assert [] == re.findall(r"/(?:home|tmp|root|work|usr)\b", text)
    assert {"demo"} == set(re.findall(r"\w+@(\w+)", text))
