"""How rows of a table become inputs: one typed value, kept with a run, that says the same of every later row."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
from annotated_types import Gt, MaxLen
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from fedspan.data.federated import Index
from fedspan.data.tables.table_columns import Columns
from fedspan.errors import DataError
from fedspan.storage.atomic import write_atomic

Matrix: TypeAlias = NDArray[np.float64]
Who: TypeAlias = Callable[[int], str]
"""Whose a row is and which one, in words."""

FILE = "preprocessing.json"
Name: TypeAlias = Annotated[str, MaxLen(200)]
Positive: TypeAlias = Annotated[float, Gt(0)]


class Agreed(BaseModel):
    """A value that clients agree on; as it comes from outside, everything in it is typed and finite."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class InputColumn(Agreed):
    """A column of a table: of numbers, or of these categories."""

    name: Name
    categories: Annotated[list[Name], MaxLen(10_000)] | None = None


class Encoding(Agreed):
    """Which columns are read, in which order, and as what."""

    columns: Annotated[list[InputColumn], MaxLen(100_000)]
    encode: Literal["one-hot", "drop-first"] = "one-hot"
    unseen: Literal["error", "zero"] = "error"
    missing: Literal["error", "drop", "mean", "indicator"] = "error"
    target: Annotated[list[Name], MaxLen(10_000)]
    class_names: Annotated[list[Name], MaxLen(1_000_000)] | None = None
    """Of a target of classes; None for targets that are numbers."""

    def shown(self, column: InputColumn) -> list[str]:
        """The categories of a column that have an input of their own."""
        words = column.categories or []
        return words[1:] if self.encode == "drop-first" else words

    @property
    def names(self) -> list[str]:
        """The inputs, before those that say that a value is missing."""
        return [
            name
            for c in self.columns
            for name in ([c.name] if c.categories is None else [f"{c.name}={w}" for w in self.shown(c)])
        ]

    @property
    def of_numbers(self) -> NDArray[np.bool_]:
        """Which inputs are columns of numbers."""
        flags = [[True] if c.categories is None else [False] * len(self.shown(c)) for c in self.columns]
        return np.array([f for some in flags for f in some], bool)

    def matrix(self, columns: Columns, who: Who) -> Matrix:
        """Inputs of rows as float64, NaN where a value is missing. [rows, inputs]

        Raises:
            DataError: naming client, column and remedy, for what the agreement does not know.
        """
        return np.concatenate([self._inputs(c, columns, who) for c in self.columns], 1)

    def _inputs(self, column: InputColumn, columns: Columns, who: Who) -> Matrix:
        name = column.name
        if name not in columns:
            raise DataError(f"{who(0)}: column '{name}' is missing; add it, or leave it out for all with data.drop.")
        held = columns[name]
        if column.categories is None:
            numbers = held.as_numbers()
            if numbers is None:
                row = _first_text(held.values)
                raise DataError(
                    f"{who(row)}: column '{name}' must hold numbers. Got {held.values[row]!r:.60}; correct"
                    " it, or name the column in data.categorical."
                )
            return numbers[:, None]
        at = {word: k for k, word in enumerate(column.categories)}
        place = np.array([-1 if w is None else at.get(w, -2) for w in held.words()], np.int64)
        unseen = np.flatnonzero(place == -2)
        if len(unseen) and self.unseen == "error":
            row = int(unseen[0])
            raise DataError(
                f"{who(row)}: column '{name}' has the category {held.words()[row]!r:.60}, which no client has in"
                f" training ({len(unseen)} row(s)); list it in data.categories.{name}, or set data.unseen = 'zero'."
            )
        hot: Matrix = (place[:, None] == np.arange(len(at))[None]).astype(np.float64)
        hot[place == -1] = np.nan
        return hot[:, 1:] if self.encode == "drop-first" else hot

    def targets(self, columns: Columns, who: Who) -> NDArray[Any]:
        """Labels [rows] of classes, or numbers, [rows] of one target and [rows, k] of several.

        Raises:
            DataError: naming client, target and remedy, for what is neither.
        """
        if self.class_names is not None:
            return self._labels(columns, who)
        values = []
        for name in self.target:
            numbers = _target(columns, name, who).as_numbers()
            if numbers is None:
                held = columns[name]
                row = _first_text(held.values)
                raise DataError(
                    f"{who(row)}: target '{name}' must hold numbers. Got {held.values[row]!r:.60}; correct"
                    " it, or set data.target_type = 'class'."
                )
            values.append(numbers)
        return values[0] if len(values) == 1 else np.stack(values, 1)

    def _labels(self, columns: Columns, who: Who) -> NDArray[np.int64]:
        assert self.class_names is not None
        name, at = self.target[0], {word: k for k, word in enumerate(self.class_names)}
        words = _target(columns, name, who).words()
        labels = np.array([-1 if w is None else at.get(w, -1) for w in words], np.int64)
        if (labels < 0).any():
            row = int(np.flatnonzero(labels < 0)[0])
            raise DataError(
                f"{who(row)}: target '{name}' must be one of {', '.join(self.class_names)[:200]}. Got"
                f" {words[row]!r:.60}; correct it, or list it in data.categories.{name}."
            )
        return labels


def _target(columns: Columns, name: str, who: Who) -> Any:
    if name not in columns:
        raise DataError(f"{who(0)}: the target column '{name}' is missing; add it.")
    return columns[name]


def _first_text(values: NDArray[Any]) -> int:
    """The first row whose text is no finite number."""
    for row, value in enumerate(values):
        try:
            if value is not None and not np.isfinite(float(value)):
                return row
        except (TypeError, ValueError):
            return row
    return 0


class Scaling(Agreed):
    """What is subtracted from every input, and what it is then divided by."""

    mean: list[float]
    scale: list[Positive]

    def apply(self, x: Matrix) -> Matrix:
        """Scaled inputs."""
        scaled: Matrix = (x - np.array(self.mean)) / np.array(self.scale)
        return scaled


class Preprocessing(Agreed):
    """All that is done to a row before a model sees it; the same in training, in evaluation and in use."""

    format: Literal[1] = 1
    encoding: Encoding
    fill: list[float]
    """What takes the place of a missing value, of every input."""
    indicators: list[Name] = []
    """Columns with a further input that is 1 where their value is missing."""
    standardise: Literal["none", "client", "federated"] = "none"
    scaling: Scaling | None = None
    """Over the training rows of all clients."""
    clients: dict[Name, Scaling] = {}
    """Of every client by itself, where inputs are standardised so."""

    @property
    def names(self) -> list[str]:
        """The inputs of a model, in order."""
        return [*self.encoding.names, *(f"{name} missing" for name in self.indicators)]

    @property
    def class_names(self) -> list[str]:
        """The classes of the target; none where it is a number."""
        return list(self.encoding.class_names or [])

    def apply(self, columns: Columns, who: Who, client: str | None = None) -> Matrix:
        """Inputs of rows, complete and scaled. [rows, inputs]

        Raises:
            DataError: naming client, column and remedy, for rows that are not as agreed.
        """
        return self.finish(self.encoding.matrix(columns, who), self.scaling_of(client), who)

    def scaling_of(self, client: str | None) -> Scaling | None:
        """How the inputs of a client are scaled.

        Raises:
            DataError: if that is by its own rows, and it is not known.
        """
        if self.standardise != "client":
            return self.scaling
        if client not in self.clients:
            known = ", ".join(self.clients)[:200] or "none"
            raise DataError(
                f"Data: inputs are standardised by client, so a client must be one of {known}. Got {client}."
            )
        return self.clients[client]

    def finish(self, x: Matrix, scaling: Scaling | None, who: Who) -> Matrix:
        """Fill in what is missing, scale, and add the inputs that say what was missing."""
        gaps = np.isnan(x)
        if gaps.any() and self.encoding.missing == "error":
            row, k = (int(v[0]) for v in np.nonzero(gaps))
            name = [n for n, at in self._first_inputs().items() if at <= k][-1]
            raise DataError(
                f"{who(row)}: column '{name}' has no value; set data.missing to 'drop', 'mean' or 'indicator'."
            )
        first = self._first_inputs()
        more = [gaps[:, first[name]] for name in self.indicators]
        x = np.where(gaps, np.array(self.fill), x)
        x = x if scaling is None else scaling.apply(x)
        return np.concatenate([x, *(m[:, None].astype(np.float64) for m in more)], 1)

    def _first_inputs(self) -> dict[str, int]:
        """Where the inputs of every column begin; a column of one dropped category has none of its own."""
        places, at = {}, 0
        for c in self.encoding.columns:
            places[c.name] = at
            at += 1 if c.categories is None else len(self.encoding.shown(c))
        return places

    def write(self, folder: Path) -> None:
        """Keep it in a folder, all or nothing."""
        write_atomic(folder / FILE, self.model_dump_json(indent=1) + "\n")

    @staticmethod
    def read(folder: Path) -> Preprocessing | None:
        """What a folder keeps; None if it keeps none.

        Raises:
            DataError: if it cannot be read.
        """
        path = folder / FILE
        if not path.is_file():
            return None
        try:
            return Preprocessing.model_validate_json(path.read_bytes())
        except (ValidationError, OSError) as error:
            raise DataError(f"{path}: must be a preprocessing that fedspan wrote ({type(error).__name__}).") from None


def rows_in(columns: Columns) -> int:
    """How many rows there are."""
    return len(next(iter(columns.values()))) if columns else 0


def taken(columns: Columns, rows: Index) -> Columns:
    """Some rows of all columns."""
    return {name: column.take(rows) for name, column in columns.items()}
