"""Overrides from the command line: `section.key=value`, each value read by the type of the field it is for.

What is typed is text. It is read as TOML first (`0.1`, `true`, `[1, 2]`); where the field takes a string and not what
that gives, the text itself is its value, so that `method.v_scale=1` is "1" and `name=2026` is "2026".
"""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fedspan.config.sections import DataConfig, ModelConfig, PartitionConfig
from fedspan.data import PARTITIONS
from fedspan.data.partitions.kinds import TEXTS
from fedspan.errors import ConfigError
from fedspan.method.fields import fits, keys_of
from fedspan.method.named_code import is_spec
from fedspan.methods import METHODS, find_method
from fedspan.models import MODELS
from fedspan.simulation.asynchronous import Asynchronous
from fedspan.simulation.defence import Defence
from fedspan.simulation.devices import Devices
from fedspan.simulation.settings import Settings
from fedspan.storage.toml import parse_value, short

SECTIONS: dict[str, type] = {
    "data": DataConfig,
    "partition": PartitionConfig,
    "model": ModelConfig,
    "train": Settings,
    "devices": Devices,
    "defence": Defence,
    "asynchronous": Asynchronous,
}
OPTIONS: dict[type, Mapping[str, Any]] = {PartitionConfig: PARTITIONS, ModelConfig: MODELS}
"""Sections whose further keys are options of their kind."""
TOP: dict[str, Any] = {"name": str, "seed": int, "rounds": int}


def apply_overrides(values: dict[str, Any], overrides: Sequence[str]) -> None:
    """Write overrides into the plain values of an experiment file; the last one of a key counts.

    Raises:
        ConfigError: for what is no override, or goes into what is no section.
    """
    typed: dict[tuple[str, ...], str] = {}
    for text in overrides:
        path, equals, value = text.partition("=")
        keys = path.strip().split(".")
        if not equals or not all(re.fullmatch(r"[A-Za-z0-9_-]{1,60}", k) for k in keys) or len(keys) > 3:
            raise ConfigError(f"Config: an override must look like section.key=value. Got {short(text)}.")
        _set(values, keys, parse_value(value))
        typed[tuple(keys)] = value
    for keys_, value in typed.items():  # after all are set, as the name of the method decides which fields there are
        if _wants_text(values, keys_, parse_value(value), value):
            _set(values, keys_, value)


def _set(values: dict[str, Any], keys: Sequence[str], value: Any) -> None:
    at = values
    for k in keys[:-1]:
        at = at.setdefault(k, {})
        if not isinstance(at, dict):
            raise ConfigError(f"Config: '{k}' is not a section, so '{'.'.join(keys)}' cannot be set.")
    at[keys[-1]] = value
    if keys[0] == "method" and len(keys) == 2 and isinstance(values.get("methods"), dict):
        for table in values["methods"].values():  # what is typed last wins over the file's single methods, too
            if isinstance(table, dict):
                table.pop(keys[1], None)


def _wants_text(values: Mapping[str, Any], keys: tuple[str, ...], value: Any, text: str) -> bool:
    """Whether the field of an override takes the text as it was typed, and not what TOML makes of it."""
    if isinstance(value, str | list | dict):  # brackets and braces are TOML on purpose
        return False
    return any(fits(hint, text) and not fits(hint, value) for hint in _hints(values, keys))


def _hints(values: Mapping[str, Any], keys: tuple[str, ...]) -> Iterator[Any]:
    """The annotation of the field that a path leads to; none where no field is known."""
    section, key = keys[0], keys[-1]
    if len(keys) == 1:
        yield from (TOP[key],) if key in TOP else ()
    elif section == "methods" and len(keys) == 3:
        yield from _method_hint(keys[1], key)
    elif section == "method" and len(keys) == 2:
        yield from (str,) if key == "name" else _shared_hint(values, key)
    elif section in SECTIONS:
        yield from _section_hint(SECTIONS[section], values[section], keys[1:])


def _section_hint(cls: type, section: Mapping[str, Any], keys: tuple[str, ...]) -> Iterator[Any]:
    known = keys_of(cls)
    if len(keys) == 2:  # a table within a section: [data.columns]
        hint = known[keys[0]].hint if keys[0] in known else None
        yield from typing.get_args(hint)[1:] if typing.get_origin(hint) is dict else ()
    elif keys[0] in known and keys[0] != "options":
        yield known[keys[0]].hint
    else:  # an option of the section's kind, which is what its default is
        found = OPTIONS[cls].get(str(section.get("kind"))) if cls in OPTIONS else None
        text = found is not None and (isinstance(found.options.get(keys[0]), str) or keys[0] in TEXTS)
        yield from (str,) if text else ()


def _shared_hint(values: Mapping[str, Any], key: str) -> Iterator[Any]:
    """A key of `[method]` as its method has it, or, for a comparison, as another method of the file or of all has."""
    method, methods = values.get("method"), values.get("methods")
    named = [method.get("name")] if isinstance(method, Mapping) else []
    named += list(methods) if isinstance(methods, Mapping) else []
    for name in [*named, *METHODS]:
        if found := list(_method_hint(name, key)):
            yield from found
            return


def _method_hint(name: Any, key: str) -> Iterator[Any]:
    if isinstance(name, str) and (name in METHODS or is_spec(name)):
        known = keys_of(find_method(name))
        yield from (known[key].hint,) if key in known else ()
