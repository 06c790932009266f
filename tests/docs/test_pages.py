"""The pages keep their word: files they show are written, Python is run, commands are called, links lead somewhere.

Blocks of a page are followed from top to bottom in one empty folder:

* ```` ```python ```` is executed; all blocks of a page share their names.
* ```` ```console ```` lines `$ fedspan …` and `$ python …` are called and must end with 0.
* ```` ```toml ```` is a checked experiment; below `<!-- file: NAME -->` a block is also written to that file.
* Below `<!-- not run: why -->` a block is left out, and below `<!-- long -->` it waits for the long tests.
* Below `<!-- tree … -->` a block is an edit of fedspan itself, which the long tests make in a copy.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import pytest

from conftest import call
from fedspan.config import from_dict
from fedspan.methods import METHODS

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
RUN = [ROOT / "README.md", *sorted(DOCS.glob("tutorials/*.md")), *sorted(DOCS.glob("how-to/*.md"))]
ALL = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))]
LONG = {"add_a_method", "compare", "measures", "workers"}  # pages that take several seconds
ENTRY_POINTS = {"fedspan.methods", "fedspan.models", "fedspan.data"}
LANGUAGES = {"python", "console", "toml", "text", "ini", "yaml", "bibtex"}
BLOCK = re.compile(r"(?:^<!-- (?P<mark>[^\n]*) -->\n)?^```(?P<kind>\w*)\n(?P<text>.*?)^```$", re.M | re.S)


class Block(NamedTuple):
    """A fenced block: its language, what the comment above it says, its text and its line."""

    kind: str
    mark: str
    text: str
    line: int

    @property
    def excused(self) -> bool:
        """Whether the page says why it is not run."""
        return self.mark.startswith("not run: ")

    @property
    def edits(self) -> bool:
        """Whether it is an edit of fedspan's own files."""
        return self.mark.startswith("tree ")


def blocks(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page in their order."""
    text = page.read_text(encoding="utf-8")
    for found in BLOCK.finditer(text):
        line = text.count("\n", 0, found.start("kind")) + 1
        yield Block(found["kind"], found["mark"] or "", found["text"], line)


def follow(page: Path, long: bool) -> None:
    """Do what a page says, in the current folder."""
    names: dict[str, Any] = {"__name__": "page"}
    for block in blocks(page):
        if block.excused or block.edits or (block.mark == "long" and not long):
            continue
        where = f"{page.name}:{block.line}"
        if block.mark.startswith("file: "):
            Path(block.mark.removeprefix("file: ")).write_text(block.text, encoding="utf-8")
        elif block.kind == "python":
            exec(compile(block.text, where, "exec"), names)
        elif block.kind == "console":
            for line in block.text.splitlines():
                command(line, where)


def command(line: str, where: str) -> None:
    """Call a line of a console block."""
    words = shlex.split(line.removeprefix("$ "), comments=True)
    settings = dict(w.split("=", 1) for w in words if re.fullmatch(r"[A-Z]+=.*", w))
    words = [w for w in words if w.split("=")[0] not in settings]
    if words[0] == "fedspan" and not settings and words[1] != "deploy":
        call(*words[1:])
        return
    assert words[0] in ("fedspan", "python"), f"{where}: '{line}' is neither run nor excused"
    program = ["-m", "fedspan.cli.app", *words[1:]] if words[0] == "fedspan" else words[1:]
    path = os.pathsep.join(p for p in (settings.pop("PYTHONPATH", ""), str(ROOT / "src")) if p)
    env = os.environ | settings | {"PYTHONPATH": path}
    done = subprocess.run([sys.executable, *program], env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, f"{where}: {line}\n{done.stdout}\n{done.stderr}"


def has_long(page: Path) -> bool:
    """Whether a page has blocks for the long tests."""
    return any(block.mark == "long" for block in blocks(page))


@pytest.mark.parametrize(
    "page", [pytest.param(p, marks=[pytest.mark.long] * (p.stem in LONG)) for p in RUN], ids=lambda p: p.stem
)
def test_a_page_can_be_followed(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    matplotlib.use("Agg")
    follow(page, long=False)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", [p for p in RUN if has_long(p)], ids=lambda p: p.stem)
def test_a_page_can_be_followed_to_its_end(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    follow(page, long=True)


@pytest.mark.parametrize("page", RUN, ids=lambda p: p.stem)
def test_every_block_is_run_checked_or_excused(page: Path) -> None:
    for block in blocks(page):
        where = f"{page.name}:{block.line}"
        assert block.kind in LANGUAGES, f"{where}: say what language the block is in"
        assert not block.mark.startswith("not run") or len(block.mark) > len("not run: ") + 5, f"{where}: say why"
        if block.kind == "console" and not block.excused:
            strange = [
                x for x in block.text.splitlines() if not x.startswith(("$ fedspan ", "$ python ", "$ PYTHONPATH="))
            ]
            assert not strange, f"{where}: {strange[0]!r} cannot be run by the test"
        if block.kind == "toml" and not block.excused and not block.edits:
            from_dict(tomllib.loads(block.text))


def edit(block: Block, tree: Path) -> None:
    """Make an edit that a page asks for: a new file, or lines below a line."""
    kind, _, rest = block.mark.removeprefix("tree ").partition(": ")
    name, _, above = rest.partition(" below ")
    path = tree / name
    if kind == "file":
        path.write_text(block.text, encoding="utf-8")
    else:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        (at,) = (k for k, line in enumerate(lines) if line.lstrip().startswith(above))
        path.write_text("".join([*lines[: at + 1], block.text, *lines[at + 1 :]]), encoding="utf-8")


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_method_joins_the_tree_as_the_page_says(tmp_path: Path) -> None:
    for part in ("src", "tests", "docs", "experiments"):
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "mkdocs.yml"):
        shutil.copy(ROOT / file, tmp_path / file)
    edits = [block for block in blocks(DOCS / "tutorials" / "add_a_method.md") if block.edits]
    assert len(edits) == 7
    for block in edits:
        edit(block, tmp_path)
    env = os.environ | {"PYTHONPATH": str(tmp_path / "src")}
    for program in (
        ["docs/generate.py"],
        ["-m", "pytest", "-q", "-n0", "tests/methods", "tests/method", "tests/reference", "-k", "damped or has_a_page"],
        ["-m", "pytest", "-q", "-n0", "tests/docs/test_generated_pages.py"],
    ):
        words = [w for w in program if not w.startswith("tests/") or (tmp_path / w).exists()]
        done = subprocess.run(
            [sys.executable, *words], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def anchors(page: Path) -> set[str]:
    """The anchors that a page's headings make."""
    text = BLOCK.sub("", page.read_text(encoding="utf-8"))
    titles = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", t.lower()).strip()) for t in titles}


@pytest.mark.parametrize("page", ALL, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = BLOCK.sub("", page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        goal = (page.parent / path).resolve() if path else page
        assert goal.is_relative_to(ROOT) and goal.exists(), f"{page.name}: {target}"
        if anchor:
            assert anchor in anchors(goal), f"{page.name}: {target}"


@pytest.mark.parametrize("page", ALL, ids=lambda p: str(p.relative_to(ROOT)))
def test_paths_in_the_text_exist(page: Path) -> None:
    """`src/…`, `docs/…`, `tests/…` and `experiments/…` in back quotes are files or folders of the repository."""
    text = page.read_text(encoding="utf-8")
    made = {block.mark.removeprefix("tree file: ") for block in blocks(page)}
    for path in set(re.findall(r"`((?:src|docs|tests|experiments|bench)/[\w./-]+)`", text)) - made:
        assert page.name == "CHANGELOG.md" or (ROOT / path).exists(), f"{page.name}: {path}"


@pytest.mark.parametrize("page", [p for p in ALL if p.name != "CHANGELOG.md"], ids=lambda p: str(p.relative_to(ROOT)))
def test_names_in_the_text_exist(page: Path) -> None:
    """`fedspan.module.name` in back quotes can be imported; entry points are named beside the word."""
    text = BLOCK.sub("", page.read_text(encoding="utf-8"))
    for name in set(re.findall(r"`(fedspan(?:\.\w+)+)`", text)) - ENTRY_POINTS:
        thing: Any = importlib.import_module("fedspan")
        for part in name.split(".")[1:]:
            inner = f"{thing.__name__}.{part}" if hasattr(thing, "__path__") else ""
            found = inner and importlib.util.find_spec(inner)
            thing = importlib.import_module(inner) if found else getattr(thing, part)


def test_every_page_is_on_the_site() -> None:
    nav = set(re.findall(r"([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.M))
    assert nav == {str(p.relative_to(DOCS)) for p in DOCS.rglob("*.md")}


def test_pages_say_how_many_methods_there_are() -> None:
    for path, times in ((ROOT / "README.md", 2), (DOCS / "index.md", 1)):
        said = re.findall(r"\b(\d+) methods|\| methods \| (\d+)", path.read_text(encoding="utf-8"))
        assert [int(a or b) for a, b in said] == [len(METHODS)] * times, path


def test_a_block_that_fails_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = tmp_path / "page.md"
    page.write_text("```python\nassert 1 == 2\n```\n")
    with pytest.raises(AssertionError):
        follow(page, long=False)
    page.write_text("```console\n$ fedspan run missing.toml\n```\n")
    with pytest.raises(AssertionError, match="missing"):
        follow(page, long=False)
    page.write_text("<!-- not run: needs another machine -->\n```python\nassert 1 == 2\n```\n")
    follow(page, long=False)
