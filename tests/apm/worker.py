"""Celery's command with an integration: ``python -m tests.apm.worker worker …``, and the app that it loads."""

from __future__ import annotations

import json
import os
import sys

from tests.apm.integrations import installed
from tests.integration.recorder import Recorder

if __name__ == "__main__":
    conf = json.loads(os.environ["SINGLETON_TEST_CONF"])
    recorder, tag = Recorder(conf["test_directory"]), f"sent-{conf['task_default_queue']}"
    installed().start(lambda kind: recorder.note(tag, kind))
    from celery.__main__ import main

    sys.argv[1:1] = ["-A", "tests.apm.worker"]
    main()
else:
    from tests.apm.tasks import add_tasks
    from tests.integration.worker_app import app

    add_tasks(app)
