"""A store that takes no writes cannot count: each worker tells of its outages by events, and by `inspect singleton_locks`."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator, Sequence
from typing import Any

import psutil
import pytest
import redis

from tests.integration.conftest import POOLS
from tests.integration.environment import SOON, WorkerEnvironment
from tests.integration.event_stream import EventStream
from tests.integration.nodes import WorkerSpec
from tests.operate.test_refusing_store import REFUSALS
from tests.servers import RedisServer, until

pytestmark = pytest.mark.long

BEGAN, ENDED = "singleton-outage-began", "singleton-outage-ended"
#: Longer than any moment of slowness.
TTL = {"lock_options": {"lock_ttl": 15}}


@pytest.fixture(scope="module", params=POOLS)
def pool(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def worker_specs(pool: str) -> Sequence[WorkerSpec]:
    return (WorkerSpec(pool, concurrency=1 if pool == "solo" else 2, options=("-E",)),)


@pytest.fixture(scope="module")
def extra_conf(own_store: RedisServer) -> dict[str, Any]:
    return {"singleton_lock_url": own_store.url()}


@pytest.fixture
def client(own_store: RedisServer) -> Iterator[Any]:
    with redis.Redis.from_url(own_store.url()) as found:
        yield found
        for _, mend, _ in REFUSALS.values():
            found.execute_command(*mend)


def told(env: WorkerEnvironment) -> Any:
    """Return what the worker says of its store."""
    node = env.worker.hostname()
    (reply,) = env.app.control.broadcast("singleton_locks", destination=[node], reply=True, timeout=SOON)
    return reply[node]["store"]


def begun(env: WorkerEnvironment, name: str, errors: int) -> Any:
    """Return the outage of now once so many calls have failed, of which one is of this kind."""
    found = told(env)
    is_begun = found["outage"] and found["outage"]["store_errors"] >= errors and found["errors"][name]
    return is_begun and found["outage"]


def events(stream: EventStream, kind: str) -> list[Any]:
    return [one for one in stream.events if one["type"] == kind]


@pytest.mark.parametrize("refusal", ["full", "read-only"])
def test_acquires_fail(env: WorkerEnvironment, client: Any, refusal: str) -> None:
    """The worker says since when and why, how many calls have failed, and what became of the tasks."""
    until(lambda: told(env)["outage"] is None, "the outage before is over")
    before = told(env)["errors"]
    breaks, mends, said = REFUSALS[refusal]
    with EventStream(env) as stream:
        began = time.time()
        client.execute_command(*breaks)
        retried = [env.job("store_retry").delay(env.other_tag(str(number))) for number in range(3)]
        for result in retried:
            env.wait_for_state(result, "RETRY")
        assert "done" == env.get(env.job("store_run").delay(env.tag))
        outage = until(
            lambda: (found := begun(env, "acquire", 4)) and found["without_lock"] and found,
            "the worker tells of the outage",
        )
        assert began - 1 <= outage["since"] <= time.time() + 1
        assert (1, True) == (outage["without_lock"], outage["postponed"] >= 3)
        (event,) = until(lambda: events(stream, BEGAN), "an event tells of it")
        assert re.search(said, outage["error"])
        assert event["error"] == outage["error"]
        assert [] == events(stream, ENDED)
        client.execute_command(*mends)
        assert ["done"] * 3 == [env.get(result) for result in retried]
        (event,) = until(lambda: events(stream, ENDED), "an event tells of the end")
    assert (1, True, True) == (event["without_lock"], event["postponed"] >= 3, event["store_errors"] >= 4)
    assert (0, True) == (event["lost"], event["seconds"] > 0)
    after = told(env)
    assert (None, True) == (after["outage"], after["errors"]["acquire"] - before["acquire"] >= 4)


@pytest.mark.parametrize("stopped", [False, True])
def test_renewals_fail(env: WorkerEnvironment, client: Any, pool: str, stopped: bool) -> None:
    """Failed renewals are told of, in prefork also those by the main process for a child that is stopped."""
    if pool == "solo" or (stopped and pool != "prefork"):
        pytest.skip("the worker answers nothing meanwhile")
    until(lambda: told(env)["outage"] is None, "the outage before is over")
    result = env.hold("skip", **TTL)
    child = psutil.Process(env.starts()[0]["pid"])
    breaks, mends, said = REFUSALS["read-only"]
    if stopped:
        child.send_signal(signal.SIGSTOP)
    try:
        client.execute_command(*breaks)
        outage = until(lambda: begun(env, "renew", 1), "the worker tells of the outage")
        assert re.search(said, outage["error"])
    finally:
        client.execute_command(*mends)
        if stopped:
            child.send_signal(signal.SIGCONT)
    env.let_go()
    assert "held" == env.get(result)
