"""Policies decide what happens to a duplicate: one module each, registered in `NAMED` (see CONTRIBUTING.md, "Add a policy")."""

from celery_singleton_lock.policies.decisions import Policy
from celery_singleton_lock.policies.raise_ import Raise
from celery_singleton_lock.policies.retry_later import RetryLater
from celery_singleton_lock.policies.run_once_more import RunOnceMore
from celery_singleton_lock.policies.skip import Skip
from celery_singleton_lock.policies.wait import Wait

__all__ = ["Policy", "Raise", "RetryLater", "RunOnceMore", "Skip", "Wait", "as_policy"]

#: The policies that have a name, for the option `on_duplicate`.
NAMED: dict[str, Policy] = {
    "skip": Skip(),
    "raise": Raise(),
    "retry": RetryLater(),
    "wait": Wait(),
    "run_once_more": RunOnceMore(),
}


def as_policy(value: object) -> Policy | None:
    """Return the policy that this name or policy object stands for, or None."""
    if isinstance(value, Policy):
        return value
    return NAMED.get(value) if isinstance(value, str) else None
