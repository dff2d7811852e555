"""Finds the tasks that would have followed a task that is skipped or replaced."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from celery.app.task import Context


def successors(request: Any) -> Iterator[Context]:
    """Yield a request for each task id in the rest of the chain and in the callbacks of a request."""
    seen: set[str] = set()
    for context in _contexts([*(request.chain or ()), *(request.callbacks or ())], in_header=False):
        if context.id not in seen:  # a chord has the id of its body
            seen.add(context.id)
            yield context


def _contexts(signatures: Iterable[Any], in_header: bool) -> Iterator[Context]:
    """Yield a request for each task with an id. Members of a chord's header are not counted for its body, which never began."""
    for signature in signatures:
        options, kwargs = signature.get("options") or {}, signature.get("kwargs") or {}
        kind = signature.get("subtask_type")
        if options.get("task_id") and kind not in ("group", "chain"):
            yield _context(signature, options, in_header)
        if kind in ("group", "chain"):
            yield from _contexts(kwargs.get("tasks") or (), in_header)
        if kind == "chord":
            yield from _contexts(_members(kwargs.get("header")), in_header=True)
            yield from _contexts(_members(kwargs.get("body")), in_header)
        yield from _contexts(_members(options.get("link")), in_header=True)


def _members(value: Any) -> Iterable[Any]:
    """Return the signatures in a value that may be one, several or none."""
    return (value,) if isinstance(value, Mapping) else value or ()


def _context(signature: Any, options: Mapping[str, Any], in_header: bool) -> Context:
    """Make a request as `celery.backends.base.Backend.mark_as_failure` (5.7) does for the rest of a chain."""
    context = Context(signature)
    context.update(options)
    context.id = options["task_id"]
    context.group = options.get("group_id")
    if in_header:
        context.chord = None
    return context
