"""Writes the tables of the site from the code: ``python -m docs.generate``.

A table stands on a page between ``<!-- generated: NAME -->`` and ``<!-- end -->``. A unit test fails if one differs.
"""

from __future__ import annotations

import configparser
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import click
from celery import Celery

from celery_singleton_lock import Holder, Lease, MaxStarts, SingletonError, errors, locks, signals
from celery_singleton_lock.cli import singleton
from celery_singleton_lock.config.call_options import CALL_OPTIONS
from celery_singleton_lock.config.options import APP_SETTINGS, TASK_OPTIONS, Option
from celery_singleton_lock.contrib.prometheus import SERVER_FIELDS, LockCollector
from celery_singleton_lock.policies import KINDS, NAMED
from celery_singleton_lock.reports import events, outage
from celery_singleton_lock.store.records import LOSSES, OUTCOMES, STATES, VERBS, Statistics

DOCS = Path(__file__).resolve().parent
BLOCK = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
Rows = Sequence[Sequence[str]]


def table(head: Sequence[str], rows: Rows) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def markdown(text: str) -> str:
    """Return a text of a docstring in one line of Markdown."""
    return " ".join(text.split()).replace("``", "`")


def sentence(text: str) -> str:
    """Return a text that begins with a capital, unless it begins with code."""
    return text[:1].upper() + text[1:]


def described(thing: Any) -> tuple[str, dict[str, str]]:
    """Return the first paragraph of a docstring, and its arguments with their meanings."""
    doc = inspect.getdoc(thing) or ""
    found = re.search(r"^Arguments:\n((?:    .*\n?)+)", doc, re.MULTILINE)
    arguments = re.findall(r"^    (\w+): ((?:.*\n?)(?:     .*\n?)*)", found[1] if found else "", re.MULTILINE)
    return markdown(doc.partition("\n\n")[0]), {name: markdown(meaning) for name, meaning in arguments}


def comments(module: Any, pattern: str) -> Iterator[tuple[str, str]]:
    """Yield the names that this pattern finds in a module, each with the ``#:`` comment above it."""
    for comment, name in re.findall(rf"((?:^#: .*\n)+){pattern}", inspect.getsource(module), re.MULTILINE):
        yield name, markdown(comment.replace("#: ", " "))


def option_rows(options: Mapping[str, Option]) -> Rows:
    return [(f"`{name}`", default_of(option), option.meaning) for name, option in options.items()]


def default_of(option: Option) -> str:
    """Return what users read as the default of an option."""
    return option.default_text or f"`{option.default!r}`".replace("'", '"')


def policies() -> str:
    rows = [(f'`"{name}"`', f"`{policy!r}`", described(policy)[0]) for name, policy in NAMED.items()]
    for cls in (cls for cls, name in KINDS.items() if name not in NAMED):
        arguments = ", ".join(
            one.name if one.default is MISSING else f"{one.name}={one.default!r}" for one in fields(cls)
        )
        rows.append(("none", f"`{cls.__name__}({arguments})`", described(cls)[0]))
    return table(("name", "stands for", "a duplicate"), rows)


def policy_arguments() -> str:
    rows = []
    for cls in (*KINDS, MaxStarts):
        defaults = {one.name: "required" if one.default is MISSING else f"`{one.default!r}`" for one in fields(cls)}
        meanings = described(cls)[1]
        rows += [(f"`{cls.__name__}`", f"`{name}`", defaults[name], sentence(meanings[name])) for name in defaults]
    return table(("class", "argument", "default", "meaning"), rows)


def exceptions() -> str:
    rows = []
    for name, cls in vars(errors).items():
        if isinstance(cls, type) and issubclass(cls, SingletonError):
            base = next(one.__name__ for one in cls.__mro__[1:] if issubclass(one, Exception))
            attributes = ", ".join(f"`.{one}`" for one in described(cls)[1]) or ("`.key`" if name == "LockLost" else "")
            rows.append((f"`{name}`", f"`{base}`", attributes, described(cls)[0]))
    return table(("exception", "is a", "attributes", "meaning"), rows)


def lease() -> str:
    rows = []
    for name, member in vars(Lease).items():
        if not name.startswith("_"):
            call = "" if isinstance(member, property) else "()"
            rows.append((f"`.{name}{call}`", described(member)[0]))
    return table(("attribute", "meaning"), rows)


def holder() -> str:
    return table(("field", "meaning"), [(f"`.{name}`", sentence(text)) for name, text in described(Holder)[1].items()])


def signal_rows() -> str:
    rows = []
    for name, text in comments(signals, r"(\w+) = Signal\("):
        arguments, _, meaning = text.partition(": ")
        rows.append((f"`{name}`", arguments, sentence(meaning)))
    return table(("signal", "arguments", "sent when"), rows)


def event_rows() -> str:
    rows = [
        (f"`{getattr(module, name)}`", text)
        for module, names in ((events, r"(TASK_\w+) = "), (outage, r"(OUTAGE_\w+) = "))
        for name, text in comments(module, names)
    ]
    return table(("event", "sent when"), rows)


class _AllMetrics(LockCollector):
    """A collector whose store answers with one task and all that a server says of itself."""

    def _ask(self, question: Callable[[Any], Any]) -> Any:
        answers = {locks.stats: [Statistics("task")], locks.server: dict.fromkeys(SERVER_FIELDS, "0")}
        return answers.get(question, True)


def metrics() -> str:
    rows = []
    for family in _AllMetrics(Celery()).collect():
        kind = "gauge" if family.type == "info" else family.type
        suffix = {"counter": "_total", "info": "_info"}.get(family.type, "")
        labels = [label for label in family.samples[0].labels if label != "le"]
        rows.append((f"`{family.name}{suffix}`", kind, ", ".join(labels), family.documentation))
    return table(("metric", "type", "labels", "meaning"), rows)


def labels() -> str:
    policies = (*KINDS.values(), "callable", "custom")
    values = {"outcome": OUTCOMES, "policy": policies, "reason": LOSSES, "verb": VERBS, "state": STATES}
    rows = [(f"`{label}`", ", ".join(f"`{value}`" for value in some)) for label, some in values.items()]
    return table(("label", "values"), rows)


def commands() -> str:
    rows = [(f"`{name}`", one.get_short_help_str(200)) for name, one in sorted(singleton.commands.items())]
    return table(("command", "what it does"), rows)


def command_details() -> str:
    parts = []
    for name, command in sorted(singleton.commands.items()):
        context = click.Context(command, info_name=name)
        usage = " ".join(["celery -A APP singleton", name, *command.collect_usage_pieces(context)])
        found = [one.get_help_record(context) for one in command.params]
        rows = [(f"`{record[0]}`", record[1]) for record in found if record and record[1]]
        text = "\n\n".join(markdown(part) for part in inspect.cleandoc(command.help or "").split("\n\n"))
        options = f"\n{table(('option', 'meaning'), rows)}" if rows else ""
        parts.append(f"### {name}\n\n```text\n{usage}\n```\n\n{text}\n{options}")
    return "\n".join(parts)


def tox() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None)
    parser.read(DOCS.parent / "tox.ini", encoding="utf-8")
    return parser


def versions() -> str:
    """Return each Celery of the test matrix, with its versions of Python and redis-py."""
    found: dict[str, list[list[str]]] = {}
    for environment in tox()["tox"]["env_list"].split():
        if match := re.fullmatch(r"py3(\d+)-celery5(\d)-redis(\d)", environment):
            python, celery, redis = match.groups()
            found.setdefault(f"5.{celery}", []).append([f"3.{python}", f"{redis}"])
    rows = [
        (celery, *(", ".join(dict.fromkeys(column)) for column in zip(*pairs, strict=True)))
        for celery, pairs in found.items()
    ]
    return table(("Celery", "Python", "redis-py"), rows)


def environments() -> str:
    parser, rows = tox(), []
    for section in parser.sections():
        if section.startswith("testenv"):
            name = section.removeprefix("testenv").removeprefix(":") or "py"
            name = re.sub(r"^(\w+)-\{", r"\1{-", name).replace("{,", "{").partition("{")[0].rstrip("-")
            rows.append((f"`{name}`", parser[section].get("description", "")))
    return table(("environment", "what it does"), list(dict(rows).items()))


BLOCKS: dict[str, Callable[[], str]] = {
    "options": lambda: table(("option", "default", "meaning"), option_rows(TASK_OPTIONS)),
    "settings": lambda: table(("app setting", "default", "meaning"), option_rows(APP_SETTINGS)),
    "call-options": lambda: table(
        ("option", "meaning"), [(f"`{one}`", TASK_OPTIONS[one].meaning) for one in CALL_OPTIONS]
    ),
    "policies": policies,
    "policy-arguments": policy_arguments,
    "exceptions": exceptions,
    "lease": lease,
    "holder": holder,
    "signals": signal_rows,
    "events": event_rows,
    "metrics": metrics,
    "labels": labels,
    "commands": commands,
    "command-details": command_details,
    "versions": versions,
    "environments": environments,
}


def generated(text: str) -> str:
    """Return the text of a page with its tables as the code has them now."""
    return BLOCK.sub(lambda match: f"{match[1]}\n{BLOCKS[match[2]]()}\n{match[3]}", text)


def pages() -> list[Path]:
    """Return the pages of the site."""
    return sorted(DOCS.rglob("*.md"))


def main() -> None:
    """Write all tables."""
    for page in pages():
        before = page.read_text("utf-8")
        if (after := generated(before)) != before:
            page.write_text(after, "utf-8")
            print(page.relative_to(DOCS.parent))


if __name__ == "__main__":
    main()
