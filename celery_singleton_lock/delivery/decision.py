"""Asks a task's policy what becomes of a duplicate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from celery_singleton_lock.config.exclusions import excluded_pairs
from celery_singleton_lock.config.options import Options
from celery_singleton_lock.delivery.attempt import Attempt
from celery_singleton_lock.delivery.routing import goes_to_several_queues
from celery_singleton_lock.errors import ConfigurationError
from celery_singleton_lock.holder import Holder
from celery_singleton_lock.policies import Policy, RetryLater, Skip, as_policy
from celery_singleton_lock.policies.decisions import Decision, Duplicate, Enqueue, Fail, Follow, RunLater, SkipRun
from celery_singleton_lock.store.protocol import AcquireResult


def policy_of(task: Any, options: Options, holder: Holder) -> Policy:
    """Return the policy for a duplicate of this holder.

    Raises:
        ConfigurationError: the task's callable returned something else.
    """
    chosen = options.on_duplicate
    if not callable(chosen):
        return chosen
    policy = as_policy(answer := chosen(task, holder))
    if policy is None:
        raise ConfigurationError(f"task {task.name}: on_duplicate returned {answer!r}, which is no policy")
    if excluded := tuple(excluded_pairs(task.name, replace(options, on_duplicate=policy))):
        raise ConfigurationError(*excluded)
    if getattr(policy, "quiet", 0.0):
        raise ConfigurationError(
            f"task {task.name}: on_duplicate returned {answer!r}: a quiet time begins with the first call, which is no duplicate"
        )
    return policy


def decide(attempt: Attempt, policy: Policy, result: AcquireResult) -> tuple[Policy, Decision]:
    """Ask the policy; return it with its decision. A broadcast message that cannot wait is skipped, and an eager run fails."""
    request, state = attempt.request, attempt.retry_state
    is_broadcast = goes_to_several_queues(attempt.task.app, request)
    can_run_later = not is_broadcast and not request.is_eager
    # What we publish again keeps `retries` as it was.
    own_retry = (bool(request.retries) or state.is_unfinished) and can_run_later
    duplicate = Duplicate(
        result.holder or Holder(),
        state.times,
        state.waited,
        can_run_later,
        own_retry,
        result.waiting,
        result.head,
        result.is_waiting,
        has_waited=bool(state.ticket),
        asked=result.asked,
    )
    decision = policy.decide(duplicate)
    if isinstance(decision, (RunLater, Enqueue, Follow)) and not can_run_later:
        return (Skip(), SkipRun()) if is_broadcast else (policy, Fail())
    is_kept = policy.keeps_duplicates or isinstance(decision, (RunLater, Enqueue))
    if state.is_unfinished and can_run_later and not is_kept:  # its work has begun, so it is never dropped
        decision = RetryLater().decide(duplicate)
    return policy, decision
