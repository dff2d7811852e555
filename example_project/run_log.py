"""A log of all runs in an SQL table: who ran what, when, for how long, and how it ended. Receivers of signals write it.

``python -m example_project.run_log`` shows it. To use it in a project of yours, copy this file, and put the URL of your database
into `engine`. It costs two transactions for each run, which the run waits for.
"""

# Celery has no types of its own, its decorators neither.
# mypy: disallow-untyped-decorators=False

import argparse
import os
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any

from celery.signals import task_postrun, worker_init
from sqlalchemy import (
    Column,
    DateTime,
    Engine,
    Float,
    Integer,
    MetaData,
    NullPool,
    String,
    Table,
    create_engine,
    select,
)

from celery_singleton_lock import Lease, SingletonTask, signals
from example_project import ledger

metadata = MetaData()
#: A run without an end goes on, or its process was killed. Times are in UTC.
runs = Table(
    "run_log",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("task", String(255), nullable=False),
    Column("task_id", String(255), nullable=False),
    Column("key", String(1200), nullable=False),
    Column("host", String(255), nullable=False),
    Column("pid", Integer, nullable=False),
    Column("start", DateTime, nullable=False),
    Column("end", DateTime),
    Column("seconds", Float),
    Column("status", String(10)),
    Column("error", String(100)),
)
#: Attribute of a request: the row of its run.
_ROW = "run_log_row"


@cache
def engine(path: Path) -> Engine:
    """Return the engine. It keeps no connection open, so that forked processes share none."""
    return create_engine(f"sqlite:///{path}", poolclass=NullPool, connect_args={"timeout": 10})


@worker_init.connect
def on_init(**_: Any) -> None:
    """Create the table before the first task."""
    metadata.create_all(engine(ledger.path()))


@signals.lock_acquired.connect
def on_acquired(sender: SingletonTask, lease: Lease, **_: Any) -> None:
    """Begin the row of a run, before its body starts."""
    request = sender.request
    row = {"task": sender.name, "task_id": request.id, "key": lease.key, "host": request.hostname, "pid": os.getpid()}
    with engine(ledger.path()).begin() as connection:
        result = connection.execute(runs.insert().values(**row, start=_now()))
    setattr(request, _ROW, result.inserted_primary_key)


@task_postrun.connect
def on_end(sender: Any, state: str | None = None, retval: object = None, **_: Any) -> None:
    """Complete the row, once Celery knows how the task has ended. A duplicate, and a plain task, have none."""
    row = getattr(sender.request, _ROW, None)
    if row is None:
        return
    error = f"{type(retval).__name__}: {retval}"[:100] if isinstance(retval, Exception) else None
    with engine(ledger.path()).begin() as connection:
        (start,) = connection.execute(select(runs.c.start).where(runs.c.id == row[0])).one()
        end = {"end": _now(), "seconds": (_now() - start).total_seconds(), "status": state, "error": error}
        connection.execute(runs.update().where(runs.c.id == row[0]).values(end))


def _now() -> datetime:
    return datetime.now(timezone.utc).replace(tzinfo=None)  # SQLite keeps no time zone


def main() -> None:
    """Show the runs, the latest last."""
    parser = argparse.ArgumentParser(prog="python -m example_project.run_log", description=main.__doc__)
    parser.add_argument("ledger", nargs="?", type=Path, default=ledger.path(), help="default: %(default)s")
    path = parser.parse_args().ledger
    if not path.is_file():  # SQLite would make one
        parser.error(f"there is no file {path}")
    line = "{:19}  {:>8}  {:8}  {:28}  {:30}  {}"
    print(line.format("start (UTC)", "seconds", "status", "task", "host", "error"))
    with engine(path).connect() as connection:
        for run in connection.execute(select(runs).order_by(runs.c.start)):
            seconds = "–" if run.seconds is None else f"{run.seconds:.2f}"
            name = run.task.removeprefix("example_project.tasks.")
            print(
                line.format(f"{run.start:%F %T}", seconds, run.status or "–", name, run.host, run.error or "").rstrip()
            )


if __name__ == "__main__":
    main()
