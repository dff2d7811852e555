"""The options of one call: which may be given, and how a message carries them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from celery_singleton_lock.errors import ConfigurationError
from celery_singleton_lock.policies import Policy, portable_policy

#: Header of a message: the options of its call.
LOCK_OPTIONS_HEADER = "singleton_lock_options"
CALL_OPTIONS = ("on_duplicate", "lock_ttl", "lock_key", "on_lock_lost", "on_store_error")


def call_options(task: str, given: Any) -> dict[str, Any]:
    """Return the options that a caller gave, or that a header carries; a policy as its name or as an object.

    Raises:
        ConfigurationError: one of them cannot be given for one call, or cannot travel in a message.
    """
    source = f"task {task}: lock_options"
    if not isinstance(given, Mapping):
        raise ConfigurationError(f"{source}={given!r} must be a dict of options")
    found = {}
    for name, value in given.items():
        if name not in CALL_OPTIONS:
            raise ConfigurationError(
                f"{source}: {name}={value!r}: only {', '.join(CALL_OPTIONS)} can be given for one call"
            )
        if name == "on_duplicate" and value is not None and not isinstance(value, str):
            found[name] = _policy(f"{source}: {name}={value!r}", value)
        elif callable(value):
            raise ConfigurationError(f"{source}: {name}={value!r}: a callable cannot travel in a message")
        elif value is not None:
            found[name] = value
    return found


def as_header(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return checked options in a form that JSON and the headers of AMQP can carry."""
    return {name: value.__json__() if isinstance(value, Policy) else value for name, value in options.items()}


def _policy(source: str, value: Any) -> Policy:
    try:
        policy = portable_policy(value)
    except ConfigurationError as error:
        raise ConfigurationError(f"{source}: {error}") from error
    if policy is None:
        raise ConfigurationError(
            f"{source}: for one call, give the name of a policy or a policy object of this library; "
            "a callable or a policy class of your own cannot travel in a message"
        )
    return policy
