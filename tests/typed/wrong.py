"""Refused by mypy and pyright, with and without `celery-types`, in each line that says so."""

from celery_singleton_lock import Debounce, MaxStarts, RunOnceMore, SingletonTask


class Sync(SingletonTask):
    on_duplicate = "skp"  # wrong
    lock_from = "publsh"  # wrong
    lock_until = "end"  # wrong
    on_lock_lost = "log"  # wrong
    on_store_error = "skip"  # wrong


RunOnceMore("last")  # wrong
Debounce(5, 60, keep="last")  # wrong
MaxStarts(3, count="all")  # wrong


def call(task: SingletonTask) -> str:
    return task.delay(42).duplicate.task_id  # wrong: there may be none
