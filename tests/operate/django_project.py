"""A Django project, as Celery's documentation and the README describe it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from textwrap import dedent

from tests.servers import Process

FILES = {
    "shop/__init__.py": """
        from shop.celery import app
        __all__ = ["app"]
    """,
    "shop/celery.py": """
        from celery import Celery
        app = Celery("shop")
        app.config_from_object("django.conf:settings", namespace="CELERY")
        app.autodiscover_tasks()
    """,
    "shop/settings.py": """
        SECRET_KEY = "of a test"
        INSTALLED_APPS = ["celery_singleton_lock.contrib.django", "books"]
        CELERY_BROKER_URL = "memory://"
    """,
    "books/__init__.py": "",
    "books/tasks.py": """
        from celery import shared_task
        from celery_singleton_lock import SingletonTask

        @shared_task(base=SingletonTask, unique_on="account")
        def close(account): ...
    """,
}
#: With Django's admin.
WITH_ADMIN = {
    **FILES,
    "shop/settings.py": """
        from pathlib import Path
        DIRECTORY = Path(__file__).parent.parent
        SECRET_KEY = "of a test"
        DEBUG = True
        USE_TZ = True
        ROOT_URLCONF = "shop.urls"
        STATIC_URL = "static/"
        DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": DIRECTORY / "shop.sqlite3"}}
        PARTS = ["admin", "auth", "contenttypes", "sessions", "messages", "staticfiles"]
        INSTALLED_APPS = [*(f"django.contrib.{part}" for part in PARTS), "celery_singleton_lock.contrib.django", "books"]
        PROCESSORS = ["django.template.context_processors.request", "django.contrib.auth.context_processors.auth",
                      "django.contrib.messages.context_processors.messages"]
        TEMPLATES = [{"BACKEND": "django.template.backends.django.DjangoTemplates", "APP_DIRS": True,
                      "OPTIONS": {"context_processors": PROCESSORS}}]
        MIDDLEWARE = ["django.contrib.sessions.middleware.SessionMiddleware",
                      "django.middleware.csrf.CsrfViewMiddleware",
                      "django.contrib.auth.middleware.AuthenticationMiddleware",
                      "django.contrib.messages.middleware.MessageMiddleware"]
    """,
    "shop/urls.py": """
        from django.contrib import admin
        from django.urls import path
        urlpatterns = [path("admin/", admin.site.urls)]
    """,
    "books/tasks.py": """
        from time import sleep
        from celery import shared_task
        from celery_singleton_lock import SingletonTask
        from django.conf import settings

        @shared_task(base=SingletonTask, unique_on="account", lock_ttl=600)
        def close(account, reason=""):
            # The body runs until the test makes a file for its account.
            while not (settings.DIRECTORY / f"end-{account}").exists():
                sleep(0.05)

        @shared_task(base=SingletonTask)
        def report(month):
            raise ValueError(f"no <b>figures</b> of {month}")
    """,
}


class DjangoProject:
    """The project in a directory of its own, and its programs."""

    def __init__(self, directory: Path, files: Mapping[str, str] = FILES) -> None:
        self.directory = directory
        self._files = files

    def write(self, lines: Mapping[str, str]) -> None:
        """Write the files, each with more lines of the test's."""
        for name, text in self._files.items():
            path = self.directory / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(f"{dedent(text)}\n{lines.get(name, '')}\n")

    @property
    def env(self) -> dict[str, str]:
        """The variables of its programs."""
        return {
            **os.environ,
            "DJANGO_SETTINGS_MODULE": "shop.settings",
            "PYTHONPATH": os.pathsep.join([str(self.directory), *filter(None, sys.path)]),
            "PYTHONDONTWRITEBYTECODE": "1",  # bytecode of a file that was written in the same second would be taken
        }

    def manage(self, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a management command, as `manage.py` does."""
        return self.run("-m", "django", *words, **variables)

    def celery(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command of `celery -A shop`."""
        return self.run("-m", "celery", "-A", "shop", *words)

    def run(self, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run Python in the project, with more environment variables."""
        command, env = [sys.executable, *words], {**self.env, **variables}
        return subprocess.run(command, cwd=self.directory, env=env, capture_output=True, text=True, timeout=100)

    def process(self, name: str, *words: str) -> Process:
        """Return a process that runs a module of Python in the project, not started yet."""
        env = {**self.env, "PYTHONUNBUFFERED": "1"}
        return Process([sys.executable, *words], self.directory / f"{name}.log", env)
