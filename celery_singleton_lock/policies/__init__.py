"""Policies decide what happens to a duplicate: one module each, registered in `NAMED` (see docs/project/extending.md)."""

from collections.abc import Mapping
from typing import Literal

from celery_singleton_lock.policies.debounce import Debounce
from celery_singleton_lock.policies.decisions import Policy
from celery_singleton_lock.policies.join import Join
from celery_singleton_lock.policies.raise_ import Raise
from celery_singleton_lock.policies.replace import Replace
from celery_singleton_lock.policies.retry_later import RetryLater
from celery_singleton_lock.policies.run_once_more import RunOnceMore
from celery_singleton_lock.policies.skip import Skip
from celery_singleton_lock.policies.wait import Wait

__all__ = [
    "Debounce",
    "Join",
    "Policy",
    "PolicyName",
    "Raise",
    "Replace",
    "RetryLater",
    "RunOnceMore",
    "Skip",
    "Wait",
    "as_policy",
    "name_of",
    "portable_policy",
]

PolicyName = Literal["skip", "retry", "raise", "wait", "join", "run_once_more", "replace"]
#: The policies that have a name, for the option `on_duplicate`.
NAMED: dict[str, Policy] = {
    "skip": Skip(),
    "retry": RetryLater(),
    "raise": Raise(),
    "wait": Wait(),
    "join": Join(),
    "run_once_more": RunOnceMore(),
    "replace": Replace(),
}
#: This library's policies, and what counters call them. `Debounce` is no name for the option: it has no defaults.
KINDS: dict[type, str] = {**{type(policy): name for name, policy in NAMED.items()}, Debounce: "debounce"}


def as_policy(value: object) -> Policy | None:
    """Return the policy that this name or policy object stands for, or None."""
    if isinstance(value, Policy):
        return value
    return NAMED.get(value) if isinstance(value, str) else None


def name_of(value: object) -> str:
    """Return the name of a policy; "custom" for one of a user's class, "callable" for a function that chooses one."""
    return KINDS.get(type(value)) or ("custom" if isinstance(value, Policy) else "callable")


def portable_policy(value: object) -> Policy | None:
    """Return the policy for a policy object of this library, or for what its `__json__` returned; None for anything else.

    Raises:
        ConfigurationError: a field is out of range.
    """
    classes: dict[str, type[Policy]] = {kind.__name__: kind for kind in KINDS}
    if isinstance(value, Policy):
        return value if type(value) in classes.values() else None
    if not isinstance(value, Mapping):
        return None
    fields = dict(value)
    try:
        return classes[fields.pop("policy")](**fields)
    except (KeyError, TypeError):  # from a newer version of this library
        return None
