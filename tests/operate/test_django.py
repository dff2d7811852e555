"""`manage.py check` in a Django project reports what would keep a worker from starting, or locks from being kept."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.operate.django_project import DjangoProject
from tests.servers import RedisServer, free_port

pytest.importorskip("django")

STORE = 'CELERY_SINGLETON_LOCK_URL = "redis://127.0.0.1:1/0"'
Check = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def check(tmp_path: Path) -> Check:
    """Return a function that makes the project, adds lines to files of it, and checks it with Django's command."""

    def checked(*options: str, lines: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        project = DjangoProject(tmp_path)
        project.write(lines)
        return project.manage("check", *options)

    return checked


def test_sound_project(check: Check) -> None:
    """A sound project has no issues. The check does not talk to the store, which is away here."""
    done = check(lines={"shop/settings.py": STORE})
    assert (0, "System check identified no issues (0 silenced).\n") == (done.returncode, done.stdout)


@pytest.mark.parametrize(
    ("file", "line", "said"),
    [
        ("shop/settings.py", "", "E001) no store for locks: set singleton_lock_url"),
        ("shop/settings.py", f"{STORE}\nCELERY_SINGLETON_LOCK_TLL = 5", "E001) "),
        (
            "shop/settings.py",
            f"{STORE}\nCELERY_SINGLETON_LOCK_TTL = -5",
            "E002) setting singleton_lock_ttl (task books.tasks",
        ),
        (
            "books/tasks.py",
            "@shared_task(base=SingletonTask, lock_ttl=0)\ndef wrong(): ...",
            "E002) task books.tasks.wrong: lock_ttl=0 must be",
        ),
        (
            "books/tasks.py",
            "@shared_task(base=SingletonTask, on_duplicate='join')\ndef report(): ...",
            "E002) task books.tasks.report: on_duplicate='join' needs a result backend",
        ),
        (
            "books/tasks.py",
            "for limit in (1, 2):\n"
            "    @shared_task(name=str(limit), base=SingletonTask, lock_group='g', unique_on=[], lock_limit=limit)\n"
            "    def task(): ...",
            "E003) task 1: lock_limit=1 with task 2: lock_limit=2",
        ),
    ],
)
def test_errors(check: Check, file: str, line: str, said: str) -> None:
    """What a worker refuses at its start is an error of the check, which names task, option and value."""
    lines = {"shop/settings.py": STORE, file: line}
    done = check(lines=lines)
    assert done.returncode == 1, done.stdout
    assert f"celery_singleton_lock.{said}" in done.stderr
    assert "Traceback" not in done.stderr


def test_store_that_may_drop_locks(check: Check) -> None:
    """With --deploy, the store's eviction policy is checked."""
    with RedisServer("--maxmemory-policy", "allkeys-lru") as careless:
        lines = {"shop/settings.py": f'CELERY_SINGLETON_LOCK_URL = "{careless.url()}"'}
        assert "celery_singleton_lock.W" not in check(lines=lines).stderr
        done = check("--deploy", lines=lines)
        assert "celery_singleton_lock.W001) The store of locks may drop locks" in done.stderr


def test_store_away(check: Check) -> None:
    """With --deploy, a store that cannot be asked is a warning."""
    away = f'CELERY_SINGLETON_LOCK_URL = "redis://127.0.0.1:{free_port()}/0"'
    done = check("--deploy", lines={"shop/settings.py": away})
    assert "celery_singleton_lock.W002) The store of locks does not show its maxmemory-policy" in done.stderr
    assert done.returncode == 0
