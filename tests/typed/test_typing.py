"""What mypy and pyright know of this library, with and without `celery-types`. `tox -e typing` has all three."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

for _program in ("celery-types", "mypy", "pyright"):
    try:
        version(_program)
    except PackageNotFoundError:
        pytest.skip(f"{_program} is not installed", allow_module_level=True)

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SITE = Path(sysconfig.get_path("purelib"))
TYPES = pytest.mark.parametrize("has_types", [True, False], ids=["celery-types", "untyped"])
#: Checks a file; returns the lines with an error.
Check = Callable[[Path, bool], set[int]]


def mypy(file: Path, has_types: bool) -> set[int]:
    # Without `celery-types`, mypy takes Celery's names to be anything, whether it finds it or not.
    without = [] if has_types else ["--no-site-packages", "--ignore-missing-imports"]
    words = ["-m", "mypy", "--config-file=", "--cache-dir", "cache", "--follow-imports=silent", *without, file.name]
    found = run(words, file.parent, MYPYPATH=str(ROOT))
    return {int(line) for line in re.findall(rf"^{file.name}:(\d+): error:", found, re.MULTILINE)}


def pyright(file: Path, has_types: bool) -> set[int]:
    environment = file.parent / "environment"
    site = environment / SITE.relative_to(sys.prefix)
    site.mkdir(parents=True)
    (environment / "pyvenv.cfg").write_text("")
    for entry in SITE.iterdir():
        if has_types or not entry.name.endswith("-stubs"):
            (site / entry.name).symlink_to(entry)
    config = {"include": [file.name], "extraPaths": [str(ROOT)], "venvPath": ".", "venv": environment.name}
    (file.parent / "pyrightconfig.json").write_text(json.dumps(config))
    found = json.loads(run(["-m", "pyright", "--outputjson"], file.parent))
    assert 1 == found["summary"]["filesAnalyzed"]
    errors = [one for one in found["generalDiagnostics"] if one["severity"] == "error"]
    return {one["range"]["start"]["line"] + 1 for one in errors}


def run(words: list[str], directory: Path, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *words],
        cwd=directory,
        env={"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "HOME": str(Path.home()), **environment},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.stdout


@pytest.fixture(params=[mypy, pyright])
def check(request: pytest.FixtureRequest, tmp_path: Path) -> Check:
    def check(file: Path, has_types: bool) -> set[int]:
        found: set[int] = request.param(Path(shutil.copy(file, tmp_path)), has_types)
        return found

    return check


@TYPES
def test_accepted(check: Check, has_types: bool) -> None:
    """Options with their values, and `duplicate` of what a call returns, are known."""
    assert set() == check(HERE / "example.py", has_types)


def test_decorated(check: Check) -> None:
    """With `celery-types`, a decorated task is known to be of the class that is its base."""
    assert set() == check(HERE / "decorated.py", True)


@TYPES
def test_refused(check: Check, has_types: bool) -> None:
    """A value that an option does not have is an error, and so is a `duplicate` that is used without a look."""
    text = (HERE / "wrong.py").read_text()
    wrong = {number for number, line in enumerate(text.splitlines(), 1) if "# wrong" in line}
    assert wrong == check(HERE / "wrong.py", has_types)
