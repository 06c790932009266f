"""Ctrl-C, pressed once or twenty times: the first stops the command, and nothing disturbs what it then saves."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def one_interrupt() -> Iterator[None]:
    """Let the first Ctrl-C raise KeyboardInterrupt and ignore all that follow, to the end of the process.

    Where Ctrl-C is ignored already, as in a shell's background jobs, it stays so.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _first)
    try:
        yield
    finally:
        _leave_undisturbed()


def _first(number: int, frame: FrameType | None) -> None:
    # A function and not SIG_IGN: Python complains of a signal that arrives while its handler is being taken away.
    signal.signal(signal.SIGINT, _later)
    raise KeyboardInterrupt


def _later(number: int, frame: FrameType | None) -> None:
    """Do nothing: the command is stopping."""


def _leave_undisturbed() -> None:
    """Ignore Ctrl-C while the interpreter ends, when functions of Python can no longer be called."""
    if signal.getsignal(signal.SIGINT) is not _later:
        return
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    signal.signal(signal.SIGINT, signal.SIG_IGN)
