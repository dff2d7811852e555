"""What the workers of these tests load, and what the tests' own app has in common with it."""

from __future__ import annotations

import os

from celery import Celery
from kombu import Queue
from kombu.common import Broadcast

#: Name of the queue that gives each message to every worker.
NEWS = "news"


def add_broadcast(app: Celery) -> None:
    """Let an app have the broadcast queue besides its default one, where its configuration says so."""
    if app.conf.get("test_broadcast"):
        app.conf.task_queues = (Queue(app.conf.task_default_queue), Broadcast(NEWS, routing_key=NEWS))


if "SINGLETON_TEST_CONF" in os.environ:
    from tests.integration.worker_app import app

    add_broadcast(app)
