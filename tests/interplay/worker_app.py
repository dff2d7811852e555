"""What the workers of these tests load, and what the tests' own app has in common with it."""

from __future__ import annotations

import os

from celery import Celery
from kombu import Exchange, Queue
from kombu.common import Broadcast

from tests.interplay import whole_files

#: Name of the queue that gives each message to every worker.
NEWS = "news"


def arrange_queues(app: Celery) -> None:
    """Give an app the queues that its configuration asks for: a broadcast queue, or one that is bound by a pattern."""
    default = app.conf.task_default_queue
    if app.conf.get("test_broadcast"):
        app.conf.task_queues = (Queue(default), Broadcast(NEWS, routing_key=NEWS))
    if app.conf.get("test_topic"):
        jobs = Exchange(f"{default}-topic", type="topic")
        app.conf.task_queues = (Queue(default), Queue(jobs.name, jobs, routing_key="jobs.#"))


whole_files.use()  # here, because workers and the tests' own process both import this module

if "SINGLETON_TEST_CONF" in os.environ:
    from tests.integration.worker_app import app

    arrange_queues(app)
