"""What the columns of a table are: whose row, what is predicted, what it is predicted from, and how."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge

from fedspan.errors import ConfigError
from fedspan.method.fields import check, field_default


@dataclass(frozen=True, kw_only=True)
class TableLayout:
    """The roles of a table's columns; keys of `[data]` in an experiment file."""

    KEYS: ClassVar[dict[str, str]] = {
        k: k
        for k in (
            *("client", "target", "target_type", "split", "fold", "features", "drop", "categorical", "categories"),
            *("encode", "unseen", "missing", "standardise", "standardised"),
        )
    }

    client: str | None = None
    """The column that says whose a row is; with one file per client there is none."""
    target: str | tuple[str, ...] = ()
    """The column to be predicted, or several of numbers; it makes the source a table."""
    target_type: Literal["auto", "class", "number"] = "auto"
    """What a target is: `auto` takes text, true/false and whole numbers as classes, other numbers as values."""
    split: str | None = None
    """The column that says train, validation or test, or the number of a fold; without it rows are divided by
    `[partition]`."""
    fold: Annotated[int, Ge(0)] = 0
    """The fold that is tested on, where the split column holds numbers."""
    features: tuple[str, ...] = ()
    """Columns to predict from, in this order; without it all others, in the order of their names."""
    drop: tuple[str, ...] = ()
    """Columns to leave out."""
    categorical: tuple[str, ...] = ()
    """Columns of numbers that are categories; columns of text always are."""
    categories: dict[str, list[str | int | float | bool]] = field(default_factory=dict)
    """Categories of a column, or classes of the target, in order; found in the training rows where not given."""
    encode: Literal["one-hot", "drop-first"] = "one-hot"
    """An input for every category of a column, or for every one but the first."""
    unseen: Literal["error", "zero"] = "error"
    """What a category does that no client has in training: it is refused, or all its inputs are 0."""
    missing: Literal["error", "drop", "mean", "indicator"] = "error"
    """What is done about a missing value: refuse it, leave the row out, put the federation's mean in its place, or
    that and a further input that says so."""
    standardise: Literal["auto", "none", "client", "federated"] = "auto"
    """Whether inputs are brought to mean 0 and deviation 1 over each client's training rows or over all; `auto`:
    over all, if a column's mean or deviation lies outside 0.1 to 10."""
    standardised: Literal["numbers", "all"] = "numbers"
    """Which inputs are: columns of numbers, or the inputs of categories too."""

    def __post_init__(self) -> None:
        check(self, "Data")
        roles = [*self.targets, *(c for c in (self.client, self.split) if c is not None)]
        for where, names in (
            ("target, client and split", roles),
            ("features", [*self.features]),
            ("drop", [*self.drop]),
        ):
            twice = sorted({n for n in names if names.count(n) > 1})
            if twice:
                raise ConfigError(f"Data: {where} must name every column once. Got '{twice[0]}' twice.")
        for name in self.features:
            if name in roles:
                raise ConfigError(f"Data: features must not name the target, client or split column. Got '{name}'.")
        for name in self.drop:
            if name in self.features or name in roles:
                raise ConfigError(f"Data: drop must not name a column that is used elsewhere. Got '{name}'.")
        if not self.targets and any(getattr(self, f.name) != field_default(f) for f in fields(self)):
            raise ConfigError("Data: a table needs its target, the column to be predicted. Got none; set data.target.")

    @property
    def targets(self) -> tuple[str, ...]:
        """The target columns."""
        return (self.target,) if isinstance(self.target, str) else self.target

    @property
    def roles(self) -> frozenset[str]:
        """Columns that are no features."""
        return frozenset([*self.targets, *self.drop, *(c for c in (self.client, self.split) if c is not None)])
