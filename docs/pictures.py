"""Makes the pictures of the documentation from six minutes of the example project, with faults.

It needs Prometheus, Chromium, Flower, and the dependency group `test`. The picture of the admin is made by its test
(`DJANGO_PICTURE`, tests/operate/test_django_admin.py).

python -m docs.pictures
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from io import StringIO
from pathlib import Path
from typing import Any

from example_project import demo, display, interrupts
from tests.servers import free_port, until

HERE = Path(__file__).parent
IMAGES = HERE / "images"
TASK = "example_project.tasks.import_rates"
#: Seconds of the run that the dashboard shows, and of its faults.
SECONDS = 330.0
PAUSED, HUNG, STOPPED = 170.0, 210.0, 240.0
PROMETHEUS = """
global: {{scrape_interval: 2s}}
scrape_configs: [{{job_name: locks, static_configs: [{{targets: ["127.0.0.1:{}"]}}]}}]
"""


def celery(*words: str) -> list[str]:
    """Return a command of Celery for the example."""
    return [sys.executable, "-m", "celery", "-A", "example_project", *words]


def screenshot(url: str, name: str, size: str) -> None:
    """Have Chromium draw a page."""
    program = shutil.which("chromium") or shutil.which("google-chrome") or "chromium"
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=5000"]
    subprocess.run(
        [program, *options, f"--window-size={size}", f"--screenshot={IMAGES / name}", url],
        check=True,
        capture_output=True,
    )


def terminal(*words: str) -> None:
    """Draw what a command prints as `commands.svg`."""
    from rich.console import Console
    from rich.text import Text

    console = Console(record=True, width=132, file=StringIO())
    printed = subprocess.run(celery(*words), capture_output=True, text=True, check=True).stdout
    console.print(Text(f"$ celery -A example_project {' '.join(words)}", style="bold"))
    console.print(Text.from_ansi(printed), no_wrap=True, overflow="ellipsis")
    console.save_svg(str(IMAGES / "commands.svg"), title="")


def begin_trouble(fleet: Any) -> None:
    """Pause a task, have the store hang for two seconds, and stop two workers for longer than `lock_ttl`."""
    begun = time.monotonic()

    def wait(moment: float) -> None:
        time.sleep(max(0.0, begun + moment - time.monotonic()))

    def stop(seconds: float, *names: str) -> None:
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for name in names:
                os.killpg(fleet._processes[name].pid, number)
            time.sleep(seconds)

    wait(PAUSED)
    pause = celery("singleton", "pause", "--task", TASK, "--for", "15s", "--reason", "the bank is closed")
    subprocess.run(pause, capture_output=True, check=True)
    terminal("singleton", "list")
    wait(HUNG)
    stop(2.0, "redis")
    wait(STOPPED)
    stop(4.0, "threads", "gevent")


def main() -> None:
    """Run the example, and make each picture."""
    interrupts.listen()
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        running = demo.Demo(demo.Options(SECONDS, True, False, directory / "long.svg"), directory, display.Plain())
        stack.callback(running.fleet.close)
        exporter, prometheus, flower = free_port(), free_port(), free_port()
        (directory / "prometheus.yml").write_text(PROMETHEUS.format(exporter))
        commands = [
            celery("singleton", "exporter", "--listen", f"127.0.0.1:{exporter}"),
            ["prometheus", f"--config.file={directory}/prometheus.yml", f"--storage.tsdb.path={directory}/data",
             f"--web.listen-address=127.0.0.1:{prometheus}"],
            celery("flower", f"--port={flower}", "--address=127.0.0.1"),
        ]  # fmt: skip
        work = threading.Thread(target=running.run)
        work.start()
        until(lambda: "redis" in running.fleet._processes, "the store")
        for command in commands:
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            stack.callback(process.wait)
            stack.callback(process.kill)
        begin_trouble(running.fleet)
        time.sleep(SECONDS - STOPPED - 20)
        screenshot(f"http://127.0.0.1:{flower}/tasks", "flower.png", "1400,700")
        draw = [
            sys.executable,
            str(HERE / "monitoring" / "render.py"),
            f"http://127.0.0.1:{prometheus}",
            "--minutes",
            "5",
        ]
        page = subprocess.run([*draw, "--rate-interval", "20s"], capture_output=True, check=True).stdout
        (directory / "dashboard.html").write_bytes(page)
        screenshot(f"file://{directory}/dashboard.html", "dashboard.png", "1352,1234")
        work.join()
    subprocess.run([sys.executable, "-m", "example_project", "--timeline", str(IMAGES / "timeline.svg")], check=True)


if __name__ == "__main__":
    main()
