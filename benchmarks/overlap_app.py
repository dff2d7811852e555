"""The app of the benchmarks about duplicates: one lock key, and a task for each policy, whose bodies note when they ran."""

from __future__ import annotations

import os
import time
from functools import cache
from typing import Any

from celery import Celery
from redis import Redis

from benchmarks.gates import OPEN, REACHED
from benchmarks.tasks import ONCE, SINGLETON, base_classes, make_app
from celery_singleton_lock import Debounce, Replace, RetryLater, SingletonTask, Wait

#: Key of the list of runs: "<start> <end>" in seconds, on a clock that processes share.
RUNS = "benchmarks:runs"
PLAIN, AT_PUBLISH = "plain", 'lock_from="publish"'
PLAIN_LATE, WAIT_LATE = "plain, acks_late", "wait, acks_late"
#: A plain task whose body publishes the next call as its last act, until so many have run.
SUCCESSIVE = "plain, successive"
#: Length of a body that ends when it is told to.
UNTIL_OPENED = -1.0
SOON = RetryLater(delay=0.5, backoff=1.0, max_delay=0.5)


def policies() -> dict[str, dict[str, Any]]:
    """Return the options of each kind of task of this library."""
    return {
        "skip": {},
        AT_PUBLISH: {"lock_from": "publish"},
        "raise": {"on_duplicate": "raise"},
        "retry": {"on_duplicate": SOON},
        "wait": {"on_duplicate": Wait(max_waiting=100_000)},
        "run_once_more": {"on_duplicate": "run_once_more"},
        "debounce": {"on_duplicate": Debounce(quiet=1, max_quiet=30)},
        "join": {"on_duplicate": "join"},
        "replace": {"on_duplicate": Replace(grace=3600)},  # as the first body does not stop
    }


def make(broker: str, store: str) -> Celery:
    """Return an app with a task for each policy, and for each peer that is installed."""
    app = make_app(broker, store)
    app.conf.result_backend = broker
    app.task(_body, name=f"overlap.{PLAIN}", shared=False)
    app.task(_body, name=f"overlap.{PLAIN_LATE}", shared=False, acks_late=True)
    app.task(_successive, name=f"overlap.{SUCCESSIVE}", shared=False, bind=True)
    ours = policies()
    ours[WAIT_LATE] = {**ours["wait"], "acks_late": True}
    for name, options in ours.items():
        stores = {"ignore_result": name != "join"}
        app.task(_body, name=f"overlap.{name}", shared=False, base=SingletonTask, unique_on=[], **stores, **options)
    bases = base_classes()
    for name, options in ((ONCE, {"once": {"keys": [], "graceful": True}}), (SINGLETON, {"unique_on": ["same"]})):
        if name in bases:
            app.task(_body, name=f"overlap.{name}", shared=False, base=bases[name], **options)
    app.finalize(auto=True)
    return app


@cache
def _client() -> Any:
    return Redis.from_url(os.environ["BENCHMARKS_BROKER"], socket_timeout=3600)


def _body(seconds: float = 0.0, same: str = "") -> None:
    start = time.monotonic()
    if seconds < 0:
        _client().rpush(REACHED, 1)
        _client().blpop([OPEN])
    else:
        time.sleep(seconds)
    _client().rpush(RUNS, f"{start} {time.monotonic()}")


def _successive(task: Any, seconds: float, same: str, more: int) -> None:
    _body(seconds)
    if more:
        task.apply_async((seconds, same, more - 1), queue=task.request.delivery_info["routing_key"])


if "BENCHMARKS_STORE" in os.environ:
    app = make(os.environ["BENCHMARKS_BROKER"], os.environ["BENCHMARKS_STORE"])
