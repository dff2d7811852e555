"""Rules of prose that a program can check, in pages and docstrings."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import celery_singleton_lock
from tests.unit.site import PAGES, name_of

PACKAGE = Path(celery_singleton_lock.__file__).parent
#: Words of a sentence, code counting as one.
LONGEST = 30
_CODE_BLOCK = re.compile(r"```[\s\S]*?```|<!--[\s\S]*?-->|^\|.*$|^#.*$|^:.*$", re.MULTILINE)
_SENTENCE_END = re.compile(r"(?<=[.!?:;])[*)\"]*\s+")
#: Ends of a paragraph: an empty line, an item of a list, an argument in a docstring.
_PARAGRAPH_END = re.compile(r"\n\s*\n|\n(?=\s*(?:[*-]|\d+\.) )|\n(?=\s+[\w, `:]+: )")


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a page or docstring, without tables, headings and blocks of code."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", _CODE_BLOCK.sub("", text))
    text = re.sub(r"`[^`]*`(, `[^`]*`)*", "code", text)  # a list of names, too, is read at once
    for paragraph in _PARAGRAPH_END.split(text):
        yield from _SENTENCE_END.split(" ".join(paragraph.split()))


def too_long(text: str) -> list[str]:
    return [sentence for sentence in sentences(text) if len(sentence.split()) > LONGEST]


def docstrings(path: Path) -> list[tuple[ast.AST, str]]:
    documented = ast.Module | ast.ClassDef | ast.FunctionDef
    nodes = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, documented)]
    return [(node, text) for node in nodes if (text := ast.get_docstring(node))]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_sentences_of_pages(page: Path) -> None:
    """No sentence of a page is too long."""
    assert [] == too_long(page.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_docstrings(path: Path) -> None:
    """No sentence of a docstring is too long. That of a function or class begins with a verb or a noun."""
    found = docstrings(path)
    assert [] == [sentence for _, text in found for sentence in too_long(text)]
    begin_badly = re.compile(r"(What|Whoever|That of|It)\b")
    assert [] == [text for node, text in found if not isinstance(node, ast.Module) and begin_badly.match(text)]


def test_what_is_too_long() -> None:
    """Code, table rows and headings do not count, a sentence over several lines does."""
    long = " ".join(["word"] * (LONGEST + 1))
    assert [] == too_long(f"# {long}\n\n| {long} |\n\n`{long}`\n\n```\n{long}\n```\n\nOne. Two.")
    assert [long] == too_long(f"One. {long[:59]}\n{long[60:]}")
