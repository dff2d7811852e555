"""What names a delivery."""

from __future__ import annotations

import copy
import pickle

from celery.app.task import Context

from celery_singleton_lock.worker.delivery import PROPERTY, Delivery, delivery_of, new_token


def test_token_is_not_shown() -> None:
    """Neither an attempt nor the tuple that a child is sent shows the token; the child gets it as a plain text."""
    token = new_token()
    assert token not in repr([token, Delivery(token)])
    arrived = pickle.loads(pickle.dumps(token))
    assert (str, token) == (type(arrived), arrived)


def test_copy_is_an_attempt_of_its_own() -> None:
    """A request that a body copies or pickles has no token in it."""
    request = Context({"properties": {PROPERTY: (new_token(), "application/json", True, True)}})
    named = delivery_of(request)
    assert named is delivery_of(request)
    for other in (copy.deepcopy(request.properties), pickle.loads(pickle.dumps(request.properties))):
        assert named.token != other[PROPERTY].token
        assert ("application/json", True, False) == (
            other[PROPERTY].content_type, other[PROPERTY].events, other[PROPERTY].supervised
        )  # fmt: skip


def test_request_without_a_name() -> None:
    """A delivery that no worker of ours has named is an attempt of its own."""
    assert delivery_of(Context()).token != delivery_of(Context()).token
