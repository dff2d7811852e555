"""Locks as Django's admin knows them: a name and permissions, without a table or migrations."""

from __future__ import annotations

from typing import Any

from django.db import models


class NoRows(models.Manager):  # type: ignore[misc]
    """Never asks the database, which has no table of locks; `manage.py dumpdata` would."""

    def get_queryset(self) -> Any:
        return super().get_queryset().none()


class Lock(models.Model):  # type: ignore[misc]
    """A lock. `manage.py migrate` makes its permissions, as it does for every model of an installed app."""

    key = models.CharField(max_length=255, primary_key=True)
    objects = NoRows()

    class Meta:
        managed = False
        base_manager_name = "objects"
        verbose_name = "lock"
        default_permissions = ("view",)
        permissions = (
            ("release_lock", "Can release lock whose body does not run"),
            ("force_release_lock", "Can release lock whatever its worker says"),
        )

    def __str__(self) -> str:
        return str(self.key)
