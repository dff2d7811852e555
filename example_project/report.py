"""Makes the final table and the list of faults, which is empty if every promise was kept."""

from collections.abc import Iterator

from example_project import tasks
from example_project.constants import IMPORT_EVERY, LOCK_TTL
from example_project.story import Run, Story, Takeover

TASKS = ("import_rates", "sync_account", "statement", "monthly_report", "revalue", "close_book")
HEADINGS = ("task", "runs", "skips", "retries", "once more", "refused", "overlaps", "takeover after the kill")

#: Seconds by which the key of a killed worker may outlive `lock_ttl`.
KEY_SLACK = 0.5
#: Seconds for a message to travel and a body to start.
START_SLACK = 0.5


def table(story: Story) -> list[tuple[str, ...]]:
    """Return one row for each task, with the columns of `HEADINGS`."""
    return [tuple(_row(story, task)) for task in TASKS]


def takeover_lines(story: Story) -> list[str]:
    """Return a line for each lock key that the killed worker was running."""
    return [f"{takeover.cut.work}: {_course(takeover, story)}" for takeover in story.takeovers()]


def imported(story: Story) -> bool:
    """Return whether an import has come to its end."""
    return any(run.task == "import_rates" and run.ended for run in story.runs)


def faults(story: Story, kill_wanted: bool) -> list[str]:
    """Return all faults, except for work that is missing in the ledger."""
    found = [
        f"overlap: {earlier.work} on {earlier.node} and {later.node} at {later.started:.2f} s"
        for earlier, later in story.overlaps()
    ]
    found += [
        f"lease lost: {event.task} on {event.node} at {event.at:.2f} s"
        for event in story.events
        if event.kind == "lost"
    ]
    found += [f"never ended: {run.work} on {run.node}" for run in story.unfinished()]
    if not imported(story):
        found.append("no import came to its end")
    if story.kill and story.kill.late_write:
        found.append(f"late write: {story.kill.late_write} of {story.kill.node} was written under an old fence")
    if kill_wanted and story.kill is None:
        found.append("no moment came to kill a worker that held the import")
    return found + [fault for takeover in story.takeovers() for fault in _late(takeover, story)]


def _row(story: Story, task: str) -> Iterator[str]:
    yield task
    yield str(sum(run.task == task for run in story.runs))
    for kind in ("Skip", "RetryLater", "RunOnceMore", "Raise"):
        yield str(story.count(task, kind) or "–")
    yield str(sum(earlier.task == task for earlier, _ in story.overlaps()))
    waits = [
        after - story.until(it.cut) for it in story.takeovers() if it.cut.task == task and (after := _start(it.next))
    ]
    yield ", ".join(f"{wait:.2f} s" for wait in waits) or "–"


def _start(run: Run | None) -> float | None:
    return run.started if run else None


def _course(takeover: Takeover, story: Story) -> str:
    killed = story.until(takeover.cut)
    gone = "key still there" if takeover.gone is None else f"key gone {takeover.gone - killed:.2f} s after the kill"
    if takeover.next is None:
        return f"{gone}, never run again"
    return f"{gone}, next run {takeover.next.started - killed:.2f} s after it on {takeover.next.node}"


def _late(takeover: Takeover, story: Story) -> Iterator[str]:
    work, killed = takeover.cut.work, story.until(takeover.cut)
    allowed = LOCK_TTL + KEY_SLACK
    if takeover.gone is None or takeover.gone - killed > allowed:
        yield f"{work}: the dead worker's key was not gone within {allowed:g} s of the kill"
        return
    if story.kill and takeover.cut.key in story.kill.renewed:
        yield f"{work}: the lease was renewed after its worker had been killed"
    wait = _longest_wait(takeover.cut)
    if takeover.next is None:
        yield f"{work}: never run again after the kill"
    elif wait is not None and (idle := takeover.next.started - takeover.gone) > wait + START_SLACK:
        yield f"{work}: the next run came {idle:.2f} s after the key had gone, not within {wait:g} s"


def _longest_wait(cut: Run) -> float | None:
    """Return the seconds until beat or a waiting duplicate tries again, or None if neither does."""
    if cut.task == "import_rates":
        return IMPORT_EVERY
    if cut.task == "sync_account":
        return float(tasks.SYNC_AGAIN.max_delay * (1 + tasks.SYNC_AGAIN.jitter))
    return None
