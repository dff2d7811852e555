"""What a skipped task leaves unrun: every task id already promised in it is stored as revoked, so that nobody waits for ever."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from celery.app.task import Context

_REASON = "not run: an earlier step was skipped"


def revoke_successors(task: Any, request: Any) -> None:
    """Store as revoked whatever would have followed this request.

    Arguments:
        task: the task that is skipped.
        request: its request, with the rest of its chain and its callbacks.
    """
    seen: set[str] = set()
    for context in _promised([*(request.chain or ()), *(request.callbacks or ())], in_header=False):
        if context.id in seen:  # a chord goes by the id of its body
            continue
        seen.add(context.id)
        task.backend.mark_as_revoked(context.id, _REASON, request=context, store_result=not context.ignore_result)


def _promised(signatures: Iterable[Any], in_header: bool) -> Iterator[Context]:
    """Requests of all tasks in these signatures that have an id.

    Those in the header of a chord that is itself dropped are not counted for its body: nobody has started to count.
    """
    for signature in signatures:
        options, kwargs = signature.get("options") or {}, signature.get("kwargs") or {}
        kind = signature.get("subtask_type")
        if options.get("task_id") and kind not in ("group", "chain"):
            yield _context(signature, options, in_header)
        if kind in ("group", "chain"):
            yield from _promised(kwargs.get("tasks") or (), in_header)
        if kind == "chord":
            yield from _promised(_members(kwargs.get("header")), in_header=True)
            yield from _promised(_members(kwargs.get("body")), in_header)
        yield from _promised(_members(options.get("link")), in_header=True)


def _members(value: Any) -> Iterable[Any]:
    """Signatures in what may be one, several or none."""
    return (value,) if isinstance(value, Mapping) else value or ()


def _context(signature: Any, options: Mapping[str, Any], in_header: bool) -> Context:
    """As `celery.backends.base.Backend.mark_as_failure` (5.7) makes it for the rest of a chain."""
    context = Context(signature)
    context.update(options)
    context.id = options["task_id"]
    context.group = options.get("group_id")
    if in_header:
        context.chord = None
    return context
