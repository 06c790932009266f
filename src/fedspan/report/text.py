"""Values and names made fit to be shown: what stands in a run directory is not trusted."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

_ABSOLUTE = re.compile(r"(?<![\w.~/\\])(?:~|[A-Za-z]:)?(?:(?:/|\\{1,2})[^\s/\\'\":;,]+)+[/\\]*")
_WHOLE = re.compile(r"(?:~|/|[A-Za-z]:[/\\])[^\n'\"]*")


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as one dict with dotted keys."""
    out: dict[str, Any] = {}
    for k, v in values.items():
        out |= flatten(v, f"{prefix}{k}.") if isinstance(v, dict) else {f"{prefix}{k}": v}
    return out


def shown(value: Any) -> str:
    """A setting's value as a person writes it."""
    if value is None:
        return "none"
    return without_paths(value) if isinstance(value, str) else without_paths(json.dumps(value, default=str))


def without_paths(text: str) -> str:
    """The text with every absolute path cut to its last part: a report is passed on, the machine's layout is not."""

    def cut(match: re.Match[str]) -> str:
        parts = re.split(r"[/\\]+", match.group().rstrip("/\\"))
        return match.group() if len(parts) < 3 and not match.group().startswith("~") else f"…/{parts[-1]}"

    text = text.replace("file://", "")
    whole = _WHOLE.fullmatch(text)  # a path alone may hold blanks
    return cut(whole) if whole else _ABSOLUTE.sub(cut, text)


def clean(text: str, longest: int = 80) -> str:
    """The text without control, direction or surrogate characters, cut to a length that fits a table."""
    text = "".join(c if c.isprintable() else "\ufffd" for c in text)
    return text if len(text) <= longest else text[: longest - 1] + "…"


def number(value: Any) -> float | None:
    """A finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None
