"""Errors survive pickle and Celery's result backends."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

import celery_singleton_lock
from celery_singleton_lock import (
    ConfigurationError,
    DuplicateTask,
    Holder,
    LockKeyError,
    LockLost,
    SingletonError,
    StoreError,
    StoreUnavailable,
    TooManyStarts,
)
from tests.unit.conftest import MakeApp

HOLDER = Holder("id-1", "node@host", 4711, 1.5, 28.5)
ERRORS = [
    ConfigurationError("task x: lock_ttl=0"),
    LockKeyError("parameter 'a'"),
    DuplicateTask("key", HOLDER),
    DuplicateTask(),
    TooManyStarts("key", 3, "unsuccessful"),
    TooManyStarts(),
    LockLost("key"),
    LockLost(),
    StoreError("refused"),
    StoreUnavailable("away"),
]


def same(one: BaseException, other: Any) -> None:
    assert type(one) is type(other)
    assert str(one) == str(other)
    assert getattr(one, "key", None) == getattr(other, "key", None)
    for name in ("holder", "starts", "count"):
        assert getattr(one, name, None) == getattr(other, name, None)


@pytest.mark.parametrize("error", ERRORS, ids=repr)
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickle(error: Exception, protocol: int) -> None:
    """Each error survives pickle, more than once."""
    for _ in range(2):
        error = pickle.loads(pickle.dumps(error, protocol))
    same(error, next(one for one in ERRORS if repr(one) == repr(error)))


@pytest.mark.parametrize("error", ERRORS, ids=repr)
@pytest.mark.parametrize("serializer", ["json", "pickle"])
def test_result_backend(make_app: MakeApp, error: Exception, serializer: str) -> None:
    """Each error is the same after a result backend stored and returned it, with either serializer."""
    app = make_app(result_serializer=serializer, accept_content=["json", "pickle"])
    backend = app.backend
    stored = backend.decode(backend.encode({"result": backend.prepare_exception(error, serializer)}))
    same(error, backend.exception_to_python(stored["result"]))


def test_hierarchy() -> None:
    """All errors have one base, and StoreUnavailable is a StoreError."""
    for error in ERRORS:
        assert isinstance(error, SingletonError)
    assert issubclass(StoreUnavailable, StoreError)


def test_text_of_a_duplicate() -> None:
    """The text of a DuplicateTask has the key, and the holder's task id, node and process."""
    text = str(DuplicateTask("the-key", HOLDER))
    for part in ("the-key", "id-1", "node@host", "4711"):
        assert part in text


def test_public_names() -> None:
    """The package exports the public names and no others."""
    expected = {
        *(
            "SingletonTask",
            "SingletonMixin",
            "SingletonResult",
            "Skip",
            "RetryLater",
            "Raise",
            "Policy",
            "Lease",
            "Holder",
            "signals",
        ),
        *("MaxStarts", "TooManyStarts"),
        *("SingletonError", "ConfigurationError", "LockKeyError", "DuplicateTask", "LockLost"),
        *("StoreError", "StoreUnavailable", "Wait", "RunOnceMore", "Debounce", "Replace", "Join"),
    }
    assert expected == set(celery_singleton_lock.__all__)
    assert all(hasattr(celery_singleton_lock, name) for name in expected)
