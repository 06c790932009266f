"""Files that people and other processes read: whole, or as they were before."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A place beside `path` to write to; it becomes `path` when all is written."""
    temporary = path.with_name(path.name + ".tmp")
    yield temporary
    os.replace(temporary, path)


def write_atomic(path: Path, text: str) -> None:
    """Write a text."""
    with replacing(path) as place:
        place.write_text(text, encoding="utf-8")
