"""What identifies a delivery."""

from __future__ import annotations

import copy
import pickle

from celery.app.task import Context

from celery_singleton_lock.delivery.properties import PROPERTY, Delivery, delivery_of, new_token, take_delivery


def test_token_is_not_shown() -> None:
    """Neither a delivery nor the tuple that is sent to a child shows the token, also not in the child."""
    token = new_token()
    sent = (token, "application/json", True, True)
    assert token not in repr([token, sent, Delivery(*sent)])
    arrived = pickle.loads(pickle.dumps(sent))
    assert sent == arrived
    assert token not in repr(arrived)


def test_request_loses_its_token() -> None:
    """A request whose token was taken has none that a body could copy or pickle; the rest of its delivery stays."""
    token = new_token()
    request = Context({"properties": {PROPERTY: (token, "application/json", True, True), "mine": 1}})
    assert token == take_delivery(request).token
    for properties in (request.properties, copy.deepcopy(request.properties)):
        assert token not in f"{tuple(properties[PROPERTY])}"
    assert token.encode() not in pickle.dumps(request.properties)
    assert Delivery("", "application/json", True, True) == delivery_of(request)
    assert 1 == request.properties["mine"]


def test_request_without_a_token() -> None:
    """A delivery that no worker of ours has named gets a token of its own, each time."""
    assert take_delivery(Context()).token != take_delivery(Context()).token
    assert Delivery() == delivery_of(Context())


def test_token_is_never_taken_from_a_message() -> None:
    """A publisher's own value in the property of that name is not used as a token."""
    for forged in ("token", ["token"], {"token": 1}, None):
        assert "token" != take_delivery(Context({"properties": {PROPERTY: forged}})).token
