"""The pages of the site and the README, as tests read and run them."""

from __future__ import annotations

import builtins
import os
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dis import get_instructions
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NamedTuple
from unittest.mock import patch

from celery import Celery

from celery_singleton_lock.testing import memory_store

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
#: What GitHub shows beside the README; the site includes some of it.
OTHERS = [ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")]
PAGES = [README, *sorted(DOCS.rglob("*.md"))]
REPOSITORY = "https://github.com/celery-singleton-lock/celery_singleton_lock"
SITE = "https://celery-singleton-lock.readthedocs.io"
#: A block of code, with the comment before it that says why it is not run, if there is one.
_BLOCK = re.compile(r"(?:^ *<!-- not run: (.+?) -->\n\n?)?^( *)```(\w+)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A block of code of a page."""

    page: Path
    line: int
    language: str
    text: str
    not_run: str

    @property
    def name(self) -> str:
        return f"{name_of(self.page)}:{self.line}"


def name_of(page: Path) -> str:
    """Return the path of a page in the repository."""
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, *languages: str) -> list[Block]:
    """Return the blocks of code of a page in these languages."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in _BLOCK.finditer(text):
        not_run, indent, language, code = match.groups()
        code = re.sub(rf"^{indent}", "", code, flags=re.MULTILINE)
        line = text.count("\n", 0, match.start(4)) + 1
        found.append(Block(page, line, language, code, not_run or ""))
    return [block for block in found if block.language in languages]


class Run:
    """Runs the Python blocks of a page in their order, in one namespace, as a reader would paste them into one module.

    Apps keep their locks in memory, run tasks eagerly, and need no server. A block that begins with a comment like
    ``# shop/tasks.py`` can be imported by later ones under that name.
    """

    def __init__(self, page: str, **readers: Any) -> None:
        self.names: dict[str, Any] = {"__name__": "shop.tasks", **readers}
        self._blocks = [block for block in blocks(ROOT / page, "python") if not block.not_run]
        self._stack, self._modules, self._apps = ExitStack(), set[str](), dict[int, Celery]()

    def __enter__(self) -> Run:
        servers = {"CELERY_BROKER_URL": "memory://", "CELERY_RESULT_BACKEND": "cache+memory://"}
        self._stack.enter_context(patch.dict(os.environ, servers))  # Celery reads them before an app's own
        for block in self._blocks:
            self._run(block)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        for name in self._modules:
            sys.modules.pop(name, None)

    def __getitem__(self, name: str) -> Any:
        return self.names[name]

    def _run(self, block: Block) -> None:
        self.names["__file__"] = str(block.page)
        code = compile("\n" * (block.line - 1) + block.text, str(block.page), "exec", dont_inherit=True)
        exec(code, self.names)
        missing = sorted(set(global_names(code)) - self.names.keys() - vars(builtins).keys())
        assert not missing, f"{block.name} uses names that no block before it has: {missing}"
        for app in [value for value in self.names.values() if isinstance(value, Celery)]:
            if id(app) not in self._apps:
                self._apps[id(app)] = app
                self._stack.callback(app.close)
                self._stack.enter_context(memory_store(app))
                app.conf.task_always_eager = True
        if match := re.match(r"# ([\w/]+)\.py\n", block.text):
            self._publish(match[1].replace("/", "."))

    def _publish(self, name: str) -> None:
        """Let later blocks import what there is now."""
        for length in range(1, name.count(".") + 2):
            part = ".".join(name.split(".")[:length])
            module = ModuleType(part)
            module.__path__ = []
            self._modules.add(part)
            sys.modules[part] = module
        vars(sys.modules[name]).update(self.names)


def global_names(code: CodeType) -> Iterator[str]:
    """Yield the names that functions of this code take from their module."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _loaded(constant)
            yield from global_names(constant)


def _loaded(code: CodeType) -> Iterator[str]:
    return (str(one.argval) for one in get_instructions(code) if one.opname == "LOAD_GLOBAL")


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and MyST make them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"```\{include\} (\S+).*?```", "", text, flags=re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
