"""Celery settings of the example. Celery imports this module when it first needs a setting."""

import os
from typing import Any

from example_project.constants import IMPORT_EVERY, LOCK_TTL, PREFIX_VARIABLE, REDIS_URL_VARIABLE, VISIBILITY_TIMEOUT

broker_url = result_backend = os.environ.get(REDIS_URL_VARIABLE, "redis://localhost:6379/0")
_prefix = os.environ.get(PREFIX_VARIABLE, "example_project:")

broker_transport_options: dict[str, Any] = {
    "global_keyprefix": _prefix,
    "visibility_timeout": VISIBILITY_TIMEOUT,
    # How often a worker searches for unacknowledged messages. Kombu before 5.7 does not know the first two options; there a
    # worker searches rarely, except at its start.
    "unacked_restore_interval": 1,
    "unacked_restore_throttle": 1,
    "unacked_mutex_expire": 2,
}
result_backend_transport_options = {"global_keyprefix": _prefix}
result_expires = 600
broker_connection_retry_on_startup = True

# Acknowledge a message after its body has ended, so that the broker gives the work of a killed worker to another one.
task_acks_late = True
task_reject_on_worker_lost = True
worker_prefetch_multiplier = 1

singleton_lock_ttl = LOCK_TTL

beat_schedule = {
    "import-rates": {"task": "example_project.tasks.import_rates", "schedule": IMPORT_EVERY},
}
