"""Typed values from untyped ones: pydantic checks them, one sentence says what is wrong."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Literal, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from fedspan.errors import ConfigError, nearest

T = TypeVar("T")


def build_dataclass(cls: type[T], values: Mapping[str, Any], who: str) -> T:
    """An instance of a dataclass from plain values, each checked strictly against its annotation.

    Raises:
        ConfigError: for unknown fields (naming the nearest), wrong types, or what the class itself refuses.
    """
    known = {f.name for f in fields(cls) if f.init}  # type: ignore[arg-type]
    hints = typing.get_type_hints(cls)
    checked = {}
    for name, value in values.items():
        if name not in known:
            raise ConfigError(f"{who}: unknown key '{name}'.{nearest(name, known)}")
        if isinstance(value, list):  # TOML has lists only; fields of frozen dataclasses are tuples
            value = tuple(value)
        try:
            checked[name] = TypeAdapter(hints[name], config=ConfigDict(strict=True)).validate_python(value)
        except ValidationError:
            raise ConfigError(f"{who}: {name} must be {say(hints[name])}. Got {value!r}.") from None
    return cls(**checked)


def say(hint: Any) -> str:
    """A type in words."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return "one of " + ", ".join(repr(a) for a in args)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(say(a) for a in args if a is not type(None))
    if origin in (tuple, list):
        return f"a list of {say(args[0]) if args else 'values'}"
    words = {int: "an integer", float: "a number", str: "a text", bool: "true or false"}
    return words.get(hint, str(getattr(hint, "__name__", hint)))
