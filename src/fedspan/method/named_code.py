"""Code that a configuration names: "package.module:Class" is imported only if its package was allowed before.

Importing a module runs it, so a file from somebody else could run anything. Whoever runs fedspan says which packages
may be imported (`--allow-code PACKAGE`, a settings file, `fedspan.allow_code`, a node's policy); the name is compared
before anything is imported, and only what the key asks for is accepted. Packages that are installed with an entry point
of fedspan's count as registered. Nothing is looked up beside a configuration or in the working directory, unless
Python's own path has it.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from fedspan.errors import ConfigError, nearest

B = TypeVar("B")


@dataclass(frozen=True)
class Allowance:
    """Packages whose code may be named, and how somebody adds one."""

    packages: frozenset[str]
    remedy: str

    def need(self, package: str, spec: str, who: str) -> None:
        """Refuse a package that is not among them.

        Raises:
            ConfigError: naming what allows it.
        """
        if package not in self.packages:
            remedy = self.remedy.format(package=package)
            raise ConfigError(
                f"{who}: code of package '{package}' must be allowed before it runs. Got {spec!r}; {remedy}."
            )


_OWN: set[str] = set()
_ONLY: ContextVar[Allowance | None] = ContextVar("fedspan_allowed_code", default=None)


def allow_code(*packages: str) -> None:
    """Let configurations in this process name code of these top-level packages, e.g. `allow_code("my_methods")`.

    Raises:
        ConfigError: for what is not the name of a top-level package.
    """
    _OWN.update(checked_packages(packages))


def checked_packages(packages: Iterable[str], who: str = "allow_code") -> frozenset[str]:
    """These names, if each can be that of a top-level package.

    Raises:
        ConfigError: otherwise.
    """
    given = list(packages) if not isinstance(packages, str) else [packages]
    for name in given:
        if not isinstance(name, str) or not name.isidentifier():
            top = str(name).partition(":")[0].partition(".")[0]
            hint = f"; use '{top}'" if top.isidentifier() else ""
            raise ConfigError(f"{who}: a package must be given by its top-level name. Got {str(name)[:60]!r}{hint}.")
    return frozenset(given)


@contextmanager
def only_allowing(packages: Iterable[str], remedy: str, who: str = "allow_code") -> Iterator[None]:
    """Allow these packages and no others, whatever the process allows; `remedy` says how `{package}` is added."""
    token = _ONLY.set(Allowance(checked_packages(packages, who), remedy))
    try:
        yield
    finally:
        _ONLY.reset(token)


def allowance() -> Allowance:
    """What is allowed here and now."""
    usual = Allowance(frozenset(_OWN), "allow it with --allow-code {package}, in Python with allow_code('{package}')")
    return _ONLY.get() or usual


def is_spec(name: str) -> bool:
    """Whether a name asks for code: 'package.module:Class'."""
    return ":" in name


def named_class(spec: str, base: type[B], called: str, who: str) -> type[B]:
    """The class 'package.module:Class', a subclass of `base`, which the user knows as `called`.

    Raises:
        ConfigError: if its package is not allowed, it cannot be found, or it is something else.
    """
    return need_subclass(_named(spec, who, "Class", base), base, called, who)


def named_function(spec: str, who: str) -> Any:
    """The function 'package.module:function'.

    Raises:
        ConfigError: if its package is not allowed, it cannot be found, or it is something else.
    """
    found = _named(spec, who, "function", object)
    if not inspect.isfunction(found):
        raise ConfigError(f"{who}: must be a function. Got {describe_object(found)}.")
    return found


def _named(spec: str, who: str, what: str, base: type) -> Any:
    path, _, name = spec.partition(":")
    if not name.isidentifier() or not all(part.isidentifier() for part in path.split(".")):
        raise ConfigError(f"{who}: code must be given as 'package.module:{what}'. Got {spec[:80]!r}.")
    allowance().need(path.partition(".")[0], spec, who)  # before the import, which runs the module
    try:
        module = importlib.import_module(path)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{who}: {path} cannot be imported ({brief(error)}); looked in {', '.join(p or '.' for p in sys.path)}."
            " Install it or put its folder on PYTHONPATH."
        ) from error
    if name not in vars(module):
        classes = [n for n, v in vars(module).items() if inspect.isclass(v) and issubclass(v, base)]
        where = getattr(module, "__file__", None) or "built in"
        raise ConfigError(f"{who}: {path} has no {what.lower()} '{name}' ({where}).{nearest(name, classes)}")
    return vars(module)[name]


def need_subclass(found: Any, base: type[B], called: str, who: str) -> type[B]:
    """What was found, if it is a subclass of `base`.

    Raises:
        ConfigError: saying what it is.
    """
    if not inspect.isclass(found) or not issubclass(found, base):
        raise ConfigError(f"{who}: must be a subclass of {called}. Got {describe_object(found)}.")
    return found


def describe_object(found: object) -> str:
    """What an object is, in words: a class with its name, a function, a value of a type."""
    if inspect.isclass(found):
        return f"the class {found.__module__}.{found.__qualname__}"
    if inspect.isroutine(found):
        return f"the function {found.__name__}"
    return f"a value of type {type(found).__name__}"


def brief(error: BaseException) -> str:
    """The first line of an error, short enough to stand inside a sentence."""
    lines = str(error).strip().splitlines() or [""]
    line = lines[0].rstrip(".")
    return f"{type(error).__name__}: {line[:157] + '...' if len(line) > 160 else line}".rstrip(": ")


# ------------------------------------------------------------------------------------------------ installed packages


@functools.cache
def installed(group: str) -> dict[str, EntryPoint]:
    """The entry points of a group by name; of two with one name the first one, and `load_installed` refuses it."""
    found: dict[str, EntryPoint] = {}
    for entry in _entries(group):
        found.setdefault(entry.name, entry)
    return found


@functools.cache
def _entries(group: str) -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group=group)) if group else ()


def load_installed(group: str, name: str, who: str) -> Any:
    """What an installed package offers under a name of a group.

    Raises:
        ConfigError: naming package and entry point, if it cannot be loaded or two packages offer it.
    """
    owners = [entry for entry in _entries(group) if entry.name == name]
    if len({entry.value for entry in owners}) > 1:
        both = " and ".join(sorted(_package(entry) for entry in owners))
        raise ConfigError(f"{who}: one installed package must offer it. Got {both}; uninstall all but one.")
    entry = owners[0]
    try:
        return entry.load()
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{who}: entry point '{name} = {entry.value}' ({group}) of package '{_package(entry)}' cannot be loaded"
            f" ({brief(error)}); mend or uninstall the package."
        ) from error


def _package(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else "unknown"


def forget_installed() -> None:
    """Look at the installed packages anew when they are next asked for."""
    installed.cache_clear()
    _entries.cache_clear()
