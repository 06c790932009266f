"""One process per run directory, and one at a time for files that several change."""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedspan.errors import CheckpointError, WriteError

try:
    import fcntl
except ImportError:  # Windows, where the same is done by msvcrt
    fcntl = None  # type: ignore[assignment]

FAR = 1 << 30
"""A byte beyond the text of a lock file: Windows lets nobody read what another process has locked."""

_open_locks: weakref.WeakSet[Lock] = weakref.WeakSet()


class Lock:
    """One process per run directory; the kernel releases it when the process dies."""

    def __init__(self, directory: Path) -> None:
        path = directory / "lock"
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o644)
        try:
            _take(self.fd)
        except OSError:
            pid = os.read(self.fd, 20).decode(errors="replace").strip() or "unknown"
            self.close()
            raise CheckpointError(
                f"Run directory {directory} is in use by process {pid}. "
                "Wait for it, stop it, or choose another directory."
            ) from None
        try:
            os.ftruncate(self.fd, 0)
            os.lseek(self.fd, 0, os.SEEK_SET)
            os.write(self.fd, f"{os.getpid()}\n".encode())
        except BaseException:  # a full or faulty disk: otherwise this process would lock itself out
            self.close()
            raise
        _open_locks.add(self)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1


def _take(fd: int) -> None:
    """Lock an open file for this process alone.

    Raises:
        OSError: if another one has it.
    """
    if fcntl is not None:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    elif sys.platform == "win32":
        import msvcrt

        os.lseek(fd, FAR, os.SEEK_SET)
        try:
            msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
        finally:
            os.lseek(fd, 0, os.SEEK_SET)


def _leave_locks_to_parent() -> None:
    for lock in list(_open_locks):
        lock.close()


@contextmanager
def exclusive(path: Path, who: str, seconds: float = 30.0) -> Iterator[None]:
    """Hold a file that several processes change, for a moment; others wait for their turn.

    Raises:
        WriteError: if another process holds it all that time.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o600)
    end = time.monotonic() + seconds
    try:
        while True:
            try:
                _take(fd)
                break
            except OSError:
                if time.monotonic() > end:
                    raise WriteError(
                        f"{who}: another process has held {path} for {seconds:g} s. Wait for it, or stop it."
                    ) from None
                time.sleep(0.02)
        yield
    finally:
        os.close(fd)


# Otherwise a forked worker that outlives its killed parent would keep the directory locked.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_locks_to_parent)
