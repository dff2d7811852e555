"""The task class for Django projects: a singleton task with Celery's `delay_on_commit` and `apply_async_on_commit`."""

from __future__ import annotations

from celery.contrib.django.task import DjangoTask

from celery_singleton_lock.task import SingletonMixin


class SingletonDjangoTask(SingletonMixin, DjangoTask):  # type: ignore[misc]
    """`SingletonTask` for Django projects. The options are those of `SingletonMixin`. Celery has its base class from 5.4 on."""

    abstract = True
