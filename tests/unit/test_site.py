"""The README and the site: tables are those of the code, Python blocks run, links lead somewhere, commands exist."""

from __future__ import annotations

import configparser
import re
from pathlib import Path
from urllib.parse import urlsplit

import celery
import pytest

import celery_singleton_lock
from celery_singleton_lock import signals
from celery_singleton_lock.worker.bootstep import NEWEST_CELERY
from docs import generate
from tests.unit.site import DOCS, OTHERS, PAGES, README, REPOSITORY, ROOT, SITE, Run, anchors, blocks, name_of

each_page = pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=name_of)


def environments() -> set[str]:
    """Return the names of the environments in tox.ini, generated ones included."""
    parser = configparser.ConfigParser(interpolation=None)
    parser.read(ROOT / "tox.ini", encoding="utf-8")
    names = {"py", *parser["tox"]["env_list"].split()}
    for section in parser.sections():
        name = section.removeprefix("testenv:")
        stem, _, rest = name.partition("{")
        names |= {stem + factor for factor in rest.partition("}")[0].split(",")} if rest else {name}
    return names


@pytest.mark.parametrize("page", generate.pages(), ids=name_of)
def test_tables(page: Path) -> None:
    """The tables of a page are those that `python -m docs.generate` writes."""
    text = page.read_text(encoding="utf-8")
    assert generate.generated(text) == text


def test_all_tables_are_used() -> None:
    """Each table that can be generated is on a page."""
    text = "".join(page.read_text(encoding="utf-8") for page in generate.pages())
    assert generate.BLOCKS.keys() == {match[2] for match in generate.BLOCK.finditer(text)}


def test_all_signals_are_in_the_table() -> None:
    """The table of signals, which is made from comments, misses none."""
    names = {name for name, value in vars(signals).items() if isinstance(value, signals.Signal)}
    assert names == set(re.findall(r"^\| `(\w+)`", generate.signal_rows(), re.MULTILINE))


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=name_of)
def test_python(page: Path) -> None:
    """The Python blocks of a page run one after the other; those that cannot, say why, and can be compiled."""
    for block in blocks(page, "python"):
        compile(block.text, block.name, "exec")
    if page.name == "settings.md" and celery.VERSION < (5, 4):
        pytest.skip("it has a task class for Django, whose base Celery has from 5.4 on")
    with Run(name_of(page)):
        pass


@each_page
def test_links(page: Path) -> None:
    """Each link to a file, a page of the site or a file of the repository leads there, and to a heading in it."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(<?([^)\s>]+)>?\)", text):
        target, anchor = target_of(page, link)
        if target is None:
            continue
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


def target_of(page: Path, link: str) -> tuple[Path | None, str]:
    """Return the file that a link means, and the heading in it; None for a link to somewhere else."""
    url = urlsplit(link)
    if link.startswith((f"{REPOSITORY}/blob/main/", f"{REPOSITORY}/tree/main/")):
        return ROOT / url.path.split("/main/", 1)[1], url.fragment
    if link.startswith("https://raw.githubusercontent.com/"):
        return ROOT / url.path.split("/main/", 1)[1], ""
    if link.startswith(f"{SITE}/en/latest/"):
        return DOCS / url.path.removeprefix("/en/latest/").replace(".html", ".md"), url.fragment
    if url.scheme:
        return None, ""
    return (page.parent / url.path).resolve() if url.path else page, url.fragment


@each_page
def test_tox_environments(page: Path) -> None:
    """Each tox environment that a page names exists."""
    spec = re.findall(r"tox -e ([\w,-]+)", page.read_text(encoding="utf-8"))
    assert set() == {name for names in spec for name in names.split(",")} - environments() - {"NAME"}


@each_page
def test_extras(page: Path) -> None:
    """Each extra in an install command exists."""
    setup = configparser.ConfigParser(interpolation=None)
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    spec = re.findall(r"celery_singleton_lock\[([\w,-]+)\]", page.read_text(encoding="utf-8"))
    assert {name for names in spec for name in names.split(",")} <= set(setup["options.extras_require"])


def test_all_public_names_are_in_the_api() -> None:
    """The page of the Python API has each public name of the package."""
    text = (DOCS / "reference" / "python-api.md").read_text(encoding="utf-8")
    errors = set(re.findall(r"^\| `(\w+)`", generate.exceptions(), re.MULTILINE))
    shown = {*re.findall(r"autoclass:: celery_singleton_lock\.(\w+)$", text, re.MULTILINE), "SingletonTask", "signals"}
    assert set(celery_singleton_lock.__all__) - errors == shown


def test_all_pages_are_in_the_index() -> None:
    """Each page of the site is in the index, once."""
    listed = re.findall(r"^([\w-]+/[\w-]+)$", (DOCS / "index.md").read_text(encoding="utf-8"), re.MULTILINE)
    pages = {page.relative_to(DOCS).with_suffix("").as_posix() for page in generate.pages()}
    assert len(listed) == len(set(listed))
    assert set() == {page for page in pages if "/" in page} - set(listed)


def test_changelog_has_the_version() -> None:
    """The first entry of the changelog is that of this version."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert celery_singleton_lock.__version__ == re.findall(r"^## \[(.+?)\]", text, re.MULTILINE)[0]


def test_readme_is_short() -> None:
    """The README has at most 600 words."""
    assert 600 >= len(README.read_text(encoding="utf-8").split())


def test_readme_has_absolute_links() -> None:
    """Links and pictures of the README work on a package index, too."""
    links = re.findall(r"\]\(<?([^)\s>]+)>?\)", README.read_text(encoding="utf-8"))
    assert links
    assert [] == [link for link in links if not link.startswith("https://")]


def test_readme_versions() -> None:
    """The versions of Celery and Python in the README are those that tox.ini tests; a worker warns of a newer Celery."""
    matrix, text = (ROOT / "tox.ini").read_text(encoding="utf-8"), README.read_text(encoding="utf-8")
    celery, python = (
        sorted({int(digits) for digits in re.findall(rf"{word}(\d+)-", matrix)}) for word in ("celery", "py")
    )
    assert f"Celery 5.{celery[0] - 50} to 5.{celery[-1] - 50}" in text
    assert (5, celery[-1] - 50) == NEWEST_CELERY
    assert f"Python 3.{python[0] - 300} to 3.{python[-1] - 300}" in text


def test_readme_names_the_policies() -> None:
    """The README has a line for each policy with a name."""
    text = README.read_text(encoding="utf-8")
    assert [*generate.NAMED] == re.findall(r'^\* `"(\w+)"`', text, re.MULTILINE)


def test_workflow() -> None:
    """The workflow of GitHub runs each environment of tox.ini's list, with its Python, and no other."""
    text = (ROOT / ".github" / "workflows" / "checks.yml").read_text(encoding="utf-8")
    parser = configparser.ConfigParser(interpolation=None)
    parser.read(ROOT / "tox.ini", encoding="utf-8")
    pairs = re.findall(r'python: "3\.(\d+)", environment: (\S+)', text)
    static = re.findall(r"environment: \[(.*)\]", text)[0].split(", ")
    assert parser["tox"]["env_list"].split() == [*(name for _, name in pairs), *static]
    assert all(name.startswith(f"py3{python}-") for python, name in pairs)


def test_picture() -> None:
    """The picture is small, and shows neither a path nor a host."""
    picture = DOCS / "images" / "timeline.svg"

    assert 300_000 > picture.stat().st_size
    text = picture.read_text(encoding="utf-8")
    assert [] == re.findall(r"/(?:home|tmp|root|work|usr)\b", text)
    assert {"demo"} == set(re.findall(r"\w+@(\w+)", text))
