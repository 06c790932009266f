"""The methods by name: built-in ones imported when they are asked for, registered ones, those of installed packages.

>>> from dataclasses import dataclass
>>> from fedspan.method.registry import METHODS, register
>>> from fedspan.method import Training
>>> @register("doc-example")
... @dataclass(frozen=True, kw_only=True)
... class DocExample(Training):
...     pass
>>> METHODS["doc-example"] is DocExample
True
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from fedspan.errors import ConfigError, nearest, safe_name
from fedspan.method.fields import build
from fedspan.method.named_code import (
    allowance,
    installed,
    is_spec,
    load_installed,
    named_class,
    need_subclass,
    only_allowing,
)
from fedspan.method.protocol import Method

BASE = "fedspan.Method"

C = TypeVar("C", bound=type[Method])


class Registry(Mapping[str, type[Method]]):
    """Names of methods to their classes; a class is imported when it is first asked for.

    A built-in name cannot be taken by a package or a decorator; what is registered in this process comes before what
    is installed.
    """

    def __init__(self) -> None:
        self.group = ""
        self._places: dict[str, str] = {}
        self._classes: dict[str, type[Method]] = {}

    def add_table(self, places: Mapping[str, str], group: str) -> None:
        """Add built-in methods as names to 'module:Class', and the entry points by which packages bring theirs."""
        self._places.update(places)
        self.group = group

    def add(self, name: str, cls: type[Method]) -> None:
        """Add a class under a name.

        Raises:
            ConfigError: if the name cannot be one, or stands for another class.
        """
        who = f"register '{name}'"
        safe_name(name, f"{who}: the name")
        need_subclass(cls, Method, BASE, who)
        other = self._places.get(name) or _place(self._classes.get(name))
        if other not in (None, _place(cls)):  # a module that is loaded again brings the same class anew
            raise ConfigError(f"{who}: the name must be free. It stands for {other}; choose another one.")
        self._classes[name] = cls

    def __getitem__(self, name: str) -> type[Method]:
        if name in self._classes:
            return self._classes[name]
        if name in self._places:
            module, _, attribute = self._places[name].partition(":")
            found: type[Method] = getattr(importlib.import_module(module), attribute)
        elif name in installed(self.group):
            who = f"Method {name}"
            found = need_subclass(load_installed(self.group, name, who), Method, BASE, who)
        else:
            raise KeyError(name)
        self._classes[name] = found
        return found

    def __contains__(self, name: object) -> bool:
        return name in self._places or name in self._classes or name in installed(self.group)

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self._places, *self._classes, *installed(self.group)]))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def name_of(self, cls: type[Method]) -> str | None:
        """The name of a class, None if it has none; nothing is imported to find out."""
        if found := next((name for name, c in self._classes.items() if c is cls), None):
            return found
        for name, place in self._places.items():
            module, _, attribute = place.partition(":")
            if module in sys.modules and getattr(sys.modules[module], attribute, None) is cls:
                return name
        return None


def _place(cls: type | None) -> str | None:
    return None if cls is None else f"{cls.__module__}:{cls.__qualname__}"


METHODS = Registry()
"""Every method by name. A mapping that imports a method's module when its class is asked for."""


def register(name: str) -> Callable[[C], C]:
    """Register a class of one's own under a name, as a decorator: `@register("my-method")`.

    Raises:
        ConfigError: if the name is taken, or the class is no `Method`.
    """

    def add(cls: C) -> C:
        METHODS.add(name, cls)
        return cls

    return add


def find_method(name: str) -> type[Method]:
    """The class of a method: by its registered name, or 'package.module:Class' of an allowed package.

    Raises:
        ConfigError: if there is none, its package is not allowed, or it is no method.
    """
    if is_spec(name):
        return named_class(name, Method, BASE, f"Method {name}")
    if name not in METHODS:
        raise ConfigError(f"Method: unknown method '{name[:60]}'.{nearest(name[:60], METHODS)}")
    return METHODS[name]


def make(name: str, /, *, allow_code: Iterable[str] = (), **fields: Any) -> Method:
    """The method of that name, or of 'package.module:Class', with these fields.

    Args:
        name: a registered name (`fedspan methods` lists them), or code of one's own.
        allow_code: top-level packages that the name may import; `fedspan.allow_code` says it for the whole process.

    Raises:
        ConfigError: for an unknown name or field, a value that does not fit, or code that is not allowed.
    """
    now = allowance()
    with only_allowing(now.packages | set(allow_code), now.remedy):
        cls = find_method(name)
    return build(cls, fields, f"Method {name}")


def name_of(method: Method) -> str:
    """The registered name, or the class name of a method that is not registered."""
    return METHODS.name_of(type(method)) or type(method).__name__
