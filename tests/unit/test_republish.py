"""A message that is published again goes where it came from, with all that it carried, after a delay that its broker keeps."""

from __future__ import annotations

import math
from datetime import datetime, timezone
from typing import Any

import celery
import pytest
from celery import Celery
from celery import signals as celery_signals
from celery.app.task import Context
from celery.exceptions import Ignore, Reject, Retry
from kombu import Exchange, Queue, binding
from kombu.common import Broadcast
from kombu.exceptions import EncodeError

from celery_singleton_lock import DuplicateTask, RetryLater, SingletonTask, StoreUnavailable
from celery_singleton_lock.config.task_config import config_for
from celery_singleton_lock.context import context_of
from celery_singleton_lock.delivery import delays, routing
from celery_singleton_lock.delivery.attempt import Attempt
from celery_singleton_lock.delivery.republish import signature_of
from celery_singleton_lock.delivery.retry_state import RETRY_STATE_HEADER, RetryState, retry_state_of
from celery_singleton_lock.holder import Holder
from celery_singleton_lock.store.protocol import AcquireResult, AcquireStatus
from celery_singleton_lock.store.requests import LeaseSpec
from celery_singleton_lock.testing import locked
from tests.unit.conftest import MakeApp
from tests.unit.test_task import Singleton, deliver

TOPIC = Exchange("tasks", "topic")
#: As from Datadog, and from Sentry before 2.40.
NESTED = {"headers": {"x-datadog-trace-id": "17"}, "x-mine": "of the caller", "x-number": 7}
by_us = pytest.mark.skipif(
    celery.VERSION < (5, 7), reason="Celery before 5.7 stores RETRY by itself, whatever the request says"
)
STATE = {"times": 2, "waited": 15.0, "redelivery_checks": 0}


@pytest.fixture(autouse=True)
def _forget_results(app: Celery) -> None:
    """All apps of a process share the results in memory."""
    app.backend.client.cache.clear()


def published(task: Any, expected: str = "RETRY", queue: str = "celery", **request: Any) -> Any:
    """Deliver a duplicate; return the message that is published again."""
    with task.app.connection_for_write() as connection, connection.SimpleQueue(queue) as found:
        found.clear()
        assert expected == deliver(task, **request).info.state
        return found.get(timeout=5)


def hold_as(task: Any, task_id: str) -> None:
    """Let another delivery of this task id hold the lock."""
    config = config_for(task)
    context_of(task.app).store.acquire(LeaseSpec(config.base, config.digest((), {}), "first", 600.0, task_id))


def request(**given: Any) -> Context:
    """Make a request as a worker does."""
    return Context({"id": "id-1", "args": (), "kwargs": {}, **given})


def delay_of(message: Any, before: datetime) -> float:
    """Return the seconds until the message is due."""
    return (datetime.fromisoformat(message.headers["eta"]) - before).total_seconds()


# -- headers and properties ----------------------------------------------------------------------


def test_nested_headers(singleton: Singleton) -> None:
    """Headers of the caller and those that a tracer nests stay where they were, and the retry state counts on."""

    @singleton(name="x", on_duplicate="retry")
    def task() -> None: ...

    with locked(task):
        headers = published(task, headers={**NESTED, RETRY_STATE_HEADER: STATE}).headers
    own = {name: headers[name] for name in NESTED}
    assert NESTED == own
    assert 3 == headers[RETRY_STATE_HEADER]["times"]
    assert 15.0 < headers[RETRY_STATE_HEADER]["waited"]


def test_nested_headers_and_a_policy_that_ends(singleton: Singleton) -> None:
    """The task fails after ``max_wait``, whatever is nested in the headers."""

    @singleton(name="x", on_duplicate=RetryLater(max_wait=15))
    def task() -> None: ...

    with locked(task):
        outcome = deliver(task, headers={**NESTED, RETRY_STATE_HEADER: STATE})
    assert isinstance(outcome.info.retval, DuplicateTask)


def test_objects_on_the_request_are_no_headers(singleton: Singleton) -> None:
    """An object that a receiver of ``task_prerun`` put on the request does not become a header."""

    @singleton(name="x", on_duplicate="retry")
    def task() -> None: ...

    def receive(task: Any, **_: Any) -> None:
        task.request.session = object()

    celery_signals.task_prerun.connect(receive)
    try:
        with locked(task):
            headers = published(task, headers=NESTED).headers
    finally:
        celery_signals.task_prerun.disconnect(receive)
    assert "session" not in headers


@pytest.mark.parametrize("nested", [{}, {"headers": {"x-death": [1], "x-last-death-queue": "q", "x-mine": 1}}])
def test_dead_letter_headers_are_removed(singleton: Singleton, nested: Any) -> None:
    """Headers about dead letters are removed, since RabbitMQ would detect a cycle and drop the message."""

    @singleton(name="x", on_duplicate="retry")
    def task() -> None: ...

    death = {"x-death": [{"count": 1}], "x-first-death-reason": "expired", "x-mine": 2}
    with locked(task):
        headers = published(task, headers={**death, **nested}).headers
    assert ["x-mine"] == [name for name in headers if name.startswith("x-")]
    assert not nested or {"x-mine": 1} == headers["headers"]


@pytest.mark.parametrize("parent", [None, "parent-1"])
def test_parent_is_kept(singleton: Singleton, parent: str | None) -> None:
    """A task that runs later keeps its parent, and is not its own parent or child."""
    trails: list[Any] = []

    @singleton(name="x", on_duplicate="retry")
    def task() -> None: ...

    def receive(task: Any, **_: Any) -> None:
        trails.append(list(task.request.children))

    celery_signals.task_postrun.connect(receive)
    try:
        with locked(task):
            message = published(task, parent_id=parent, root_id="root-1")
    finally:
        celery_signals.task_postrun.disconnect(receive)
    assert (parent, "root-1") == (message.headers["parent_id"], message.headers["root_id"])
    assert [[]] == trails


def test_properties_are_kept(singleton: Singleton) -> None:
    """Properties of the publisher are kept, such as the periodic task's name that django-celery-beat adds."""

    @singleton(name="x", on_duplicate="retry")
    def task() -> None: ...

    properties = {"periodic_task_name": "nightly", "correlation_id": "id-1", "delivery_tag": "old", "argsrepr": "(1,)"}
    with locked(task):
        message = published(task, properties=properties)
    assert "nightly" == message.properties["periodic_task_name"]
    assert "old" != message.properties["delivery_tag"]


@pytest.mark.parametrize(
    ("header", "state"),
    [
        ({}, RetryState()),
        ({"times": 2, "waited": 1.5, "redelivery_checks": 3}, RetryState(2, 1.5, 3)),
        ({"times": 2, "unknown": 1}, RetryState(2, 0.0, 0)),
    ],
)
def test_retry_state_of_other_versions(header: dict[str, Any], state: RetryState) -> None:
    """A retry state with missing or unknown fields, as another version writes it, can be read."""
    assert state == retry_state_of(request(**{RETRY_STATE_HEADER: header}))


# -- destinations --------------------------------------------------------------------------------


def use_queues(app: Celery, *queues: Any) -> None:
    app.conf.task_queues = [Queue("celery"), *queues]
    app.conf.task_default_queue = "celery"


def source(key: str, exchange: str = "tasks") -> dict[str, Any]:
    return {"delivery_info": {"exchange": exchange, "routing_key": key}}


@pytest.mark.parametrize(
    "queue",
    [Queue("orders", TOPIC, "orders.#"), Queue("orders", bindings=[binding(TOPIC, "orders.#"), binding(TOPIC, "x")])],
    ids=["bound", "bindings"],
)
def test_topic_exchange(app: Celery, singleton: Singleton, queue: Queue) -> None:
    """A message of a topic exchange returns to its queue, though this process never declared the exchange."""
    use_queues(app, queue)

    @singleton(name="x", on_duplicate="retry")
    def task() -> None: ...

    with locked(task):
        message = published(task, queue="orders", **source("orders.new"))
    assert ("tasks", "orders.new") == (message.delivery_info["exchange"], message.delivery_info["routing_key"])


def test_natively_delayed_message(app: Celery, singleton: Singleton) -> None:
    """A message that RabbitMQ delayed comes from another exchange; it returns to its own queue, with its own routing key."""
    quorum = {"x-queue-type": "quorum"}
    orders = Queue("orders", TOPIC, "orders.#", queue_arguments=quorum)
    use_queues(app, Queue("other", TOPIC, "other", queue_arguments=quorum), orders)

    @singleton(name="x", on_duplicate="retry")
    def task() -> None: ...

    delayed = source("0." * 27 + "1.orders.new", "celery_delayed_delivery")
    signature = signature_of(Attempt(task, request(**delayed)), 1.0, RetryState())
    found = signature.options["queue"]
    assert ("orders", TOPIC, "orders.new") == (found.name, found.exchange, found.routing_key)
    assert "orders.#" == app.amqp.queues["orders"].routing_key


@pytest.mark.parametrize(
    ("queues", "several"),
    [
        ([Broadcast("all")], True),
        ([Queue("a", Exchange("all", "topic"), "#"), Queue("b", Exchange("all", "topic"), "k")], True),
        ([Queue("a", Exchange("all"), "k"), Queue("b", Exchange("all"), "k")], True),
        ([Queue("a", Exchange("all", "topic"), "#"), Queue("b", Exchange("all", "topic"), "other")], False),
        ([Queue("a", Exchange("all"), "k")], False),
        ([Queue("a", bindings=[binding(Exchange("all", "topic"), word) for word in "k#"])], False),
        ([], False),
    ],
)
def test_message_in_several_queues(app: Celery, queues: list[Any], several: bool) -> None:
    """A message of a fanout exchange, or one that an exchange puts into several queues, is recognized."""
    use_queues(app, *queues)
    assert several is routing.goes_to_several_queues(app, request(**source("k", "all")))
    assert not routing.goes_to_several_queues(app, request(**source("k", "")))
    assert not routing.goes_to_several_queues(app, request())


class TestBroadcast:
    """A message for all workers is never published again, since each worker would get it again."""

    @pytest.fixture(params=["skip", "retry", "raise"])
    def task(self, request: pytest.FixtureRequest, app: Celery, singleton: Singleton) -> Any:
        use_queues(app, Broadcast("all"))

        @singleton(name="x", on_duplicate=request.param)
        def task() -> None:
            pytest.fail("must not run")

        return task

    @pytest.fixture(autouse=True)
    def _nothing_is_published(self, app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(app, "send_task", lambda *_, **__: pytest.fail("published"))

    def test_same_message_elsewhere(self, task: Any) -> None:
        """While one worker runs it, the others drop it and store nothing, under every policy."""
        hold_as(task, "id-1")
        assert "IGNORED" == deliver(task, **source("", "all")).info.state
        assert "PENDING" == task.AsyncResult("id-1").state

    def test_other_message(self, task: Any) -> None:
        """A duplicate of another message is skipped if the policy would run it later; else the policy decides."""
        hold_as(task, "other")
        outcome = deliver(task, **source("", "all"))
        raises = task.on_duplicate == "raise"
        assert ("FAILURE" if raises else "IGNORED") == outcome.info.state
        assert ("FAILURE" if raises else "SUCCESS") == task.AsyncResult("id-1").state

    def test_store_away(self, app: Celery, task: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """The task fails at once if the store is unreachable."""

        def away(*_: Any) -> None:
            raise StoreUnavailable("away")

        monkeypatch.setattr(context_of(app).store, "acquire", away)
        assert isinstance(deliver(task, **source("", "all")).info.retval, StoreUnavailable)


# -- delays --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("spec", "kept"), [(0.2, 1.0), (1.0, 1.0), (1.2, 2.0), (5.0, 5.0)])
def test_delay_of_a_quorum_queue(app: Celery, spec: float, kept: float) -> None:
    """RabbitMQ delays messages of quorum queues by whole seconds, at least one."""
    use_queues(app, Queue("orders", TOPIC, "orders", queue_arguments={"x-queue-type": "quorum"}))
    assert kept == delays.shortened(app, spec)


@pytest.mark.parametrize(
    ("broker", "options", "longest"),
    [
        ("redis://h/0", {}, 600.0),
        (["sentinel://a", "sentinel://b"], {}, 600.0),
        ("redis://h/0", {"visibility_timeout": 4}, 2.0),
        ("redis://h/0", {"visibility_timeout": 43200}, 600.0),
        ("sqs://", {}, 600.0),
        ("SQS://", {"visibility_timeout": 60}, 30.0),
        ("my.transport:Class://h", {"visibility_timeout": 60}, 30.0),
        ("amqp://h", {}, 600.0),
    ],
)
def test_delay_that_every_broker_keeps(app: Celery, broker: Any, options: Any, longest: float) -> None:
    """A message never waits for longer than ten minutes, or half of the broker's visibility timeout.

    RabbitMQ closes the channel of a worker that keeps a message for 30 minutes.
    """
    app.conf.update(broker_url=broker, broker_transport_options=options)
    assert longest == delays.longest_delay(app.conf)
    assert longest == delays.shortened(app, 7200.0)
    assert 0.2 == delays.shortened(app, 0.2)


@pytest.mark.parametrize("broker", ["amqp://h", "amqps://h", "pyamqp://h;amqp://other", "memory://", "kafka://h"])
def test_leftover_visibility_timeout(app: Celery, broker: str) -> None:
    """The option counts only for brokers that have such a timeout: one that was left from Redis cuts no delay."""
    app.conf.update(broker_url=broker, broker_transport_options={"visibility_timeout": 4})
    assert math.inf == delays.visibility_timeout(app.conf)
    assert 60.0 == delays.shortened(app, 60.0)


def test_timeout_of_the_broker_that_is_read(app: Celery) -> None:
    """With different brokers to read and to write, a worker keeps messages of the first."""
    options = {"visibility_timeout": 4}
    app.conf.update(broker_read_url="redis://h", broker_write_url="amqp://h", broker_transport_options=options)
    assert 2.0 == delays.longest_delay(app.conf)


@pytest.mark.parametrize("same", [True, False], ids=["redelivery", "duplicate"])
@pytest.mark.parametrize(
    "policy", [RetryLater(delay=7200, max_delay=7200, max_wait=7200), "retry", "wait", "join"], ids=str
)
@pytest.mark.parametrize("holder", ["body", "cooldown", "operator"])
def test_no_delay_is_longer(
    make_app: MakeApp, policy: Any, holder: str, same: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long a lock is held, a message comes back after at most ten minutes, and then waits again."""
    app = make_app(singleton_lock_eager=True)

    @app.task(base=SingletonTask, name="x", on_duplicate=policy)
    def task() -> None: ...

    found = AcquireResult(AcquireStatus.REFUSED, holder_for(holder, "id-1" if same else "other"))
    store = context_of(app).store
    monkeypatch.setattr(store, "acquire", lambda spec: joined(found, spec))
    monkeypatch.setattr(store, "holder", lambda lock: found.holder)
    before = datetime.now(timezone.utc)
    is_redelivery = same and holder != "operator"
    is_stored = not is_redelivery and not (policy == "wait" or (policy == "join" and holder != "operator"))
    message = published(task, "RETRY" if is_stored else "IGNORED", delivery_info={"redelivered": same})
    assert delay_of(message, before) <= 601


def holder_for(kind: str, task_id: str) -> Holder:
    """Return a holder who keeps the lock for two hours."""
    state = {"body": "running", "operator": "paused"}.get(kind, "cooldown")
    return Holder("" if kind == "operator" else task_id, remaining=7200.0, state=state)


def joined(found: AcquireResult, spec: LeaseSpec) -> AcquireResult:
    """Return the store's answer: a message that wants to join the line does."""
    is_waiting = bool(spec.place and spec.place.room)
    return found._replace(is_waiting=is_waiting, waiting=int(is_waiting))


@pytest.mark.parametrize("same", [True, False], ids=["redelivery", "duplicate"])
def test_published_delay_fits(singleton: Singleton, same: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Redelivery checks and retries use delays that the broker can keep, and max_wait counts the shortened delay."""
    monkeypatch.setattr(delays, "LONGEST_DELAY", 0.1)

    @singleton(name="x", on_duplicate=RetryLater(delay=60, jitter=0))
    def task() -> None: ...

    hold_as(task, "id-1" if same else "other")
    before = datetime.now(timezone.utc)
    message = published(task, "IGNORED" if same else "RETRY")
    assert 0.1 <= delay_of(message, before)
    assert delay_of(message, datetime.now(timezone.utc)) < 0.2
    assert (0.0 if same else 0.1) == message.headers[RETRY_STATE_HEADER]["waited"]


# -- publishing fails ----------------------------------------------------------------------------


@pytest.mark.parametrize("acks_late", [True, False])
@pytest.mark.parametrize("error", [OSError("away"), EncodeError("cannot"), ValueError("countdown")])
def test_check_that_cannot_be_published(
    singleton: Singleton, monkeypatch: pytest.MonkeyPatch, acks_late: bool, error: Exception
) -> None:
    """A redelivered message that is acknowledged late goes back to the broker if its check cannot be published."""

    @singleton(name="x", acks_late=acks_late)
    def task() -> None: ...

    def fail(*_: Any, **__: Any) -> None:
        raise error

    hold_as(task, "id-1")
    monkeypatch.setattr(task.app, "send_task", fail)
    raised = deliver(task).info.retval
    assert isinstance(raised, Reject if acks_late else Ignore)
    assert not acks_late or raised.requeue


# -- the state RETRY -----------------------------------------------------------------------------


def test_reason_of_a_retry(app: Celery) -> None:
    """``on_retry`` and the stored RETRY have the error that names the holder."""
    seen: list[Any] = []

    class Hooked(SingletonTask):
        def on_retry(self, exc: Any, *_: Any, **__: Any) -> None:
            seen.append(exc.args)

    @app.task(base=Hooked, name="x", on_duplicate="retry")
    def task() -> None: ...

    app.finalize()
    with locked(app.tasks["x"]):
        retry = deliver(app.tasks["x"]).info.retval
    assert isinstance(retry, Retry)
    assert isinstance(retry.exc, DuplicateTask)
    assert [retry.exc.args] == seen
    stored = app.AsyncResult("id-1")
    assert ("RETRY", "held-by-test") == (stored.state, stored.result.holder.task_id)


@by_us
def test_state_that_cannot_be_stored(singleton: Singleton, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message is published again though the result backend is unreachable."""

    @singleton(name="x", on_duplicate="retry")
    def task() -> None: ...

    real = task.backend.mark_as_retry
    calls: list[Any] = []

    def unreachable_once(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) == 1:
            raise OSError("unreachable")
        return real(*args, **kwargs)

    monkeypatch.setattr(task.backend, "mark_as_retry", unreachable_once)
    with locked(task):
        published(task)
    assert "RETRY" == task.AsyncResult("id-1").state


@pytest.mark.parametrize("ignored", [pytest.param(True, marks=by_us), False])
def test_ignored_result(singleton: Singleton, ignored: bool) -> None:
    """A task that ignores its result stores no RETRY, and its message keeps that option."""

    @singleton(name="x", on_duplicate="retry")
    def task() -> None: ...

    with locked(task):
        message = published(task, ignore_result=ignored)
    assert ("PENDING" if ignored else "RETRY") == task.AsyncResult("id-1").state
    assert ignored is message.headers["ignore_result"]
