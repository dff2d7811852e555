"""What each error that a server can answer counts as: an outage, or a refusal. docs/operate/store-login.md has the list."""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from redis import Redis
from redis.exceptions import RedisError

from celery_singleton_lock import StoreError, StoreUnavailable
from celery_singleton_lock.context import context_of
from celery_singleton_lock.store.access import Access
from celery_singleton_lock.store.protocol import AcquireStatus
from celery_singleton_lock.store.redis import RedisStore, connector
from celery_singleton_lock.store.requests import LeaseSpec
from tests.servers import RedisServer, free_port, until

MakeRequest = Callable[..., LeaseSpec]
PAGE = Path(__file__).parents[2] / "docs" / "operate" / "store-login.md"


class Case:
    """A server that can be brought to refuse, and a store on it."""

    def __init__(self, *options: str) -> None:
        self.server = RedisServer(*options).start()
        self.admin: Any = Redis.from_url(self.server.url(), decode_responses=True)
        self.refusals: list[StoreError] = []
        self.store = self.new_store()

    def new_store(self, url: str = "") -> RedisStore:
        """Return a store of a new process."""
        minutes = count(step=60)  # each refusal is a minute after the one before
        access = Access(self.refusals.append, minutes.__next__)
        return RedisStore(connector(url or self.server.url(), {}), 5.0, access=access)

    def close(self) -> None:
        self.store.close()
        self.admin.close()
        self.server.close()


def read_only(case: Case) -> None:
    case.admin.replicaof("127.0.0.1", "1")


def stale_replica(case: Case) -> None:
    case.admin.config_set("replica-serve-stale-data", "no")
    case.admin.replicaof("127.0.0.1", "1")


def full(case: Case) -> None:
    case.admin.config_set("maxmemory", 1)


def too_few_replicas(case: Case) -> None:
    case.admin.config_set("min-replicas-to-write", 1)


def cannot_save(case: Case) -> None:
    case.admin.config_set("save", "900 1")
    shutil.rmtree(case.server.directory)
    with suppress(RedisError):
        case.admin.bgsave()
    until(lambda: case.admin.info("persistence")["rdb_last_bgsave_status"] == "err", "the save has failed")


def busy(case: Case) -> None:
    """Run a script that is to end; one that has written can only be killed with its server: UNKILLABLE."""
    case.admin.config_set("lua-time-limit", 1)
    script = "redis.call('SET', KEYS[1], '1') while true do end"
    runner = Redis.from_url(case.server.url())

    def run() -> None:
        with suppress(RedisError, ValueError):  # redis-py reads from a closed connection
            runner.eval(script, 1, "k")

    threading.Thread(target=run, daemon=True).start()

    def is_unkillable() -> bool:
        with suppress(RedisError):
            case.admin.script_kill()
        try:
            case.admin.script_kill()
        except RedisError as error:
            return "UNKILLABLE" in str(error)
        return False

    until(is_unkillable, "the script runs")


def too_many_clients(case: Case) -> None:
    case.store.close()
    case.admin.config_set("maxclients", 1)


def loading(case: Case) -> None:
    """Restart the server with data that it takes long to load."""
    case.admin.eval("for i = 1, 5000 do redis.call('SET', 'k' .. i, i) end return 1", 0)
    case.admin.save()
    case.server.stop()
    case.admin.close()
    options = [
        "--dbfilename",
        "dump.rdb",
        "--key-load-delay",
        "2000",
        "--loading-process-events-interval-bytes",
        "1024",
    ]
    server = case.server
    process = server._process
    assert process is not None
    process.command += options
    process.start()

    def loads() -> bool:
        try:
            case.admin.get("k")
        except RedisError as error:
            return type(error).__name__ == "BusyLoadingError" or "LOADING" in str(error)
        return False

    until(loads, "it loads")


def node_without_slots(case: Case) -> None:
    """It is one already: `--cluster-enabled`."""


OUTAGES = {
    "READONLY": ((), read_only),
    "MASTERDOWN": ((), stale_replica),
    "OOM": ((), full),
    "NOREPLICAS": ((), too_few_replicas),
    "MISCONF": ((), cannot_save),
    "BUSY": ((), busy),
    "max number of clients": ((), too_many_clients),
    "LOADING": ((), loading),
    "CLUSTERDOWN": (("--cluster-enabled", "yes"), node_without_slots),
}


@pytest.fixture
def make_case() -> Iterator[Callable[..., Case]]:
    made: list[Case] = []

    def make(*options: str) -> Case:
        made.append(Case(*options))
        return made[-1]

    yield make
    for case in made:
        case.close()


@pytest.mark.parametrize("code", OUTAGES)
def test_outages(make_case: Callable[..., Case], lease_request: MakeRequest, code: str) -> None:
    """What a server cannot do now is an outage, whether it has ever served this process or not."""
    options, bring_about = OUTAGES[code]
    case = make_case(*options)
    if not options:
        case.store.acquire(lease_request("before"))
    bring_about(case)
    for store in (case.store, case.new_store()):
        with pytest.raises(StoreUnavailable, match=code):
            store.acquire(lease_request())
        store.close()
    assert [] == case.refusals


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("READONLY", "is a replica, which takes no writes: the URL is that of a replica"),
        ("NOREPLICAS", "has fewer replicas than its min-replicas-to-write"),
        ("CLUSTERDOWN", "is a node of a Redis Cluster that does not serve all keys"),
    ],
)
def test_words(make_case: Callable[..., Case], code: str, words: str) -> None:
    """What a worker's check at its start meets is said in words."""
    options, bring_about = OUTAGES[code]
    case = make_case(*options)
    bring_about(case)
    with pytest.raises(StoreUnavailable, match=words):
        case.store.check("b")


def test_another_connection_without_replicas(make_case: Callable[..., Case], lease_request: MakeRequest) -> None:
    """A server without its replicas may not be the primary any more: the next call connects anew."""
    case = make_case()
    case.store.acquire(lease_request())
    before = case.store.command("CLIENT", "ID")
    too_few_replicas(case)
    with pytest.raises(StoreUnavailable):
        case.store.acquire(lease_request("new"))
    assert before != case.store.command("CLIENT", "ID")


# -- refusals ------------------------------------------------------------------------------------


def wrong_password(case: Case) -> None:
    case.admin.execute_command("ACL", "SETUSER", "locks", "resetpass", ">other")
    case.admin.client_kill_filter(skipme=True, user="locks")


def unknown_user(case: Case) -> None:
    case.admin.execute_command("ACL", "DELUSER", "locks")


def no_scripts(case: Case) -> None:
    case.admin.execute_command("ACL", "SETUSER", "locks", "-@scripting")


def no_writes(case: Case) -> None:
    case.admin.execute_command("ACL", "SETUSER", "locks", "-hset")


def other_keys(case: Case) -> None:
    case.admin.execute_command("ACL", "SETUSER", "locks", "resetkeys", "~other:*")


REFUSALS = {
    "WRONGPASS": wrong_password,
    "deleted user": unknown_user,
    "NOPERM command": no_scripts,
    "NOPERM in a script": no_writes,
    "NOPERM key": other_keys,
}
GRANT = ("ACL", "SETUSER", "locks", "reset", "on", ">right", "~*", "&*", "+@all")


@pytest.mark.parametrize("what", REFUSALS)
def test_refusals(make_case: Callable[..., Case], lease_request: MakeRequest, what: str) -> None:
    """A login or permission that was never accepted is refused for good; one that was is away until it is accepted again."""
    case = make_case()
    case.admin.execute_command(*GRANT)
    url = case.server.url().replace("//", "//locks:right@")
    one, store = lease_request(), case.new_store(url)
    store.acquire(one)
    REFUSALS[what](case)
    for spec in (lease_request("other"), lease_request("third")):
        with pytest.raises(StoreUnavailable, match=r"the store refused.*\(before, it was accepted\)"):
            store.acquire(spec)
    if what != "NOPERM in a script":  # these two write with other commands
        with pytest.raises(StoreUnavailable):
            store.renew([one])
        with pytest.raises(StoreUnavailable):
            store.release(one, success=True)
    assert 1 == len(case.refusals), "it is told once"
    new = case.new_store(url)
    with pytest.raises(StoreError) as refused:
        new.acquire(lease_request("new"))
    assert type(refused.value) is StoreError
    case.admin.execute_command(*GRANT)
    assert store.acquire(lease_request("fourth")).status is AcquireStatus.GRANTED
    REFUSALS[what](case)
    with pytest.raises(StoreUnavailable):
        store.acquire(lease_request("fifth"))
    assert 2 == len(case.refusals), "a second time is told again"
    store.close()
    new.close()


def test_command_that_the_login_never_had(make_case: Callable[..., Case], lease_request: MakeRequest) -> None:
    """A login that works, but may not use INFO, is refused that alone: it is no outage."""
    case = make_case()
    case.admin.execute_command(*GRANT, "-info")
    store = case.new_store(case.server.url().replace("//", "//locks:right@"))
    store.acquire(lease_request())
    with pytest.raises(StoreError) as refused:
        store.eviction_policy()
    assert type(refused.value) is StoreError
    assert [] == case.refusals
    store.close()


def test_missing_login(make_case: Callable[..., Case], lease_request: MakeRequest) -> None:
    """A server that begins to want a password, as after a failover, is away for a process without one (NOAUTH)."""
    case = make_case()
    case.store.acquire(lease_request())
    case.admin.config_set("requirepass", "new")
    case.store.close()
    with pytest.raises(StoreUnavailable, match=r"wrong or missing password.*before"):
        case.store.acquire(lease_request())
    with pytest.raises(StoreError) as refused:
        case.new_store().acquire(lease_request())
    assert type(refused.value) is StoreError


def test_forked_process(make_case: Callable[..., Case], lease_request: MakeRequest) -> None:
    """A process that was forked knows that its parent was accepted; one of another URL does not."""
    case = make_case()
    case.admin.execute_command(*GRANT)
    app = Celery("fork", set_as_current=False)
    app.conf.singleton_lock_url = case.server.url().replace("//", "//locks:right@")
    context_of(app).store.check("b")
    wrong_password(case)
    pid = os.fork()
    if not pid:
        code = 1
        try:
            context_of(app).store.acquire(lease_request())
        except StoreUnavailable:
            code = 0
        finally:
            os._exit(code)
    assert 0 == os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    context_of(app).end()


@pytest.mark.parametrize("text", ["WRONGTYPE", "ERR unknown command"])
def test_what_stays_a_refusal(make_case: Callable[..., Case], lease_request: MakeRequest, text: str) -> None:
    """A key of another type, or a command that the server does not have, is refused for good, also if others were served."""
    case = make_case(*(("--rename-command", "INFO", "") if "unknown" in text else ()))
    case.store.acquire(lease_request("served"))
    one = lease_request()
    case.admin.set(one.lock, "theirs")
    with pytest.raises(StoreError, match="(?i)unknown command" if "unknown" in text else text) as refused:
        case.store.eviction_policy() if "unknown" in text else case.store.acquire(one)
    assert type(refused.value) is StoreError


# -- nodes of a cluster --------------------------------------------------------------------------


@pytest.fixture
def cluster(make_case: Callable[..., Case]) -> tuple[Case, Case]:
    """Return two nodes of a cluster, each with half of the slots."""
    nodes = [make_case("--cluster-enabled", "yes", "--cluster-port", str(free_port())) for _ in range(2)]
    for node, first in zip(nodes, (0, 8192), strict=True):
        node.admin.execute_command("CLUSTER", "ADDSLOTS", *range(first, first + 8192))
    bus = nodes[1].server.options[3]
    nodes[0].admin.execute_command("CLUSTER", "MEET", "127.0.0.1", nodes[1].server.port, bus)

    def is_whole(node: Case) -> bool:
        found = node.admin.execute_command("CLUSTER", "INFO")  # a text, or what redis-py makes of it
        return "ok" == (found["cluster_state"] if isinstance(found, dict) else found.split()[0].partition(":")[2])

    until(lambda: all(map(is_whole, nodes)), "the cluster is whole", 60)
    return nodes[0], nodes[1]


def in_slot(half: int) -> str:
    """Return what keys begin with that are in one half of the slots."""
    from redis.crc import key_slot

    return next(
        base for base in (f"b:{{{number}}}" for number in range(100)) if key_slot(base.encode()) // 8192 == half
    )


def test_node_of_a_cluster(cluster: tuple[Case, Case]) -> None:
    """A node of a cluster that has not the keys (MOVED) is named in words; so is one whose URL names a database."""
    words = "a node of a Redis Cluster.*must name a server that is no cluster"
    node = cluster[0]
    with pytest.raises(StoreError, match=words) as refused:
        node.store.check(in_slot(1))
    assert type(refused.value) is StoreError
    with pytest.raises(StoreError, match=words) as refused:
        node.new_store(node.server.url(1)).check(in_slot(0))
    assert type(refused.value) is StoreError
    node.store.check(in_slot(0))


def test_slot_that_moves(cluster: tuple[Case, Case]) -> None:
    """While a slot moves to another node (ASK, TRYAGAIN), a node that has served is away."""
    from redis.crc import key_slot

    source, target = cluster
    base = in_slot(0)
    slot = key_slot(base.encode())
    one = LeaseSpec(base, "d", "t1", 30.0, "id")
    source.store.acquire(one)
    identities = [node.admin.execute_command("CLUSTER", "MYID") for node in (source, target)]
    target.admin.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", identities[0])
    source.admin.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", identities[1])
    # Its keys are there in part: the lock, and not the others of the call.
    with pytest.raises(StoreUnavailable, match="TRYAGAIN"):
        source.store.acquire(one)
    with pytest.raises(StoreUnavailable, match=r"a node of a Redis Cluster.*ASK.*before"):
        source.store.holder(f"{base}:lock:other")
    with pytest.raises(StoreError, match=r"a node of a Redis Cluster.*ASK") as refused:
        source.new_store().holder(f"{base}:lock:other")
    assert type(refused.value) is StoreError


# -- the page ------------------------------------------------------------------------------------


def test_the_page_lists_them() -> None:
    """The page lists each answer that is decided on."""
    section = PAGE.read_text(encoding="utf-8").partition("## What the store answers")[2].partition("\n## ")[0]
    listed = set(re.findall(r"`([A-Z]{3,})`", section))
    from celery_singleton_lock.store.redis import errors

    assert {*errors._CODES, "NOAUTH", "WRONGPASS"} <= listed
