"""The app that ``celery -A tests.integration.worker_app`` loads, configured by the environment."""

from __future__ import annotations

import json
import os

from celery import signals

from tests.integration.tasks import chatty_library, make_app, record_signals
from tests.stacks import install

install()
app = make_app(json.loads(os.environ["SINGLETON_TEST_CONF"]))
app.in_worker = True
record_signals(app)
signals.after_setup_logger.connect(chatty_library, weak=False)
