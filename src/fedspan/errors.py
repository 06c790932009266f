"""Errors a person reads: one sentence that says who, what is allowed, what was got, and a remedy."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from pathlib import Path


class FedspanError(ValueError):
    """Base of every error that fedspan raises on purpose; the command line prints it without a traceback."""


class ConfigError(FedspanError):
    """The experiment file, an override or a method's field is not usable."""


class DataError(FedspanError):
    """The data of some client are not usable."""


class CheckpointError(FedspanError):
    """No checkpoint of a run directory can be used, or it belongs to another experiment."""


class WriteError(FedspanError):
    """A file could not be written: the disk is full or faulty, or the place is closed to us."""


class Divergence(FedspanError):
    """Training left the numbers a computer can hold, or is about to."""


class OutOfMemory(FedspanError):
    """Memory ran out while clients were computed."""


class Refused(FedspanError):
    """An upload that does not keep to its method's declaration."""


class PromiseError(FedspanError):
    """A method breaks a promise that every method keeps: it changes its inputs, or returns something else."""


def nearest(name: str, options: Iterable[str]) -> str:
    """` Did you mean 'x'?`, or the allowed names when nothing is close."""
    options = sorted(options)
    close = difflib.get_close_matches(name, options, n=1, cutoff=0.5)
    if close:
        return f" Did you mean '{close[0]}'?"
    return f" Allowed: {', '.join(options)}." if options else ""


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_DEVICES = {"con", "prn", "aux", "nul", *(f"com{i}" for i in range(1, 10)), *(f"lpt{i}" for i in range(1, 10))}


def safe_name(name: str, what: str = "name") -> str:
    """Return `name` if it can be a file name anywhere; otherwise raise.

    Raises:
        ConfigError: for separators, `..`, control characters, look-alike letters, device names, or over 100 characters.
    """
    if not _NAME.fullmatch(name) or ".." in name or name.endswith(".") or name.split(".")[0].lower() in _DEVICES:
        shown = name if len(name) <= 60 else name[:57] + "..."
        raise ConfigError(
            f"{what} must be 1 to 100 letters, digits, '.', '_' or '-', starting with a letter or digit. Got {shown!r}."
        )
    return name


def inside(root: Path, name: str, what: str = "path") -> Path:
    """`root / name`, refused if it would leave `root` (also through a symbolic link)."""
    path = (root / name).resolve()
    if not path.is_relative_to(root.resolve()):
        raise ConfigError(f"{what} must stay inside {root}. Got {name!r}.")
    return path
