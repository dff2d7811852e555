"""What the library uses of Celery's private names is there in this Celery. One that is gone is named, with what it was for."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import celery
import celery._state
import kombu.transport.redis
import pytest
from celery import Celery
from celery.app import trace
from celery.worker.consumer import Consumer
from celery.worker.request import Request

import celery_singleton_lock
from tests.unit.test_request import received

PACKAGE = Path(celery_singleton_lock.__file__).parent
#: Whose name it is, the name, and what the library cannot do without it.
NAMES: list[tuple[Any, str, str]] = [
    (celery._state, "get_current_task", "tell whether a task's body was called by another task"),
    (trace, "_install_stack_protection", "mark the body of a task as its own, as this function does with `_protected`"),
    (Request, "_announce_revoked", "say which task has replaced one that was terminated"),
    (Request, "_context", "revoke what follows a task that was terminated"),
    (Consumer, "on_decode_error", "free the lock of a message that no worker can read"),
    (kombu.transport.redis.QoS, "_remove_from_indices", "return a message to where it was in its queue"),
    (kombu.transport.redis.Channel, "_do_restore_message", "return a message to where it was in its queue"),
]


@pytest.mark.parametrize(("owner", "name", "purpose"), NAMES, ids=[name for _, name, _ in NAMES])
def test_name_is_there(owner: Any, name: str, purpose: str) -> None:
    """Celery has this name."""
    assert hasattr(owner, name), (
        f"Celery {celery.__version__} has no {owner.__name__}.{name} any more: we cannot {purpose}"
    )


@pytest.mark.parametrize(
    ("name", "purpose"),
    [("_eventer", "tell whether a worker sends events"), ("_apply_result", "tell whether a task runs")],
)
def test_attribute_is_there(app: Celery, singleton: Callable[..., Any], name: str, purpose: str) -> None:
    """A request has this attribute, the second once a pool has it."""

    @singleton(name="x")
    def task() -> None: ...

    task.Request = Request
    request = received(app)
    request.execute_using_pool(type("Pool", (), {"apply_async": lambda *args, **options: pytest})())
    assert hasattr(request, name), f"Celery {celery.__version__} has no Request.{name} any more: we cannot {purpose}"


def test_protection_is_a_mark_on_the_request() -> None:
    """Celery's tracer reads the mark that a body sets."""
    source = Path(trace.__file__).read_text(encoding="utf-8")
    assert "._protected = 1" in source, f"Celery {celery.__version__} marks a body that runs in another way"


def test_no_other_module_has_private_names() -> None:
    """All of them are in one module, but for what Celery's documentation names, and what is the library's own."""
    private = re.compile(r"(?<!self)(?<!cls)\._(?!replace\b|asdict\b|fields\b)([a-z]\w*)|(?:celery|kombu)\.(_\w+)")
    others = [
        path for path in PACKAGE.rglob("*.py") if not path.name.endswith("_internals.py") and "redis" not in path.parts
    ]
    texts = [re.sub(r'"""[\s\S]*?"""|#.*|`[^`]*`', "", path.read_text(encoding="utf-8")) for path in others]
    found = {one or two for text in texts for one, two in private.findall(text)}
    assert {"get_current_object"} == found - {"singleton", "original", "key", "was_enabled"}
