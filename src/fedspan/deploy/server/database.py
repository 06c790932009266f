"""The SuperLink's database: what answers leave behind in it is given back to the disk."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

MOST_FREE = 16 << 20
"""Bytes of free pages, and of the write-ahead log, that a database may keep."""


def trim_database(path: Path, log: Callable[[str], None]) -> int:
    """Shrink a database with many free pages, while its SuperLink uses it; how many bytes were given back.

    Flower deletes the objects of an answer once it was fetched, but SQLite keeps their pages.
    """
    wal = path.with_name(f"{path.name}-wal")
    if not path.exists():
        return 0
    try:
        with closing(sqlite3.connect(path, timeout=2.0, isolation_level=None)) as db:
            free = db.execute("PRAGMA freelist_count").fetchone()[0] * db.execute("PRAGMA page_size").fetchone()[0]
            if free + _size(wal) <= MOST_FREE:
                return 0
            before = _size(path) + _size(wal)
            if free > MOST_FREE:
                db.execute("VACUUM")
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            return max(0, before - _size(path) - _size(wal))
    except sqlite3.Error as e:
        log(f"The SuperLink's database is in use and was not trimmed ({e}); that is tried again after the next round.")
        return 0


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
