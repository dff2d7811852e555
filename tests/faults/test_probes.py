"""Tests of the probes: they understand the real output of MONITOR, and a probe that sees nothing is detected."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from hashlib import sha1
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import redis

import celery_singleton_lock
from celery_singleton_lock.store.keys import LINE_TOKEN, line_keys, queued_token
from celery_singleton_lock.store.protocol import RenewResult
from celery_singleton_lock.store.redis import RedisStore, connector
from celery_singleton_lock.store.redis.scripts import script
from celery_singleton_lock.store.requests import AfterRelease, LeaseSpec, Place
from tests.faults import probes
from tests.faults.checker import Violation, check
from tests.faults.harness import WorkerEnvironment
from tests.faults.ledger import Event, Ledger, name_of
from tests.faults.probes import Commands, Deaths, Keys, Script, Watching, scripts
from tests.faults.schedule import Fault, Limits, Schedule
from tests.servers import RedisServer, until

LIMITS = Limits(ttl=30.0)
BASE = 'singleton:{job \\ "one"}'
LOCK, REVOKED, REGISTRY, PAUSES = f"{BASE}:lock:1", f"{BASE}:revoked", f"{BASE}:registry", f"{BASE}:pauses"


class Scene:
    """A server with a probe, and two requests for one lock."""

    def __init__(self, server: RedisServer, directory: Path) -> None:
        self.ledger = Ledger(directory)
        self.schedule = Schedule()
        self.url = server.url()
        self.commands = Commands(self.ledger, self.url)
        self.commands.start()
        until(self.commands.ready.is_set, "MONITOR")
        self.store = RedisStore(connector(self.url, {}), history=9)
        self.client = redis.Redis.from_url(self.url)
        self.names: dict[str, str] = {}  # of other tokens
        self.a, self.b = (
            LeaseSpec(BASE, "1", token * 32, 30.0, f"task-{token}", supervised=token == "a") for token in "ab"
        )

    def seen(self) -> list[tuple[str, str, str, str]]:
        """Return the changes of a lock as verb, token's letter, key and action, after all sent commands were read."""
        self.commands.close()
        assert self.commands.sound
        names = {name_of("a" * 32): "a", name_of("b" * 32): "b", "": "", **self.names}
        events = [event for event in self.ledger.events("store") if event["does"]]
        return [(event["verb"], names.get(event["run"], "?"), event["key"], *event["does"]) for event in events]

    def found(self, *faults: Fault) -> set[str]:
        """Return the kinds of violations."""
        return {violation.kind for violation in check(self.ledger.events(), [*self.schedule, *faults], LIMITS)}

    def close(self) -> None:
        self.commands.close()
        self.store.close()
        self.client.close()

    def broken(self, verb: str, old: str, new: str, keys: list[str], *args: object) -> None:
        """Run a script with some text removed; the probe treats it as the original."""
        text = script(verb, frozenset()).text
        assert 1 == text.count(old)
        text = text.replace(old, new)
        self.commands._scripts[sha1(text.encode()).hexdigest()] = Script(verb)
        self.client.eval(text, len(keys), *keys, *args)  # type: ignore[no-untyped-call]


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    """Yield a server of this test, with a probe."""
    with RedisServer() as server:
        scene = Scene(server, tmp_path)
        yield scene
        scene.close()


def test_every_verb(scene: Scene) -> None:
    """The probe records each change of a lock and no call without effect, by the script's text or by its digest."""
    for _ in range(2):
        scene.store.acquire(scene.a)
        scene.store.acquire(scene.b)
        assert [RenewResult.RENEWED, RenewResult.NOT_OWNER] == scene.store.renew([scene.a, scene.b])
        scene.store.release(scene.b, True)
        scene.client.delete(LOCK)
        scene.store.reacquire(scene.a, 1)
        scene.store.reacquire(scene.b, 1)
        scene.store.holder(LOCK)
        scene.store.release(scene.a, True)
        scene.a, scene.b = scene.b, scene.a
    deeds = [("acquire", "take"), ("renew", "renew"), ("reacquire", "take"), ("release", "free")]
    assert [(verb, who, LOCK, deed) for who in "ab" for verb, deed in deeds] == scene.seen()
    assert not scene.ledger.events("unknown script")
    sent = [event["verb"] for event in scene.ledger.events("store", sent=True)]
    assert ["acquire", "acquire", "renew", "renew", "release", "reacquire", "reacquire", "release"] == sent[
        -8:
    ]  # the events before these include calls by EVAL


def test_renewal_by_the_attempt(scene: Scene) -> None:
    """The probe distinguishes a main process's renewal, by token alone, from the child's own."""
    scene.store.acquire(scene.a)
    scene.store.renew([LeaseSpec(BASE, "", scene.a.token, 30.0, "task-a", supervised=True)])
    scene.store.renew([scene.a])
    assert [("renew", "a", LOCK, "renew")] * 2 == scene.seen()[1:]
    own = [event["own"] for event in scene.ledger.events("store", verb="renew", sent=True)]
    assert [False, True] == own[-2:]  # the first was sent twice, because its script was unknown


def test_foreign_release(scene: Scene) -> None:
    """A release of another holder's lock is recorded and counts as a theft."""
    scene.store.acquire(scene.a)
    keys = [LOCK, scene.b.attempt, scene.b.completed]
    scene.broken("release", "if holder[1] ~= ARGV[1] then", "if false then", keys, scene.b.token, 30000, "1")
    assert [("acquire", "a", LOCK, "take"), ("release", "b", LOCK, "free")] == scene.seen()
    assert {"theft"} == scene.found()


def test_foreign_renewal(scene: Scene) -> None:
    """A renewal of another holder's lock is recorded and counts as a theft."""
    scene.store.acquire(scene.a)
    keys = [LOCK, scene.b.attempt, REVOKED, REGISTRY]
    scene.broken("renew", "if owner == token then", "if true then", keys, scene.b.token, 30000)
    assert [("acquire", "a", LOCK, "take"), ("renew", "b", LOCK, "renew")] == scene.seen()
    assert {"theft"} == scene.found()


@pytest.mark.parametrize("verb", ["acquire", "reacquire"])
def test_taken_after_its_release(scene: Scene, verb: str) -> None:
    """An acquire by a run after its release is recorded and counts as a late renewal."""
    scene.store.acquire(scene.a)
    scene.store.release(scene.a, True)
    getattr(scene.store, verb)(scene.a, *([1] if verb == "reacquire" else []))
    assert [("acquire", "take"), ("release", "free"), (verb, "take")] == [(v, does) for v, _, _, does in scene.seen()]
    assert {"late renewal"} == scene.found()


def test_renewal_after_its_release(scene: Scene) -> None:
    """An effective renewal after the release is recorded and counts as a late renewal."""
    scene.store.acquire(scene.a)
    scene.store.release(scene.a, True)
    scene.broken(
        "renew",
        "if owner == token then",
        "if true then",
        [LOCK, scene.a.attempt, REVOKED, REGISTRY],
        scene.a.token,
        30000,
    )
    assert ("renew", "a", LOCK, "renew") == scene.seen()[-1]
    assert {"late renewal"} == scene.found()


def test_unlock(scene: Scene) -> None:
    """A revocation is recorded, and is no violation if the schedule has one."""
    scene.store.acquire(scene.a)
    with scene.schedule.during("unlock"):
        scene.store.revoke(BASE, LOCK)
    scene.store.acquire(scene.b)
    assert ("revoke", "", LOCK, "unlock") == scene.seen()[1]
    assert set() == scene.found()
    scene.schedule.faults.clear()
    assert {"theft"} == scene.found()


def test_every_script_is_known() -> None:
    """Each line of code of each script file is in a script that the probe knows."""
    known = "\n".join(one.text for one in scripts().values())
    for path in (Path(celery_singleton_lock.__file__).parent / "store" / "redis").glob("*.lua"):
        code = [line for line in path.read_text().splitlines() if not line.strip().startswith("--")]
        assert [] == [line for line in code if line not in known], path.name


def test_slots(scene: Scene) -> None:
    """Each slot of a lock with a limit is a lock of its own."""
    for request in (scene.a, scene.b):
        request.limit = 2
        request.use_slot(scene.store.acquire(request).slot)
    scene.store.renew([scene.a, scene.b])
    scene.store.holder(LOCK, scene.a.slots)
    scene.store.release(scene.b, True)
    seen = [("acquire", "a", LOCK, "take"), ("acquire", "b", f"{LOCK}:1", "take"), ("renew", "a", LOCK, "renew")]
    assert [*seen, ("renew", "b", f"{LOCK}:1", "renew"), ("release", "b", f"{LOCK}:1", "free")] == scene.seen()
    assert set() == scene.found()


def test_reservations(scene: Scene) -> None:
    """A reservation is a lock of its message, which only a delivery of that message may turn into its lease."""
    reserved = LeaseSpec(BASE, "1", queued_token("task-a"), 30.0, "task-a", queued=True)
    scene.store.acquire(reserved)
    scene.store.acquire(scene.b)
    scene.store.acquire(scene.a)
    scene.store.release(scene.a, False, kept=AfterRelease("queued", 30.0, queued_token("task-a")))
    again = LeaseSpec(BASE, "1", "b" * 32, 30.0, "task-a")
    scene.store.acquire(again)
    scene.store.release(again, True)
    scene.names = {name_of(queued_token("task-a")): "queued"}
    seen = [("acquire", "queued", LOCK, "take"), ("acquire", "a", LOCK, "take"), ("release", "a", LOCK, "free")]
    seen += [("release", "queued", LOCK, "take"), ("acquire", "b", LOCK, "take"), ("release", "b", LOCK, "free")]
    assert seen == scene.seen()
    assert set() == scene.found()


def test_reservation_of_another(scene: Scene) -> None:
    """A delivery that takes another message's reservation is a theft."""
    scene.store.acquire(LeaseSpec(BASE, "1", queued_token("task-x"), 30.0, "task-x", queued=True))
    keys = [LOCK, scene.b.attempt, scene.b.completed, f"{BASE}:fence", f"{BASE}:recent", REVOKED, PAUSES]
    who = (scene.b.token, 30000, "task-b", "", 0, "", "")
    scene.broken("acquire", "if owner ~= 'queued:' .. ARGV[3] then", "if false then", keys, *who)
    scene.names = {name_of(queued_token("task-x")): "queued"}
    assert [("acquire", "queued", LOCK, "take"), ("acquire", "b", LOCK, "take")] == scene.seen()
    assert {"theft"} == scene.found()


def _waits(scene: Scene, ticket: str, due: float = 60.0, replace: bool = False) -> None:
    text = f"message of {ticket}" if due > 0 else ""
    place = Place(ticket, 0.0, 0 if replace else 9, replace, 1.0, due, text, gives_way=True)
    scene.store.acquire(LeaseSpec(BASE, "1", ticket * 8, 30.0, f"task-{ticket}", place=place))


def _starts(scene: Scene, ticket: str) -> LeaseSpec:
    request = LeaseSpec(BASE, "1", ticket * 9, 30.0, f"task-{ticket}", place=Place(ticket, 1.0))
    scene.store.acquire(request)
    return request


def _moves(scene: Scene) -> list[tuple[str, str]]:
    return [(event["does"], event["ticket"]) for event in scene.ledger.events("line", key=LOCK)]


def test_line(scene: Scene) -> None:
    """The probe records who joins a line and leaves it, and why; at a release the lock becomes the reservation of its head."""
    scene.a.place = Place()
    scene.store.acquire(scene.a)
    for ticket in ("t1", "t2", "t3"):
        _waits(scene, ticket)
    scene.store.leave(scene.a, "t2")
    assert "message of t1" == scene.store.release(scene.a, True).message
    scene.store.acquire(LeaseSpec(BASE, "1", LINE_TOKEN, 30.0, "task-t1", queued=True, place=Place("t1", 1.0)))
    first = _starts(scene, "t1")
    _waits(scene, "t4", replace=True)
    scene.store.release(first, True)
    assert ["take", "free", "take", "take", "free", "take"] == [does for *_, does in scene.seen()]
    joins = [("join", "t1"), ("join", "t2"), ("join", "t3")]
    moves = [("leave", "t2"), ("turn", "t1"), ("superseded", "t3"), ("join", "t4"), ("turn", "t4")]
    assert [*joins, *moves] == _moves(scene)
    takes = [event for event in scene.ledger.events("store", verb="acquire") if "ticket" in event]
    assert ["", "t1"] == [take["ticket"] for take in takes]
    assert set() == scene.found()


def test_replaced(scene: Scene) -> None:
    """A newcomer ends the reservation of a message that it replaces; a holder that it asks to stop is renewed as before."""
    reserved = LeaseSpec(BASE, "1", queued_token("task-x"), 30.0, "task-x", queued=True)
    scene.store.acquire(reserved)
    scene.a.place, scene.a.stoppable = Place("t1", 0.0, 1, True, 1.0, 60.0, "", stop=True), True
    scene.store.acquire(scene.a)
    newer = Place("t2", 0.0, 1, True, 1.0, 60.0, "", stop=True)
    scene.store.acquire(LeaseSpec(BASE, "1", "c" * 32, 30.0, "task-c", place=newer))
    assert [RenewResult.STOP] == scene.store.renew([scene.a])
    scene.names = {name_of(queued_token("task-x")): "queued"}
    seen = [("acquire", "queued", LOCK, "take"), ("acquire", "queued", LOCK, "free"), ("acquire", "a", LOCK, "take")]
    assert [*seen, ("renew", "a", LOCK, "renew")] == scene.seen()
    assert [("join", "t2")] == _moves(scene)
    assert set() == scene.found()


def test_line_that_is_not_kept(scene: Scene) -> None:
    """A message that starts before the head of the line is found, if the script lets it."""
    scene.a.place = Place()
    scene.store.acquire(scene.a)
    _waits(scene, "t1")
    _waits(scene, "t2")
    scene.store.release(scene.a, True)
    text = script("acquire", frozenset({"line", "body"})).text
    rule = "is_turn = is_turn and (not head or head == ticket)"
    assert 1 == text.count(rule)
    text = text.replace(rule, "")
    scene.commands._scripts[sha1(text.encode()).hexdigest()] = Script("acquire", in_line=True)
    keys = [LOCK, scene.b.attempt, scene.b.completed, f"{BASE}:fence", f"{BASE}:recent", REVOKED, PAUSES]
    keys += line_keys(BASE, "1")
    who = (scene.b.token, 30000, "task-t2", "", 0, "", "")
    scene.client.eval(text, len(keys), *keys, *who, "t2", "t2", 1, 0, "", 0, "", 3600000, "")  # type: ignore[no-untyped-call]
    assert ("acquire", "b", LOCK, "take") == scene.seen()[-1]
    assert {"order"} == scene.found()


def test_lapse(scene: Scene) -> None:
    """A message whose copy does not come in time loses its place, which only a fault explains."""
    scene.a.place = Place()
    scene.store.acquire(scene.a)
    _waits(scene, "t1", due=-1.0)
    _waits(scene, "t2")
    scene.store.release(scene.a, True)
    _starts(scene, "t2")
    scene.seen()
    assert [("join", "t1"), ("lapse", "t1"), ("join", "t2"), ("turn", "t2")] == _moves(scene)
    assert {"order"} == scene.found()
    assert set() == scene.found(Fault("stop", 0))


def test_unknown_script(scene: Scene) -> None:
    """The probe reports a script that it does not know."""
    scene.client.eval("return 1", 0)  # type: ignore[no-untyped-call]
    assert [] == scene.seen()
    assert {"blind"} == scene.found()


def test_cut_off(scene: Scene) -> None:
    """The probe reconnects after its connection was closed, and reports it."""
    scene.commands.ready.clear()
    scene.client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")  # type: ignore[no-untyped-call]
    until(scene.commands.ready.is_set, "MONITOR")
    scene.store.acquire(scene.a)
    assert [("acquire", "a", LOCK, "take")] == scene.seen()
    assert 2 == len(scene.ledger.events("store reset"))  # the other at its end


@pytest.fixture
def _errors_in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ignore errors of threads, which these tests cause on purpose."""
    monkeypatch.setattr(threading, "excepthook", lambda args: None)


@pytest.mark.usefixtures("_errors_in_threads")
def test_reader_that_failed(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that ended with its own error is not sound, and reports that error."""
    monkeypatch.setattr(scene.commands, "_read", lambda line: 1 / 0)
    scene.store.acquire(scene.a)
    until(lambda: not scene.commands.is_alive(), "the thread is over")
    scene.commands.close()
    assert not scene.commands.sound
    assert ["ZeroDivisionError('division by zero')"] == [end["error"] for end in scene.ledger.events("probe ended")]


def test_reader_that_hears_nothing(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """A running reader that reads nothing is not sound."""
    monkeypatch.setattr(scene.commands, "_read", lambda line: None)
    scene.commands.close()
    assert not scene.commands.sound


class Broken(Watching):
    """A watcher whose step fails."""

    def __init__(self, ledger: Ledger, error: Exception) -> None:
        super().__init__(ledger, 0.001)
        self.error = error
        self.stepped = threading.Event()

    def step(self) -> None:
        self.stepped.set()
        raise self.error


@pytest.mark.usefixtures("_errors_in_threads")
@pytest.mark.parametrize(("error", "sound"), [(redis.ConnectionError(), True), (ValueError(), False)])
def test_watcher_that_failed(tmp_path: Path, error: Exception, sound: bool) -> None:
    """An unreachable store does not end a watcher; its own error does, and stays visible after repeated closing."""
    watcher = Broken(Ledger(tmp_path), error)
    watcher.start()
    watcher.stepped.wait(10)
    if not sound:
        watcher.join(10)
        watcher.error = redis.ConnectionError()  # for the last poll
    for _ in range(2):
        watcher.close()
        assert sound is watcher.sound
    env = SimpleNamespace(_watchers=[watcher], ledger=watcher.ledger, schedule=Schedule(), limits=LIMITS)
    assert ([] if sound else ["ValueError()"]) == [end["error"] for end in watcher.ledger.events("probe ended")]
    assert ([] if sound else [Violation("blind", "Broken")]) == WorkerEnvironment.verdict(cast(Any, env))


def test_keys(scene: Scene) -> None:
    """The probe records when a lease appears and when it disappears."""
    keys = Keys(scene.ledger, scene.url)
    keys.start()
    scene.store.acquire(scene.a)

    def events(what: str) -> list[Event]:
        return scene.ledger.events(what, run=name_of(scene.a.token), key=LOCK)

    until(lambda: events("key"), "seen")
    scene.store.release(scene.a, True)
    until(lambda: events("gone"), "gone")
    keys.close()
    assert keys.sound


def test_clocks_are_read_at_one_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that is stopped between two clock readings repeats them; otherwise leases would seem to end early."""
    times = iter([10.0, 10.5, 11.0, 11.001])
    walls = iter([1000.4, 1001.0])
    monkeypatch.setattr(probes, "now", lambda: next(times))
    monkeypatch.setattr(probes.time, "time", lambda: next(walls))
    assert 11.0 - 1001.0 == probes._offset()


def test_death_of_a_process_with_a_used_number(tmp_path: Path) -> None:
    """A process that has the number of one that died before is seen to die, too."""
    ledger = Ledger(tmp_path)
    deaths = Deaths(ledger)
    with subprocess.Popen(["true"]) as process:
        pass
    for _ in range(2):
        ledger.note("start", pid=process.pid)
        deaths.step()
        deaths.step()
    assert [process.pid, process.pid] == [death["of"] for death in ledger.events("death")]
