"""What publishing a singleton task returns."""

from __future__ import annotations

from celery.result import AsyncResult

from celery_singleton_lock.holder import Holder


class SingletonResult(AsyncResult):  # type: ignore[misc]
    """Celery's `AsyncResult`, as type checkers know that of a singleton task's `delay()` and `apply_async()`.

    At run time it is of the class that the app uses, and has the attribute; in eager mode it is an `EagerResult`.
    """

    #: Who had the lock when the task was published; None: nobody.
    duplicate: Holder | None
