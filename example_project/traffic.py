"""Sends the demo's work by a plan: payments, reports and one book to close."""

from collections.abc import Callable

from celery_singleton_lock import DuplicateTask
from example_project import ledger, tasks
from example_project.app import app

#: Seconds between two rounds of payments. A round has two payments for each account.
ROUND = 4.0
BOOK = "2026-Q1"


class Traffic:
    """Sends work when it is due, and remembers what must be done in the end."""

    def __init__(self, seconds: float) -> None:
        """Plan the work of a demo that sends for this many seconds."""
        self._reports: list[str] = []  # ids, because a result object would keep a connection
        self.books: list[str] = []
        plan: list[tuple[float, Callable[[], None]]] = []
        for number in range(int(max(seconds - 5, 1) // ROUND) + 1):
            plan.append((0.5 + number * ROUND, self._pay_all))
        for month, at in (("2026-01", 1.0), ("2026-02", seconds * 0.6)):
            plan += [(at, self._report(month)), (at + 1, self._report(month))]
        plan.append((seconds * 0.15, self._close_book))
        self._plan = sorted(plan, key=lambda entry: entry[0])

    def tick(self, elapsed: float) -> None:
        """Send everything that is due."""
        while self._plan and self._plan[0][0] <= elapsed:
            self._plan.pop(0)[1]()

    def settled(self) -> bool:
        """Return whether all work that was sent is done."""
        return (
            not self._plan
            and not ledger.number("SELECT count(*) FROM payments WHERE posted = 0")
            and ledger.number("SELECT count(*) FROM books") == len(self.books)
            and _last_statement() == ledger.total()
            and all(app.AsyncResult(report).ready() for report in self._reports)
        )

    def missing(self) -> list[str]:
        """Return a line for each piece of work that was sent and is not in the ledger."""
        unposted = ledger.read("SELECT id, account FROM payments WHERE posted = 0")
        astray = ledger.read(
            "SELECT account, cents, (SELECT coalesce(sum(cents), 0) FROM payments"
            " WHERE payments.account = balances.account AND posted) AS due FROM balances WHERE cents != due"
        )
        closed = {row["book"] for row in ledger.read("SELECT book FROM books")}
        return [
            *(f"payment {row['id']} of {row['account']} was never posted" for row in unposted),
            *(f"{row['account']} has {row['cents']} cents, its payments make {row['due']}" for row in astray),
            *(f"book {book} was never closed" for book in self.books if book not in closed),
            *([] if (last := _last_statement()) == ledger.total() else [f"the last statement says {last} cents"]),
            *(line for report in self._reports if (line := _unanswered(report))),
        ]

    def _pay_all(self) -> None:
        for account in ledger.ACCOUNTS:
            for cents in (250, 975):
                tasks.pay(account, cents)

    def _report(self, month: str) -> Callable[[], None]:
        return lambda: self._reports.append(tasks.monthly_report.delay(month).id)

    def _close_book(self) -> None:
        tasks.prepare_book.delay(BOOK, [ledger.add_payment("initech", cents) for cents in (1100, 2200)])
        self.books.append(BOOK)


def _last_statement() -> int:
    return ledger.number("SELECT cents FROM statements ORDER BY rowid DESC LIMIT 1")


def _unanswered(report: str) -> str:
    result = app.AsyncResult(report)
    if not result.ready():
        return f"report {report} is still {result.state}"
    # Not read with `get`: the error that it raises would keep the result alive for longer than the demo's Redis.
    refused = isinstance(result.result, DuplicateTask)
    return "" if result.successful() or refused else f"report {report} failed: {result.result!r}"
