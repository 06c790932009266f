"""Columns of a table as arrays: numbers with NaN where there is none, or text with None where there is none."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedspan.data.federated import Index
from fedspan.data.formats.parquet import need
from fedspan.data.formats.part import printable, short
from fedspan.errors import DataError

ColumnKind: TypeAlias = Literal["number", "text", "other"]


@dataclass(frozen=True, eq=False)
class TableColumn:
    """Values of one column; `told` says in words what its type was in the file."""

    name: str
    kind: ColumnKind
    values: NDArray[Any]
    """float64 for numbers, objects (text or None) for text, nothing for what cannot be an input."""
    told: str

    def __len__(self) -> int:
        return len(self.values)

    @property
    def missing(self) -> NDArray[np.bool_]:
        """Where there is no value."""
        if self.kind == "other":
            return np.zeros(len(self.values), bool)
        gaps = np.isnan(self.values) if self.kind == "number" else [v is None for v in self.values]
        return np.asarray(gaps, bool)

    @property
    def whole(self) -> bool:
        """Whether all its numbers are whole ones."""
        held = self.values[~self.missing] if self.kind == "number" else np.empty(0)
        return self.kind == "number" and bool((held == np.floor(held)).all())

    def take(self, rows: Index) -> TableColumn:
        """Some of its rows."""
        return TableColumn(self.name, self.kind, self.values[rows], self.told)

    def words(self) -> list[str | None]:
        """Its values as names of categories: 1 and 1.0 are the same one."""
        if self.kind == "number":
            name = _TRUTH.__getitem__ if self.told == "bool" else number_word
            return [None if np.isnan(v) else name(v) for v in self.values.tolist()]
        return list(self.values)

    def as_numbers(self) -> NDArray[np.float64] | None:
        """Its values as numbers, also where a file has them as text; None if some are none."""
        if self.kind == "number":
            return self.values
        try:
            found = np.array([np.nan if v is None else float(v) for v in self.values], np.float64)
        except (TypeError, ValueError):
            return None
        return None if self.kind == "other" or (np.abs(found) > LARGEST).any() else found


Columns: TypeAlias = dict[str, TableColumn]

LARGEST = 1e30
"""The largest number of a column: its square over all rows is still a finite number, and single precision holds it."""

_TRUTH = {0.0: "false", 1.0: "true"}


def number_word(value: float) -> str:
    """A number as the name of a category."""
    return str(int(value)) if value == int(value) else repr(float(value))


def word_of(value: str | int | float | bool) -> str:
    """A value of an experiment file as the name of a category."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return value if isinstance(value, str) else number_word(float(value))


def in_order(words: Iterable[str]) -> list[str]:
    """Names of categories once each: numbers by size, then text."""

    def rank(word: str) -> tuple[int, float, str]:
        try:
            return 0, float(word), word
        except ValueError:
            return 1, 0.0, word

    return sorted(set(words), key=rank)


def by_name(names: Iterable[str]) -> list[str]:
    """Names of columns in an order that does not depend on the file's: x2 before x10."""

    def rank(name: str) -> tuple[list[tuple[int, int, str]], str]:
        parts = re.split(r"(\d+)", name)
        return [(0, int(p), "") if p.isdigit() and p.isascii() else (1, 0, p) for p in parts], name

    return sorted(names, key=rank)


def columns_of(table: Any, where: str, only: Sequence[str] | None = None) -> Columns:
    """The columns of an arrow table.

    Raises:
        DataError: naming table, column and row, for infinities and for text that is no text.
    """
    names = list(table.column_names) if only is None else [n for n in only if n in table.column_names]
    try:
        return {name: _column(table.column(name), name, where) for name in names}
    except DataError:
        raise
    except Exception as error:  # pyarrow raises many kinds on what a damaged file made of a column
        raise DataError(f"{where}: its columns must be readable. Got: {short(error)}.") from None


def _column(cells: Any, name: str, where: str) -> TableColumn:
    pa = need("pyarrow")
    kind, types = cells.type, pa.types
    if types.is_dictionary(kind):
        cells = cells.cast(kind.value_type)
        kind = cells.type
    told = str(kind)
    if types.is_null(kind):
        return TableColumn(name, "number", np.full(len(cells), np.nan), "empty")
    if types.is_boolean(kind):
        return TableColumn(name, "number", np.array(cells.cast(pa.float64()).to_numpy(), np.float64), told)
    if types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind):
        values = np.array(cells.cast(pa.float64(), safe=False).to_numpy(), np.float64)
        if (np.abs(values) > LARGEST).any():
            row = int(np.flatnonzero(np.abs(values) > LARGEST)[0])
            got = "infinity" if np.isinf(values[row]) else f"{values[row]:g}"
            raise DataError(
                f"{where}: column '{name}' must hold finite numbers of usual size. Got {got} in row {row}; correct it,"
                " or leave the cell empty and set data.missing."
            )
        return TableColumn(name, "number", values, told)
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        values = np.empty(len(cells), object)
        values[:] = [None if v is None else printable([v.strip()])[0] for v in cells.to_pylist()]
        return TableColumn(name, "text", values, "text")
    return TableColumn(name, "other", np.empty(len(cells), object), told)


def joined(pieces: Sequence[TableColumn]) -> TableColumn:
    """Rows of several clients as one column; numbers become words where another client has text."""
    first = pieces[0]
    if all(p.kind == first.kind for p in pieces):
        return TableColumn(first.name, first.kind, np.concatenate([p.values for p in pieces]), first.told)
    values = np.array([w for p in pieces for w in p.words()], object)
    return TableColumn(first.name, "text", values, "text")
