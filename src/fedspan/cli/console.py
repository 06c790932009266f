"""What commands share: where they write, how they speak, and which paths they accept."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedspan.errors import ConfigError, inside, safe_name

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)


class Picture(StrEnum):
    """What figures can be written as."""

    png = "png"
    pdf = "pdf"
    svg = "svg"


def listed(text: str) -> list[str]:
    """What an option names with commas between."""
    return [part.strip() for part in text.split(",") if part.strip()]


def say(text: str, style: str = "") -> None:
    """A line for the reader, as it is: brackets are not markup."""
    out.print(Text(text, style))


def note(text: str) -> None:
    """A line beside the results, on stderr, so that piped output stays clean."""
    err.print(Text(text, "yellow"))


def fail(text: str) -> None:
    """The one line of an error."""
    err.print(Text("Error: ", "bold red") + Text(" ".join(text.split()), "red"))


def show(table: Table) -> None:
    """A table; where output is not a terminal, as wide as it needs to be."""
    console = out if out.is_terminal else Console(width=max(out.width, 200), highlight=False)
    console.print(table)


def table(titles: Sequence[str], rows: Iterable[Sequence[Any]], right: Iterable[int] = ()) -> Table:
    """A plain table; columns in `right` hold numbers."""
    made = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, show_header=any(titles))
    for k, title in enumerate(titles):
        made.add_column(title, justify="right" if k in set(right) else "left", overflow="fold")
    for row in rows:
        made.add_row(*(Text("" if v is None else str(v)) for v in row))
    return made


def size(count: float) -> str:
    """Bytes as a person reads them (1 kB = 1,000 bytes)."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000 or unit == "GB":
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.2f} {unit}"
        count /= 1000
    raise AssertionError


def user_path(path: Path, what: str) -> Path:
    """A path the user typed; it may lie anywhere, but its last part must be a usable file name.

    Raises:
        ConfigError: for control characters, or a last part that `safe_name` refuses.
    """
    if not str(path).isprintable():
        raise ConfigError(f"{what} must not hold control characters. Got {str(path)[:60]!r}.")
    if path.name:
        safe_name(path.name, what)
    return path


def directory(given: Path | None, *default: str) -> Path:
    """The directory a command writes to: the user's, or runs/DEFAULT, which must not lead out of runs/."""
    if given is not None:
        return user_path(given, "--out")
    return child(Path("runs"), "-".join(default))


def child(root: Path, name: str) -> Path:
    """A run directory inside `root`, refused if its name is unusable or it would lie elsewhere (a symbolic link)."""
    # '=' and ',' name the settings of a sweep; every file system takes them.
    safe_name(name.replace("=", "-").replace(",", "-").replace("+", "-"), "A run's directory")
    inside(root, name, "A run's directory")
    return root / name
