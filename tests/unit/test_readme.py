"""The Python of the README, run as it stands there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from celery_singleton_lock import Holder, Raise, SingletonMixin, Skip, signals
from celery_singleton_lock.testing import hold, memory_store
from tests.servers import until

README = Path(__file__).resolve().parents[2] / "README.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


class Names(dict[str, Any]):
    """The names of the README's blocks, and stand-ins for what a reader has: each says what it was called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        super().__init__(
            __name__="shop.tasks",
            pages=lambda account: [f"{account}, page {number}" for number in (1, 2)],
            store=lambda page: self.calls.append(("store", page)) or 1,
            download_rates=lambda: "rates",
            page_someone=lambda words: self.calls.append(("page_someone", words)),
        )

    def run(self, *marks: str) -> None:
        """Run the first block, and those with these words in them, one each."""
        for mark in ("app = Celery(", *marks):
            (block,) = (block for block in BLOCKS if mark in block)
            exec(compile(block, str(README), "exec"), self)


def count(item: int) -> int:
    """A body of the tests' own."""
    return item


@pytest.fixture
def names() -> Iterator[Names]:
    """What the blocks define, and the app of the first one closed."""
    own = Names()
    yield own
    if "app" in own:
        own["app"].close()


def test_blocks(names: Names) -> None:
    """There is no block that is not run by a test below."""
    marks = ("app = Celery(", "DjangoTask", "def by_age", "lock_lost.connect", "memory_store")
    names.run()

    assert [1] * len(BLOCKS) == [sum(mark in block for mark in marks) for block in BLOCKS]


def test_first_block(names: Names) -> None:
    """A second import is skipped while one runs; of two syncs of an account, whatever the reason, the second would wait."""
    names.run()
    app, sync, import_rates = names["app"], names["sync"], names["import_rates"]

    with memory_store(app), hold(import_rates), hold(sync, 42, reason="one"):
        assert ("SUCCESS", None) == (import_rates.apply().state, import_rates.apply().result)
        assert "DuplicateTask" == type(sync.apply((42, "another")).result).__name__
        assert [] == names.calls
        assert "SUCCESS" == sync.apply((43,)).state
    assert [("store", "43, page 1"), ("store", "43, page 2")] == names.calls
    with memory_store(app):
        assert 1 == import_rates.apply().result


def test_django(names: Names) -> None:
    """The mixin before Celery's Django task class makes a task that is locked and keeps `delay_on_commit`."""
    pytest.importorskip("django")
    pytest.importorskip("celery.contrib.django.task", reason="Celery 5.3 has no task class for Django")
    names.run("DjangoTask")
    task = names["app"].task(base=names["SingletonDjangoTask"])(count)

    assert isinstance(task, SingletonMixin)
    assert callable(task.delay_on_commit)
    with memory_store(names["app"]), hold(task, 1):
        assert [None, 2] == [task.apply((item,)).result for item in (1, 2)]


def test_policy_case_by_case(names: Names) -> None:
    """The function is a policy: it refuses where the holder is old, and skips where it is not."""
    names.run("def by_age")

    assert Raise() == names["by_age"](None, Holder(age=3601.0))
    assert Skip() == names["by_age"](None, Holder(age=3600.0))
    task = names["app"].task(base=names["SingletonTask"], on_duplicate=names["by_age"])(count)
    with memory_store(names["app"]), hold(task, 1):
        assert [None, 2] == [task.apply((item,)).result for item in (1, 2)]


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
    """The tests that are shown pass."""
    names.run("memory_store")
    shown = [name for name in names if name.startswith("test_")]

    assert shown
    for name in shown:
        names[name]()
