"""The alert rules, with promtool: each fires, resolves, and is silent in quiet times, a deploy, and a restart without data.

One sample a minute. `values` of a series are in promtool's notation: `0x10 3x20` is 0 for eleven minutes and then 3.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.servers import required

MONITORING = Path(__file__).resolve().parents[2] / "docs" / "monitoring"
ALERTS = (MONITORING / "alerts.yaml").read_text(encoding="utf-8")
#: Each alert with its severity, summary and runbook_url.
RULES = {
    text.split()[0]: {
        field: re.findall(rf"^ *{field}: (.+)$", text, re.MULTILINE)[0]
        for field in ("severity", "summary", "runbook_url")
    }
    for text in re.split(r"^ *- alert: ", ALERTS, flags=re.MULTILINE)[1:]
}
TASK, SCHEDULED = "shop.tasks.sync", "shop.tasks.import_rates"
STORE = {"cluster": "eu", "namespace": "shop", "job": "locks"}
HOUR = 60
Series = Mapping[str, str]


def series(name: str, values: str, instance: str = "a", **labels: str) -> Series:
    """Return a series of the exporter."""
    name = name if name == "up" else f"celery_singleton_{name}"
    text = ", ".join(f'{label}="{value}"' for label, value in {**STORE, "instance": instance, **labels}.items())
    return {"series": f"{name}{{{text}}}", "values": values}


class Case(NamedTuple):
    """A situation in which alerts fire.

    Arguments:
        alert: its name without what all begin with.
        input_series: what exporters have told.
        fires: a minute in which it fires, and not two minutes before it begins.
        ends: a minute in which no alert fires any more.
        description: what it says.
        labels: besides severity, and those of the store.
        others: further alerts that fire then.
    """

    alert: str
    input_series: Sequence[Series]
    fires: int
    ends: int
    description: str
    labels: Mapping[str, str | None] = {}
    others: Sequence[str] = ()


ALIVE = [series("build_info", f"1x{26 * HOUR}", version="1"), series("up", f"1x{26 * HOUR}")]
AGAIN = "0x20 1x20 2x20 3x20 4x220"  # once in each of four times twenty minutes
CASES = [
    Case(
        "LocksLost",
        [
            series("lost_total", "0x10 3x120", instance, task=task, reason=reason)
            for instance in "ab"
            for task, reason in ((TASK, "expired"), (TASK, "not_owner"), ("other", "expired"))
        ],
        15,
        40,
        "9 locks were lost within 15 minutes. Two runs may have been there at the same time. "
        "The dashboard and `celery singleton stats` show of which tasks.",
    ),
    Case(
        "LeasesExpire",
        [series("expired_total", AGAIN, task=TASK)],
        80,
        250,
        "Leases expired in 4 of the last 8 quarters of an hour. Nobody was left to release them.",
    ),
    Case(
        "RenewalsFail",
        [series("renewal_failures_total", AGAIN, task=TASK)],
        80,
        250,
        "Renewals failed in 4 of the last 8 quarters of an hour. A lease that is not renewed until its end is lost.",
    ),
    Case(
        "AcquiresFail",
        [series("store_errors_total", AGAIN, task=TASK, verb="acquire")],
        80,
        250,
        "Calls to acquire locks failed in 4 of the last 8 quarters of an hour. Tasks come late, or fail.",
    ),
    Case(
        "LeaseTooOld",
        [series("oldest_lease_start_timestamp_seconds", "60x310 0x20", task=TASK)],
        301,
        320,
        f"A run of {TASK} has held its lock for 5h 0m 0s.",
        {"task": TASK},
    ),
    Case(
        "ReservationTooOld",
        [series("oldest_reservation_start_timestamp_seconds", "60x50 0x20", task=TASK)],
        41,
        60,
        f"A message of {TASK} was published with its lock 40m 0s ago.",
        {"task": TASK},
    ),
    Case(
        "PauseTooOld",
        [series("oldest_pause_start_timestamp_seconds", f"60x{25 * HOUR + 10} 0x20", task=TASK)],
        25 * HOUR + 1,
        25 * HOUR + 20,
        f"{TASK} has been paused for 1d 1h 0m 0s. `celery singleton list` shows by whom and why.",
        {"task": TASK},
    ),
    Case(
        "NoSuccess",
        [
            series("store_start_timestamp_seconds", "60x400"),
            series("last_success_timestamp_seconds", "600x210 12660x20", task=SCHEDULED),
        ],
        200,
        220,
        f"{SCHEDULED} has not succeeded for 3h 10m 0s.",
        {"task": SCHEDULED},
    ),
    Case(
        "NoSuccess",
        [
            series("store_start_timestamp_seconds", "60x400"),
            series("last_success_timestamp_seconds", "0x210 12660x20", task=SCHEDULED),
        ],
        191,
        220,
        f"{SCHEDULED} has not succeeded for 3h 10m 0s.",
        {"task": SCHEDULED},
    ),
    Case(
        "DuplicatesBlocked",
        [series("blocked_duplicates", "250x30 0x10", task=TASK)],
        15,
        35,
        f"A holder of a lock of {TASK} has met 250 duplicates and goes on.",
        {"task": TASK},
    ),
    Case(
        "StartsRefused",
        [series("starts_refused_total", "0+1x30 30x30", task=TASK)],
        20,
        50,
        f"{TASK} was refused 15 starts within 15 minutes (max_starts).",
        {"task": TASK},
    ),
    Case(
        "StoreDown",
        [series("store_up", "1x10 0x10 1x10"), series("store_writable", "1x10 0x10 1x10")],
        15,
        25,
        "No exporter of locks reaches the store. No task can acquire a lock, and running ones lose theirs.",
    ),
    Case(
        "StoreTakesNoWrites",
        [series("store_up", "1x30"), series("store_writable", "1x10 0x10 1x10")],
        15,
        25,
        "The store of locks is full or read-only. No task can acquire a lock, and running ones lose theirs.",
    ),
    Case(
        "StoreEvicts",
        [series("store_evicted_keys_total", "0+1x20 20x30")],
        20,
        45,
        "The store evicted 15 keys within 15 minutes. A lock may be one of them.",
    ),
    Case(
        "StoreMemoryFull",
        [series("store_memory_used_bytes", "950x20 500x10"), series("store_memory_max_bytes", "1000x30")],
        10,
        25,
        "The store uses 95% of its memory. It will refuse locks, or evict them.",
    ),
    Case(
        "ScrapeErrors",
        [series("scrape_errors_total", "0x10 0+1x20 20x30")],
        27,
        55,
        "The exporter a got no answer 15 times within 15 minutes.",
        {"instance": "a"},
    ),
    Case(
        "ExporterDown",
        [series("build_info", "1x300", "b", version="1"), series("up", "1x20 0x20 1x10", "b")],
        35,
        45,
        "The exporter b of locks cannot be scraped.",
        {"instance": "b"},
    ),
    Case(
        "ExporterMissing",
        [series("build_info", "1x20 stale _x30 1x20", job="other", version="1")],
        40,
        60,
        "Without an exporter none of these alerts fires.",
        {"job": "other"},
    ),
]


def everything(instance: str, values: Mapping[str, str], begin: int = 0, end: int = 10 * HOUR) -> list[Series]:
    """Return a series of each metric that the alerts read, from an exporter that lives from one minute to another.

    Where no values are given, counters stay at 7, as something has happened before, and others at 0.
    """
    labels = {
        "lost_total": [
            {"task": TASK, "reason": reason}
            for reason in ("expired", "not_owner", "released_by_operator", "lock_at_most")
        ],
        "store_errors_total": [{"task": TASK, "verb": verb} for verb in ("acquire", "release", "renew")],
        "build_info": [{"version": "1"}],
        "last_success_timestamp_seconds": [{"task": TASK}, {"task": SCHEDULED}],
    }
    found = []
    for name in sorted({*re.findall(r"celery_singleton_(\w+)", ALERTS), "up"}):
        of_store = name in ("build_info", "up", "scrape_errors_total") or name.startswith("store_")
        for more in labels.get(name, [{}] if of_store and name != "store_errors_total" else [{"task": TASK}]):
            chosen = values.get(name, "7x600" if name.endswith("_total") else "0x600")
            chosen = values.get(f"{name}:{more.get('reason', more.get('verb', ''))}", chosen)
            lives = ["_"] * begin + expanded(chosen)[begin:end] + ["stale"]
            found.append(series(name, " ".join(lives), instance, **more))
    return found


def expanded(values: str) -> list[str]:
    """Return the single samples of promtool's notation."""
    found = []
    for word in values.split():
        first, more, times = re.fullmatch(r"(_|stale|\d+)(?:\+(\d+))?(?:x(\d+))?", word).groups()  # type: ignore[union-attr]
        steps = range(int(times or 0) + 1)
        found += [f"{int(first) + int(more or 0) * step}" if first.isdigit() else first for step in steps]
    return found


#: Ten hours in which all is well: an operator has released locks, and `lock_at_most` has ended some.
WELL = {
    "build_info": "1x600",
    "up": "1x600",
    "store_up": "1x600",
    "store_writable": "1x600",
    "store_memory_used_bytes": "1000x600",
    "lost_total:released_by_operator": "0+1x600",
    "lost_total:lock_at_most": "0+1x600",
    "blocked_duplicates": "100x600",
    "last_success_timestamp_seconds": "0+60x600",
}
QUIET = everything("a", WELL) + everything("b", {**WELL, "store_up": "1x10 0x590"})
#: What a short trouble leaves: renewals and calls to acquire have failed once, and a scrape or two.
BLIP = {
    "renewal_failures_total": "0x60 12x540",
    "store_errors_total": "0x60 90x540",
    "scrape_errors_total": "0x60 3x540",
    "expired_total": "0x60 4x540",
}
#: In hour 1, each exporter starts anew: one under its address, the other under a new one. A worker is killed with four locks.
DEPLOY = [
    *everything("a", {**WELL, **BLIP, "up": "1x60 0x5 1x535", "build_info": "1x60 stale _x4 1x535"}),
    *everything("b", {**WELL, **BLIP}, end=63),
    *everything("c", {**WELL, **BLIP}, begin=63),
]
#: In hour 1, the store is away for a moment and comes back without data; its tasks are known again a minute later.
RESTART = everything(
    "a",
    {
        **WELL,
        "store_up": "1x59 0 1x540",
        "store_writable": "1x59 0 1x540",
        "store_start_timestamp_seconds": "0x60 3600x540",
        "scrape_errors_total": "0x59 1x541",
        "last_success_timestamp_seconds": "0+60x59 _ _ 0x10 4300+60x530",
        "renewal_failures_total": "40x59 _ _ 0x5 12x535",
        "store_errors_total": "40x59 _ _ 0x5 90x535",
        "lost_total": "40x59 _ _ 0x540",
        "expired_total": "40x59 _ _ 0x540",
        "starts_refused_total": "40x59 _ _ 0x540",
        "store_evicted_keys_total": "40x59 _ 0x541",
        "blocked_duplicates": "100x59 _ _ 3x540",
        "oldest_lease_start_timestamp_seconds": "0x59 _ _ 0x540",
    },
)


@pytest.fixture(scope="module")
def promtool() -> str:
    """Return the program. Not installed: skipped locally, an error in CI."""
    found = shutil.which("promtool")
    if not found and required("CI"):
        pytest.fail("promtool is not installed")
    return found or pytest.skip("promtool is not installed")


def run_promtool(promtool: str, directory: Path, input_series: Sequence[Series], at: Mapping[int, Any]) -> None:
    """Check which alerts fire in these minutes: for each, the labels and the description, or nothing."""
    tests = []
    for minute, expected in at.items():
        for name, rule in RULES.items():
            texts = {"summary": rule["summary"], "runbook_url": rule["runbook_url"]}
            fires = [
                {
                    "exp_labels": {"severity": rule["severity"], **labels},
                    "exp_annotations": {**texts, "description": description},
                }
                for labels, description in expected.get(name, ())
            ]
            tests.append({"eval_time": f"{minute}m", "alertname": name, "exp_alerts": fires})
    test = {"interval": "1m", "input_series": [*input_series], "alert_rule_test": tests}
    text = {"rule_files": [str(MONITORING / "alerts.yaml")], "evaluation_interval": "1m", "tests": [test]}
    (directory / "test.json").write_text(json.dumps(text))
    done = subprocess.run(
        [promtool, "test", "rules", "test.json"], cwd=directory, capture_output=True, text=True, timeout=120
    )
    assert 0 == done.returncode, done.stdout + done.stderr


def test_rules_are_valid(promtool: str) -> None:
    """promtool has no complaint."""
    done = subprocess.run([promtool, "check", "rules", "alerts.yaml"], cwd=MONITORING, capture_output=True, text=True)
    assert (0, True) == (done.returncode, f"SUCCESS: {len(RULES) + 2} rules found" in done.stdout + done.stderr)


def test_all_alerts_have_a_case() -> None:
    """No alert is missing in the tests below."""
    assert {*RULES} == {f"CelerySingleton{case.alert}" for case in CASES}


@pytest.mark.parametrize("case", CASES, ids=[f"{case.alert}-{number}" for number, case in enumerate(CASES)])
def test_fires_and_resolves(promtool: str, tmp_path: Path, case: Case) -> None:
    """The alert fires once, for the store or the task, with what it says, and resolves; no other alert fires."""
    expected = {f"CelerySingleton{case.alert}": [({**STORE, **case.labels}, case.description)]}
    run_promtool(promtool, tmp_path, [*ALIVE, *case.input_series], {0: {}, case.fires: expected, case.ends: {}})


@pytest.mark.parametrize("situation", [QUIET, DEPLOY, RESTART], ids=["quiet", "deploy", "restart"])
def test_silent(promtool: str, tmp_path: Path, situation: Sequence[Series]) -> None:
    """Nothing fires while all is well, in a rolling deploy of workers and exporters, and after a restart without data."""
    run_promtool(promtool, tmp_path, situation, {minute: {} for minute in (*range(0, 200, 4), 599)})


def test_nobody_is_there(promtool: str, tmp_path: Path) -> None:
    """Where there never was an exporter, that is told, too."""
    expected = {"CelerySingletonExporterMissing": [({}, "Without an exporter none of these alerts fires.")]}
    run_promtool(promtool, tmp_path, [], {10: {}, 20: expected})
