"""One module ends deliveries."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import celery_singleton_lock

PACKAGE = Path(celery_singleton_lock.__file__).parent
ENDING = PACKAGE / "delivery" / "ending.py"
#: Exceptions by which Celery's tracer knows that a delivery has ended.
ENDS = {"Ignore", "Reject", "Retry"}


def ends_in(path: Path) -> list[str]:
    """Return the lines of a module that raise such an exception, or store a state."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        raises = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ENDS
        stores = isinstance(node, ast.Attribute) and (node.attr.startswith("mark_as_") or node.attr == "store_result")
        if raises or stores:
            found.append(f"{path.relative_to(PACKAGE)}:{node.lineno}")  # type: ignore[attr-defined]
    return found


def test_no_other_module_ends_a_delivery() -> None:
    """Each Ignore, Retry and Reject is raised, and each state stored, in `delivery/ending.py`. Stores know nothing of Celery."""
    others = [path for path in PACKAGE.rglob("*.py") if path != ENDING and PACKAGE / "store" not in path.parents]
    assert [] == [line for path in others for line in ends_in(path)]
    assert ends_in(ENDING)


@pytest.mark.parametrize("what", ["raise Ignore(1)", "task.backend.mark_as_done(1)", "backend.store_result(1)"])
def test_what_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """The test above finds each of them."""
    monkeypatch.setattr(f"{__name__}.PACKAGE", tmp_path)
    (tmp_path / "module.py").write_text(what)
    assert ["module.py:1"] == ends_in(tmp_path / "module.py")
