"""The contract of a method: few names, capabilities without fields, short chains of bases, words for readers."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import pkgutil
import re
from itertools import zip_longest
from types import ModuleType

import pytest

import fedspan.method
from fedspan.method import Abilities, Begins, MeasuredStep, Method, Newcomer, Sharing, capabilities
from fedspan.methods import METHODS

CORE = {
    "about",
    "plan",
    "init_server",
    "init_client",
    "download",
    "client_update",
    "server_update",
    "personal",
}
LONGEST_CHAIN = 4  # Method → Training → Averaging → Sharing → X
CAPABILITIES = [
    value
    for name, value in vars(capabilities).items()
    if inspect.isclass(value)
    and value.__module__ == capabilities.__name__
    and not name.startswith("_")
    and value not in (Abilities, Begins, MeasuredStep, Newcomer)
]
NAMED = pytest.mark.parametrize("name", METHODS)


def public(cls: type) -> set[str]:
    """Names that a class itself defines for others."""
    return {name for name in vars(cls) if not name.startswith("_")}


def edges(cls: type) -> int:
    """How many bases lie between `Method` and a class, along the longest chain; capabilities do not count."""
    if cls is Method:
        return 0
    return 1 + max(edges(base) for base in cls.__bases__ if issubclass(base, Method))


def modules() -> list[ModuleType]:
    """The package `fedspan.method` and every module in it."""
    names = [m.name for m in pkgutil.iter_modules(fedspan.method.__path__, "fedspan.method.")]
    return [fedspan.method, *map(importlib.import_module, names)]


def test_a_method_is_six_functions_a_plan_and_what_it_says_about_itself() -> None:
    assert public(Method) == CORE and len(CORE) <= 8
    assert not dataclasses.fields(Method)


@pytest.mark.parametrize("function", sorted(CORE - {"about", "plan", "init_client"}))
def test_what_a_method_must_define_is_asked_for_by_name(function: str) -> None:
    method = Method()
    arguments = [None] * (len(inspect.signature(getattr(method, function)).parameters))
    with pytest.raises(TypeError, match=f"^Method: {function} must be defined.$"):
        getattr(method, function)(*arguments)


# ------------------------------------------------------------------------------------------------ capabilities


def test_all_capabilities_are_known() -> None:
    names = {c.__name__ for c in CAPABILITIES}
    known = {
        "Announces",
        "Converts",
        "Lifts",
        "Ranked",
        "Coded",
        "Adapts",
        "Observed",
        "Onboards",
        "Cautions",
        "Judged",
        "Estimates",
    }
    assert names == known


@pytest.mark.parametrize("capability", CAPABILITIES, ids=lambda c: c.__name__)
def test_a_capability_has_no_fields_and_no_check(capability: type) -> None:
    """So that the order of a method's bases decides nothing."""
    assert not issubclass(capability, Method)
    assert not dataclasses.is_dataclass(capability)
    for base in capability.__mro__[:-1]:
        assert not inspect.get_annotations(base)
        assert not {"__post_init__", "__init__", "__new__"} & vars(base).keys()
        assert all(inspect.isfunction(getattr(base, name)) for name in public(base))


def test_capabilities_share_no_names_but_those_they_inherit() -> None:
    for one in CAPABILITIES:
        for other in CAPABILITIES:
            if one is not other:
                assert not public(one) & public(other), (one, other)
        assert not public(one) & CORE


# ------------------------------------------------------------------------------------------------ registered methods


def test_edges_are_counted_without_capabilities() -> None:
    class One(Sharing, capabilities.Announces, capabilities.Observed): ...

    class Two(One): ...

    assert [edges(c) for c in (Method, Sharing, One, Two)] == [0, 3, 4, 5]


@NAMED
def test_the_chain_of_bases_is_short(name: str) -> None:
    cls = METHODS[name]
    chain = " → ".join(b.__name__ for b in reversed(cls.__mro__) if issubclass(b, Method))
    assert edges(cls) <= LONGEST_CHAIN, chain


@NAMED
def test_no_method_is_built_on_another_paper(name: str) -> None:
    """Methods share building blocks; a base with a name of its own in the registry is of the same file or folder."""
    cls = METHODS[name]
    here = cls.__module__.split(".")[:3]
    others = [b for b in cls.__mro__[1:] if b in METHODS.values()]
    assert all(b.__module__.split(".")[:3] == here for b in others)


@NAMED
def test_the_docstring_says_what_is_kept_and_sent(name: str) -> None:
    text = METHODS[name].__dict__["__doc__"] or ""
    assert re.search(r"\bKept:\s+\S", text) and re.search(r"\bSent:\s+\S", text)
    first = text.splitlines()[0]
    assert first.endswith(".") and len(first) <= 120


@NAMED
def test_about_names_family_and_reference(name: str) -> None:
    about = METHODS[name].about
    assert about.family and about.reference
    given = {f.name: getattr(about, f.name) for f in dataclasses.fields(about)}
    assert None not in [value for name, value in given.items() if name != "yardstick"]  # few methods are one


# ------------------------------------------------------------------------------------------------ words


INHERITED = CORE.union(*(public(c) for c in CAPABILITIES))
"""Functions whose docstring stands where they are declared."""


def silent(body: list[ast.stmt], where: str) -> list[str]:
    """Public names of a module or class without a docstring: functions, classes, and aliases with none below them."""
    found = []
    for node, after in zip_longest(body, body[1:]):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            told = ast.get_docstring(node) is not None or node.name in INHERITED
            if not node.name.startswith("_") and not told:
                found.append(f"{where}.{node.name}")
            if isinstance(node, ast.ClassDef):
                found += silent([n for n in node.body if isinstance(n, ast.FunctionDef)], f"{where}.{node.name}")
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id[0] != "_":
            below = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            found += [] if below else [f"{where}.{node.target.id}"]
    return found


@pytest.mark.parametrize("module", modules(), ids=lambda m: m.__name__)
def test_every_public_name_of_the_package_has_a_docstring(module: ModuleType) -> None:
    tree = ast.parse(inspect.getsource(module))
    assert ast.get_docstring(tree)
    assert not silent(tree.body, module.__name__)


def test_a_silent_name_is_found() -> None:
    source = "A: int = 1\ndef f(): ...\nclass C:\n    def g(self): ...\n    def _h(self): ...\n"
    assert silent(ast.parse(source).body, "m") == ["m.A", "m.f", "m.C", "m.C.g"]
    assert not silent(ast.parse('A: int = 1\n"""One."""\ndef f():\n    """Two."""').body, "m")


def test_everything_the_package_offers_is_there() -> None:
    assert sorted(fedspan.method.__all__) == fedspan.method.__all__
    assert all(hasattr(fedspan.method, name) for name in fedspan.method.__all__)
