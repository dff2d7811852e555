"""Accepted by mypy and pyright, with and without `celery-types`: classes of tasks, and what a call returns."""

from typing_extensions import assert_type

from celery_singleton_lock import Debounce, Holder, MaxStarts, RunOnceMore, SingletonResult, SingletonTask


class Sync(SingletonTask):
    on_duplicate = "wait"
    lock_from = "publish"
    lock_until = "start"
    on_lock_lost = "raise"
    on_store_error = "run"
    max_starts = MaxStarts(3, count="unsuccessful")

    def run(self, account: int) -> None:
        self.lease.ensure()


class Refresh(SingletonTask):
    on_duplicate = Debounce(5, 60, keep="latest")


class Rebuild(SingletonTask):
    on_duplicate = RunOnceMore("latest")


def call(task: SingletonTask) -> None:
    result = task.delay(42)
    assert_type(result, SingletonResult)
    assert_type(result.duplicate, Holder | None)
    assert_type(task.apply_async((42,), lock_options={"lock_ttl": 5}).duplicate, Holder | None)
