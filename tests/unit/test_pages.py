"""The pages of the site that are no reference: they are short, complete, and their migrations do what they say."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from celery_singleton_lock import ConfigurationError, DuplicateTask
from celery_singleton_lock.testing import memory_store
from tests.unit.site import DOCS, Run, blocks, name_of

GUIDES = sorted(
    page for folder in ("tutorial", "how-to", "operate", "explanation") for page in (DOCS / folder).glob("*.md")
)
#: Pages for those who change the project, without two with long tables of results.
PROJECT = [page for page in sorted((DOCS / "project").glob("*.md")) if page.stem not in ("benchmarks", "fault-tests")]
ONCE, SINGLETON = "docs/how-to/migrate-celery-once.md", "docs/how-to/migrate-celery-singleton.md"


@pytest.mark.parametrize("page", [*GUIDES, *PROJECT], ids=name_of)
def test_short(page: Path) -> None:
    """A page has at most 900 words, without code, comments and the targets of links."""
    text = re.sub(r"^```.*?^```$|<!--.*?-->", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    words = [word for word in re.sub(r"\]\([^)]*\)", "]", text).split() if any(map(str.isalnum, word))]
    assert 900 >= len(words)


def test_contributing_is_a_map() -> None:
    """It has at most 1,500 words, and names each package and module."""
    text = (DOCS.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert 1500 >= len(text.split())
    package = DOCS.parent / "celery_singleton_lock"
    parts = [f"{one.parent.name}/" for one in package.glob("*/__init__.py")]
    parts += [one.stem for one in package.glob("*.py") if one.stem != "__init__"]
    listed = text.partition("## Packages")[2].partition("```text")[2].partition("```")[0]
    named = re.findall(r"[a-z_]+/?", "\n".join(re.split(r"  +", line)[0] for line in listed.splitlines()))
    assert sorted(parts) == sorted(named)


def test_all_faults_have_a_guarantee() -> None:
    """The page of guarantees has each fault of the fault tests once."""
    rows = re.findall(r"^\| ([\d, –]+) \|", (DOCS / "explanation" / "guarantees.md").read_text("utf-8"), re.MULTILINE)
    spans = [re.findall(r"\d+", span) for row in rows for span in row.split(",")]
    found = sorted(number for span in spans for number in range(int(span[0]), int(span[-1]) + 1))
    tests = re.findall(r"^\| (\d+) \|.*`test_", (DOCS / "project" / "fault-tests.md").read_text("utf-8"), re.MULTILINE)
    assert found == [int(number) for number in tests]


def test_glossary() -> None:
    """The glossary is in order, and has each word once."""
    words = re.findall(r"^\* \*\*(.+?)\*\*", (DOCS / "explanation" / "glossary.md").read_text("utf-8"), re.MULTILINE)
    assert len(words) > 30
    assert sorted(set(words)) == words


@contextmanager
def published(page: str) -> Iterator[Run]:
    """Run the "after" blocks of a page; its app publishes to a broker in memory, and nobody takes the messages."""
    with Run(page) as run:
        app: Celery = run["app"]
        app.conf.update(broker_url="memory://", result_backend="cache+memory://", task_always_eager=False)
        with memory_store(app):
            app.conf.singleton_lock_eager = False
            yield run


def test_celery_once(capsys: pytest.CaptureFixture[str]) -> None:
    """The examples of celery-once's README do after the migration what they did before; old options are refused."""
    with published(ONCE) as page:
        page["start"]()
        page["start"]()
        assert " is queued for " in capsys.readouterr().out
        assert page["start_if_free"]().duplicate.state == "queued"
        first, second = page["import_rates"].delay(), page["import_rates"].delay()
        assert (first.id, None) == (second.id, first.duplicate)
        page["slow_add"].delay(1, 1)
        with pytest.raises(DuplicateTask):
            page["slow_add"].delay(1, 2)
        page["slow_add"].delay(2, 2)
        for name in ("long_running_task", "rebuild_index"):
            page[name].delay()
            with pytest.raises(DuplicateTask):
                page[name].delay()
        with pytest.raises(ConfigurationError, match=r'use unique_on, .*lock_from="publish"'):
            page["slow_task"].apply_async(once={"graceful": True})
        assert_refused(page, {"once": {"keys": ["a"]}})


def test_celery_singleton(capsys: pytest.CaptureFixture[str]) -> None:
    """The examples of celery-singleton's README do after the migration what they did before; old options are refused."""
    with published(SINGLETON) as page:
        do_stuff = page["do_stuff"]
        first, second, other = (do_stuff.delay(*args, a="b") for args in ((1, 2, 3), (1, 2, 3), (4, 5, 6)))
        assert first == second != other
        assert second.duplicate.state == "queued"
        do_something = page["do_something"]
        assert do_something.delay(username="bob", otherarg=99) == do_something.delay("bob", otherarg=100)
        page["start"]("bob")
        page["start"]("bob")
        assert capsys.readouterr().out.startswith("duplicate of ")
        assert page["refresh_rates"].delay() == page["refresh_rates"].delay()
        assert page["crawl"].delay() == page["crawl"].delay()
        assert_refused(page, {"raise_on_duplicate": True})
        assert_refused(page, {"lock_expiry": 10})


def assert_refused(page: Run, options: dict[str, Any]) -> None:
    """Check that a task with options of the other library is refused, and that the error names what is needed besides."""

    def body(a: int) -> None: ...

    task = page["app"].task(base=page["SingletonTask"], name="old", shared=False, **options)(body)
    with pytest.raises(ConfigurationError, match='lock_from="publish"'):
        task.delay(1)
    del page["app"].tasks["old"]


@pytest.mark.parametrize("page", [ONCE, SINGLETON])
def test_before_and_after(page: str) -> None:
    """Each page has code before and after."""
    found = blocks(DOCS.parent / page, "python")
    assert min(sum(bool(block.not_run) for block in found), sum(not block.not_run for block in found)) >= 3
