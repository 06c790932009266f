"""One process per run directory."""

from __future__ import annotations

import fcntl
import os
import weakref
from pathlib import Path

from fedspan.errors import CheckpointError

_open_locks: weakref.WeakSet[Lock] = weakref.WeakSet()


class Lock:
    """One process per run directory; the kernel releases it when the process dies."""

    def __init__(self, directory: Path) -> None:
        self.fd = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.read(self.fd, 20).decode(errors="replace").strip() or "unknown"
            self.close()
            raise CheckpointError(
                f"Run directory {directory} is in use by process {pid}. "
                "Wait for it, stop it, or choose another directory."
            ) from None
        try:
            os.ftruncate(self.fd, 0)
            os.pwrite(self.fd, f"{os.getpid()}\n".encode(), 0)
        except BaseException:  # a full or faulty disk: otherwise this process would lock itself out
            self.close()
            raise
        _open_locks.add(self)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1


def _leave_locks_to_parent() -> None:
    for lock in list(_open_locks):
        lock.close()


# Otherwise a forked worker that outlives its killed parent would keep the directory locked.
os.register_at_fork(after_in_child=_leave_locks_to_parent)
