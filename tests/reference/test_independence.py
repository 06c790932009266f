"""Pages are independent, short, and there is one for every method."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from harness import PLACE
from plain import PAGES

from fedspan.methods import BUILT_IN

ALLOWED = {"__future__", "collections", "dataclasses", "math", "numpy", "plain", "torch", "typing"}
LONGEST = 75
"""Lines of a page, helpers of its file not counted."""

SOURCES = [PLACE / "plain.py", *sorted((PLACE / "pages").glob("*.py"))]
WITH_SOURCE = pytest.mark.parametrize("path", SOURCES, ids=[p.stem for p in SOURCES])


def test_every_method_has_a_page() -> None:
    missing, unknown = sorted(BUILT_IN.keys() - PAGES.keys()), sorted(PAGES.keys() - BUILT_IN.keys())
    assert not missing, f"no page in tests/reference/pages: {', '.join(missing)}"
    assert not unknown, f"pages of no method: {', '.join(unknown)}"


@WITH_SOURCE
def test_pages_import_torch_and_numpy_alone(path: Path) -> None:
    assert not foreign(path.read_text(encoding="utf-8")), "a page must be independent of what it is compared with"


def test_a_foreign_import_is_found() -> None:
    assert foreign("from fedspan.learn import sgd") == {"fedspan"}
    assert foreign("def f():\n    import harness, torch.nn") == {"harness"}
    assert foreign("from . import x\n__import__('fedspan')") == {".", "__import__"}


def foreign(source: str) -> set[str]:
    """Packages that a source imports and a page may not, and ways to import without saying so."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add("." if node.level else str(node.module).partition(".")[0])
        elif isinstance(node, ast.Name) and node.id in {"__import__", "exec", "eval"}:
            found.add(node.id)
    return found - ALLOWED


@WITH_SOURCE
def test_a_page_is_a_page(path: Path) -> None:
    functions = [n for n in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(n, ast.FunctionDef)]
    long = {n.name: lines for n in functions if (lines := (n.end_lineno or 0) - n.lineno) > LONGEST}
    assert not long, long
