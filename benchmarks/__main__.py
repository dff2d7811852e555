"""Runs the benchmarks: ``python -m benchmarks [--quick] [--out DIRECTORY] [WORD...]``; a word selects those whose name has it."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks import (
    commands,
    cycle,
    duplicate,
    failover,
    idle,
    imports,
    keys,
    memory,
    path,
    pools,
    scripts,
    storm,
    sweep,
)
from benchmarks.picture import svg_of
from benchmarks.report import Section, json_of, text_of
from benchmarks.stage import Stage, stage

BENCHMARKS: dict[str, Callable[[Stage], Section]] = {
    "a-cycle": cycle.run,
    "b-path": path.run,
    "c-commands": commands.run,
    "d-duplicate": duplicate.run,
    "e-sweep": sweep.run,
    "f-pools": pools.run,
    "g-memory": memory.run,
    "h-keys": keys.run,
    "i-imports": imports.run,
    "j-idle": idle.run,
    "k-storm": storm.run,
    "l-scripts": scripts.run,
    "m-failover": failover.run,
}
DISTRIBUTIONS = ("celery", "redis", "hiredis", "gevent", "celery-once", "celery-singleton", "python-redis-lock")


def main() -> None:
    """Run what is asked for, print the tables, and write figures and picture."""
    options = _options()
    chosen = [name for name in BENCHMARKS if not options.words or any(word in name for word in options.words)]
    if not chosen:
        sys.exit(f"no benchmark has that in its name: {', '.join(BENCHMARKS)}")
    out = options.out or Path(tempfile.mkdtemp(prefix="benchmarks-"))
    sections = []
    with stage(options.quick) as shared:
        facts = _facts(shared)
        print(_lines(facts), flush=True)
        for name in chosen:
            sections.append(_run(name, shared))
    _write(out, sections, facts)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure the library and its peers.")
    parser.add_argument("words", nargs="*", metavar="WORD", help=f"parts of names: {', '.join(BENCHMARKS)}")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, to see that everything works")
    parser.add_argument("--out", type=Path, help="where figures and picture go; default: a new temporary directory")
    return parser.parse_args()


def _run(name: str, shared: Stage) -> Section:
    shared.clear()
    begin = time.monotonic()
    section = BENCHMARKS[name](shared)
    print(f"\n{text_of(section)}\n  took {time.monotonic() - begin:.1f} s", flush=True)
    return section


def _facts(shared: Stage) -> dict[str, Any]:
    """What figures depend on; nothing that tells where they were made."""
    versions = {name: _version(name) for name in DISTRIBUTIONS}
    return {
        "quick": shared.quick,
        "python": platform.python_version(),
        "server": shared.client.info("server").get("redis_version"),
        "cores": os.cpu_count(),
        "load before": round(os.getloadavg()[0], 1),
        "redis-py parser": "hiredis" if find_spec("hiredis") else "Python",
        **versions,
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _lines(facts: dict[str, Any]) -> str:
    return "\n".join(f"{name}: {value}" for name, value in facts.items())


def _write(out: Path, sections: list[Section], facts: dict[str, Any]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    figures = json.dumps(json_of(sections, facts), indent=1, ensure_ascii=False)
    (out / "figures.json").write_text(figures + "\n", "utf-8")
    (out / "figures.svg").write_text(svg_of([bars for section in sections for bars in section.bars]), "utf-8")
    print(f"\nFigures and picture: {out}")


if __name__ == "__main__":
    main()
