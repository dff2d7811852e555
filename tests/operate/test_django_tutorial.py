"""The Django tutorial: its files make a project whose check, tests and settings are as the page says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.site import DOCS, ROOT, blocks

pytest.importorskip("django")

PAGE = DOCS / "tutorial" / "django-nightly-import.md"
#: Files of the page -> their text; what follows the name in the first comment is said of it.
FILES = {re.match(r"# ([\w/.]+)", one.text)[1]: one.text for one in blocks(PAGE, "python")}  # type: ignore[index]

Manage = Callable[..., str]


@pytest.fixture
def manage(tmp_path: Path) -> Manage:
    """Make the project as the page does; return what runs its `manage.py`, and returns what that prints."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def run(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, *words],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        return done.stdout + done.stderr

    run("-m", "django", "startproject", "shop", ".")
    run("manage.py", "startapp", "rates")
    for name, text in FILES.items():
        file = tmp_path / name
        earlier = file.read_text(encoding="utf-8") if "at its end" in text else ""
        file.write_text(earlier + text, encoding="utf-8")
    return lambda *words: run("manage.py", *words)


def test_check(manage: Manage, tmp_path: Path) -> None:
    """The check has no complaint, and finds the misspelt option of the page."""
    assert "System check identified no issues (0 silenced)." in manage("check")
    tasks = tmp_path / "rates" / "tasks.py"
    tasks.write_text(tasks.read_text(encoding="utf-8").replace("unique_on=", "unique_onn="), encoding="utf-8")
    (expected,) = re.findall(r"^\?: \(celery_singleton_lock.E002\) .*$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert expected in manage("check")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="the page says that enterContext needs Python 3.11")
def test_tests(manage: Manage) -> None:
    """The tests of the page pass, without a store."""
    printed = manage("test")
    assert "Ran 2 tests" in printed
    assert "OK" in printed, printed


def test_settings(manage: Manage) -> None:
    """The store is that of the settings, and beat has the schedule."""
    code = (
        "from shop.celery import app; from celery_singleton_lock.context import context_of;"
        "print(app.conf.singleton_lock_url, *app.conf.beat_schedule); app.loader.import_default_modules();"
        "print(app.tasks['rates.tasks.import_rates'].lock_key_for('x'))"
    )
    printed = manage("shell", "-c", code)
    assert "redis://localhost:6379/0 nightly import" in printed
    assert "singleton:{rates.tasks.import_rates}:lock:" in printed
