"""LEAF's JSON format (Caldas et al., 2018): `users`, `num_samples` and `user_data`, one natural client per user.

Files are untrusted: they are measured before they are read, and every fault is one sentence that names the user.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from fedspan.data.formats.arrays import too_big
from fedspan.data.formats.part import Array, FilePart, join, printable, short
from fedspan.errors import DataError, inside

MAX_JSON = 2**30  # parsed text takes several times its size in memory, so max_bytes alone would not protect anyone
MAX_NAME = 100

Shape = tuple[int, ...]


def find(folder: Path) -> tuple[list[Path], list[Path]]:
    """Training and test files of a folder: its own *.json, or train/*.json and test/*.json, or all_data/*.json.

    Raises:
        ConfigError: if a file is a link that leads out of the folder.
    """

    def files(name: str) -> list[Path]:
        return [inside(folder, str(p.relative_to(folder)), "LEAF file") for p in sorted((folder / name).glob("*.json"))]

    train, test = files("."), []
    if not train:
        train, test = files("train"), files("test")
    return train or files("all_data"), test


def leaf_parts(folder: Path, limit: int, shape: Shape | None = None) -> tuple[FilePart, FilePart | None] | None:
    """Train and perhaps test part of a folder in LEAF's format; None if it has no JSON files.

    Args:
        limit: refuse data that would take more bytes than this.
        shape: what an example is, for pictures; their pixels must lie in 0..1 and are kept as bytes.

    Raises:
        DataError: naming file and user, if anything in a file is not as LEAF writes it.
    """
    train, test = find(folder)
    if not train:
        return None
    parts: list[FilePart] = []
    for path in [*train, *test]:
        parts.append(read(path, limit, shape))
        limit -= parts[-1].x.nbytes
    held = parts[len(train) :]
    return join(parts[: len(train)]), join(held) if held else None


def read(path: Path, limit: int, shape: Shape | None = None) -> FilePart:
    """One JSON file.

    Raises:
        DataError: if it is too large, damaged, or a user's examples are not usable.
    """
    where = printable([path.name])[0]
    users, counts, held = _layout(where, _parse(path, where, limit))
    xs: list[Array] = []
    ys: list[Array] = []
    owners: list[str] = []
    size = 0
    for user, count in zip(users, counts):
        if user not in held:
            raise DataError(f"{_who(where, user)} is in users, but not in user_data. The file is damaged.")
        x, y = _examples(_who(where, user), held.pop(user), count, shape)  # popped, so that the text's lists can go
        if not count:
            continue
        size += x.nbytes
        if size > limit:
            raise too_big(where, size, limit)
        if xs and x.shape[1:] != xs[0].shape[1:]:
            raise DataError(f"{_who(where, user)} must have examples of shape {xs[0].shape[1:]}. Got {x.shape[1:]}.")
        xs.append(x)
        ys.append(y)
        owners.append(user)
    if held:
        raise DataError(f"{_who(where, next(iter(held)))} is in user_data, but not in users. The file is damaged.")
    if not xs:
        raise DataError(f"{where}: there must be at least one example. Got none.")
    client = np.repeat(np.array(owners), [len(y) for y in ys])
    return FilePart(where=where, x=np.concatenate(xs), y=np.concatenate(ys), client=client)


def _who(where: str, user: str) -> str:
    return f"{where}: user '{printable([user])[0]}'"


def _constant(text: str) -> NoReturn:
    raise ValueError(f"the number {text}")


def _parse(path: Path, where: str, limit: int) -> Any:
    most = min(limit, MAX_JSON)
    try:
        size = path.stat().st_size
        if size > most:
            raise too_big(where, size, most)
        with path.open("rb") as stream:
            return json.loads(stream.read(most + 1), parse_constant=_constant)
    except DataError:
        raise
    except RecursionError:
        raise DataError(f"{where}: must be JSON as LEAF writes it. Got lists nested too deeply.") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{where}: must be JSON as LEAF writes it. Got: {short(error)}.") from None


def _layout(where: str, content: Any) -> tuple[list[str], list[int], dict[str, Any]]:
    """The three keys of a file, each of the right type and as long as the others."""
    if not isinstance(content, dict):
        raise DataError(f"{where}: must be an object with users, num_samples and user_data. Got another kind of value.")
    kinds = {"users": list, "num_samples": list, "user_data": dict}
    for key, kind in kinds.items():
        if not isinstance(content.get(key), kind):
            got = "no such key" if key not in content else type(content[key]).__name__
            raise DataError(f"{where}: '{key}' must be {'a list' if kind is list else 'an object'}. Got {got}.")
    users, counts = content["users"], content["num_samples"]
    if len(users) != len(counts):
        raise DataError(f"{where}: num_samples must have one entry per user, {len(users)}. Got {len(counts)}.")
    seen: set[str] = set()
    for user, count in zip(users, counts):
        if not isinstance(user, str) or not 0 < len(user) <= MAX_NAME:
            raise DataError(f"{where}: a user must be a string of 1 to {MAX_NAME} characters. Got {repr(user)[:60]}.")
        if user in seen:
            raise DataError(f"{_who(where, user)} must appear once in users. Got it twice.")
        if type(count) is not int or count < 0:
            raise DataError(f"{_who(where, user)} must have a whole number in num_samples. Got {repr(count)[:60]}.")
        seen.add(user)
    return users, counts, content["user_data"]


def _examples(who: str, data: Any, count: int, shape: Shape | None) -> tuple[Array, Array]:
    if not isinstance(data, dict) or not isinstance(data.get("x"), list) or not isinstance(data.get("y"), list):
        raise DataError(f"{who} must have the lists x and y in user_data. Got {_keys(data)}.")
    for name in ("x", "y"):
        if len(data[name]) != count:
            raise DataError(f"{who} must have {count} entries in {name}, as num_samples says. Got {len(data[name])}.")
    if count == 0:
        return np.empty((0, 1)), np.empty(0)
    width = None if shape is None else math.prod(shape)
    x, y = _array(data["x"]), _array(data["y"])
    if y is None or y.dtype.kind not in "iu" or y.ndim != 1:
        raise DataError(f"{who} must have whole numbers as labels in y. Got other values.")
    if x is None or x.ndim < 2 or (width is not None and math.prod(x.shape[1:]) != width):
        needed = "numbers" if width is None else f"{width} numbers"
        raise DataError(f"{who} must have {needed} for every example in x, as many for each. Got other values.")
    if shape is None:
        if not np.abs(x).max(initial=0) <= np.finfo(np.float32).max:
            raise DataError(f"{who} must have numbers up to 3.4e38 in x, what 32 bits hold. Got larger ones.")
        return x.astype(np.float32), y.astype(np.int64)
    if x.min() < 0 or x.max() > 1:
        raise DataError(f"{who} must have pixels in 0..1. Got {x.min():.4g}..{x.max():.4g}.")
    return np.rint(255 * x).astype(np.uint8).reshape(count, *shape), y.astype(np.int64)


def _array(values: list[Any]) -> Array | None:
    """Numbers as an array; None for text, nothing, or rows of different lengths (numpy would convert or guess)."""
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError):
        return None
    return array if array.dtype.kind in "iuf" else None


def _keys(data: Any) -> str:
    return ", ".join(printable(list(data)[:5])) or "nothing" if isinstance(data, dict) else type(data).__name__
