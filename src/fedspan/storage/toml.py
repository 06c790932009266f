"""TOML as text: reading what nobody vouches for, and writing plain values."""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedspan.errors import ConfigError

MAX_BYTES = 1 << 20
MAX_DEPTH = 4
MAX_DOTS = 200  # in one line: the parser's time grows with the square of a dotted key's length
LARGEST = 1e18  # nobody means more; it catches 1e308, which is finite but overflows in the first product


def read_small(path: str | Path, who: str) -> bytes:
    """The bytes of a text file of at most 1 MB.

    Raises:
        ConfigError: if it cannot be read or is larger.
    """
    try:
        with Path(path).open("rb") as stream:
            raw = stream.read(MAX_BYTES + 1)
    except (OSError, ValueError) as e:
        why = e.strerror if isinstance(e, OSError) else e
        raise ConfigError(f"{who}: {str(path)!r} cannot be read: {why}.") from None
    if len(raw) > MAX_BYTES:
        raise ConfigError(f"{who}: {path} must be at most 1 MB. It is larger.")
    return raw


def parse_toml(raw: bytes | str, where: str = "TOML") -> dict[str, Any]:
    """Parse untrusted TOML; refuses what is too deep for an experiment."""
    try:
        text = raw if isinstance(raw, str) else raw.decode()
        if max((line.count(".") for line in text.splitlines()), default=0) > MAX_DOTS:
            raise ConfigError(f"Config: {where} has a line with more than {MAX_DOTS} dots; it is nested too deeply.")
        values = tomllib.loads(text)
    except RecursionError:
        raise ConfigError(f"Config: {where} is nested too deeply; {MAX_DEPTH} levels are allowed.") from None
    except ConfigError:
        raise
    except ValueError as e:  # not TOML, not UTF-8, or an integer of thousands of digits
        raise ConfigError(f"Config: {where} is not valid TOML: {str(e)[:200]}.") from None
    return values


def parse_value(text: str) -> Any:
    """A value from the command line: TOML if it is, otherwise the text itself."""
    if "\n" not in text and len(text) <= 10_000:
        try:
            return tomllib.loads(f"v = {text}")["v"]
        except (ValueError, RecursionError):
            pass
    return text


def checked(values: Mapping[str, Any], at: str, depth: int) -> dict[str, Any]:
    """A copy that may be changed, refusing numbers nobody means and nesting nobody needs."""
    if depth > MAX_DEPTH:
        raise ConfigError(f"Config: '{at[:60]}' is nested too deeply; {MAX_DEPTH} levels are allowed.")
    out: dict[str, Any] = {}
    for k, v in values.items():
        if isinstance(v, Mapping):
            out[k] = checked(v, f"{at}{k}.", depth + 1)
            continue
        for x in v if isinstance(v, list) else [v]:
            if isinstance(x, list | dict):
                raise ConfigError(f"Config: {at}{k} must be a value or a list of values. Got {short(v)}.")
            if isinstance(x, int | float) and not isinstance(x, bool) and not abs(x) <= LARGEST:
                raise ConfigError(f"Config: {at}{k} must be a finite number of usual size. Got {short(x)}.")
            if not isinstance(x, str | int | float):
                raise ConfigError(f"Config: {at}{k} must be text, a number, or true or false. Got {short(x)}.")
        out[k] = list(v) if isinstance(v, list) else v
    return out


def short(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # Python refuses to write out integers of thousands of digits
        text = "a very long number"
    return text if len(text) <= 80 else text[:77] + "..."


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Without unset values, tuples as lists."""
    out = {k: plain(v) if isinstance(v, Mapping) else v for k, v in values.items() if v is not None}
    return {k: list(v) if isinstance(v, tuple) else v for k, v in out.items()}


def write_toml(values: Mapping[str, Any], prefix: str = "") -> str:
    """Plain nested values (text, numbers, booleans, lists, dicts) as TOML."""
    lines = [f"{_key(k)} = {_value(v)}" for k, v in values.items() if not isinstance(v, Mapping)]
    for k, v in values.items():
        if isinstance(v, Mapping):
            name = prefix + _key(k)
            body = write_toml(v, name + ".")
            lines.append(f"\n[{name}]\n{body}".rstrip("\n"))
    return "\n".join(lines) + "\n"


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _value(key)


def _value(v: Any) -> str:
    if isinstance(v, bool):
        return "true" if v else "false"
    if isinstance(v, int):
        return str(v)
    if isinstance(v, float):
        text = repr(v) if math.isfinite(v) else str(v)
        return text if any(c in text for c in ".en") else text + ".0"
    if isinstance(v, str):
        # JSON's escapes are TOML's, except for U+007F and lone surrogates, which TOML has no way to write.
        return json.dumps(v, ensure_ascii=False).replace("\x7f", "\\u007F")
    if isinstance(v, list | tuple):
        return "[" + ", ".join(_value(x) for x in v) + "]"
    if isinstance(v, Mapping):
        return "{" + ", ".join(f"{_key(k)} = {_value(x)}" for k, x in v.items()) + "}"
    raise ConfigError(f"Config: {type(v).__name__} cannot be written as TOML. Got {short(v)}.")
