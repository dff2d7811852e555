"""Options of one call: what is refused in the caller's process, what a message carries, and what a worker makes of it."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from amqp import serialization as amqp
from celery import Celery
from celery.app.task import Context
from celery.signals import before_task_publish
from kombu.utils import json as kombu_json

from celery_singleton_lock import (
    ConfigurationError,
    Debounce,
    DuplicateTask,
    Policy,
    Raise,
    RetryLater,
    SingletonTask,
    Skip,
)
from celery_singleton_lock.config.call_options import LOCK_OPTIONS_HEADER, as_header, call_options
from celery_singleton_lock.config.task_config import config_for, config_of_call
from celery_singleton_lock.delivery.retry_state import lock_options_of
from celery_singleton_lock.policies import NAMED, portable_policy
from celery_singleton_lock.policies.decisions import Decision, Duplicate, Fail
from celery_singleton_lock.testing import locked
from tests.unit.conftest import MakeApp
from tests.unit.test_republish import published
from tests.unit.test_task import Singleton, deliver

ALL = {
    "on_duplicate": RetryLater(delay=1, jitter=0.0),
    "lock_ttl": 5,
    "lock_key": "customer-{account}",
    "on_lock_lost": "raise",
    "on_store_error": "run",
}
#: The same in a message.
CARRIED = {**ALL, "on_duplicate": {"policy": "RetryLater", "delay": 1, "jitter": 0.0}}


@dataclass(frozen=True)
class Own(Policy):
    """A policy class of the user's."""

    def decide(self, duplicate: Duplicate) -> Decision:
        return Fail()


def sync(account: int = 0, kind: str = "full") -> None: ...


@pytest.fixture
def task(singleton: Singleton) -> Any:
    return singleton(name="sync", unique_on="kind", on_duplicate="skip", lock_ttl=60)(sync)


@contextmanager
def messages(task: Any) -> Iterator[Callable[[], Any]]:
    """Yield a function that returns the next message that was published."""
    with task.app.connection_for_write() as connection, connection.SimpleQueue("celery") as queue:
        queue.clear()
        yield lambda: queue.get(timeout=5)


def sent(task: Any, call: Callable[[], Any]) -> Any:
    """Return the header with the options that a call publishes, "" if there is none."""
    with messages(task) as message:
        call()
        return message().headers.get(LOCK_OPTIONS_HEADER, "")


# -- in the caller's process ---------------------------------------------------------------------


@pytest.mark.parametrize("method", ["apply_async", "apply"])
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("lock_ttl", "options of one call are given as lock_options="),
        ("unique_on", "options of one call are given as lock_options="),
        ("lock_option", "options of one call are given as lock_options="),
        ("once", 'use unique_on, .*with lock_from="publish" instead, as options of the task'),
    ],
)
def test_refused_outside_of_lock_options(task: Any, method: str, name: str, says: str) -> None:
    """An option, ours or another plugin's, that is a keyword of the call, where it would have no effect, is refused."""
    with pytest.raises(ConfigurationError, match=f"task sync: {name}=5: {says}"):
        getattr(task, method)((1,), **{name: 5})


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"lock_ttl": 0}, "lock_options lock_ttl=0 must be a number of seconds"),
        ({"lock_ttl": "5"}, "lock_options lock_ttl='5' must be"),
        ({"on_duplicate": "ignore"}, "lock_options on_duplicate='ignore' must be"),
        ({"on_duplicate": Own()}, r"lock_options: on_duplicate=Own\(\): .*cannot travel in a message"),
        ({"on_duplicate": type("Skip", (Own,), {})()}, "on_duplicate=.*cannot travel in a message"),
        ({"on_duplicate": lambda task, holder: "skip"}, "on_duplicate=<function.*cannot travel in a message"),
        ({"on_duplicate": {"policy": "Later"}}, "on_duplicate={'policy': 'Later'}: .*a policy object of this library"),
        ({"on_duplicate": {"policy": ["Skip"]}}, "a policy object of this library"),
        ({"on_duplicate": {"policy": "Skip", "new": 1}}, "a policy object of this library"),
        ({"on_duplicate": {"policy": "RetryLater", "delay": -1}}, "on_duplicate=.*RetryLater: delay=-1 must be"),
        ({"on_duplicate": 5}, "on_duplicate=5: .*a policy object of this library"),
        ({"lock_key": "{custmer}"}, "lock_options lock_key='{custmer}': 'custmer' is no parameter of the task"),
        ({"lock_key": "{account.id}"}, "lock_key='{account.id}': a field must be a plain parameter name"),
        ({"lock_key": ""}, "lock_options lock_key='' must be"),
        ({"lock_key": lambda account: "x"}, "lock_key=<function.*a callable cannot travel in a message"),
        ({"on_lock_lost": "ignore"}, "lock_options on_lock_lost='ignore' must be"),
        ({"on_store_error": True}, "lock_options on_store_error=True must be"),
        ({"unique_on": ["kind"]}, r"unique_on=\['kind'\]: only on_duplicate, lock_ttl, lock_key"),
        ({"lock_group": "g"}, "lock_group='g': only on_duplicate, lock_ttl, lock_key"),
        ({"lock_tll": 5}, "lock_tll=5: only on_duplicate, lock_ttl, lock_key"),
        ({"lock_tll": None}, "lock_tll=None: only"),
        ({5: 5}, "5=5: only"),
        ("raise", "lock_options='raise' must be a dict of options"),
        ([("lock_ttl", 5)], r"lock_options=\[\('lock_ttl', 5\)\] must be a dict"),
        (0, "lock_options=0 must be a dict"),
    ],
)
@pytest.mark.parametrize("method", ["apply_async", "apply"])
def test_refused_in_the_callers_process(task: Any, method: str, given: Any, text: str) -> None:
    """An option that cannot be used is refused before anything is published; the error names task, option and value."""
    sent: list[Any] = []

    def note(**kwargs: Any) -> None:
        sent.append(kwargs)

    before_task_publish.connect(note, sender="sync")
    try:
        with pytest.raises(ConfigurationError, match=f"task sync: .*{text}"):
            getattr(task, method)((1,), lock_options=given)
    finally:
        before_task_publish.disconnect(note, sender="sync")
    assert [] == sent


def test_a_publisher_needs_no_store(make_app: MakeApp) -> None:
    """Options of a call are checked without a store, as a publisher may have none."""
    app = make_app(singleton_lock_url=None)
    task = app.task(base=SingletonTask, name="sync")(sync)
    app.finalize(auto=True)
    task = app.tasks["sync"]
    with pytest.raises(ConfigurationError, match="no store"):
        config_for(task)
    assert {"lock_ttl": 5} == sent(task, lambda: task.apply_async(lock_options={"lock_ttl": 5}))


def test_unknown_attribute(make_app: MakeApp) -> None:
    """`lock_options` is no option of a task."""
    app = make_app()
    app.task(base=SingletonTask, name="sync", lock_options={"lock_ttl": 5})(sync)
    with pytest.raises(ConfigurationError, match=r"sync: lock_options=.*no such option"):
        config_for(app.tasks["sync"])


# -- in the message ------------------------------------------------------------------------------


def test_header(task: Any) -> None:
    """The options travel in one header, a policy as its class and what differs from its defaults."""
    assert CARRIED == sent(task, lambda: task.apply_async((1,), lock_options=ALL))


def test_other_headers_stay(task: Any) -> None:
    """The caller's headers are kept, and the caller's dict is not changed."""
    headers = {"x-mine": 1}
    with messages(task) as message:
        task.apply_async(headers=headers, lock_options={"lock_ttl": 5})
        found = message().headers
    assert (1, {"lock_ttl": 5}) == (found["x-mine"], found[LOCK_OPTIONS_HEADER])
    assert {"x-mine": 1} == headers


@pytest.mark.parametrize("options", [{}, {"lock_options": None}])
def test_plain_call_has_no_header(task: Any, options: Any) -> None:
    """A call without options publishes no header for them."""
    assert sent(task, lambda: task.apply_async((1,), **options)) == ""
    assert sent(task, lambda: task.delay(1)) == ""


def test_none_is_not_given(task: Any) -> None:
    """None as an option of a call means: not given."""
    assert {"lock_ttl": 5} == sent(task, lambda: task.apply_async(lock_options={"lock_key": None, "lock_ttl": 5}))


def test_signature(task: Any) -> None:
    """A signature carries the options, and so do its copies in JSON and pickle."""
    signature = task.s(1).set(lock_options=ALL)
    assert CARRIED == sent(task, signature.apply_async)
    copied = task.app.signature(kombu_json.loads(kombu_json.dumps(signature)))
    assert CARRIED == sent(task, copied.apply_async)
    copied = task.app.signature(dict(pickle.loads(pickle.dumps(signature))))
    assert CARRIED == sent(task, copied.apply_async)


def test_options_given_again(task: Any) -> None:
    """Options that a retry gives replace those of the message that have the same name."""
    headers = {LOCK_OPTIONS_HEADER: {"lock_ttl": 5, "lock_key": "x"}}
    found = sent(task, lambda: task.apply_async(headers=headers, lock_options={"lock_ttl": 7}))
    assert {"lock_ttl": 7, "lock_key": "x"} == found
    with pytest.raises(ConfigurationError, match="task sync: lock_options='x' must be a dict"):
        task.apply_async(headers={LOCK_OPTIONS_HEADER: "x"}, lock_options={"lock_ttl": 7})


@pytest.mark.parametrize(
    "policy", [*NAMED.values(), Skip([1, None]), RetryLater(max_wait=float("inf")), Raise(), Debounce(1, 2)]
)
def test_policy_in_a_message(policy: Policy) -> None:
    """Each policy of this library survives JSON, and the headers of AMQP."""
    assert policy == portable_policy(json.loads(json.dumps(as_header({"x": policy})["x"])))
    assert policy == portable_policy(kombu_json.loads(kombu_json.dumps(policy)))
    (table,), _ = amqp.loads("F", amqp.dumps("F", [as_header({"x": policy})]), 0)
    assert policy == portable_policy(table["x"])


# -- in the worker -------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [ALL, CARRIED])
def test_configuration_of_a_call(task: Any, given: Any) -> None:
    """The options of a call count before the task's; those that were not given are the task's."""
    config = config_of_call(task, given)
    found = {name: getattr(config.options, name) for name in ALL}
    assert ALL == found
    assert (None, True) == (config.options.unique_on, config.options.singleton)
    assert config.base == config_for(task).base
    assert config_of_call(task, {"lock_ttl": 5}).options.on_duplicate == Skip()


def test_plain_call_pays_no_work(task: Any) -> None:
    """A call without options uses the one configuration of its task."""
    assert config_for(task) is config_of_call(task, None)
    assert lock_options_of(Context({"headers": {LOCK_OPTIONS_HEADER: 1}})) is None  # headers of a tracer's own


@pytest.mark.parametrize("own", [{"unique_on": "kind"}, {"lock_key": "{kind}"}, {"lock_key": lambda kind: kind}, {}])
@pytest.mark.parametrize("setting", [{}, {"singleton_unique_on": "kind"}, {"singleton_lock_key": "{kind}"}])
def test_key_of_a_call(make_app: MakeApp, own: Any, setting: Any) -> None:
    """The key of a call replaces the task's, and both settings; its template is filled as usual, a plain text is literal."""
    app = make_app(**setting)
    app.task(base=SingletonTask, name="sync", **own)(sync)
    app.finalize(auto=True)

    def key(lock_key: str, *args: Any) -> str:
        return config_of_call(app.tasks["sync"], {"lock_key": lock_key}).digest(args, {})

    assert key("customer-7", 1) == key("customer-7", 2, "other")
    assert key("customer-7", 1) != key("customer-8", 1)
    assert key("customer-{account}", 1) == key("customer-{account}", 1, "other")
    assert key("customer-{account}", 1) != key("customer-{account}", 2)
    with pytest.raises(TypeError):
        key("customer-7", 1, 2, 3)


def test_a_literal_key_excludes(task: Any) -> None:
    """Two calls with one literal key are the same work, whatever their arguments are."""
    with held(task, {"lock_key": "customer-7"}):
        assert "IGNORED" == state(task, {"lock_key": "customer-7"}, 2)
        assert "SUCCESS" == state(task, {"lock_key": "customer-8"}, 2)
        assert "SUCCESS" == state(task, None, 2)


def test_policy_of_a_call(task: Any) -> None:
    """The policy of a call decides, given as a name or as a policy object."""
    with locked(task):
        assert "IGNORED" == state(task, {})
        assert "FAILURE" == state(task, {"on_duplicate": "raise"})
        assert "FAILURE" == state(task, as_header({"on_duplicate": RetryLater(max_wait=0)}))
        assert "RETRY" == state(task, {"on_duplicate": "retry"})


def test_ttl_of_a_call(singleton: Singleton) -> None:
    """The lease of a call lives as long as the call says."""
    seen = []

    @singleton(name="x", bind=True, lock_ttl=60)
    def task(self: Any) -> None:
        seen.append(self.lease.remaining)

    deliver(task, headers={LOCK_OPTIONS_HEADER: {"lock_ttl": 5}})
    deliver(task)
    assert 0 < seen[0] <= 5 < seen[1]


@pytest.mark.parametrize("given", [{"on_duplicate": "newer"}, {"newer": 1}, {"lock_key": "{newer}"}, "x", [1]])
def test_options_that_a_worker_does_not_know(task: Any, given: Any) -> None:
    """A message with options that this worker does not know fails, and does not run under other options."""
    result = deliver(task, 1, headers={LOCK_OPTIONS_HEADER: given})
    assert "FAILURE" == result.info.state
    assert isinstance(result.info.retval, ConfigurationError)
    assert "task sync" in str(result.info.retval)


@pytest.mark.parametrize("nested", [{}, {"headers": {"x-datadog-trace-id": "17"}}])
def test_republished_message(task: Any, nested: Any) -> None:
    """A postponed duplicate keeps the options of its call, whatever is nested in its headers."""
    given = {"on_duplicate": {"policy": "RetryLater", "delay": 1}, "lock_key": "customer-7"}
    with held(task, given):
        message = published(task, headers={LOCK_OPTIONS_HEADER: given, **nested})
        assert given == message.headers[LOCK_OPTIONS_HEADER]
        again = {name: message.headers[name] for name in message.headers if name.startswith("singleton_")}
        assert given == published(task, headers={**again, **nested}).headers[LOCK_OPTIONS_HEADER]


def test_options_that_send_task_was_given(task: Any) -> None:
    """`send_task` does not know the options and puts them among the properties; a postponed message forgets them."""
    with locked(task):
        properties = {"lock_options": {"lock_tll": 5}}
        options = {LOCK_OPTIONS_HEADER: {"on_duplicate": "retry"}}
        message = published(task, headers=options, properties=properties)
    assert options[LOCK_OPTIONS_HEADER] == message.headers[LOCK_OPTIONS_HEADER]


@pytest.mark.parametrize("nested", [{}, {"headers": {"x-datadog-trace-id": "17"}}])
def test_own_retry(singleton: Singleton, nested: Any) -> None:
    """A task's own retry keeps the options of its call, whatever is nested in its headers."""

    @singleton(name="x", bind=True)
    def task(self: Any) -> None:
        self.retry(countdown=0)

    with messages(task) as message:
        assert "RETRY" == deliver(task, headers={LOCK_OPTIONS_HEADER: {"lock_ttl": 5}, **nested}).info.state
        assert {"lock_ttl": 5} == message().headers[LOCK_OPTIONS_HEADER]


# -- eager ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("always_eager", [False, True])
def test_eager(singleton: Singleton, app: Celery, always_eager: bool) -> None:
    """An eager run uses the options of its call, and so do its own retries."""
    seen = []

    @singleton(name="x", bind=True, max_retries=1)
    def task(self: Any, a: int) -> None:
        seen.append(self.lease.remaining)
        if not self.request.retries:
            self.retry(countdown=0)

    app.conf.task_always_eager = always_eager
    run = task.apply_async if always_eager else task.apply
    assert run((1,), lock_options={"lock_ttl": 5}).successful()
    assert 2 == len(seen)
    assert max(seen) <= 5
    with locked(task, 1):
        assert isinstance(run((1,), lock_options={"on_duplicate": "raise"}).result, DuplicateTask)
        assert run((1,), lock_options={"lock_key": "other"}).successful()


# -- helps ---------------------------------------------------------------------------------------


def state(task: Any, options: Any, *args: Any) -> Any:
    """Deliver a call with these options; return how it ends."""
    headers = {} if options is None else {LOCK_OPTIONS_HEADER: options}
    ended = deliver(task, *args, task_id="id-2", headers=headers)
    return "SUCCESS" if ended.info is None else ended.info.state


@contextmanager
def held(task: Any, options: Any) -> Iterator[None]:
    """Hold the lock of a call with these options."""
    config = config_of_call(task, call_options(task.name, options))
    task.__dict__["_singleton_config"], own = config, config_for(task)
    try:
        with locked(task):
            task.__dict__["_singleton_config"] = own
            yield
    finally:
        task.__dict__["_singleton_config"] = own
