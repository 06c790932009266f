"""A disk that fails: every change below a folder is counted, and one of them raises an error or cuts the power.

After a power cut nothing more reaches the disk, and `lose` leaves what a real one may leave: of every file what was
synced, and of names (new files, renames, folders) either all or only those whose folder was synced.
"""

from __future__ import annotations

import builtins
import io
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

_open, _fsync, _replace, _unlink, _mkdir = io.open, os.fsync, os.replace, os.unlink, os.mkdir
_pwrite, _ftruncate = os.pwrite, os.ftruncate


class PowerCut(BaseException):
    """The end of the process, as far as the disk can tell."""


class _File:
    """A file opened for writing, whose every write may fail."""

    def __init__(self, disk: FaultyDisk, file: Any) -> None:
        self._disk, self._file = disk, file

    def write(self, data: Any) -> int:
        self._disk.change()
        return int(self._file.write(data))

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def truncate(self, size: int | None = None) -> int:
        self._disk.change()
        return int(self._file.truncate(size))

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class FaultyDisk:
    """The files below `root`.

    Args:
        fail_at: the number of the change that fails, from 1; 0 for none.
        error: errno of the failure; None cuts the power instead.

    Attributes:
        changes: how many there were.
    """

    def __init__(self, root: Path, fail_at: int = 0, error: int | None = None) -> None:
        self.root, self.fail_at, self.error = root.resolve(), fail_at, error
        self.changes, self.dead = 0, False
        self._durable: dict[int, bytes] = {}
        self._names: list[tuple[Path, Callable[[], None]]] = []  # folder, and how to undo a change of its names
        self._spare = root.parent / f"{root.name}.replaced"

    def change(self) -> None:
        """Count a change of the disk; fail where it is its turn."""
        if self.dead:
            raise PowerCut
        self.changes += 1
        if self.changes == self.fail_at:
            if self.error is not None:
                raise OSError(self.error, os.strerror(self.error))
            self.dead = True
            raise PowerCut

    def lose(self, names: bool) -> None:
        """Leave what a power cut leaves; with `names`, also undo changes of names that were not synced."""
        for path in [p for p in self.root.rglob("*") if p.is_file()]:
            kept = self._durable.get(path.stat().st_ino)
            if kept is not None:
                path.write_bytes(kept)
        for _, undo in reversed(self._names if names else []):
            undo()

    @contextmanager
    def attached(self) -> Iterator[FaultyDisk]:
        """Put this disk below everything that Python code writes."""
        self._spare.mkdir(exist_ok=True)
        with (
            patch.object(builtins, "open", self._opened), patch.object(io, "open", self._opened),
            patch.object(os, "fsync", self._synced), patch.object(os, "replace", self._replaced),
            patch.object(os, "unlink", self._unlinked), patch.object(os, "mkdir", self._made),
            patch.object(os, "pwrite", lambda *a: (self.change(), _pwrite(*a))[1]),
            patch.object(os, "ftruncate", lambda *a: (self.change(), _ftruncate(*a))[1]),
        ):  # fmt: skip
            yield self

    def _ours(self, path: Any) -> bool:
        return not isinstance(path, int) and Path(os.path.abspath(path)).is_relative_to(self.root)

    def _opened(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if not self._ours(file) or not set(mode) & set("wax+"):
            return _open(file, mode, *args, **kwargs)
        self.change()
        path = Path(file)
        new = not path.exists()
        before = b"" if new or "w" in mode else path.read_bytes()
        opened = _open(file, mode, *args, **kwargs)
        inode = os.fstat(opened.fileno()).st_ino
        if new:
            self._durable[inode] = b""
            self._names.append((path.parent, lambda: path.unlink(missing_ok=True)))
        else:
            self._durable.setdefault(inode, before)
        return _File(self, opened)

    def _synced(self, fd: int) -> None:
        self.change()
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            self._names = [(folder, undo) for folder, undo in self._names if folder.resolve() != path]
        elif path.is_relative_to(self.root):
            with _open(path, "rb") as f:
                self._durable[os.fstat(fd).st_ino] = f.read()

    def _replaced(self, source: Any, target: Any) -> None:
        self.change()
        source, target = Path(source), Path(target)
        spare = self._spare / str(self.changes)
        if target.exists():
            shutil.copy(target, spare)

        def undo() -> None:
            if target.exists():
                _replace(target, source)
            if spare.exists():
                shutil.copy(spare, target)

        _replace(source, target)
        self._names.append((target.parent, undo))

    def _unlinked(self, path: Any, **kwargs: Any) -> None:
        if self._ours(path):
            self.change()
        _unlink(path, **kwargs)

    def _made(self, path: Any, *args: Any, **kwargs: Any) -> None:
        if self._ours(path):
            self.change()
        _mkdir(path, *args, **kwargs)
        if self._ours(path):
            self._names.append((Path(path).parent, lambda: shutil.rmtree(path, ignore_errors=True)))
