"""`celery singleton exporter`, with a real store and a real worker: what Prometheus reads of it, and the files for monitoring.

The exporter's app knows no task. Debian's package `prometheus` has promtool and the server.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest
import redis
from celery import Celery
from prometheus_client.parser import text_string_to_metric_families
from pytest_celery import CeleryBackendCluster, CeleryBrokerCluster, CeleryTestSetup, CeleryWorkerCluster

from celery_singleton_lock import locks
from celery_singleton_lock.policies import KINDS
from celery_singleton_lock.store.protocol import AcquireStatus
from celery_singleton_lock.store.records import LOSSES, OUTCOMES, STATES, VERBS
from celery_singleton_lock.store.redis import RedisStore, connector
from celery_singleton_lock.store.requests import LeaseSpec
from tests.integration.environment import SOON, WorkerEnvironment
from tests.integration.nodes import WorkerSpec
from tests.integration.recorder import Recorder
from tests.servers import (
    Process,
    RedisServer,
    free_port,
    is_listening,
    new_directory,
    remove_directory,
    required,
    until,
)
from tests.store_login import login

#: Seconds in which a program starts and ends.
LATE = 100
ROOT = Path(__file__).resolve().parents[2]
MONITORING = ROOT / "docs" / "monitoring"
PAGE = (ROOT / "docs" / "operate" / "monitoring.md").read_text(encoding="utf-8")
DASHBOARD = json.loads((MONITORING / "dashboard.json").read_text(encoding="utf-8"))
EXPRESSIONS = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
ALERTS = (MONITORING / "alerts.yaml").read_text(encoding="utf-8")
LABELS = {
    "outcome": {*OUTCOMES},
    "policy": {*KINDS.values(), "callable", "custom"},
    "reason": {*LOSSES},
    "verb": {*VERBS},
    "state": {*STATES},
}
#: Fields of the statistics that are no counters in Prometheus.
TIMES = {"hold", "hold_ms", "wait", "wait_ms", "last_start", "last_success"}
APP = (
    'from celery import Celery\napp = Celery("bare", broker="memory://", changes={{"singleton_lock_url": {store!r}}})\n'
)


class Output:
    """What an exporter answered."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.families = {family.name: family for family in text_string_to_metric_families(text)}
        self.samples = [sample for family in self.families.values() for sample in family.samples]

    def value(self, name: str, task: str = "", **labels: str) -> float:
        """Return the value of a sample, given its name without the prefix."""
        spec = {**({"task": f"job.{task}"} if task else {}), **labels}
        (value,) = (one.value for one in self.samples if one.name == f"celery_singleton_{name}" and one.labels == spec)
        return float(value)

    def sum(self, name: str, task: str) -> float:
        """Return the sum over the values of all other labels; `task` is the whole name."""
        found = [one.value for one in self.samples if one.name == f"celery_singleton_{name}"]
        assert found, name
        return float(
            sum(
                one.value
                for one in self.samples
                if (one.name, one.labels.get("task")) == (f"celery_singleton_{name}", task)
            )
        )


@contextmanager
def exporter(store: str, listen: str = "127.0.0.1:0") -> Iterator[tuple[Process, str]]:
    """Run an exporter on a free port until the end; yield it and its URL."""
    directory = new_directory("exporter")
    (directory / "bare.py").write_text(APP.format(store=store))
    command = [sys.executable, "-m", "celery", "-A", "bare", "singleton", "exporter", "--listen", listen]
    process = Process(command, directory / "log", environment(directory))
    process.start()
    try:
        said = until(lambda: "listens on " in process.output() or not process.running, "it listens")
        assert said and process.running, process.output()
        yield process, process.output().split("listens on ")[1].split()[0]
    finally:
        process.kill()
        remove_directory(directory)


def environment(directory: Path, **variables: str) -> dict[str, str]:
    paths = [str(directory), *filter(None, sys.path)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1", **variables}


def scrape(url: str) -> Output:
    with urlopen(url, timeout=SOON) as answer:
        assert 200 == answer.status
        return Output(answer.read().decode())


@pytest.fixture(scope="module")
def promtool() -> str:
    """Return the program. Not installed: skipped locally, an error in CI."""
    found = shutil.which("promtool")
    if not found and required("CI"):
        pytest.fail("promtool is not installed")
    return found or pytest.skip("promtool is not installed")


def run(*command: str, text: str = "") -> str:
    """Run a program that must succeed, and return what it printed."""
    done = subprocess.run(command, input=text, cwd=MONITORING, capture_output=True, text=True, timeout=LATE)
    assert 0 == done.returncode, done.stdout + done.stderr
    return done.stdout + done.stderr


# -- the work --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def worker_specs() -> Sequence[WorkerSpec]:
    return [WorkerSpec("threads")]


@pytest.fixture(scope="module")
def extra_conf(own_store: RedisServer) -> dict[str, Any]:
    return {"singleton_lock_url": own_store.url()}


@pytest.fixture(scope="module")
def worked(
    celery_worker_cluster: CeleryWorkerCluster,
    celery_broker_cluster: CeleryBrokerCluster,
    celery_backend_cluster: CeleryBackendCluster,
    celery_setup_app: Celery,
    own_store: RedisServer,
    recorder: Recorder,
) -> Iterator[tuple[str, Output, Output, WorkerEnvironment]]:
    """Yield the URL of an exporter, its answers before and after some work, and the environment of that work."""
    app = celery_setup_app
    app.set_current()
    setup = CeleryTestSetup(celery_worker_cluster, celery_broker_cluster, celery_backend_cluster, app)
    env = WorkerEnvironment(setup, recorder, secrets.token_hex(6))
    with exporter(own_store.url()) as (_, url):
        until(lambda: locks.tasks(app), "the worker has told its tasks")
        before = scrape(url)
        work(env, own_store)
        yield url, before, scrape(url), env
    env.let_all_go()


def work(env: WorkerEnvironment, store: RedisServer) -> None:
    """Run, skip, fail, retry, wait, refuse, lose and expire; one lease is held in the end."""
    for _ in range(3):
        env.get(env.job("skip_value").delay(env.tag))
    env.error(env.job("raising").delay(env.tag, "raise"))
    env.get(env.job("stingy").delay(env.other_tag("own"), ["retry", "return"]))
    for number in range(3):
        env.error(env.job("tried").delay(env.other_tag(f"tried-{number // 3}"), "raise"))
    wait_for_lock(env)
    lose(env)
    expire(env, store)
    held = env.other_tag("held")
    env.hold("long", held)
    for _ in range(2):
        env.get(env.job("long").delay(held))


def wait_for_lock(env: WorkerEnvironment) -> None:
    tag = env.other_tag("waits")
    held = env.hold("retry", tag)
    waits = env.job("retry").delay(tag)
    env.wait_for_state(waits, "RETRY")
    env.let_go(tag)
    env.get(held)
    env.get(waits)


def lose(env: WorkerEnvironment) -> None:
    """Revoke a lock while its body runs. Its process reports that some seconds later."""
    tag = env.other_tag("lost")
    held, key = env.hold("skip_short", tag, lock_options={"lock_ttl": 9}), env.key("skip_short", tag)
    assert locks.release(env.app, key, force=True).released
    until(lambda: env.lock_signals(key, "lock_lost"), "the holder is told")
    env.let_go(tag)
    env.get(held)
    until(lambda: locks.stats(env.app, "job.skip_short")[0].sum("lost"), "the loss is reported")


def expire(env: WorkerEnvironment, store: RedisServer) -> None:
    """Acquire a lock as a body does whose worker vanishes."""
    base, _, digest = env.key("told").rpartition(":lock:")
    spec = LeaseSpec(base, digest, secrets.token_hex(16), 0.05, "vanished", "gone@local", 4711)
    granted = RedisStore(connector(store.url(), {}), history=100).acquire(spec)
    assert AcquireStatus.GRANTED is granted.status
    until(lambda: locks.stats(env.app, "job.told")[0].counters.get("expired"), "it expires")


# -- the numbers -----------------------------------------------------------------------------------


def test_zero_from_the_start(worked: Any) -> None:
    """As soon as a worker has told its tasks, each of them has all series, at zero."""
    _, before, after, env = worked
    ours = [one for one in before.samples if "task" in one.labels]
    assert {one.labels["task"] for one in ours} == {*locks.tasks(env.app)}
    assert {0.0} == {one.value for one in ours}
    assert {(one.name, *sorted(one.labels.items())) for one in ours} == {
        (one.name, *sorted(one.labels.items())) for one in after.samples if "task" in one.labels
    }


def test_numbers(worked: Any) -> None:
    """The counters agree with what ran."""
    value = worked[2].value
    assert (3, 3) == (value("acquired_total", "skip_value"), value("released_total", "skip_value", outcome="success"))
    assert (1, 1) == (value("acquired_total", "raising"), value("released_total", "raising", outcome="failure"))
    assert (1, 1) == tuple(value("released_total", "stingy", outcome=one) for one in ("retry", "success"))
    assert (2, 1) == (value("released_total", "tried", outcome="failure"), value("starts_refused_total", "tried"))
    assert (1, 2) == (value("duplicates_total", "retry", policy="retry"), value("acquired_total", "retry"))
    assert (2, 0) == (
        value("duplicates_total", "long", policy="skip"),
        value("duplicates_total", "long", policy="wait"),
    )
    assert (1, 1) == (
        value("lost_total", "skip_short", reason="released_by_operator"),
        value("released_by_operator_total", "skip_short"),
    )
    assert (1, 1) == (value("acquired_total", "told"), value("expired_total", "told"))


def test_present(worked: Any) -> None:
    """The gauges tell of the lease that exists now, in seconds since 1970, and of the server."""
    value = worked[2].value
    assert {"running": 1, "queued": 0, "cooldown": 0, "paused": 0} == {
        one: value("leases", "long", state=one) for one in STATES
    }
    assert 2 == value("blocked_duplicates", "long")
    assert time.time() - 600 < value("oldest_lease_start_timestamp_seconds", "long") <= time.time()
    assert (0, 0) == tuple(value("oldest_lease_start_timestamp_seconds", one) for one in ("skip", "skip_value"))
    assert time.time() - 600 < value("last_success_timestamp_seconds", "skip_value") <= time.time()
    assert (0, True) == (
        value("last_success_timestamp_seconds", "raising"),
        value("last_start_timestamp_seconds", "raising") > 0,
    )
    assert 1 == value("store_up")
    assert time.time() - 600 < value("store_start_timestamp_seconds") <= time.time() + 1
    assert (0, 0) == tuple(value(f"store_{one}") for one in ("memory_max_bytes", "evicted_keys_total"))
    assert 0 == value("scrape_errors_total")
    assert min(value(f"store_{one}") for one in ("memory_used_bytes", "cpu_seconds_total", "connected_clients")) > 0


def test_histograms(worked: Any) -> None:
    """Buckets are cumulative; sums are in seconds, as in the history of runs."""
    _, _, after, env = worked
    value = after.value
    runs = locks.history(env.app, "job.skip_value")
    assert 3 == value("hold_seconds_count", "skip_value") == value("hold_seconds_bucket", "skip_value", le="+Inf")
    assert sum(run.duration for run in runs) == pytest.approx(value("hold_seconds_sum", "skip_value"), abs=0.002)
    assert 1 == value("wait_seconds_count", "retry")
    assert 0.1 < value("wait_seconds_sum", "retry") < 200
    for family in ("hold_seconds", "wait_seconds"):
        samples = after.families[f"celery_singleton_{family}"].samples
        buckets = [one.value for one in samples if one.labels["task"] == "job.retry" and "le" in one.labels]
        assert 10 == len(buckets)
        assert buckets == sorted(buckets)


def test_sum(worked: Any) -> None:
    """For each task, acquired + reacquired = released + expired + released_by_operator + what is held now."""
    _, _, after, env = worked
    for task in locks.tasks(env.app):
        gained, ended = (
            sum(after.sum(f"{name}_total", task) for name in names)
            for names in (("acquired", "reacquired"), ("released", "expired", "released_by_operator"))
        )
        assert gained == ended + after.sum("leases", task), task


def test_nothing_is_left_out(worked: Any) -> None:
    """All that the store counts is in the output, under a known label."""
    _, _, after, env = worked
    for one in locks.stats(env.app):
        names = {field.partition(":")[0] for field in one.counters} - TIMES
        assert {name: one.sum(name) for name in names} == {name: after.sum(f"{name}_total", one.task) for name in names}


def test_labels_are_bounded(worked: Any) -> None:
    """There is no label but `task` and those with a few known values, so the series per task are as many for each task."""
    samples = [one for one in worked[2].samples if "task" in one.labels]
    for one in samples:
        for label, text in one.labels.items():
            assert label in ("task", "le") or text in LABELS[label], one
    assert [64] == [*set(Counter(one.labels["task"] for one in samples).values())]
    assert "vanished" not in worked[2].text and "@local" not in worked[2].text


# -- the exporter ------------------------------------------------------------------------------------


@pytest.mark.timed
def test_store_away() -> None:
    """While the store is away or hangs, a scrape answers within two seconds, says so and counts it; afterwards all is well."""
    with RedisServer() as server, exporter(server.url()) as (process, url):
        assert (1, 0) == ((up := scrape(url)).value("store_up"), up.value("scrape_errors_total"))
        server.pause()
        begin = time.monotonic()
        assert (0, 1) == ((hangs := scrape(url)).value("store_up"), hangs.value("scrape_errors_total"))
        assert time.monotonic() - begin < 2
        assert hangs.value("scrape_duration_seconds") > 0.5
        server.resume()
        until(lambda: scrape(url).value("store_up"), "it is back")
        server.stop()
        gone = scrape(url)
        assert 0 == gone.value("store_up") < gone.value("scrape_errors_total")
        assert [] == [one.name for one in gone.samples if "task" in one.labels or "_store_memory" in one.name]
        assert "the store of locks: " in process.output()
        server.start()
        assert 1 == scrape(url).value("store_up")


def test_store_away_at_the_start() -> None:
    """It starts without the store."""
    with exporter(f"redis://127.0.0.1:{free_port()}/0") as (_, url):
        assert 0 == scrape(url).value("store_up")


def test_login() -> None:
    """The documented login suffices. If it lacks `info`, the metrics of tasks are there, and those of the server are not."""
    with RedisServer() as server, redis.Redis.from_url(server.url()) as client:
        client.execute_command(*login("secret"))
        client.hset("singleton:tasks", "shop.tasks.sync", "shop.tasks.sync")
        with exporter(server.url().replace("//", "//locks:secret@")) as (_, url):
            allowed = scrape(url)
            client.execute_command("ACL", "SETUSER", "locks", "-info")
            refused = scrape(url)
    assert (1, 0) == (allowed.value("store_up"), allowed.value("scrape_errors_total"))
    assert (1, 0) == (refused.value("store_up"), refused.value("scrape_errors_total"))
    assert allowed.value("store_connected_clients") > 0 == refused.sum("acquired_total", "shop.tasks.sync")
    assert "store_connected_clients" not in refused.text


def test_health() -> None:
    """The health path answers while the store hangs, and counts no scrape: an orchestrator restarts no exporter for it."""
    with RedisServer() as server, exporter(server.url()) as (process, url):
        health = url.replace("/metrics", "/health")
        server.pause()
        for _ in range(3):
            with urlopen(health, timeout=10) as answer:
                assert (200, b"ok\n") == (answer.status, answer.read())
        server.resume()
        assert 0 == scrape(url).value("scrape_errors_total")
        assert f"listens on {url}\n" == process.output()


def test_log_lines() -> None:
    """What it logs has a time and a level."""
    with RedisServer() as server, exporter(server.url()) as (process, url):
        server.stop()
        scrape(url)
        until(lambda: "the store of locks: " in process.output(), "it logs")
        line = process.output().splitlines()[1]
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} WARNING the store of locks: ", line), line


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
@pytest.mark.parametrize("host", ["", "[::]", "0.0.0.0", "[::1]"])
def test_interfaces(own_store: RedisServer, host: str) -> None:
    """Without a host it listens on all interfaces, those of IPv6 included; else on the address that is given."""
    port = free_port()  # nobody else's on any of the addresses
    with exporter(own_store.url(), f"{host}:{port}"):
        reached = [one for one in ("127.0.0.1", "[::1]") if answers(f"http://{one}:{port}/health")]
    assert {"0.0.0.0": ["127.0.0.1"], "[::1]": ["[::1]"]}.get(host, ["127.0.0.1", "[::1]"]) == reached


def answers(url: str) -> bool:
    try:
        with urlopen(url, timeout=10) as answer:
            return bool(200 == answer.status)
    except URLError:
        return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_end(own_store: RedisServer, number: int) -> None:
    """It says in one line where it listens, and ends with 0 at SIGTERM and Ctrl-C."""
    with exporter(own_store.url()) as (process, url):
        assert f"listens on {url}\n" == process.output()
        process.signal(number)
        assert 0 == process.wait(SOON)
        assert f"listens on {url}\n" == process.output()
        assert not is_listening(int(url.split(":")[2].split("/")[0]))


def exporter_that_fails(directory: Path, store: str | None, *words: str, app: str = "", **variables: str) -> Any:
    (directory / "bare.py").write_text(APP.format(store=store) + app)
    command = [sys.executable, "-m", "celery", "-A", "bare", "singleton", "exporter", *words]
    env = environment(directory, **variables)
    return subprocess.run(command, env=env, cwd=directory, capture_output=True, text=True, timeout=LATE)


def test_errors_are_one_line(own_store: RedisServer, tmp_path: Path) -> None:
    """What keeps it from starting is told in one line: the extra, the store or the address."""
    url, taken = own_store.url(), f"127.0.0.1:{own_store.port}"
    wrong_login = url.replace("//", "//nobody:pa55word@")
    without = "import sys; sys.modules['prometheus_client'] = None\n"
    for done, code, said in [
        (exporter_that_fails(tmp_path, url, app=without), 1, 'install the extra: "celery_singleton_lock[prometheus]"'),
        (exporter_that_fails(tmp_path, None), 3, "Error: no store for locks: "),
        (exporter_that_fails(tmp_path, wrong_login), 3, "the store refused the login, wrong or missing password"),
        (exporter_that_fails(tmp_path, "memory://"), 3, "memory://"),
        (
            exporter_that_fails(tmp_path, url, app="app.conf.singleton_lock_stats = False\n"),
            3,
            "no records of locks are kept",
        ),
        (exporter_that_fails(tmp_path, url, "--listen", taken), 1, f"Error: cannot listen on {taken}: "),
    ]:
        assert (code, "") == (done.returncode, done.stdout)
        assert said in done.stderr
        assert 1 == len(done.stderr.splitlines()), done.stderr
    for wrong in ("9809", "127.0.0.1:metrics", "127.0.0.1:99999"):
        done = exporter_that_fails(tmp_path, url, "--listen", wrong)
        assert (2, True) == (done.returncode, f"'{wrong}' is not HOST:PORT" in done.stderr)


def test_environment_is_no_option(own_store: RedisServer, tmp_path: Path) -> None:
    """The variables that Kubernetes sets for a service of that name are not read."""
    variables = {f"CELERY_SINGLETON_EXPORTER_{name}": "tcp://metrics" for name in ("LISTEN", "PORT", "HOST")}
    taken = f"127.0.0.1:{own_store.port}"
    done = exporter_that_fails(tmp_path, own_store.url(), "--listen", taken, **variables)
    assert f"cannot listen on {taken}" in done.stderr
    done = exporter_that_fails(tmp_path, None, **variables)
    assert done.stderr.startswith("Error: no store for locks: ")


# -- the files for monitoring ------------------------------------------------------------------------


def metrics_in(text: str) -> set[str]:
    """Return the names of metrics in expressions; those of recording rules have a colon."""
    return set(re.findall(r"\bcelery_singleton_\w+", text))


def test_names(worked: Any) -> None:
    """Each metric of the dashboard and of the alerts is one of the exporter, and each label one of its or of a scrape."""
    names = {one.name for one in worked[2].samples}
    assert metrics_in("\n".join(EXPRESSIONS)) <= names
    assert 20 < len(metrics_in("\n".join(EXPRESSIONS)))
    expressions = re.sub(r"^ *(#|- alert|summary|description).*$", "", ALERTS, flags=re.MULTILINE)
    assert metrics_in(expressions) <= names
    found = ", ".join(re.findall(r"by \(([\w, ]+)\)", "\n".join([*EXPRESSIONS, ALERTS])))
    assert {*found.split(", ")} <= {"cluster", "namespace", "job", "instance", "task", "le", *LABELS}


def test_metrics_are_well_named(worked: Any, promtool: str) -> None:
    """`promtool check metrics` has no complaint."""
    assert "" == run(promtool, "check", "metrics", text=worked[2].text)
    with pytest.raises(AssertionError, match="counter metrics should have"):
        run(promtool, "check", "metrics", text=worked[2].text.replace("expired_total", "expired"))


def test_alerts() -> None:
    """Each alert has a severity, texts and a link to an existing section, and is explained in the documents."""
    alerts = re.split(r"^ *- alert: ", ALERTS, flags=re.MULTILINE)[1:]
    names = [alert.split()[0] for alert in alerts]
    assert 17 == len(names) == len({*names})
    for name, alert in zip(names, alerts, strict=True):
        assert re.fullmatch(r"CelerySingleton([A-Z][a-z]+)+", name)
        assert re.search(r"^ *severity: (critical|warning|info)$", alert, re.MULTILINE)
        assert all(f" {word}: " in alert for word in ("summary", "description", "runbook_url"))
        (page, heading) = re.findall(r"runbook_url: (\S+)#(\S+)", alert)[0]
        headings = re.findall(r"^##+ (.+)$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
        assert heading in [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in headings]
        assert re.search(
            rf"^\| `{name}` \|.*{page.removeprefix('docs/operate/monitoring.md').removeprefix('docs/operate/')}#{heading}",
            PAGE,
            re.MULTILINE,
        )


def test_dashboard() -> None:
    """Data source and job are variables; two exporters of a store count once, and two stores with a task of one name twice."""
    variables = {one["name"]: one for one in DASHBOARD["templating"]["list"]}
    assert ["datasource", "job", "task"] == [*variables]
    assert {"${datasource}"} == {
        one["datasource"]["uid"] for panel in DASHBOARD["panels"] for one in (panel, *panel["targets"])
    }
    assert [] == [one for one in EXPRESSIONS if 'job=~"$job"' not in one]
    assert [] == [one for one in EXPRESSIONS if "$task" in one and "max by (cluster, namespace, job, task" not in one]
    assert [] == [
        one
        for one in EXPRESSIONS
        if re.search(r"rate\(|increase\(", one) and not re.search(r"\[(\$__rate_interval|1h)\]", one)
    ]
    places = [
        (p["gridPos"]["x"] + x, p["gridPos"]["y"] + y)
        for p in DASHBOARD["panels"]
        for x in range(p["gridPos"]["w"])
        for y in range(p["gridPos"]["h"])
    ]
    assert len(places) == len({*places}), "panels overlap"
    assert max(x for x, _ in places) < 24


def test_rendered(worked: Any, promtool: str, tmp_path: Path) -> None:
    """A Prometheus that scrapes the exporter answers all queries of the dashboard; `render.py` draws each panel."""
    program = shutil.which("prometheus") or pytest.skip("no prometheus")
    url, *_, env = worked
    env.hold("long", env.other_tag("held on"))  # on a busy machine, the body that holds another lock may be over
    target, port = url.split("/")[2], free_port()
    jobs = f'scrape_configs: [{{job_name: locks, static_configs: [{{targets: ["{target}"]}}]}}]'
    (tmp_path / "prometheus.yml").write_text(f"global: {{scrape_interval: 1s}}\n{jobs}\n")
    command = [program, f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"]
    server = Process([*command, f"--web.listen-address=127.0.0.1:{port}"], tmp_path / "log")
    server.start()
    try:
        until(lambda: found(port, "count_over_time(celery_singleton_store_up[1m]) > 3"), "some scrapes", every=0.2)
        empty = [
            one
            for one in EXPRESSIONS
            if not found(port, filled(one)) and not one.endswith("> 0") and "quantile" not in one
        ]
        assert [] == [one for one in empty if "memory_max" not in one]
        page = run(sys.executable, "render.py", f"http://127.0.0.1:{port}", "--minutes", "0.5")
    finally:
        server.kill()
    assert [panel["title"] for panel in DASHBOARD["panels"]] == re.findall(r"<h2>(.*?)</h2>", page)
    assert page.count("<svg") == sum(panel["type"] == "timeseries" for panel in DASHBOARD["panels"])
    assert {"up", "success", "running", "job.long (locks)", "CPU (locks)"} <= set(re.findall(r">([\w.() ]+)</", page))


def found(port: int, query: str) -> Any:
    """Return the answer of a Prometheus, and an empty one while it starts."""
    try:
        with urlopen(f"http://127.0.0.1:{port}/api/v1/query?{urlencode({'query': query})}") as answer:
            return json.load(answer)["data"]["result"]
    except URLError:
        return []


def filled(expression: str) -> str:
    return expression.replace("$job", ".+").replace("$task", ".*").replace("$__rate_interval", "10s")


# -- the page ----------------------------------------------------------------------------------------


def test_page(worked: Any) -> None:
    """The table of metrics is that of the exporter: name, type, labels and meaning."""
    rows = []
    for family in worked[2].families.values():
        labels = sorted(
            {*{label for one in family.samples for label in one.labels}} - {"le"}, key=lambda one: (one != "task", one)
        )
        name = family.name + {"counter": "_total"}.get(family.type, "")
        rows.append(f"| `{name}` | {family.type} | {', '.join(labels)} | {family.documentation} |")
    section = (ROOT / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
    assert "\n".join(rows) == "\n".join(re.findall(r"^\| `celery_.*$", section, re.MULTILINE))


@pytest.mark.parametrize("name", ["dashboard.png", "flower.png"])
def test_pictures(name: str) -> None:
    """The pictures are small, and the page shows them."""
    assert 300_000 > (ROOT / "docs" / "images" / name).stat().st_size > 10_000
    assert f"](../images/{name})" in PAGE
