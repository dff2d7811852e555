"""Runs the fault matrix, several tests in parallel, since they mostly wait: ``python -m tests.faults [WORD ...]``.

Each test function runs in its own pytest. A word selects the functions whose name contains it. At the end comes one table of
all bounds and figures, and the failed tests with their output.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.servers import new_directory, remove_directory

HERE = Path(__file__).parent
SHOWN = 20_000  # characters of a failed test's output, from its start (the failure) and its end (the logs)
#: These take longest, so they start first.
FIRST = ("test_renewal_goes_on", "test_cold_and_soft", "test_whole_worker", "test_reply_lost", "test_regex")


def functions(words: list[str]) -> list[str]:
    """Return the test functions of all rows, without their parameters, the long ones first; other tests by file."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", str(HERE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    lines = [line.partition("[")[0] for line in done.stdout.splitlines() if "::" in line]
    found = dict.fromkeys(line if "/matrix/" in line else line.partition("::")[0] for line in lines)
    wanted = [name for name in found if not words or any(word in name for word in words)]
    return sorted(wanted, key=lambda name: not any(first in name for first in FIRST))


def run(name: str, figures: Path) -> tuple[str, int, str, float]:
    """Run one test function, and return its name, exit code, output and duration in seconds."""
    begin = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:warnings", name]
    env = {**os.environ, "FAULTS_FIGURES": str(figures)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    took = time.monotonic() - begin
    print(f"{'ok' if not done.returncode else 'FAILED':<7}{took:6.1f} s  {Path(name).name}", flush=True)
    return name, done.returncode, done.stdout + done.stderr, took


def matrix(options: argparse.Namespace) -> bool:
    """Run the matrix once, and return whether it passed."""
    begin, directory = time.monotonic(), new_directory("matrix")
    figures = directory / "figures.jsonl"
    try:
        with ThreadPoolExecutor(options.lanes) as lanes:
            done = list(lanes.map(lambda name: run(name, figures), functions(options.words)))
        rows = [json.loads(line) for line in figures.read_text().splitlines()] if figures.exists() else []
    finally:
        remove_directory(directory)
    for what, bound, measured in sorted(rows, key=lambda row: (int(row[0].split()[0]), row[0])):
        print(f"{what:<78} bound {bound:>12}   measured {measured:>8}")
    failed = [(name, output) for name, code, output, _ in done if code]
    for name, output in failed:
        story = output if len(output) <= 2 * SHOWN else f"{output[:SHOWN]}\n[...]\n{output[-SHOWN:]}"
        print(f"\n==== {name}\n{story}")
    print(f"{len(done) - len(failed)} of {len(done)} test functions are green, after {time.monotonic() - begin:.0f} s")
    return not failed


def main() -> int:
    """Run the matrix as often as requested, until the first failure, and return the exit code."""
    parser = argparse.ArgumentParser(description="Run the fault matrix.")
    parser.add_argument("--lanes", type=int, default=4, help="how many test functions run at once")
    parser.add_argument("--times", type=int, default=1, help="how often, up to the first failure")
    parser.add_argument("words", nargs="*", help="run only what has one of these words in its name")
    options = parser.parse_args()
    return int(not all(matrix(options) for _ in range(options.times)))


if __name__ == "__main__":
    sys.exit(main())
