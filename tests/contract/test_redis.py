"""Further promises of the Redis store: bounded calls, clear errors, its own connections."""

from __future__ import annotations

import gc
import os
import signal
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from celery import Celery
from redis import Redis

from celery_singleton_lock import ConfigurationError, StoreError, StoreUnavailable
from celery_singleton_lock.context import context_of
from celery_singleton_lock.max_starts import MaxStarts
from celery_singleton_lock.store.protocol import AcquireStatus, LockStore, RenewResult
from celery_singleton_lock.store.redis import RedisStore, connector, scripts
from celery_singleton_lock.store.redis import connection as connection_module
from celery_singleton_lock.store.redis.scripts import script
from celery_singleton_lock.store.requests import AfterRelease, LeaseSpec, Place
from tests.contract.conftest import MakeStore
from tests.servers import RedisServer, until

MakeRequest = Callable[..., LeaseSpec]
StartServer = Callable[..., RedisServer]

TIMEOUT = 0.4
SLACK = 0.6
#: How often something may take too long: what breaks its promise does so each time.
TRIES = 5


def revoked(lease_request: LeaseSpec) -> tuple[str, str, str, str]:
    """Return the arguments that also forget the starts."""
    return lease_request.base, lease_request.lock, "", lease_request.starts


#: Each call that a store makes, for what is true of all of them.
CALLS: dict[str, Callable[[LockStore, LeaseSpec], Any]] = {
    "acquire": lambda store, lease_request: store.acquire(lease_request),
    "renew": lambda store, lease_request: store.renew([lease_request]),
    "reacquire": lambda store, lease_request: store.reacquire(lease_request, 1),
    "release": lambda store, lease_request: store.release(lease_request, success=True),
    "acquire_starts": lambda store, lease_request: store.acquire(replace(lease_request, max_starts=MaxStarts(3))),
    "release_starts": lambda store, lease_request: store.release(replace(lease_request, max_starts=MaxStarts(3)), None),
    "release_kept": lambda store, lease_request: store.release(
        lease_request, success=True, kept=AfterRelease("cooldown", 5.0)
    ),
    "acquire_turns": lambda store, lease_request: store.acquire(replace(lease_request, limit=3, place=Place())),
    "release_limit": lambda store, lease_request: store.release(replace(lease_request, limit=3), success=True),
    "release_queued": lambda store, lease_request: store.release(replace(lease_request, limit=3, queued=True), None),
    "leave": lambda store, lease_request: store.leave(lease_request, "ticket"),
    "leave_slots": lambda store, lease_request: store.leave(replace(lease_request, limit=3), "ticket"),
    "give_back": lambda store, lease_request: store.give_back(lease_request, "ticket", "message"),
    "has_begun": lambda store, lease_request: store.has_begun(lease_request),
    "keep_continued": lambda store, lease_request: store.keep_continued(lease_request),
    "record_outcome": lambda store, lease_request: store.record_outcome(lease_request, success=True),
    "record_failure": lambda store, lease_request: store.record_outcome(lease_request, success=False),
    "holder": lambda store, lease_request: store.holder(lease_request.lock),
    "revoke": lambda store, lease_request: store.revoke(lease_request.base, lease_request.lock),
    "revoke_starts": lambda store, lease_request: store.revoke(*revoked(lease_request)),
    "eviction_policy": lambda store, lease_request: store.eviction_policy(),
}
every_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())


# -- scripts -----------------------------------------------------------------------------------


@every_call
def test_forgotten_scripts_are_no_error(
    own_server: StartServer, redis_store: MakeStore, lease_request: MakeRequest, call: Callable[..., Any]
) -> None:
    """The store sends its scripts again, within the call, to a server that has lost them."""
    store = redis_store(own_server().url())
    call(store, lease_request())
    store.command("SCRIPT", "FLUSH")
    call(store, lease_request())


def test_sections_of_scripts() -> None:
    """A script has the sections of its features alone, and names their words, which come after the verb's."""
    plain, kept = (script("release", frozenset(features)).text for features in ((), ("kept", "limit")))
    assert "kept_token" not in plain
    assert plain.splitlines()[0] == kept.splitlines()[0]
    assert "local kept_ttl = ARGV[#ARGV - 0]" in kept
    assert "local slots = KEYS[#KEYS - 0]" in kept
    assert not [line for line in kept.splitlines() if line.strip().startswith("--@")]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("-- A verb.\nreturn 1\n", "declares no feature limit"),
        ("-- A verb.\n--@feature limit\n--@if limt\n--@end\nreturn 1\n", "declares no feature limt"),
        ("-- A verb.\n--@feature limit\n--@if limit\nreturn 1\n", "a section is not closed"),
        ("-- A verb.\n--@feature limit\n--@end\nreturn 1\n", "wrong line: --@end"),
        ("-- A verb.\n--@feature limit\n--@limit\nreturn 1\n", "wrong line: --@limit"),
    ],
)
def test_wrong_script_files(monkeypatch: pytest.MonkeyPatch, text: str, words: str) -> None:
    """A feature or a section that is misspelt is an error."""
    monkeypatch.setattr(scripts, "get_data", lambda package, name: text.encode())
    with pytest.raises(ValueError, match=words):
        script("verb", frozenset({"limit"}))


@pytest.mark.parametrize("verb", ["acquire", "holder", "leave", "release", "renew", "revoke"])
def test_scripts_that_make_key_names(verb: str) -> None:
    """A script that makes names of keys, or reads one from another key, says so to servers that ask for it (Dragonfly)."""
    assert script(verb, frozenset()).text.startswith("--!df flags=allow-undeclared-keys\n")


def test_no_script_is_loaded_beforehand(
    redis_store: MakeStore, own_server: StartServer, lease_request: MakeRequest
) -> None:
    """The first call on a new server is granted, and a renewal of nothing changes nothing there."""
    store = redis_store(own_server().url())
    one = lease_request()
    assert store.acquire(one).status is AcquireStatus.GRANTED
    assert [RenewResult.RENEWED] == store.renew([one])


# -- time --------------------------------------------------------------------------------------


class Impostor:
    """A server that does not behave like Redis."""

    def __init__(self, serve: Callable[[socket.socket], None] | None, backlog: int = 16) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=backlog)
        self.port = self.listener.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.open: list[socket.socket] = []
        self._serve = serve
        if serve is not None:
            threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self.listener.accept()
            except OSError:
                return
            self.open.append(peer)
            threading.Thread(target=self._handle, args=(peer,), daemon=True).start()

    def _handle(self, peer: socket.socket) -> None:
        try:
            assert self._serve is not None
            self._serve(peer)
        except OSError:
            pass

    def fill(self) -> None:
        """Fill the queue of unaccepted connections, so that further ones hang in their handshake."""
        while True:
            one = socket.socket()
            one.settimeout(0.05)
            self.open.append(one)
            try:
                one.connect(("127.0.0.1", self.port))
            except OSError:
                return

    def accept_later(self, seconds: float) -> None:
        """Accept all waiting connections after some seconds, and send nothing."""
        time.sleep(seconds)
        with suppress(OSError):
            while True:
                self.open.append(self.listener.accept()[0])

    def close(self) -> None:
        self.listener.close()
        for one in self.open:
            one.close()


@pytest.fixture
def impostor() -> Iterator[Callable[..., Impostor]]:
    made: list[Impostor] = []

    def make(serve: Callable[[socket.socket], None] | None, **options: Any) -> Impostor:
        made.append(Impostor(serve, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def hang(peer: socket.socket) -> None:
    while peer.recv(4096):
        pass


def drip(peer: socket.socket) -> None:
    """Send one byte at a time, forever, each within the timeout of a single read."""
    peer.recv(4096)
    peer.sendall(b"$1000\r\n")
    while True:
        peer.sendall(b"x")
        time.sleep(0.1)


def pleasantries(peer: socket.socket) -> None:
    """Answer each command of the handshake just within the timeout of a single one."""
    while peer.recv(4096):
        time.sleep(TIMEOUT * 0.7)
        peer.sendall(b"+OK\r\n")


def bounded(call: Callable[[], Any], timeout: float = TIMEOUT) -> None:
    """Check that the call fails as unavailable within its timeout. One of several does: this process may have been slow."""
    took: list[float] = []
    while len(took) < TRIES and not (took and took[-1] < timeout + SLACK):
        began = time.monotonic()
        with pytest.raises(StoreUnavailable):
            call()
        took.append(time.monotonic() - began)
    assert min(took) < timeout + SLACK, f"{took} s with a timeout of {timeout} s"


def test_sentinels_that_hang(impostor: Callable[..., Impostor], lease_request: MakeRequest) -> None:
    """One deadline covers all requests to Sentinels together."""
    url = ";".join(f"sentinel://127.0.0.1:{impostor(hang).port}" for _ in range(3))
    store = RedisStore(connector(url, {"master_name": "m"}, None, TIMEOUT), TIMEOUT)
    bounded(lambda: store.acquire(lease_request()))


def test_sentinels_with_tls_check_the_name() -> None:
    """Through Sentinel the store also checks the server's name where it checks the certificate."""
    options = {"master_name": "m"}
    connection = connector("sentinel://127.0.0.1:1", options, {"ssl_cert_reqs": ssl.CERT_REQUIRED})()
    assert connection.check_hostname
    unchecked = connector("sentinel://127.0.0.1:1", options, {"ssl_cert_reqs": ssl.CERT_NONE})()
    assert not unchecked.check_hostname


@every_call
def test_server_that_accepts_and_hangs(
    impostor: Callable[..., Impostor], redis_store: MakeStore, lease_request: MakeRequest, call: Callable[..., Any]
) -> None:
    """One deadline covers each whole call to a server that never answers."""
    store = redis_store(impostor(hang).url, TIMEOUT)
    bounded(lambda: call(store, lease_request()))


@pytest.mark.parametrize("serve", [drip, pleasantries])
def test_server_that_is_slow(
    impostor: Callable[..., Impostor], redis_store: MakeStore, lease_request: MakeRequest, serve: Any
) -> None:
    """A byte or a handshake answer that arrives does not extend the deadline."""
    store = redis_store(impostor(serve).url.replace("redis://", "redis://user:secret@").replace("/0", "/3"), TIMEOUT)
    bounded(lambda: store.acquire(lease_request()))


@pytest.mark.parametrize("scheme", ["redis", "rediss"])
def test_server_that_never_connects(
    impostor: Callable[..., Impostor], redis_store: MakeStore, lease_request: MakeRequest, scheme: str
) -> None:
    """A call to a server that never completes the connection takes no longer than the timeout."""
    one = impostor(None, backlog=0)
    one.fill()
    bounded(lambda: redis_store(one.url.replace("redis", scheme), TIMEOUT).acquire(lease_request()))


def test_name_with_several_dead_addresses(
    impostor: Callable[..., Impostor],
    redis_store: MakeStore,
    lease_request: MakeRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One deadline covers all addresses of a host name."""
    one = impostor(None, backlog=0)
    one.fill()
    address = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", one.port))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **named: [address] * 3)
    bounded(lambda: redis_store(f"redis://several.example:{one.port}/0", TIMEOUT).acquire(lease_request()))


@pytest.fixture
def no_certificates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let TLS connections load no certificates. That does not count towards the deadline, and is long on a busy machine."""
    monkeypatch.setattr(ssl, "create_default_context", lambda: ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))


@pytest.mark.usefixtures("no_certificates")
def test_tls_that_never_shakes_hands(
    impostor: Callable[..., Impostor], redis_store: MakeStore, lease_request: MakeRequest
) -> None:
    """A call to a server that never answers the TLS handshake takes no longer than the timeout."""
    store = redis_store(impostor(hang).url.replace("redis", "rediss"), TIMEOUT)
    bounded(lambda: store.acquire(lease_request()))


@pytest.mark.usefixtures("no_certificates")
def test_tls_that_drips(impostor: Callable[..., Impostor], redis_store: MakeStore, lease_request: MakeRequest) -> None:
    """A TLS handshake that proceeds byte by byte takes no longer than the timeout."""

    def dribble(peer: socket.socket) -> None:
        peer.recv(4096)
        peer.sendall(b"\x16\x03\x03\x40\x00")
        while True:
            peer.sendall(b"\x00")
            time.sleep(0.1)

    store = redis_store(impostor(dribble).url.replace("redis", "rediss"), TIMEOUT)
    bounded(lambda: store.acquire(lease_request()))


@pytest.mark.usefixtures("no_certificates")
def test_slow_connection_and_slow_tls(
    impostor: Callable[..., Impostor], redis_store: MakeStore, lease_request: MakeRequest
) -> None:
    """The connection and the TLS handshake share one deadline."""
    timeout = 1.6

    def call() -> None:
        one = impostor(None, backlog=0)
        one.fill()
        one.listener.settimeout(timeout)
        threading.Thread(target=one.accept_later, args=(0.5,), daemon=True).start()
        # The dropped first packet is sent again after a second, and answered: 0.6 s are left for the handshake.
        redis_store(one.url.replace("redis", "rediss"), timeout).acquire(lease_request())

    bounded(call, timeout + 0.2)  # `fill` takes a moment


def test_own_timeout_of_a_call(
    impostor: Callable[..., Impostor], redis_store: MakeStore, lease_request: MakeRequest
) -> None:
    """A call may have a shorter timeout than the store's, never a longer one."""
    store = redis_store(impostor(hang).url, 5.0)
    bounded(lambda: store.renew([lease_request()], 0.1), 0.1)
    bounded(lambda: store.acquire(lease_request(), 0.1), 0.1)
    store = redis_store(impostor(hang).url, TIMEOUT)
    bounded(lambda: store.renew([lease_request()], 60.0))


def test_server_that_freezes(own_server: StartServer, redis_store: MakeStore, lease_request: MakeRequest) -> None:
    """A call to a frozen server takes no longer than the timeout; the server is used again when it answers."""
    server = own_server()
    store = redis_store(server.url())
    one = lease_request()
    store.acquire(one)
    server.pause()
    bounded(lambda: store.renew([one], TIMEOUT))
    bounded(lambda: store.renew([one], TIMEOUT))
    server.resume()
    assert [RenewResult.RENEWED] == store.renew([one])


def test_nothing_listens(redis_store: MakeStore, lease_request: MakeRequest) -> None:
    """A refused connection fails at once."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        store = redis_store(f"redis://127.0.0.1:{probe.getsockname()[1]}/0", 5.0)
        bounded(lambda: store.acquire(lease_request()), 0.2)


def test_reply_of_a_call_that_was_given_up(
    own_server: StartServer, redis_store: MakeStore, lease_request: MakeRequest
) -> None:
    """A call never reads the late reply to an earlier call that timed out."""
    server = own_server()
    store = redis_store(server.url())
    one, other = lease_request("a"), lease_request("b")
    store.acquire(one)
    server.pause()
    bounded(lambda: store.acquire(other, 0.2), 0.2)
    server.resume()
    assert not store.release(one, success=True).redelivery_waits
    assert [RenewResult.MISSING] == store.renew([one])


# -- connections -------------------------------------------------------------------------------


def clients(client: Any) -> int:
    return len(client.client_list()) - 1


@every_call
def test_connection_closed_by_the_server_is_replaced(
    own_server: StartServer, redis_store: MakeStore, lease_request: MakeRequest, call: Callable[..., Any]
) -> None:
    """A connection that the server closed while it was idle is replaced within the call."""
    server = own_server()
    store, killer = redis_store(server.url()), redis_store(server.url())
    call(store, lease_request())
    for _ in range(3):
        killer.command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        call(store, lease_request())


def test_restarted_server_is_used_again(
    own_server: StartServer, redis_store: MakeStore, lease_request: MakeRequest
) -> None:
    """A server that was restarted, without its data and scripts, is used again without an error."""
    server = own_server()
    store, one = redis_store(server.url()), lease_request()
    store.acquire(one)
    server.stop()
    with pytest.raises(StoreUnavailable):
        store.renew([one])
    server.start()
    assert [RenewResult.MISSING] == store.renew([one])
    assert store.acquire(one).status is AcquireStatus.GRANTED


def test_connections_are_bounded(own_server: StartServer, redis_store: MakeStore, lease_request: MakeRequest) -> None:
    """Many calling threads never open more connections than the limit, and every call succeeds."""
    server = own_server()
    store = redis_store(server.url(), limit=3)
    looker = redis_store(server.url())
    most, failures = [0], []
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            listed = str(looker.command("CLIENT", "LIST", "TYPE", "normal")).strip().splitlines()
            most[0] = max(most[0], len(listed) - 1)

    def work(number: int) -> None:
        try:
            for turn in range(20):
                one = lease_request(f"{number}-{turn}")
                assert store.acquire(one).status is AcquireStatus.GRANTED
                store.release(one, success=True)
        except Exception as error:
            failures.append(error)

    watching = threading.Thread(target=look)
    watching.start()
    threads = [threading.Thread(target=work, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    over.set()
    watching.join()
    assert [] == failures
    assert 1 <= most[0] <= 3


def test_all_connections_busy(
    impostor: Callable[..., Impostor], redis_store: MakeStore, lease_request: MakeRequest
) -> None:
    """Waiting for a connection counts towards the deadline."""
    store = redis_store(impostor(hang).url, TIMEOUT, 1)

    def wait() -> None:
        with suppress(StoreUnavailable):
            store.acquire(lease_request())

    busy = threading.Thread(target=wait)
    busy.start()
    bounded(lambda: store.acquire(lease_request()))
    busy.join()


@pytest.mark.parametrize(("threads", "limit", "timeout"), [(4, 1, 0.001), (8, 1, 0.2), (32, 10, 0.2)])
def test_fight_for_connections(
    redis_store: MakeStore, lease_request: MakeRequest, threads: int, limit: int, timeout: float
) -> None:
    """No call takes longer than its timeout where many threads wait for a connection, and each thread is served."""
    store, fights = redis_store(limit=limit), range(TRIES)
    assert any(is_fair(store, lease_request, threads, timeout) for _ in fights), "none of several fights is fair"


def is_fair(store: RedisStore, lease_request: MakeRequest, threads: int, timeout: float) -> bool:
    """Let threads fight for connections for a while; tell whether each was served, and no call took too long."""
    longest, served = [0.0] * threads, [0] * threads
    end = time.monotonic() + 2.0

    def fight(number: int) -> None:
        one = lease_request(str(number))
        while (began := time.monotonic()) < end:
            with suppress(StoreUnavailable):
                store.renew([one], timeout)
                served[number] += 1
            longest[number] = max(longest[number], time.monotonic() - began)

    running = [threading.Thread(target=fight, args=(number,)) for number in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    return max(longest) < timeout + SLACK and min(served) > 0


@pytest.mark.timeout(60, method="thread")  # the default method uses the same signal
def test_signal_while_waiting(
    impostor: Callable[..., Impostor], redis_store: MakeStore, lease_request: MakeRequest
) -> None:
    """A call whose deadline passes during a signal handler stops waiting for a connection."""
    server = impostor(hang)
    store = redis_store(server.url, limit=1)

    def use() -> None:
        with suppress(StoreUnavailable):
            store.acquire(lease_request())

    busy = threading.Thread(target=use)
    busy.start()
    until(lambda: server.open)
    before = signal.signal(signal.SIGALRM, lambda number, frame: time.sleep(TIMEOUT))

    def call() -> None:
        signal.setitimer(signal.ITIMER_REAL, TIMEOUT / 2)
        store.renew([lease_request()], TIMEOUT)

    try:
        bounded(call, 1.5 * TIMEOUT)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        server.close()  # ends the other call
    busy.join()


class Late:
    """A socket whose thread is starved before or after it sends."""

    def __init__(self, sock: Any, before: Callable[[], object] = bool, after: Callable[[], object] = bool) -> None:
        self.sock, self.before, self.after = sock, before, after

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sock, name)

    def sendall(self, *args: Any) -> None:
        self.before()
        self.sock.sendall(*args)
        self.after()


@pytest.mark.parametrize("at", ["before it is sent", "before the reply", "before the rest of the reply"])
def test_kept_from_running(redis_server: RedisServer, lease_request: MakeRequest, at: str) -> None:
    """A call whose thread was starved past its deadline still calls the store and uses the answer."""
    connection = connector(redis_server.url(), {})()
    store, one = RedisStore(lambda: connection, 30.0), lease_request()
    store.acquire(one)
    sock, read = connection._sock, connection.read_response

    def late() -> None:
        time.sleep(0.2)  # as if a body kept the GIL

    def read_late() -> Any:
        late()
        return read()

    if at == "before it is sent":
        sock._sock = Late(sock._sock, before=late)
    elif at == "before the reply":
        sock._sock = Late(sock._sock, after=late)
    else:
        connection.read_response = read_late
    assert [RenewResult.RENEWED] == store.renew([one], 0.1)
    store.release(one, success=True)
    store.close()


def test_kept_from_running_beside_a_slow_store(
    own_server: StartServer, lease_request: MakeRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call whose thread was starved waits for a reply that has not arrived yet."""
    monkeypatch.setattr(connection_module, "MIN_SEND_OR_READ_TIME", 3.0)
    server = own_server()
    connection = connector(server.url(), {})()
    store, one = RedisStore(lambda: connection, 30.0), lease_request()
    store.acquire(one)
    store.renew([one])  # so that the server has the script
    go_on = threading.Timer(0.5, server.resume)

    def late() -> None:
        time.sleep(0.2)
        server.pause()
        go_on.start()

    connection._sock._sock = Late(connection._sock._sock, before=late)
    assert [RenewResult.RENEWED] == store.renew([one], 0.1)
    go_on.join()
    store.close()


def test_connection_that_cannot_send(redis_server: RedisServer, lease_request: MakeRequest) -> None:
    """A connection that fails while a command is sent is replaced, and the command is sent once more."""
    connection = connector(redis_server.url(), {})()
    store, one = RedisStore(lambda: connection, 30.0), lease_request()
    store.acquire(one)
    connection._sock._sock.shutdown(socket.SHUT_WR)
    assert [RenewResult.RENEWED] == store.renew([one])
    store.close()


def test_nothing_is_sent_again_after_the_deadline(redis_server: RedisServer, lease_request: MakeRequest) -> None:
    """A command that could not be sent before its deadline is not sent again."""
    connection = connector(redis_server.url(), {})()
    store, one, sent = RedisStore(lambda: connection, 30.0), lease_request(), []
    store.acquire(one)

    def full() -> None:
        sent.append(1)
        raise TimeoutError

    connection._sock._sock = Late(connection._sock._sock, before=full)
    with pytest.raises(StoreUnavailable):
        store.renew([one])
    assert [1] == sent
    assert [RenewResult.RENEWED] == store.renew([one])
    store.close()


def test_no_connection_before_the_first_call(
    own_server: StartServer, redis_store: MakeStore, lease_request: MakeRequest
) -> None:
    """A new store opens no connection before its first call."""
    server = own_server()
    looker = redis_store(server.url())
    store = redis_store(server.url())

    def count() -> int:
        return len(str(looker.command("CLIENT", "LIST", "TYPE", "normal")).strip().splitlines()) - 1

    assert 0 == count()
    store.acquire(lease_request())
    assert 1 == count()
    store.close()
    until(lambda: count() == 0)


def test_interrupted_call_leaves_no_half_used_connection(redis_server: RedisServer, lease_request: MakeRequest) -> None:
    """An exception of a signal handler during a call closes the connection; the next call works."""
    connect, made = connector(redis_server.url(), {}), []

    def interrupted(*args: Any, **named: Any) -> Any:
        raise SystemExit

    store, one = RedisStore(lambda: made.append(connect()) or made[-1]), lease_request()
    store.acquire(one)
    made[0].read_response = interrupted
    with pytest.raises(SystemExit):
        store.holder(one.lock)
    assert made[0]._sock is None
    assert [RenewResult.RENEWED] == store.renew([one])
    assert 2 == len(made)
    store.close()


@pytest.mark.parametrize(("verb", "times"), [("holder", 2), ("release", 2), ("revoke", 1)])
def test_how_often_a_command_is_sent(
    impostor: Callable[..., Impostor], redis_store: MakeStore, lease_request: MakeRequest, verb: str, times: int
) -> None:
    """A command that meets a closed connection is sent once more; `revoke` is not, as it could hit the next holder."""
    sent: list[bytes] = []

    def serve(peer: socket.socket) -> None:
        """Answer the first script call, and close the connection on each later one."""
        while received := peer.recv(65536):
            if b"EVALSHA" not in received:
                peer.sendall(b"+OK\r\n" * received.count(b"CLIENT"))
                continue
            sent.append(received)
            if len(sent) > 1:
                peer.shutdown(socket.SHUT_RDWR)
                return
            peer.sendall(b"*-1\r\n")

    store = redis_store(impostor(serve).url)
    assert store.holder("idle") is None
    with pytest.raises(StoreUnavailable):
        CALLS[verb](store, lease_request())
    assert 1 + times == len(sent)


@pytest.mark.parametrize(("text", "connections"), [("READONLY You can't write.", 2), ("WRONGTYPE Not a hash.", 1)])
def test_connection_after_an_error_reply(
    impostor: Callable[..., Impostor], redis_store: MakeStore, lease_request: MakeRequest, text: str, connections: int
) -> None:
    """A connection is used again after an error reply, unless the server is a replica: the master may have moved."""
    server = impostor(answering(text))
    store = redis_store(server.url)
    for _ in range(2):
        with pytest.raises(StoreError):
            store.acquire(lease_request())
    assert connections == len(server.open)


def test_child_uses_its_own_connection(redis_server: RedisServer, lease_request: MakeRequest) -> None:
    """After a fork each process has its own connection, so no reply reaches the other process."""
    app = Celery("fork", set_as_current=False)
    app.conf.singleton_lock_url = redis_server.url()
    ours = lease_request("parent")
    assert context_of(app).store.acquire(ours).status is AcquireStatus.GRANTED
    children = []
    for number in range(3):
        pid = os.fork()
        if pid:
            children.append(pid)
            continue
        code = 1
        try:
            store = context_of(app).store
            for turn in range(50):
                one = lease_request(f"{number}-{turn}")
                assert store.acquire(one).status is AcquireStatus.GRANTED
                assert [RenewResult.RENEWED] == store.renew([one])
                store.release(one, success=True)
            code = 0
        finally:
            os._exit(code)
    store = context_of(app).store
    for _ in range(100):
        assert [RenewResult.RENEWED] == store.renew([ours])
    assert [0, 0, 0] == [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    assert [RenewResult.RENEWED] == store.renew([ours])
    store.close()


# -- errors ------------------------------------------------------------------------------------


def refuses(store: RedisStore, call: Callable[[RedisStore], Any]) -> StoreError:
    """Check that the call fails with a StoreError other than StoreUnavailable."""
    with pytest.raises(StoreError) as refused:
        call(store)
    assert not isinstance(refused.value, StoreUnavailable)
    return refused.value


def test_missing_permission(own_server: StartServer, redis_store: MakeStore, lease_request: MakeRequest) -> None:
    """A user who may not run scripts, or not on these keys, is refused."""
    server = own_server()
    admin = redis_store(server.url())
    admin.command("ACL", "SETUSER", "noscript", "on", ">pw", "~*", "+@all", "-evalsha", "-eval")
    admin.command("ACL", "SETUSER", "nokeys", "on", ">pw", "~other:*", "+@all")
    admin.command("ACL", "SETUSER", "nowrite", "on", ">pw", "~*", "+@all", "-hset")
    for user in ("noscript", "nokeys", "nowrite"):
        store = redis_store(server.url().replace("redis://", f"redis://{user}:pw@"))
        refuses(store, lambda one: one.acquire(lease_request()))


def test_key_of_another_type(redis_store: MakeStore, client: Any, lease_request: MakeRequest) -> None:
    """A key of another type is refused and left unchanged."""
    one = lease_request()
    client.set(one.lock, "theirs", px=5000)
    store = redis_store()
    refuses(store, lambda it: it.acquire(one))
    refuses(store, lambda it: it.release(one, success=True))
    assert "theirs" == client.get(one.lock)


def test_read_only_replica_is_an_outage(
    own_server: StartServer, redis_store: MakeStore, lease_request: MakeRequest
) -> None:
    """A server that has become a replica counts as an outage."""
    server = own_server("--replica-serve-stale-data", "yes")
    store = redis_store(server.url())
    store.acquire(lease_request("before"))
    store.command("REPLICAOF", "127.0.0.1", "1")
    with pytest.raises(StoreUnavailable):
        store.acquire(lease_request())
    store.command("REPLICAOF", "NO", "ONE")
    assert store.acquire(lease_request()).status is AcquireStatus.GRANTED


def test_full_memory_is_an_outage(own_server: StartServer, redis_store: MakeStore, lease_request: MakeRequest) -> None:
    """A server without free memory counts as an outage. A release still works."""
    server = own_server()
    store, one = redis_store(server.url()), lease_request("held")
    store.acquire(one)
    store.command("CONFIG", "SET", "maxmemory", "1")
    with pytest.raises(StoreUnavailable):
        store.acquire(lease_request())
    assert [RenewResult.RENEWED] == store.renew([one])
    store.release(one, success=True)
    assert store.holder(one.lock) is None


def test_busy_server_is_an_outage(own_server: StartServer, redis_store: MakeStore, lease_request: MakeRequest) -> None:
    """A server that is busy with an endless script counts as an outage."""
    server = own_server("--lua-time-limit", "1")
    store, runner = redis_store(server.url()), redis_store(server.url(), 0.2)
    store.acquire(lease_request("before"))
    runner.eviction_policy()  # connects
    with pytest.raises(StoreUnavailable):
        runner.command("EVAL", "while true do end", 0)
    until(lambda: not serves(store), "the script runs")
    with pytest.raises(StoreUnavailable):
        store.acquire(lease_request())
    store.command("SCRIPT", "KILL")
    until(lambda: serves(store), "the script has ended")
    assert store.acquire(lease_request()).status is AcquireStatus.GRANTED


def serves(store: RedisStore) -> bool:
    """Tell whether the server executes commands."""
    try:
        store.eviction_policy()
    except StoreUnavailable:
        return False
    return True


def answering(text: str) -> Callable[[socket.socket], None]:
    """Return a handler that answers each command with this error."""

    def serve(peer: socket.socket) -> None:
        while received := peer.recv(65536):
            peer.sendall(f"-{text}\r\n".encode() * max(1, received.count(b"CLIENT") or 1))

    return serve


OUTAGES = [
    "READONLY You can't write against a read only replica.",
    "OOM command not allowed when used memory > 'maxmemory'.",
    "LOADING Redis is loading the dataset in memory",
    "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
    "CLUSTERDOWN The cluster is down",
    "TRYAGAIN Multiple keys request during rehashing of slot",
    "BUSY Redis is busy running a script.",
    "NOREPLICAS Not enough good replicas to write.",
    "MISCONF Redis is configured to save RDB snapshots, but is unable to persist to disk.",
    "ERR max number of clients reached",
]


@pytest.mark.parametrize("text", OUTAGES, ids=lambda text: text.split()[0])
def test_errors_that_pass_are_outages(
    impostor: Callable[..., Impostor], redis_store: MakeStore, lease_request: MakeRequest, text: str
) -> None:
    """A temporary error of the server counts as an outage."""
    with pytest.raises(StoreUnavailable):
        redis_store(impostor(answering(text)).url).acquire(lease_request())


REFUSALS = [
    "WRONGTYPE Operation against a key holding the wrong kind of value",
    "NOPERM this user has no permissions to run the 'evalsha' command",
    "NOAUTH Authentication required.",
    "ERR unknown command 'EVALSHA'",
]


@pytest.mark.parametrize("text", REFUSALS, ids=lambda text: text.split()[0])
def test_errors_that_stay_are_refusals(
    impostor: Callable[..., Impostor], redis_store: MakeStore, lease_request: MakeRequest, text: str
) -> None:
    """A permanent error of the server is a refusal, not an outage."""
    refuses(redis_store(impostor(answering(text)).url), lambda one: one.acquire(lease_request()))


def test_too_many_clients_is_an_outage(
    own_server: StartServer, redis_store: MakeStore, lease_request: MakeRequest
) -> None:
    """A server that accepts no more clients counts as an outage."""
    server = own_server()
    first = redis_store(server.url())
    first.command("CONFIG", "SET", "maxclients", "1")  # this client itself
    with pytest.raises(StoreUnavailable):
        redis_store(server.url()).acquire(lease_request())


def test_eviction_policy(own_server: StartServer, redis_store: MakeStore) -> None:
    """The store returns the server's eviction policy unchanged."""
    store = redis_store(own_server("--maxmemory-policy", "allkeys-lru").url())
    assert "allkeys-lru" == store.eviction_policy()


@pytest.mark.parametrize("kind", ["alone", "unsafe", "safe"])
def test_unsafe_replicas(own_server: StartServer, redis_store: MakeStore, kind: str) -> None:
    """The store tells how many replicas its primary has, if it does not wait for them."""
    primary = own_server("--min-replicas-to-write", "1") if kind == "safe" else own_server()
    store = redis_store(primary.url())
    if kind != "alone":
        store.command("CONFIG", "SET", "repl-diskless-sync-delay", "0")
        own_server("--replicaof", "127.0.0.1", str(primary.port))
        until(lambda: "connected_slaves:1" in store.command("INFO", "replication"), "it has a replica")
    assert (1 if kind == "unsafe" else 0) == store.unsafe_replicas()


# -- URLs --------------------------------------------------------------------------------------


def test_database_of_the_url(own_server: StartServer, redis_store: MakeStore, lease_request: MakeRequest) -> None:
    """Locks are in the database that the URL names."""
    server, one = own_server(), lease_request()
    redis_store(server.url(5)).acquire(one)
    assert redis_store(server.url(0)).holder(one.lock) is None
    assert redis_store(server.url(5)).holder(one.lock) is not None


def test_unix_socket(own_server: StartServer, redis_store: MakeStore, lease_request: MakeRequest) -> None:
    """``redis+socket://`` connects through a unix socket, to the database of ``virtual_host``."""
    server = RedisServer()
    path = server.directory / "redis.sock"
    server.options = ("--unixsocket", str(path))
    server.start()
    try:
        one = lease_request()
        store = redis_store(f"redis+socket://{path}?virtual_host=4")
        assert store.acquire(one).status is AcquireStatus.GRANTED
        assert redis_store(server.url(4)).holder(one.lock) is not None
        assert redis_store(server.url(0)).holder(one.lock) is None
    finally:
        server.close()


@pytest.mark.parametrize(
    "url",
    [
        "redis://localhost:port/0",
        "redis://localhost/?no_such_option=1",
        "sentinel://localhost/0",
        "sentinel://localhost/0?master_name=",
        "redis+sentinel://localhost",
        "redis+sentinel://localhost/",
        "redis+sentinel://localhost/name/no_number",
        "redis+sentinel://localhost:port/name",
    ],
)
def test_bad_url_is_refused(url: str) -> None:
    """A URL that cannot be used is a ConfigurationError that names the setting."""
    with pytest.raises(ConfigurationError, match="singleton_lock_url"):
        connector(url, {})


#: Options that redis-py's URLs take; a value each.
SERVED = {
    "db": "3", "client_name": "x", "socket_keepalive": "yes", "socket_read_size": "100", "protocol": "3",
    "legacy_responses": "no", "decode_responses": "no", "encoding": "utf-16", "encoding_errors": "ignore",
    "health_check_interval": "1", "max_connections": "1", "retry_on_error": "ReadOnlyError", "retry_on_timeout": "yes",
    "socket_timeout": "0", "socket_connect_timeout": "0", "timeout": "1", "connection_class": "x",
}  # fmt: skip
REFUSED = [
    "command_packer", "driver_info", "event_dispatcher", "himport_registry", "maint_notifications_config", "parser_class",
    "maint_notifications_pool_handler", "orig_socket_timeout", "redis_connect_func", "retry", "single_connection_client",
    "socket_keepalive_options", "socket_type", "ssl_validate_ocsp", "visibility_timeout",
]  # fmt: skip


def each_verb(store: RedisStore, one: LeaseSpec) -> None:
    """Use a store as tasks and operators do."""
    assert store.acquire(one).status is AcquireStatus.GRANTED
    assert [RenewResult.RENEWED] == store.renew([one])
    records = store.records()
    records.add_tasks("tasks", {"a": "b"})
    assert {"a": "b"} == records.tasks("tasks")
    records.pause(one.base, "*", 60.0)
    assert 2 == len(list(records.locks(one.base)))
    assert records.resume(one.base, "*")
    assert 1 == records.counters(one.base)["acquired"]
    assert "redis_version" in records.server()
    assert store.eviction_policy()
    store.release(one, success=True)
    assert 1 == len(records.history(one.base))


@pytest.mark.parametrize("name", SERVED)
def test_option_of_a_url(redis_server: RedisServer, lease_request: MakeRequest, name: str) -> None:
    """An option of redis-py's URLs is used, or does not count, as the store decides it: each verb works."""
    store = RedisStore(connector(f"{redis_server.url()}?{name}={SERVED[name]}", {}), history=5)
    each_verb(store, lease_request())
    store.close()


@pytest.mark.parametrize("name", REFUSED)
def test_option_of_a_url_that_is_refused(name: str) -> None:
    """An option that a URL cannot express, or that nothing knows, is refused and named."""
    with pytest.raises(ConfigurationError, match=f"singleton_lock_url: the option {name} cannot be used"):
        connector(f"redis://127.0.0.1:1/0?{name}=1", {})


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("ssl_cert_reqs=none", "needs rediss://"),
        ("protocol=x", "protocol"),
        ("db=x", "db"),
        ("socket_read_size=x", "socket_read_size"),
    ],
)
def test_value_of_an_option_that_is_refused(option: str, says: str) -> None:
    """A value that cannot be used is refused, and its option named."""
    with pytest.raises(ConfigurationError, match=f"singleton_lock_url.*{says}"):
        connector(f"redis://127.0.0.1:1/0?{option}", {})


@pytest.mark.parametrize("password", ["1#x", "pa#x", "1?x", "pa?x", "1/2", "pa/x", "pa#x?y/z"])
@pytest.mark.parametrize("scheme", ["redis", "rediss", "valkey"])
@pytest.mark.parametrize("user", ["", "u"])
def test_unquoted_password(password: str, scheme: str, user: str) -> None:
    """A password with a character that ends the host deserves a hint; it is not shown, and no other host is used."""
    with pytest.raises(ConfigurationError, match=r"singleton_lock_url.*must be percent-encoded: %23") as refused:
        connector(f"{scheme}://{user}:{password}@127.0.0.1:6379/0", {})
    assert password not in str(refused.value)


def test_password_is_not_shown_for_a_bad_url() -> None:
    """The refusal of a URL does not show its password."""
    with pytest.raises(ConfigurationError) as refused:
        connector("redis://:hunter2@localhost:port/0", {})
    assert "hunter2" not in str(refused.value)


def test_url_options_do_not_change_our_deadlines(
    impostor: Callable[..., Impostor], redis_store: MakeStore, lease_request: MakeRequest
) -> None:
    """Timeouts and retries in a URL, as for a broker, do not change those of a store call."""
    url = (
        impostor(hang).url + "?socket_timeout=60&socket_connect_timeout=60&retry_on_timeout=yes&health_check_interval=1"
    )
    store = redis_store(url, TIMEOUT)
    bounded(lambda: store.acquire(lease_request()))


def test_timeout_keeps_nothing_alive(
    own_server: StartServer, redis_store: MakeStore, lease_request: MakeRequest
) -> None:
    """An error of a call creates no reference cycle with the frames of its callers."""

    class Witness:
        """An object in a caller's frame."""

    server = own_server()
    store = redis_store(server.url())
    store.acquire(lease_request())

    def ask() -> weakref.ref[Witness]:
        witness = Witness()
        try:
            store.acquire(lease_request("other"), 0.3)
        except StoreUnavailable:
            return weakref.ref(witness)
        raise AssertionError("the server answers")

    server.pause()
    gc.disable()
    try:
        assert ask()() is None
    finally:
        gc.enable()
        server.resume()


@pytest.mark.parametrize("place", ["redis", "valkey"])
def test_valkeys_spelling(redis_server: RedisServer, lease_request: MakeRequest, place: str) -> None:
    """``valkey://`` means the same as ``redis://``, including database and options."""
    app = Celery("valkey", set_as_current=False)
    app.conf.singleton_lock_url = redis_server.url(3).replace("redis://", f"{place}://") + "?client_name=v"
    store, one = context_of(app).store, lease_request()
    assert store.acquire(one).status is AcquireStatus.GRANTED
    with Redis.from_url(redis_server.url(3)) as client:
        assert client.exists(one.lock)
        assert "v" in [listed["name"] for listed in client.client_list()]
    store.close()
    app.close()


@pytest.mark.parametrize("path", ["/abc", "/2abc", "/1/2", "/-1"])
def test_name_of_a_database(path: str) -> None:
    """A database that is not a number is refused and does not mean number 0."""
    with pytest.raises(ConfigurationError, match="number of a database"):
        connector(f"redis://127.0.0.1:1{path}", {})
