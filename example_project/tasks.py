"""The service's tasks. Each is locked per lock key, and each has a policy that suits it."""

# Celery has no types of its own, its decorators neither.
# mypy: disallow-untyped-decorators=False

import random
import time
from typing import Any

from celery import chord

from celery_singleton_lock import RetryLater, SingletonTask
from example_project import ledger
from example_project.app import app
from example_project.recording import recorded

CURRENCIES = ("EUR", "GBP", "JPY", "CHF", "SEK")

#: A second payment of an account waits for the first. It tries again after one second, then after a little more each time.
SYNC_AGAIN = RetryLater(delay=1.0, backoff=1.5, max_delay=1.5, jitter=0.2)


@app.task(bind=True, base=SingletonTask, on_duplicate="skip", ignore_result=True)
def import_rates(self: SingletonTask) -> int:
    """Fetch one edition of all rates, one second for each currency. A duplicate is skipped."""
    with recorded(self, "import rates"):
        edition = 1 + ledger.number("SELECT max(edition) FROM editions")
        with ledger.transaction() as connection:
            connection.execute("INSERT INTO editions (edition) VALUES (?)", (edition,))
        for currency in CURRENCIES:
            time.sleep(1.0)
            with ledger.transaction() as connection:
                connection.execute("INSERT INTO rates VALUES (?, ?, ?)", (edition, currency, random.uniform(0.5, 2)))
        with ledger.transaction() as connection:
            connection.execute("UPDATE editions SET complete = 1 WHERE edition = ?", (edition,))
    return edition


@app.task(bind=True, base=SingletonTask, unique_on=["account"], on_duplicate=SYNC_AGAIN)
def sync_account(self: SingletonTask, account: str, payment: int) -> int:
    """Post one payment to its account. Payments of one account run one at a time, and none is dropped."""
    with recorded(self, f"sync {account}"):
        before = ledger.balance_of(account)
        cents = ledger.number("SELECT cents FROM payments WHERE id = ?", payment)
        time.sleep(1.0)  # the bank answers; a second body would now read the same balance
        ledger.post_payment(payment, account, before + cents, self.lease.fence)
    statement.delay()
    return payment


@app.task(bind=True, base=SingletonTask, on_duplicate="run_once_more", ignore_result=True)
def statement(self: SingletonTask) -> None:
    """Write down the sum of all balances. However many calls come while it runs, one run follows, and sees what they saw."""
    with recorded(self, "statement"):
        total = ledger.total()
        time.sleep(2.0)
        with ledger.transaction() as connection:
            connection.execute("INSERT INTO statements VALUES (?)", (total,))


@app.task(bind=True, base=SingletonTask, on_duplicate="raise")
def monthly_report(self: SingletonTask, month: str) -> int:
    """Add up all balances. A duplicate fails with `DuplicateTask`."""
    with recorded(self, f"report {month}"):
        total = ledger.total()
        time.sleep(2.5)
        with ledger.transaction() as connection:
            connection.execute("INSERT INTO reports VALUES (?, ?)", (month, total))
    return total


@app.task(bind=True, base=SingletonTask, on_duplicate="skip")
def revalue(self: SingletonTask, account: str, currency: str) -> float:
    """Value an account in another currency, at the newest complete rates."""
    with recorded(self, f"revalue {account} {currency}"):
        time.sleep(1.5)
        edition = ledger.number("SELECT max(edition) FROM editions WHERE complete = 1")
        rows = ledger.read("SELECT rate FROM rates WHERE edition = ? AND currency = ?", edition, currency)
        amount = ledger.balance_of(account) / 100 * (rows[0]["rate"] if rows else 1.0)
        with ledger.transaction() as connection:
            connection.execute("INSERT INTO valuations VALUES (?, ?, ?)", (account, currency, amount))
    return amount


@app.task(bind=True, base=SingletonTask, lock_key="{book}", on_duplicate="retry")
def close_book(self: SingletonTask, results: list[Any], book: str) -> int:
    """Close a book once all members of its chord are done, the skipped ones included."""
    with recorded(self, f"close {book}"), ledger.transaction() as connection:
        connection.execute("INSERT OR IGNORE INTO books VALUES (?, ?)", (book, len(results)))
    return len(results)


def pay(account: str, cents: int) -> None:
    """Record a payment and send its sync. Nobody waits for the result: the ledger shows it."""
    sync_account.apply_async((account, ledger.add_payment(account, cents)), ignore_result=True)


@app.task(ignore_result=True)
def prepare_book(book: str, payments: list[int]) -> None:
    """Start the chord that closes a book. Two of its members are duplicates. This task is plain: it takes no lock."""
    members = [revalue.s("acme", "EUR"), revalue.s("acme", "EUR"), revalue.s("globex", "GBP")]
    members += [sync_account.s("initech", payment) for payment in payments]
    chord(members)(close_book.s(book=book))
