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
        ("shop/settings.py", "", "E001) no store for locks: set CELERY_SINGLETON_LOCK_URL (neither"),
        ("shop/settings.py", f"{STORE}\nCELERY_SINGLETON_LOCK_TLL = 5", "E001) "),
        (
            "shop/settings.py",
            f"{STORE}\nCELERY_SINGLETON_LOCK_TTL = -5",
            "E001) CELERY_SINGLETON_LOCK_TTL=-5 must be",
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
    assert 1 == done.stderr.count("celery_singleton_lock.E"), done.stderr
    assert f"celery_singleton_lock.{said}" in done.stderr
    assert "Traceback" not in done.stderr


#: Modules of tasks with one thing wrong, each with what is said of it. More tasks are defined after it.
WRONG = {
    "shared": ("@shared_task(base=SingletonTask, lock_ttl='30')\ndef wrong(): ...", "wrong: lock_ttl='30' must be"),
    "app": (
        "from shop.celery import app\n@app.task(base=SingletonTask, lock_tll=30)\ndef wrong(): ...",
        "wrong: lock_tll=30: there is no such option",
    ),
    "class": (
        "from shop.celery import app\nclass Wrong(SingletonTask):\n    name = 'books.tasks.wrong'\n    unique_on = 'x'\n"
        "    def run(self): ...\napp.register_task(Wrong())",
        "wrong: unique_on=['x']: 'x' is no parameter",
    ),
    "mixin": (
        "from celery_singleton_lock import SingletonMixin\n@shared_task(base=SingletonMixin)\ndef wrong(): ...",
        "wrong: SingletonMixin is no task class",
    ),
}


@pytest.mark.parametrize("skips_checks", ["", "1"], ids=["checks", "no_checks"])
@pytest.mark.parametrize("kind", WRONG)
def test_worker_with_a_wrong_task(tmp_path: Path, kind: str, skips_checks: str) -> None:
    """A worker ends with one line and exit code 1, as without Django, whether Celery runs Django's checks before or not."""
    lines, said = WRONG[kind]
    project = DjangoProject(tmp_path)
    project.write({"shop/settings.py": STORE, "books/tasks.py": f"{lines}\n@shared_task\ndef after(): ..."})
    command = ["-W", "ignore", "-m", "celery", "-A", "shop", "worker", "--pool", "solo"]
    done = project.run(*command, CELERY_SKIP_CHECKS=skips_checks)
    assert (1, "") == (done.returncode, done.stdout), done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"Error: task books.tasks.{said}")


def test_worker_with_a_class_that_is_no_task(tmp_path: Path) -> None:
    """A class that is refused where it is made, as no task can be made of it, ends the worker; the last line says why."""
    wrong = "from celery import Task\nfrom celery_singleton_lock import SingletonMixin\nclass Base(Task, SingletonMixin): ..."
    project = DjangoProject(tmp_path)
    project.write({"shop/settings.py": STORE, "books/tasks.py": wrong})
    done = project.run("-W", "ignore", "-m", "celery", "-A", "shop", "worker", "--pool", "solo")
    assert (1, "") == (done.returncode, done.stdout), done.stderr
    assert done.stderr.splitlines()[-1].endswith(
        "ConfigurationError: Base: SingletonMixin must come before the other task class"
    )


def test_all_wrong_options_at_once(tmp_path: Path) -> None:
    """The check lists every wrong setting and option of the project, and a worker says the same, a line for each."""
    several = "\n".join(lines for lines, _ in WRONG.values()).replace("wrong", "wrong{}").format(*"abcd")
    project = DjangoProject(tmp_path)
    project.write({"shop/settings.py": f"{STORE}\nCELERY_SINGLETON_LOCK_EAGER = 'no'", "books/tasks.py": several})
    checked = project.manage("check")
    assert checked.returncode == 1
    said = [line.partition(") ")[2] for line in checked.stderr.splitlines() if "celery_singleton_lock.E" in line]
    assert 5 == len(said), checked.stderr
    worker = project.run("-W", "ignore", "-m", "celery", "-A", "shop", "worker", "--pool", "solo")
    assert worker.returncode == 1
    assert sorted(said) == sorted(worker.stderr.removeprefix("Error: ").splitlines())


@pytest.mark.parametrize("command", [["runserver", "--noreload", "0"], ["migrate"]], ids=["runserver", "migrate"])
def test_commands_with_a_wrong_task(tmp_path: Path, command: list[str]) -> None:
    """A command of Django that checks the project does not begin, and names the wrong task."""
    project = DjangoProject(tmp_path)
    project.write({"shop/settings.py": f"{STORE}\nDEBUG = True", "books/tasks.py": WRONG["shared"][0]})
    done = project.manage(*command)
    assert done.returncode == 1, done.stdout
    assert "celery_singleton_lock.E002) task books.tasks.wrong: lock_ttl='30' must be" in done.stderr


def test_publisher_with_a_wrong_task(tmp_path: Path) -> None:
    """A web process refuses each call of the wrong task, before and after the checks, and publishes the others."""
    project = DjangoProject(tmp_path)
    project.write({"shop/settings.py": STORE, "books/tasks.py": WRONG["shared"][0]})
    calls = """
import django
from django.core.checks import run_checks
django.setup()
from books.tasks import close, wrong
for _ in range(2):
    for _ in range(2):
        try:
            wrong.delay()
        except Exception as error:
            print(type(error).__name__)
    print(close.delay(1).duplicate)
    run_checks()
"""
    done = project.run("-c", calls)
    assert ["ConfigurationError", "ConfigurationError", "None"] * 2 == done.stdout.split(), done.stderr


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
