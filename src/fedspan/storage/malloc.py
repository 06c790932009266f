"""Memory habits of a process that is fedspan's alone."""

from __future__ import annotations

import ctypes
import os


def keep_freed_memory() -> None:
    """Keep freed memory in the process: giving gradients back and faulting them in again costs more than a step."""
    if os.name == "nt":  # there is no C library to ask by no name
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc; elsewhere the allocator's own habits stay
        libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
        libc.mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD


def return_freed_memory() -> None:
    """Return what is kept and free to the system, gaps between what is in use included."""
    if os.name == "nt":
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
