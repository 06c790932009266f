"""Plays as plain text: `NAME:` after an empty line begins a speech. Roles are clients that predict their characters."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import numpy as np

from fedspan.data.formats.arrays import too_big
from fedspan.data.formats.part import Array, FilePart
from fedspan.errors import DataError

WINDOW = 32
"""Characters that a prediction is made from."""
STRIDE = 4
"""Characters from one example of a role to the next."""
TEST = 0.25
"""Share of a role's characters, its last ones, that it is tested on."""
MOST_CHARACTERS = 1000
"""Different characters of a play: more are no alphabet."""

_ROLE = re.compile(r"(?:\A|(?<=\n\n))([^\W\d_][^\n:]{0,60}):[ \t]*$", re.M)


def play_parts(path: Path, limit: int) -> tuple[FilePart, FilePart]:
    """Windows of characters and the next one, by role: the first three quarters of each role's text, and the rest.

    Args:
        limit: refuse data that would take more bytes than this.

    Raises:
        DataError: naming the file, if it cannot be read or is no play.
    """
    where, text = path.name, _text(path, limit)
    spoken: dict[str, list[str]] = {}
    names = list(_ROLE.finditer(text))
    for name, after in zip(names, [*names[1:], None]):
        said = text[name.end() : None if after is None else after.start()].strip("\n")
        spoken.setdefault(name[1].strip(), []).append(said)
    lines = {role: "\n".join(said) for role, said in spoken.items()}
    if len(lines) < 2:
        raise DataError(
            f"{where}: a play must have at least two roles, each speech after a line 'NAME:'. Got {len(lines)}."
        )
    alphabet = sorted(set("".join(lines.values())))
    if len(alphabet) > MOST_CHARACTERS:
        raise DataError(
            f"{where}: a play must have at most {MOST_CHARACTERS} different characters. Got {len(alphabet)}."
        )
    number = {c: i for i, c in enumerate(alphabet)}
    parts: list[list[tuple[str, Array]]] = [[], []]
    for role, said in sorted(lines.items()):
        ids = np.array([number[c] for c in said], np.int64)
        cut = len(ids) - int(TEST * len(ids))
        for part, some in zip(parts, (ids[:cut], ids[cut:])):
            if len(some) > WINDOW:
                part.append((role, np.lib.stride_tricks.sliding_window_view(some, WINDOW + 1)[::STRIDE]))
    if not parts[0] or not parts[1]:
        raise DataError(f"{where}: some role must say at least {5 * WINDOW} characters. Got none that does.")
    train, test = (
        FilePart(
            where=where,
            x=np.concatenate([w[:, :-1] for _, w in part]).astype(np.float32),  # numbers of characters
            y=np.concatenate([w[:, -1] for _, w in part]),
            client=np.concatenate([np.full(len(w), role) for role, w in part]),
            class_names=tuple(repr(c) for c in alphabet),
        )
        for part in parts
    )
    return train, test


def _text(path: Path, limit: int) -> str:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
            raw = stream.read(limit + 1)
    except (OSError, EOFError, ValueError) as error:
        raise DataError(f"{path.name}: the text cannot be read ({error}).") from error
    if len(raw) * 4 * WINDOW // STRIDE > limit:  # as windows of floats
        raise too_big(path.name, len(raw) * 4 * WINDOW // STRIDE, limit)
    try:
        return raw.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{path.name}: the text must be UTF-8. Got a byte that is not at {error.start}.") from error
