"""The example's ledger refuses what a task writes after a later lease has written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def ledger(example: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The ledger, empty."""
    found = example("ledger")
    monkeypatch.setenv(found.LEDGER_VARIABLE, str(tmp_path / "ledger.sqlite3"))
    found.create()
    return found


def test_late_write_is_refused(ledger: Any) -> None:
    """A former holder that wakes up late changes nothing: neither the balance, nor whether its payment is posted."""
    late, early = (ledger.add_payment("acme", cents) for cents in (100, 20))
    ledger.post_payment(early, "acme", 20, fence=8)
    with pytest.raises(ledger.StaleFence, match=r"acme.* 7"):
        ledger.post_payment(late, "acme", 100, fence=7)
    assert 20 == ledger.balance_of("acme")
    assert [early] == [row["id"] for row in ledger.read("SELECT id FROM payments WHERE posted = 1")]


def test_one_lease_may_write_often(ledger: Any) -> None:
    """The same fence is no stale one, nor is the first."""
    for balance, fence in ((5, 1), (7, 1), (9, 2)):
        ledger.post_payment(ledger.add_payment("acme", 1), "acme", balance, fence)
    assert 9 == ledger.balance_of("acme")


def test_payment_is_posted_once(ledger: Any) -> None:
    """A payment that is posted already changes no balance, whatever the fence."""
    payment = ledger.add_payment("acme", 5)
    ledger.post_payment(payment, "acme", 5, fence=3)
    ledger.post_payment(payment, "acme", 10, fence=4)
    assert 5 == ledger.balance_of("acme")
