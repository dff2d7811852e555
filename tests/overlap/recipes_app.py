"""The app of the recipes on three pages: their own code with a short hour, and stand-ins for a reader's own functions."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from celery import _state, current_task
from celery.schedules import schedule

from celery_singleton_lock import Debounce
from tests.integration.recorder import Recorder
from tests.integration.tasks import record_signals

HOW_TO = Path(__file__).resolve().parents[2] / "docs" / "how-to"
#: Pages, and what a block of them contains that is a recipe.
PAGES = {"recipes.md": "", "debounce.md": "def update_customer", "limit.md": "def export_orders"}
BLOCKS = [
    block
    for page, mark in PAGES.items()
    for block in re.findall(r"^```python\n(.*?)^```$", (HOW_TO / page).read_text("utf-8"), re.MULTILINE | re.DOTALL)
    if mark in block
]
#: Seconds of the hour in tests: long beside a moment of slowness, as most of the page's times are parts of an hour.
HOUR = 8.0
#: What the recipes call: each records that it began and ended, and does what a test's flags say.
STAND_INS = (
    "send_report",
    "download_rates",
    "delete_old_rows",
    "build_index",
    "write_to_books",
    "draw",
    "show",
    "render_report",
    "roll_out",
    "write_file",
    "save",
    "render",
)


class ByTheClock(schedule):  # type: ignore[misc]
    """Due at the beginning of each short hour of the clock, as the page's `crontab` is once an hour."""

    def remaining_estimate(self, last_run_at: datetime) -> timedelta:
        due = (last_run_at.timestamp() // HOUR + 1) * HOUR
        return timedelta(seconds=due - time.time())


def run_page(conf: dict[str, Any]) -> dict[str, Any]:
    """Run the pages' code, and return its names; its app has this configuration, and a schedule by short hours."""
    recorder = Recorder(conf["test_directory"])
    names: dict[str, Any] = {"__name__": __name__, "Debounce": Debounce}
    code, count = re.subn(r"^HOUR = 3600\.0$", f"HOUR = {HOUR}", "\n".join(BLOCKS), flags=re.MULTILINE)
    assert 1 == count
    finalizers = set(_state._on_app_finalizers)
    exec(compile(code, str(HOW_TO), "exec"), names)
    names |= {name: _stand_in(recorder, name) for name in STAND_INS}
    names["read_lines"] = lambda file: [f"{file} {number}" for number in range(3)]
    _state._on_app_finalizers.intersection_update(finalizers)  # which would add these tasks to every app of the process
    names["app"].conf.update(conf)
    for entry in names["app"].conf.beat_schedule.values():
        entry["schedule"] = ByTheClock(HOUR)
    return names


def _stand_in(recorder: Recorder, name: str) -> Callable[..., str]:
    def work(*args: Any) -> str:
        tag = "-".join((name, *map(str, args[:1])))
        recorder.note(tag, "start", id=current_task.request.id, args=args)
        if recorder.is_raised(f"{tag}.die"):
            os.kill(os.getpid(), signal.SIGKILL)
        deadline = time.monotonic() + 60
        while recorder.is_raised(f"{tag}.hold") and time.monotonic() < deadline:
            time.sleep(0.02)
        if recorder.is_raised(f"{tag}.fail") or recorder.is_raised("-".join((tag, *map(str, args[1:2]))) + ".fail"):
            raise OSError(tag)
        recorder.note(tag, "end", args=args)
        return tag

    return work


if "SINGLETON_TEST_CONF" in os.environ:
    globals().update(run_page(json.loads(os.environ["SINGLETON_TEST_CONF"])))
    record_signals(globals()["app"])
