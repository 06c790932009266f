"""The generated pages are current: what `make docs` would write is what is committed."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    """The program docs/generate.py as a module."""
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pages(generator: ModuleType) -> Mapping[Path, str]:
    """Every generated page, written once for all tests of this file."""
    made: Mapping[Path, str] = generator.pages()
    return made


def test_the_committed_pages_are_current(pages: Mapping[Path, str]) -> None:
    stale = [str(path.relative_to(ROOT)) for path, text in pages.items() if path.read_text(encoding="utf-8") != text]
    assert not stale, f"run `make docs` and commit {', '.join(stale)}"


def test_pictures_of_claims_show_the_stored_figures(generator: ModuleType) -> None:
    """What they were drawn from is compared, not their bytes: those differ between versions of matplotlib."""
    drawn = generator.pictures()
    assert drawn and set(drawn) == set((DOCS / "reference" / "claims").iterdir())
    stale = [path.name for path, picture in drawn.items() if not picture.is_current(path)]
    assert not stale, f"run `make docs` and commit {', '.join(stale)}"


def test_blocks_of_a_page_are_filled_from_stored_outcomes(generator: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- figures: verdicts rank-permuted-digits theorem-1 -->\nstale\n<!-- end of figures -->\nb\n")
    text = generator.with_claims(page)
    assert text.startswith("a\n<!-- figures: verdicts") and text.endswith("\n<!-- end of figures -->\nb\n")
    assert "\nstale\n" not in text and "| [rank-permuted-digits](" in text and "**only if p = 1" in text
    page.write_text(text)
    assert generator.with_claims(page) == text
    page.write_text("<!-- figures: guesses theorem-1 -->\n<!-- end of figures -->\n")
    with pytest.raises(SystemExit, match="guesses"):
        generator.with_claims(page)


def test_every_page_of_the_reference_is_generated(pages: Mapping[Path, str]) -> None:
    assert {p for p in pages if p.parent == DOCS / "reference"} == set((DOCS / "reference").glob("*.md"))


def test_every_method_stands_in_readme_and_reference(generator: ModuleType, pages: Mapping[Path, str]) -> None:
    names = list(generator.built_in())
    assert len(names) >= 53
    for name in names:
        assert pages[ROOT / "README.md"].count(f"[`{name}`]") == 1, name
        assert f"### {name}\n" in pages[DOCS / "reference" / "methods.md"], name
    for name in ("waffle", "lr-bpfl", "amht-lrs"):
        (row,) = (line for line in pages[ROOT / "README.md"].splitlines() if f"[`{name}`]" in line)
        assert "(from the abstract)" in row


def test_every_command_and_public_name_is_documented(pages: Mapping[Path, str]) -> None:
    import fedspan

    commands = pages[DOCS / "reference" / "command-line.md"]
    assert {"fedspan run", "fedspan deploy local", "fedspan analyse subspace"} <= set(
        re.findall("^## (.*)$", commands, re.M)
    )
    python = pages[DOCS / "reference" / "python.md"]
    for name in fedspan.__all__:
        if name == "__version__":
            continue
        assert f"\n## {name}\n" in python, name
        text = python.split(f"\n## {name}\n")[1].split("\n## ")[0]
        without_code = re.sub(r"```.*?```", "", text, flags=re.S)
        assert without_code.strip(), f"fedspan.{name} has no docstring"


def test_pages_hold_nothing_that_differs_between_machines(pages: Mapping[Path, str]) -> None:
    for path, text in pages.items():
        assert " at 0x" not in text and str(ROOT) not in text, path.name


def test_a_method_without_a_family_is_named(generator: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    more = {**generator.built_in(), "unheard-of": object}
    monkeypatch.setattr(generator, "built_in", lambda: more)
    with pytest.raises(SystemExit, match="unheard-of"):
        generator.families()
