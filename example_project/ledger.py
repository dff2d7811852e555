"""The SQLite ledger. It holds rates, payments and balances, and a record of every run and event.

Times are readings of `time.monotonic()` in seconds, a clock that all processes of a machine share.
"""

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic

from example_project.constants import LEDGER_VARIABLE

ACCOUNTS = ("acme", "globex", "initech")

SCHEMA = """
CREATE TABLE IF NOT EXISTS rates (edition INTEGER, currency TEXT, rate REAL, PRIMARY KEY (edition, currency));
CREATE TABLE IF NOT EXISTS editions (edition INTEGER PRIMARY KEY, complete INTEGER DEFAULT 0);
CREATE TABLE IF NOT EXISTS balances (account TEXT PRIMARY KEY, cents INTEGER DEFAULT 0, fence INTEGER DEFAULT 0);
CREATE TABLE IF NOT EXISTS payments (
    id INTEGER PRIMARY KEY, account TEXT, cents INTEGER, posted INTEGER DEFAULT 0, asked REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS valuations (account TEXT, currency TEXT, amount REAL);
CREATE TABLE IF NOT EXISTS reports (month TEXT, cents INTEGER);
CREATE TABLE IF NOT EXISTS books (book TEXT PRIMARY KEY, members INTEGER);
CREATE TABLE IF NOT EXISTS statements (cents INTEGER);
CREATE TABLE IF NOT EXISTS runs (
    id INTEGER PRIMARY KEY, task TEXT, work TEXT, key TEXT, task_id TEXT, node TEXT, pid INTEGER,
    fence INTEGER, started REAL, ended REAL);
CREATE TABLE IF NOT EXISTS events (at REAL, kind TEXT, task TEXT, key TEXT, task_id TEXT, node TEXT, holder TEXT);
"""


def path() -> Path:
    """Return the ledger's path: from the environment, or else a file in the working directory."""
    return Path(os.environ.get(LEDGER_VARIABLE, "example_ledger.sqlite3"))


def create() -> None:
    """Create the ledger's tables and accounts if they are missing."""
    connection = _connect()
    try:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.executescript(SCHEMA)
        connection.executemany("INSERT OR IGNORE INTO balances (account) VALUES (?)", [(name,) for name in ACCOUNTS])
    finally:
        connection.close()


@contextmanager
def transaction() -> Iterator[sqlite3.Connection]:
    """Open a new connection inside one write transaction, so that forks and threads share nothing."""
    connection = _connect()
    try:
        connection.execute("BEGIN IMMEDIATE")
        yield connection
        connection.execute("COMMIT")
    finally:
        connection.close()


def read(query: str, *values: object) -> list[sqlite3.Row]:
    """Return the rows of a query."""
    connection = _connect()
    try:
        return connection.execute(query, values).fetchall()
    finally:
        connection.close()


def number(query: str, *values: object) -> int:
    """Return the single integer of a query, or 0 for NULL or no row."""
    rows = read(query, *values)
    return int(rows[0][0] or 0) if rows else 0


def note(kind: str, *, task: str = "", key: str = "", task_id: str = "", node: str = "", holder: str = "") -> None:
    """Record an event with the present time."""
    row = (monotonic(), kind, task, key, task_id, node, holder)
    with transaction() as connection:
        connection.execute("INSERT INTO events VALUES (?, ?, ?, ?, ?, ?, ?)", row)


def add_payment(account: str, cents: int) -> int:
    """Record a payment that is not posted yet, and return its number."""
    with transaction() as connection:
        cursor = connection.execute(
            "INSERT INTO payments (account, cents, asked) VALUES (?, ?, ?)", (account, cents, monotonic())
        )
        return int(cursor.lastrowid or 0)


class StaleFence(Exception):
    """Raised when a later lease has already written here: this task has lost its lock."""


def post_payment(payment: int, account: str, balance: int, fence: int | None) -> None:
    """Set the account's new balance and mark the payment as posted, in one transaction and only once.

    Arguments:
        payment: its number.
        account: the account of the payment.
        balance: the new balance in cents.
        fence: `lease.fence` of the task that read the balance; with None, of a task with a `lock_limit`, nothing is written.

    Raises:
        StaleFence: the account has seen a higher fence. Nothing was written.
    """
    with transaction() as connection:
        marked = connection.execute("UPDATE payments SET posted = 1 WHERE id = ? AND posted = 0", (payment,))
        if marked.rowcount:
            written = connection.execute(
                "UPDATE balances SET cents = :cents, fence = :fence WHERE account = :account AND fence <= :fence",
                {"cents": balance, "fence": fence, "account": account},
            )
            if not written.rowcount:
                raise StaleFence(f"account {account} was written under a later lease than {fence}")


def total() -> int:
    """Return the sum of all balances in cents."""
    return number("SELECT sum(cents) FROM balances")


def balance_of(account: str) -> int:
    """Return an account's balance in cents."""
    return number("SELECT cents FROM balances WHERE account = ?", account)


def _connect() -> sqlite3.Connection:
    connection = sqlite3.connect(path(), timeout=10, isolation_level=None)
    connection.row_factory = sqlite3.Row
    connection.execute("PRAGMA synchronous=OFF")
    return connection
