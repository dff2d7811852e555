"""Finds options of a task that exclude each other: the one place for such rules. A page of the site repeats the table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set

from celery_singleton_lock.config.options import Options

#: Two options, when they exclude each other, and why: the end of a sentence that has named both with their values.
#: A callable `on_duplicate` is checked when it has chosen a policy.
EXCLUSIONS: list[tuple[str, str, Callable[[Options], bool], str]] = [
    (
        "unique_on",
        "lock_key",
        lambda options: options.unique_on is not None and options.lock_key is not None,
        "give one of them",
    ),
    (
        "lock_group",
        "unique_on",
        lambda options: options.lock_group is not None and options.unique_on is None and options.lock_key is None,
        "give unique_on or lock_key too, as tasks of one group have different parameters",
    ),
    (
        "lock_group",
        "unique_on",
        lambda options: (
            options.lock_group is not None and isinstance(options.unique_on, Set) and len(options.unique_on) > 1
        ),
        "give a list, as values are compared in its order",
    ),
    (
        "lock_until",
        "lock_from",
        lambda options: options.lock_until == "start" and options.lock_from == "start",
        "there is nothing to lock, use lock_from='publish'",
    ),
    (
        "lock_group",
        "on_duplicate",
        lambda options: options.lock_group is not None and getattr(options.on_duplicate, "needs_same_work", False),
        "another task of the group is other work",
    ),
    (
        "lock_limit",
        "on_duplicate",
        lambda options: options.is_limited and getattr(options.on_duplicate, "stops_holder", False),
        "a newcomer replaces one holder",
    ),
    (
        "lock_limit",
        "on_duplicate",
        lambda options: options.is_limited and getattr(options.on_duplicate, "reads_result", False),
        "a duplicate has several holders",
    ),
    (
        "lock_limit",
        "lock_at_least",
        lambda options: options.is_limited and options.lock_at_least > 0,
        "a cooldown keeps all slots of the lock",
    ),
    (
        "on_duplicate",
        "lock_from",
        lambda options: options.lock_from == "publish" and bool(getattr(options.on_duplicate, "quiet", 0)),
        "a lock at publish does not wait for a quiet time",
    ),
    (
        "lock_at_most",
        "lock_at_least",
        lambda options: options.lock_at_most is not None and options.lock_at_most <= options.lock_at_least,
        "it must be above, as a lost lease leaves no cooldown",
    ),
    (
        "lock_until",
        "on_duplicate",
        lambda options: options.lock_until == "start" and getattr(options.on_duplicate, "reads_result", False),
        "no lock is held while the body runs",
    ),
    *(
        (
            "lock_until",
            option,
            lambda options, option=option: options.lock_until == "start" and bool(getattr(options, option)),
            "no lock is held while the body runs",
        )
        for option in ("lock_at_least", "lock_at_most", "max_starts")
    ),
]


def different_limits(options: Mapping[str, Options]) -> Iterator[str]:
    """Name tasks of one group with different limits, of which each newcomer's own would count. Callables are not compared.

    Arguments:
        options: of each task, by its name.
    """
    first: dict[str, str] = {}
    for task, own in sorted(options.items()):
        if own.lock_group is None or not own.singleton:
            continue
        other = first.setdefault(own.lock_group, task)
        one, two = options[other].lock_limit, own.lock_limit
        if one != two and not (callable(one) and callable(two)):
            yield (
                f"task {other}: lock_limit={one!r} with task {task}: lock_limit={two!r}: "
                f"tasks of lock_group={own.lock_group!r} must have the same limit"
            )


def excluded_pairs(task: str, options: Options) -> Iterator[str]:
    """Name each pair of options that exclude each other: the task, both options, their values and the reason."""
    for one, other, exclude_each_other, reason in EXCLUSIONS:
        if exclude_each_other(options):
            values = f"{one}={getattr(options, one)!r} with {other}={getattr(options, other)!r}"
            yield f"task {task}: {values}: {reason}"
