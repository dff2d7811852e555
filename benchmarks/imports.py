"""(i) Import time, and what starting up costs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from time import perf_counter

from benchmarks.report import Bars, Section, Table, Target
from benchmarks.rounds import Rounds, Spread, shuffled
from benchmarks.stage import Stage
from benchmarks.tasks import OURS, SCALARS, SINGLETON, add_tasks, base_classes, declare, make_app, nothing
from benchmarks.tracer import around_body
from tests.servers import new_directory, remove_directory

#: What each process imports after Celery (its app and task classes) and redis-py, which are timed first.
MODULES = {
    OURS: "celery_singleton_lock, celery_singleton_lock.store.redis",
    "celery-once": "celery_once, celery_once.backends",
    SINGLETON: "celery_singleton, celery_singleton.backends.redis",
}
CHILD = """
import json, sys
from time import perf_counter
begin = perf_counter()
import redis
from celery import Celery, Task
base = perf_counter() - begin
begin = perf_counter()
import {modules}
added = perf_counter() - begin
print(json.dumps([base, added]))
"""
HOW = (
    "Import: a fresh process times `import redis; from celery import Celery, Task`, then the import of the "
    "library with its store client; the ratio is of both to the first. Start-up: declaring and binding 50 "
    "tasks, and the first lock cycles of a new app."
)


def run(stage: Stage) -> Section:
    """Measure both."""
    imported = measured(stage.few(15, 4))
    imports = Table(
        "Import", ("Celery and redis-py, ms", "added, ms", "added, %"), [(n, _cells(v)) for n, v in imported.items()]
    )
    share = _percent(imported[OURS])
    bound = Rounds({kind: partial(_binding, stage, kind) for kind in base_classes()}, stage.few(12, 4))
    bindings = Table("Declaring a task", ("µs",), [(kind, (bound.spread(kind, 1e6),)) for kind in bound.values])
    first, second = zip(*(_first_cycles(stage) for _ in range(stage.few(15, 4))), strict=True)
    cycles = Table(
        "Lock cycles of a new app",
        ("µs",),
        [
            ("the first: settings, plan, connection", (Spread.of(first, 1e6),)),
            ("the second", (Spread.of(second, 1e6),)),
        ],
    )
    target = Target("import time over Celery and redis-py, %", share.median, 10.0)
    added = {name: Spread.of([b for _, b in values], 1e3) for name, values in imported.items()}
    return Section(
        "(i) import and start", HOW, [imports, bindings, cycles], [target], [Bars("Import, added", "ms", added)]
    )


def measured(rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Seconds for Celery with redis-py, and for each library after them; a process for each, in turns."""
    names = [name for name in MODULES if name in base_classes()]
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    cache = new_directory("bytecode")
    for name in names:
        _child(name, cache)  # fills it
    for order in shuffled(names, rounds):
        for name in order:
            found[name].append(_child(name, cache))
    remove_directory(cache)
    return found


def _child(name: str, cache: Path) -> tuple[float, float]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    env |= {"PYTHONPYCACHEPREFIX": str(cache), "PYTHONDONTWRITEBYTECODE": ""}
    command = [sys.executable, "-c", CHILD.format(modules=MODULES[name])]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=60)
    base, added = json.loads(done.stdout)
    return base, added


def _percent(values: list[tuple[float, float]]) -> Spread:
    return Spread.of([100 * added / base for base, added in values])


def _cells(values: list[tuple[float, float]]) -> tuple[Spread, Spread, Spread]:
    return Spread.of([a for a, _ in values], 1e3), Spread.of([b for _, b in values], 1e3), _percent(values)


def _binding(stage: Stage, kind: str) -> float:
    """Seconds to declare one task of this kind and to bind it to its app."""
    app = make_app(stage.broker.url(), stage.store.url())
    base = base_classes()[kind]
    app.finalize()
    begin = perf_counter()
    for number in range(50):
        declare(app, str(number), base, nothing)
    took = perf_counter() - begin
    app.close()
    return took / 50


def _first_cycles(stage: Stage) -> tuple[float, float]:
    """Seconds of the first and of the second lock cycle of an app that has not been used."""
    app = make_app(stage.broker.url(), stage.store.url())
    cycle = partial(around_body, add_tasks(app, nothing)[OURS], SCALARS)
    took = cycle(), cycle()
    app.close()
    return took
