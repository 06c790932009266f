"""The layout of the source: imports point one way, little stands at the root, names mean one thing.

A module imports from its own folder and from the rows above its own; rooms of one row do not import one another. Names
of modules in strings (registries, `import_module`, `python -m`) count as imports, and so do imports inside functions.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedspan.methods import METHODS

SRC = Path(__file__).resolve().parent.parent / "src" / "fedspan"
ROWS = [
    {"errors", "tree", "randomness"},
    {"linalg", "storage"},
    {"wire", "learn"},
    {"layers"},
    {"method"},
    {"methods", "data"},
    {"language"},
    {"models"},
    {"simulation"},
    {"config"},
    {"deploy", "report"},
    {"studies", "testing"},
    {"cli"},
]
ROW = {room: k for k, rooms in enumerate(ROWS) for room in rooms}
MOST_FILES = 20
LARGE = {"methods", "cli"}  # one file per paper, one per command
# Who may name a method: what has to choose one, or shows how one is chosen.
MAY_NAME = {
    "cli/doctor.py": {"fedavg"},  # a self-test has to run something
    "cli/onboard.py": {"local", "fedavg"},  # compares with two runs that the user names by options
    "cli/new.py": {"fedavg"},  # what a new method is first compared with
    "config/__init__.py": {"fedavg"},  # the default of [method]
    "simulation/simulator.py": {"fedproto", "fedtgp", "fedkd"},  # the remedy of an error sentence
    "simulation/onboarding.py": {"Local", "PflMf"},  # how a newcomer starts is still decided there
}
NAMES = METHODS.keys() | {str(cls.about.family) for cls in METHODS.values()} - {"baseline"}
CLASSES = {cls.__name__ for cls in METHODS.values()}
FILES = sorted(p for p in SRC.rglob("*.py") if p != SRC / "__init__.py")
IDS = [str(p.relative_to(SRC)) for p in FILES]


def room_of(path: Path) -> str:
    """The folder below the root, or the module at the root."""
    here = path.relative_to(SRC)
    return here.parts[0].removesuffix(".py")


def imports(source: str) -> Iterator[str]:
    """Every room that a source imports from, wherever in it that stands."""
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"fedspan.{a.name}" for a in node.names] if node.module == "fedspan" else [node.module or ""]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = re.findall(r"^fedspan\.[a-z_.]+(?=$|:\w+$)", node.value)
        yield from (n.split(".")[1] for n in names if n.startswith("fedspan.") and n.split(".")[1] in ROW)


def upward(room: str, source: str) -> set[str]:
    """Rooms a source in `room` must not import from, and does."""
    return {r for r in imports(source) if r != room and ROW[r] >= ROW[room] and ROW[room] > 0}


def named(source: str) -> set[str]:
    """Methods that a source names: in strings that are no docstrings, by a prefix it asks for, or by their class.

    What a method says of its own family is no such name, and `local` inside a sentence is an everyday word.
    """
    whole = ast.parse(source)
    silent = {id(n.value) for n in ast.walk(whole) if isinstance(n, ast.Expr) or getattr(n, "arg", None) == "family"}
    found: set[str] = set()
    for node in ast.walk(whole):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fedspan.methods"):
            found |= {a.name for a in node.names} & CLASSES
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("startswith", "removeprefix", "match"):
            inside = (n for a in node.args for n in ast.walk(a) if isinstance(n, ast.Constant))
            asked = {n.value for n in inside if isinstance(n.value, str) and len(n.value) > 2}
            found |= {a for a in asked if any(name.startswith(a) for name in NAMES)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in silent:
            words = {node.value, *(set(re.findall(r"(?<![\w.-])[\w-]+", node.value)) - {"local"})}
            found |= words & NAMES
    return found


def test_only_primitives_stand_at_the_root() -> None:
    assert {p.stem for p in SRC.glob("*.py")} - {"testing"} == {"__init__", *ROWS[0]}
    assert {p.name for p in SRC.iterdir() if p.is_dir() and p.name != "__pycache__"} <= ROW.keys()


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_imports_point_one_way(path: Path) -> None:
    above = upward(room_of(path), path.read_text(encoding="utf-8"))
    assert not above, f"{path.relative_to(SRC)} imports from {', '.join(sorted(above))}"


def test_a_forbidden_import_is_found() -> None:
    assert upward("learn", "def f():\n    from fedspan.methods.fedavg import FedAvg") == {"methods"}
    assert upward("method", "TABLE = {'fedavg': 'fedspan.methods.fedavg:FedAvg'}") == {"methods"}
    assert upward("deploy", "import fedspan.report.page") == {"report"}
    assert upward("cli", "from fedspan.methods import make\nfrom fedspan import tree") == set()


def test_no_public_class_has_two_meanings() -> None:
    where = defaultdict(list)
    for path in FILES:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                where[node.name].append(str(path.relative_to(SRC)))
    assert not {name: files for name, files in where.items() if len(files) > 1}


def test_no_module_name_has_two_meanings() -> None:
    where = defaultdict(list)
    for path in FILES:
        if path.stem != "__init__" and room_of(path) != "cli":
            where[path.stem].append(str(path.relative_to(SRC)))
    assert not {name: files for name, files in where.items() if len(files) > 1}


def test_no_folder_is_crowded() -> None:
    count: dict[str, int] = defaultdict(int)
    for path in FILES:
        count[str(path.parent.relative_to(SRC))] += 1
    assert not {folder: n for folder, n in count.items() if n > MOST_FILES and folder not in LARGE}


@pytest.mark.parametrize("here", [i for i in IDS if not i.startswith(("methods/", "studies/"))])
def test_no_method_is_named_outside_methods_and_studies(here: str) -> None:
    names = named((SRC / here).read_text(encoding="utf-8")) - MAY_NAME.get(here, set())
    assert not names, f"{here} names {', '.join(sorted(names))}: let the method bring what is special about it"


@pytest.mark.parametrize("here", MAY_NAME)
def test_exceptions_that_are_no_longer_needed_are_removed(here: str) -> None:
    assert MAY_NAME[here] & named((SRC / here).read_text(encoding="utf-8"))


def test_a_named_method_is_found() -> None:
    assert named("if run.method == 'fedavg': pass") == {"fedavg"}
    assert named("run.method.startswith(('factorized', 'x'))") == {"factorized"}
    assert named("f'the run must be of pfl-mf. Got {x}'") == {"pfl-mf"}
    assert named("from fedspan.methods.pfl_mf import PflMf") == {"PflMf"}
    assert named("RULE = {'factorized-fl': 1}") == {"factorized-fl"}
    assert named("def f():\n    'As fedavg does.'\nabout = About(family='fedhm')\nx = 'a local step'") == set()
