"""What names a delivery."""

from __future__ import annotations

import pickle

from celery_singleton_lock.attempt import Attempt


def test_the_way_to_a_child_changes_nothing() -> None:
    named = Attempt(content_type="application/json", events=True, watched=True)
    assert pickle.loads(pickle.dumps(named)) == named


def test_its_secret_is_not_shown() -> None:
    named = Attempt()
    assert named.token not in repr(named)
