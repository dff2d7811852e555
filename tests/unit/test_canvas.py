"""Each task that would have followed a skipped task is stored as REVOKED, so that no caller waits for it forever."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery, chain, chord, group
from celery.app.task import Context

from celery_singleton_lock.delivery.ending import revoke_successors
from tests.unit.conftest import MakeApp


class Backend:
    """Notes what is stored as REVOKED, and what counts for a chord."""

    def __init__(self) -> None:
        self.revoked: list[str] = []
        self.counted: list[str] = []
        self.stored: dict[str, bool] = {}

    def mark_as_revoked(
        self, task_id: str, reason: str = "", request: Any = None, store_result: bool = True, **_: Any
    ) -> None:
        assert task_id == request.id
        self.revoked.append(task_id)
        self.stored[task_id] = store_result
        if request.chord:
            self.counted.append(task_id)


@pytest.fixture
def app(make_app: MakeApp) -> Celery:
    return make_app()


@pytest.fixture
def step(app: Celery) -> Callable[..., Any]:
    """Return a function that makes signatures."""

    @app.task(name="step")
    def step(*args: Any) -> None: ...

    return lambda *args, **options: app.tasks["step"].si(*args).set(**options)


def skipped(signature: Any) -> tuple[Backend, Any]:
    """Skip the first task of a canvas as a worker would; return the backend and the result of the last task."""
    backend = Backend()
    result = signature.freeze()
    tasks = list(signature.tasks) if getattr(signature, "tasks", None) else [signature]
    first, rest = tasks[0], tasks[1:]
    request = Context(id=first.id, chain=[dict(one) for one in reversed(rest)], callbacks=first.options.get("link"))
    task = type("task", (), {"backend": backend})()
    revoke_successors(task, request)
    return backend, result


def ids(result: Any) -> set[str]:
    """Return the ids of all results that somebody could wait for in this one."""
    if hasattr(result, "results") and result.results is not None:
        return set().union(*(ids(one) for one in result.results)) if result.results else set()
    return {result.id}


def test_nothing_follows(step: Any) -> None:
    """A task without successors leaves nothing to revoke."""
    assert [] == skipped(step())[0].revoked


def test_chain(step: Any) -> None:
    """Each later step of a chain is revoked once."""
    backend, result = skipped(chain(step(0), step(1), step(2)))
    assert 2 == len(backend.revoked) == len(set(backend.revoked))
    assert result.id in backend.revoked
    assert result.parent.id in backend.revoked
    assert result.parent.parent.id not in backend.revoked


def test_group_at_the_end(step: Any) -> None:
    """Each member of a group is revoked; the group itself stores no result."""
    backend, result = skipped(chain(step(0), group(step(1), step(2), step(3))))
    assert ids(result) == set(backend.revoked)


def test_chord_at_the_end(step: Any) -> None:
    """The members of a chord and its body are revoked, and no member counts for the chord, which never began."""
    backend, result = skipped(chain(step(0), group(step(1), step(2)), step(3)))
    assert {result.id} | ids(result.parent) <= set(backend.revoked)
    assert not set(backend.counted) & ids(result.parent)


def test_nested(step: Any) -> None:
    """In groups within chords within chains, every id that a caller has is revoked."""
    inner = chain(step(3), group(step(4), chain(step(5), step(6))))
    canvas = chain(step(0), step(1), group(step(2), inner), step(7), chord([step(8), step(9)], step(10)))
    backend, result = skipped(canvas)
    waiting = set()
    node = result
    while node is not None:
        waiting |= ids(node)
        node = node.parent
    first = canvas.tasks[0].id
    assert waiting - {first} <= set(backend.revoked)
    assert first not in backend.revoked
    assert len(backend.revoked) == len(set(backend.revoked)), "stored twice"


def test_chord_in_a_group(step: Any) -> None:
    """The members and the body of a chord in a group are revoked."""
    backend, result = skipped(chain(step(0), group(step(1), chord([step(2), step(3)], step(4)))))
    assert ids(result) <= set(backend.revoked)


@pytest.mark.parametrize("several", [False, True])
def test_links(step: Any, several: bool) -> None:
    """Callbacks whose ids are known are revoked; those without an id cannot be waited for."""
    link, other, first = step(1, task_id="link"), step(2), step(0)
    first.link(link)
    if several:
        first.link(other)
    assert ["link"] == skipped(first)[0].revoked


def test_links_of_later_steps(step: Any) -> None:
    """The callbacks of a later step are revoked with it."""
    later = step(1)
    later.link(step(2, task_id="link"))
    backend, result = skipped(chain(step(0), later))
    assert {result.id, "link"} == set(backend.revoked)


def test_links_of_links(step: Any) -> None:
    """The callbacks of callbacks are revoked."""
    link = step(1, task_id="one")
    link.link(step(2, task_id="two"))
    first = step(0)
    first.link(link)
    assert {"one", "two"} == set(skipped(first)[0].revoked)


def test_linked_chain_and_group(step: Any) -> None:
    """The members of a callback that is a canvas are revoked."""
    rest = chain(step(1), group(step(2), step(3)))
    result = rest.freeze()
    first = step(0)
    first.link(rest)
    assert ids(result) | {result.parent.id} <= set(skipped(first)[0].revoked)


def test_error_callbacks_are_not_revoked(step: Any) -> None:
    """Error callbacks are not revoked, since no caller waits for them."""
    first = step(0, link_error=[dict(step(1, task_id="errback"))])
    assert [] == skipped(first)[0].revoked


def test_ignored_results_are_not_stored(step: Any) -> None:
    """A task that ignores its result stores no REVOKED."""
    backend, result = skipped(chain(step(0), step(1, ignore_result=True)))
    assert {result.id: False} == backend.stored


def test_a_chain_within_a_chords_header(step: Any) -> None:
    """The rest of a chain in a chord's header counts for the chord as a revoked member."""
    member = chain(step(0), step(1))
    member.freeze(group_id="g", chord=dict(step(2, task_id="body")))
    backend = Backend()
    tasks = list(member.tasks)
    request = Context(id=tasks[0].id, chain=[dict(tasks[1])], callbacks=None)
    revoke_successors(type("task", (), {"backend": backend})(), request)
    assert [tasks[1].id] == backend.revoked == backend.counted
