"""Registers the checks when Django starts."""

from __future__ import annotations

from django.apps import AppConfig
from django.core import checks

from celery_singleton_lock.contrib.django.checks import check_options, check_store


class SingletonLockConfig(AppConfig):  # type: ignore[misc]
    """The Django app."""

    name = "celery_singleton_lock.contrib.django"
    label = "celery_singleton_lock"
    verbose_name = "Singleton locks"

    def ready(self) -> None:
        checks.register(check_options)
        checks.register(check_store, deploy=True)
