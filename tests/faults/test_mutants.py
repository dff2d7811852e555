"""Tests of the mutants: which outcome of a row counts as red."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.mutants import GREEN, MUTANTS, RED, ROOT, Mutant, run

WORKER = "from tests.faults.harness import WorkerFailed"


@pytest.mark.harness
@pytest.mark.parametrize(
    ("text", "came"),
    [
        ("def test_it(): assert True", GREEN),
        ("def test_it(): assert False", RED),
        ("import nothing_of_that_name\ndef test_it(): pass", "pytest ended with"),
        ("def test_other(): pass", "pytest ended with"),
        ("def test_it(no_such_fixture): pass", "'errors': 1"),
        ("import pytest\ndef test_it(): pytest.skip('not here')", "'skipped': 1"),
        (f"{WORKER}\ndef test_it(): raise WorkerFailed('ended')", "a worker does not start"),
    ],
)
def test_outcomes(text: str, came: str, tmp_path: Path) -> None:
    """A test counts as red if its check failed, not if it could not run or its worker could not start."""
    (tmp_path / "test_row.py").write_text(text)
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    answer = run(tmp_path, "test_row.py::test_it")
    assert came in answer
    assert (came in (GREEN, RED)) == (answer in (GREEN, RED))


@pytest.mark.harness
@pytest.mark.parametrize(
    ("shows", "came"), [("overlap|lost", RED), ("left over", "red for another reason: AssertionError: an overlap")]
)
def test_another_reason(shows: str, came: str, tmp_path: Path) -> None:
    """A test that fails for another reason than its mutant does not count as red."""
    (tmp_path / "test_row.py").write_text("def test_it(): assert False, 'an overlap'")
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    assert run(tmp_path, "test_row.py::test_it", shows).startswith(came)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_text_is_there(mutant: Mutant) -> None:
    """The text that a mutant removes occurs exactly once in the package."""
    assert 1 == (ROOT / "celery_singleton_lock" / mutant.file).read_text().count(mutant.old)
