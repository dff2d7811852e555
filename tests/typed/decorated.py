"""Accepted by mypy and pyright with `celery-types`, which know the class that a decorator makes."""

from celery import Celery
from typing_extensions import assert_type

from celery_singleton_lock import Holder, SingletonTask

app = Celery("shop")


@app.task(base=SingletonTask, on_duplicate="wait")
def sync(account: int) -> None: ...


@app.task(bind=True, base=SingletonTask)
def clean_up(self: SingletonTask, account: int) -> None:
    self.lease.ensure()


assert_type(sync, SingletonTask)
assert_type(sync.delay(42).duplicate, Holder | None)
assert_type(clean_up.delay(42).duplicate, Holder | None)
