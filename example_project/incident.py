"""Begin the incident of docs/operate/stuck-lock.md: a worker is killed while it holds a lock, and on another one a body hangs.

It goes on until Ctrl-C, so that an operator can look at the locks and release them.
"""

import argparse
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from celery_singleton_lock import locks
from example_project import interrupts, ledger, redis_server
from example_project.app import app
from example_project.constants import LEDGER_VARIABLE, REDIS_URL_VARIABLE
from example_project.processes import DemoFailed, Fleet, node, wait_until
from example_project.redis_server import NoServerFound
from example_project.tasks import import_rates, monthly_report

#: How long the locks live without renewal: there is time to type commands.
LOCK_TTL = 600.0


def celery(*words: str) -> list[str]:
    """Return a command of Celery for the example."""
    return [sys.executable, "-m", "celery", "-A", "example_project", *words]


def start_body(fleet: Fleet, worker: str, task: Any, task_id: str, *args: str) -> int:
    """Start a worker that runs a task; return the process of the body."""
    fleet.start(worker, celery("worker", "-n", node(worker), "--concurrency", "1", "--loglevel", "INFO"))
    task.apply_async(args, task_id=task_id, lock_options={"lock_ttl": LOCK_TTL})
    wait_until(lambda: bool(locks.show(app, task_id)), 30, f"the body of {task_id}")
    (lock,) = locks.show(app, task_id)
    return lock.holder.pid


def begin(fleet: Fleet, directory: Path, listen: str) -> None:
    """Start the server and the exporter, and let one worker die and the body of another one hang."""
    fleet.start("redis", redis_server.command(redis_server.find(), directory))
    wait_until(lambda: redis_server.answers(redis_server.url(directory)), 10, "the Redis server")
    ledger.create()
    fleet.start("exporter", celery("singleton", "exporter", "--listen", listen))
    start_body(fleet, "two", import_rates, "import-1")
    fleet.kill("two")
    os.kill(start_body(fleet, "one", monthly_report, "report-2026-10", "2026-10"), signal.SIGSTOP)
    fleet.check()


def main() -> int:
    """Run until Ctrl-C, and return the exit code: 0, or 2 if the incident could not begin."""
    parser = argparse.ArgumentParser(prog="python -m example_project.incident", description=__doc__)
    parser.add_argument("--listen", default="127.0.0.1:9809", metavar="HOST:PORT", help="of the exporter: %(default)s")
    listen = parser.parse_args().listen
    interrupts.listen()
    directory = Path(tempfile.mkdtemp(prefix="example_project-"))
    environment = {
        REDIS_URL_VARIABLE: redis_server.url(directory),
        LEDGER_VARIABLE: str(directory / "ledger.sqlite3"),
    }
    os.environ.update(environment)
    fleet = Fleet(directory, environment, keep=False)
    try:
        begin(fleet, directory, listen)
        print(
            f"The incident has begun. In another terminal:\n\n  export {REDIS_URL_VARIABLE}={environment[REDIS_URL_VARIABLE]}\n"
        )
        print("Ctrl-C ends it.", flush=True)
        while True:
            interrupts.pause(3600)
    except (DemoFailed, NoServerFound) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 0
    finally:
        fleet.close()
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
