"""Memory habits of a process that is fedspan's alone."""

from __future__ import annotations

import ctypes
import os


def keep_freed_memory() -> None:
    """Keep freed memory in the process: giving gradients back and faulting them in again costs more than a step."""
    libc = _libc()
    if libc is not None and hasattr(libc, "mallopt"):  # glibc; elsewhere the allocator's own habits stay
        libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
        libc.mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD


def return_freed_memory() -> None:
    """Return what is kept and free to the system, gaps between what is in use included."""
    libc = _libc()
    if libc is not None and hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def _libc() -> ctypes.CDLL | None:
    """The C library of this process; on Windows there is none to ask by no name."""
    return None if os.name == "nt" else ctypes.CDLL(None)
