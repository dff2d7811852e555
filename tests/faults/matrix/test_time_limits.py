"""Fault 4: time limits. The lease is released when the body has really ended, also if the body swallows the exception."""

from __future__ import annotations

import pytest

from tests.faults.harness import WorkerEnvironment, since
from tests.faults.matrix import LATE
from tests.servers import until

TTL = 40
SOON = 1.0


@pytest.mark.parametrize(
    ("name", "act", "limits", "how"),
    [
        ("hard limit", ["sleep", 60], {"time_limit": 2}, ("SystemExit", "died")),
        ("hard limit, swallowed", ["swallow", 60], {"time_limit": 2}, ("died",)),
        ("soft limit", ["sleep", 60], {"soft_time_limit": 1}, ("SoftTimeLimitExceeded",)),
        ("soft limit, swallowed", ["swallow", 5], {"soft_time_limit": 1}, ("return",)),
        ("both, soft swallowed", ["swallow", 60], {"soft_time_limit": 1, "time_limit": 3}, ("died",)),
    ],
)
def test_limits(name: str, act: list[object], limits: dict[str, int], how: tuple[str, ...]) -> None:
    """The lease is released when the body has ended, not when the time limit is reported."""
    with WorkerEnvironment(ttl=TTL) as env:
        env.worker()
        env.send("skip", "a", act, **limits)
        body = env.body("a")
        end = env.end(body)
        assert end.get("how", "died") in how
        gone = env.gone(body)
        released = until(lambda: _releases(env), "MONITOR tells of the release", LATE)
        swallowed = [event["at"] for event in env.ledger.events("swallowed")]  # up to shortly before a SIGKILL
        assert 1 == len(released) and bool(swallowed) == ("swallow" in act)
        assert [] == [at for at in swallowed if at > released[0]], "freed under the body"
        env.measured(f"4 {name}: lease freed after the body", SOON, since(end, gone))
        assert env.send("skip", "a", ["sleep"], expect="once").get(timeout=LATE) == "slept"
        env.finish()


def _releases(env: WorkerEnvironment) -> list[float]:
    return [event["at"] for event in env.ledger.events("store", verb="release") if event["does"]]


def test_hard_limit_under_gevent() -> None:
    """The lease is released when gevent's own time limit ends the greenlet."""
    with WorkerEnvironment(ttl=TTL) as env:
        env.worker("gevent")
        env.send("skip", "a", ["sleep", 60], time_limit=2)
        body = env.body("a")
        env.measured("4 hard limit, gevent: lease freed after the body", SOON, since(env.end(body), env.gone(body)))
        env.finish()
