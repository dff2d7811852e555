"""Two options of one task: values of each option, which pairs are refused, and a task for each pair that is allowed."""

from __future__ import annotations

import re
from itertools import combinations
from typing import Any

from celery import Celery, Task

from celery_singleton_lock import Debounce, MaxStarts, RetryLater, RunOnceMore, SingletonTask

#: Seconds for which a success keeps the lock held: much longer than the body of a test runs.
COOLDOWN = 15.0
#: Seconds after which the lease of a body that still runs is lost.
CAP = 1.0
#: How many starts without a success are allowed.
TRIES = 3


def by_tag(tag: str) -> str:
    """Return the key of a call."""
    return tag


def two(tag: str) -> int:
    """Return the limit of a call."""
    return 2


def choose(task: Task, holder: Any) -> str:
    """Choose the policy for a duplicate."""
    return "raise"


def choose_twice(task: Task, holder: Any) -> str:
    """Choose that a call is published, and that its start fails."""
    return "raise" if task.request.id else "wait"


#: Option -> values, by a short name. "default" means the same as a task without the option.
VALUES: dict[str, dict[str, Any]] = {
    "singleton": {"default": True, "False": False},
    "unique_on": {"tag": ["tag"], "set": {"tag", "acts"}, "nothing": []},
    "lock_key": {"template": "{tag}", "callable": by_tag},
    "lock_group": {"name": "accounts"},
    "lock_limit": {"default": 1, "2": 2, "callable": two},
    "on_duplicate": {
        "skip": "skip",
        "retry": RetryLater(delay=0.2, backoff=1.0, jitter=0.0),
        "raise": "raise",
        "wait": "wait",
        "run_once_more": "run_once_more",
        "latest": RunOnceMore(keep="latest"),
        "quiet": Debounce(quiet=0.3, max_quiet=60),
        "callable": choose,
        "join": "join",
        "replace": "replace",
    },
    "lock_from": {"default": "start", "publish": "publish"},
    "lock_until": {"default": "finish", "start": "start"},
    "lock_ttl": {"20": 20.0, "60": 60.0},
    "lock_at_least": {"default": 0.0, "some": COOLDOWN},
    "lock_at_most": {"less": CAP, "more": 60.0},
    "on_lock_lost": {"default": "warn", "raise": "raise"},
    "on_store_error": {"default": "retry", "run": "run", "raise": "raise"},
    "max_starts": {"crashed": TRIES, "unsuccessful": MaxStarts(TRIES, count="unsuccessful")},
}

#: Value -> the value of another option without which it is refused. A pair gets it, unless it has that option itself.
NEEDS = {
    "lock_group=name": "unique_on=tag",
    "lock_until=start": "lock_from=publish",
}

#: The pairs that are refused, as regular expressions: the table in `docs/reference/options.md`.
REFUSED = [
    ("unique_on=.*", "lock_key=.*"),
    ("lock_group=name", "unique_on=set"),
    ("lock_until=start", "lock_from=default"),
    ("lock_group=name", "on_duplicate=(run_once_more|latest|quiet|join)"),
    ("lock_limit=(2|callable)", "on_duplicate=(join|replace)"),
    ("lock_until=start", "on_duplicate=join"),
    ("lock_limit=(2|callable)", "lock_at_least=some"),
    ("on_duplicate=quiet", "lock_from=publish"),
    ("lock_at_most=less", "lock_at_least=some"),
    ("lock_until=start", "lock_at_least=some"),
    ("lock_until=start", "lock_at_most=.*"),
    ("lock_until=start", "max_starts=.*"),
]

Pair = tuple[str, str]
#: All pairs of values of two options.
PAIRS: list[Pair] = [
    (f"{one}={this}", f"{other}={that}")
    for one, other in combinations(VALUES, 2)
    for this in VALUES[one]
    for that in VALUES[other]
]


def completed(pair: Pair) -> tuple[str, ...]:
    """Return the pair with the values that it needs, unless it has others of these options."""
    given = {value.partition("=")[0] for value in pair}
    needed = [NEEDS[value] for value in pair if value in NEEDS]
    if "lock_key" in given:
        given.add("unique_on")
    return (*pair, *(value for value in needed if value.partition("=")[0] not in given))


def refused_in(values: tuple[str, ...]) -> list[Pair]:
    """Return which pairs among these values are refused."""
    found = combinations(values, 2)
    return [pair for pair in found if any(_matches(rule, pair) or _matches(rule, pair[::-1]) for rule in REFUSED)]


def _matches(rule: Pair, pair: Pair) -> bool:
    return all(re.fullmatch(pattern, value) for pattern, value in zip(rule, pair, strict=True))


def options_of(values: tuple[str, ...]) -> dict[str, Any]:
    """Return the options of a task."""
    names = [value.partition("=") for value in values]
    return {option: VALUES[option][name] for option, _, name in names}


def case_of(pair: Pair) -> tuple[str, ...]:
    """Return the values of a pair's task without defaults. Many pairs have the same task."""
    return tuple(sorted(value for value in completed(pair) if not value.endswith("=default")))


#: The pairs that are allowed.
ALLOWED = [pair for pair in PAIRS if not refused_in(completed(pair))]
#: The values of each task that a worker runs: those of all these pairs.
LIVE = list(dict.fromkeys(case_of(pair) for pair in ALLOWED))

#: Tasks whose pairs of options have an outcome that needs a word (`docs/reference/options.md`, "Pairs that need a word").
OTHERS: dict[str, dict[str, Any]] = {
    "publish_tried": {"lock_from": "publish", "max_starts": MaxStarts(1, count="unsuccessful")},
    "publish_held": {"lock_from": "publish", "lock_at_least": COOLDOWN},
    "wait_held": {"on_duplicate": "wait", "lock_at_least": COOLDOWN, "lock_ttl": 60},
    "wait_capped": {"on_duplicate": "wait", "lock_at_most": CAP, "lock_ttl": 1.0},
    "join_capped": {"on_duplicate": "join", "lock_at_most": CAP, "lock_ttl": 1.0},
    "retry_until_start": {"lock_from": "publish", "lock_until": "start"},
    "chosen_twice": {"lock_from": "publish", "on_duplicate": choose_twice},
    "unlocked": {
        "on_store_error": "run",
        "lock_at_least": COOLDOWN / 2,
        "lock_at_most": COOLDOWN,
        "max_starts": MaxStarts(1, count="unsuccessful"),
    },
    "unlocked_capped": {"on_store_error": "run", "lock_at_most": CAP, "on_lock_lost": "raise"},
    "retry_held": {"lock_at_least": 60.0},
    "retry_tried": {"max_starts": MaxStarts(2, count="unsuccessful")},
    "held": {"lock_group": "held", "lock_at_least": 60.0, "on_duplicate": "skip"},
    "also_held": {"lock_group": "held", "on_duplicate": "skip"},
    "replaced": {"lock_group": "replaced", "on_duplicate": "replace", "lock_ttl": 60.0},
    "also_replaced": {"lock_group": "replaced", "on_duplicate": "replace", "lock_ttl": 60.0},
    "tried": {"lock_group": "tried", "max_starts": MaxStarts(1, count="unsuccessful")},
    "also_tried": {"lock_group": "tried", "max_starts": MaxStarts(1, count="unsuccessful")},
    "publish": {"lock_group": "publish", "lock_from": "publish", "on_duplicate": "skip"},
    "also_publish": {"lock_group": "publish", "lock_from": "publish", "on_duplicate": "skip"},
}


def add_pairs(app: Celery, body: Any) -> None:
    """Add the tasks of `OTHERS`, and one for each of `LIVE`, with a lock group of its own."""
    for name, options in OTHERS.items():
        _add(app, body, f"other.{name}", {"unique_on": ["tag"], **options})
    for values in LIVE:
        options = options_of(values)
        if "lock_group" in options:
            options["lock_group"] = f"group of {task_name(values)}"
        _add(app, body, task_name(values), options)


def _add(app: Celery, body: Any, name: str, options: dict[str, Any]) -> None:
    def job(self: Task, tag: str, acts: Any = "hold", seconds: float = 0.0) -> Any:
        return body(self, tag, acts, seconds)

    app.task(shared=False, bind=True, base=SingletonTask, name=name, **options)(job)


def task_name(values: tuple[str, ...]) -> str:
    """Return the name of the task with these values."""
    return f"pair.{'+'.join(values)}"
