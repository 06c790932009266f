"""Files that people and other processes read: whole, or as they were before, also after a power cut."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fedspan.errors import WriteError

PAUSES = (0.01, 0.03, 0.1, 0.3)
"""Seconds to wait for readers of a file that is to be replaced, one after another."""


def fsync_directory(path: Path) -> None:
    """Make the names in a directory durable: a rename is on the disk only when its directory is.

    Windows opens no directories and keeps names by itself.
    """
    if os.name == "nt":
        return
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_directory(path: Path) -> None:
    """Make a directory and those above it, durably: what is synced inside is lost if its own name is."""
    missing = [p for p in (path, *path.parents) if not p.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for made in reversed(missing):
        fsync_directory(made.parent)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what the system says of a failed write (disk full, I/O error, no permission) into one sentence.

    Raises:
        WriteError: naming the file, the cause and the remedy.
    """
    try:
        yield
    except OSError as e:
        raise WriteError(
            f"{path} could not be written: {e.strerror or e}. What was saved before remains; free space or check the"
            " disk, then run the same command again."
        ) from e


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A place beside `path` to write to; it becomes `path` when all is written and synced.

    Without the sync a power cut may leave the new name with no contents.

    Raises:
        WriteError: if it cannot be written; `path` is then as it was.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        with writing(path):
            yield temporary
            with temporary.open("rb+") as f:
                os.fsync(f.fileno())
            _rename(temporary, path)
            fsync_directory(path.parent)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def write_atomic(path: Path, text: str) -> None:
    """Write a text.

    Raises:
        WriteError: if it cannot be written; `path` is then as it was.
    """
    with replacing(path) as place:
        place.write_text(text, encoding="utf-8", newline="\n")  # the same bytes on every system


def _rename(temporary: Path, path: Path) -> None:
    """Put a file in the place of another; Windows refuses while somebody reads that one, so it is asked again."""
    for seconds in PAUSES if os.name == "nt" else ():
        try:
            os.replace(temporary, path)
        except PermissionError:
            time.sleep(seconds)
        else:
            return
    os.replace(temporary, path)
