"""docs/operate/stuck-lock.md: an operator releases the locks of a killed worker and of a hung body, in the example project.

With `INCIDENT_WRITE=1`, the test writes what the commands print into the page.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.operate.test_example import left_behind, messages_come_back_soon
from tests.servers import Process, free_port, new_directory, remove_directory, until

pytestmark = pytest.mark.long
PROJECT = Path(__file__).resolve().parents[2]
PAGE = PROJECT / "docs" / "operate" / "stuck-lock.md"
BLOCK = re.compile(r"(?<=<!-- transcript -->\n```console\n).*?(?=```\n<!-- /transcript -->)", re.DOTALL)
START = "python -m example_project.incident"
#: What differs from run to run, and what stands for it.
VARYING = {
    r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d\d:\d\d": "TIME",
    r"(pid[\"']?:?|kill -9) \d+": r"\1 N",
    r"\b(\d+\.\d s|\d+\.\ds|\d+m\d+s|\d+[ms])\b": "N s",
    r"(?<=@demo) +\d+": " N",
    r" +": " ",
}

Run = Callable[[str], str]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Start the incident as the page says; yield what runs a line of the page, and returns what it prints."""
    assert START in PAGE.read_text(encoding="utf-8")
    port, directory = free_port(), new_directory("incident")
    environment = {**os.environ, "TMPDIR": str(directory), "PYTHONPATH": str(PROJECT), "NO_COLOR": "1"}
    words = [*START.replace("python", sys.executable, 1).split(), "--listen", f"127.0.0.1:{port}"]
    incident = Process(words, tmp_path / "incident.log", environment)
    incident.start()

    def exported() -> dict[str, str]:
        assert incident.running, incident.output()
        return dict(re.findall(r"^ *export (\w+)=(\S+)$", incident.output(), re.MULTILINE))

    def run(line: str) -> str:
        curl = f"{sys.executable} -c 'import sys, urllib.request as r; print(r.urlopen(sys.argv[1]).read().decode())' "
        line = line.replace("celery -A", f"{sys.executable} -m celery -A").replace("curl -s ", curl)
        line = line.replace("127.0.0.1:9809", f"127.0.0.1:{port}")
        done = subprocess.run(
            line, shell=True, env=environment, cwd=directory, capture_output=True, text=True, timeout=100, check=False
        )
        assert "Traceback" not in done.stderr, done.stderr
        return done.stdout

    try:
        environment.update(until(exported, "the incident has begun", 150))
        yield run
    finally:
        incident.stop(60)
        until(lambda: not left_behind(directory), "all processes of the incident are gone")
        assert [] == list(directory.iterdir())
        remove_directory(directory)


@messages_come_back_soon
@pytest.mark.timeout(600)
def test_transcript(run: Run) -> None:
    """The commands of the page print what it says, but for times, durations and process ids."""
    page = PAGE.read_text(encoding="utf-8")
    (expected,) = BLOCK.findall(page)
    printed = ""
    for line in expected.splitlines():
        if line.startswith("# "):
            printed += f"{line}\n"
        elif line.startswith("$ kill -9"):
            (pid,) = set(re.findall(r"report-2026-10 on one@demo \(pid (\d+),", printed))
            printed += f"$ kill -9 {pid}\n{run(f'kill -9 {pid}')}"
            for task in ("import_rates", "monthly_report"):
                history = f"celery -A example_project singleton history example_project.tasks.{task}"
                until(lambda command=history: "success" in run(command), f"{task} has run again", 150)  # type: ignore[misc]
        elif line.startswith("$ "):
            printed += f"{line}\n{run(line[2:])}"
    if os.environ.get("INCIDENT_WRITE"):
        PAGE.write_text(BLOCK.sub(lambda _: printed, page), encoding="utf-8")
    else:
        assert plain(expected) == plain(printed)


def plain(transcript: str) -> str:
    """Return a transcript without what varies."""
    for pattern, text in VARYING.items():
        transcript = re.sub(pattern, text, transcript)
    return "\n".join(line.rstrip() for line in transcript.splitlines())
