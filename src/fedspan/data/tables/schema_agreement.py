"""How clients agree on a table: each says what its columns are and adds to sums; nobody shows a row.

In a simulation all of it happens in one process; in a deployment the same values travel as messages. First every client
describes its columns (`describe_columns`), and `agree` finds what they have in common and who differs. Then each adds
up its training rows (`first_sums`), once more about the means of all (`second_sums`), and `conclude` has means and
deviations as of the pooled rows. Only sums are used of the rows, which a secure sum could add.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Ge, Le, MaxLen

from fedspan.data.federated import Index
from fedspan.data.tables.preprocessing import Agreed, Encoding, InputColumn, Matrix, Name, Preprocessing, Scaling
from fedspan.data.tables.table_columns import Columns, TableColumn, by_name, in_order, word_of
from fedspan.data.tables.table_layout import TableLayout
from fedspan.errors import ConfigError, DataError, nearest

MOST_CATEGORIES = 1000
"""Of one column; more are rather names or numbers of rows."""

_USUAL = (0.1, 10.0)
"""Between these a deviation needs no standardising, and up to the second a mean."""


class ColumnFacts(Agreed):
    """What one client says of a column."""

    kind: Literal["number", "text", "empty", "other"]
    told: Name
    whole: bool
    """Whether its numbers are whole ones."""
    words: Annotated[list[Name], MaxLen(MOST_CATEGORIES)] | None = None
    """Its categories in training rows (of a target in all rows), where they may be needed; None if too many."""


class ClientSchema(Agreed):
    """What one client says of its table."""

    columns: Annotated[dict[Name, ColumnFacts], MaxLen(100_000)]
    targets: Annotated[dict[Name, ColumnFacts], MaxLen(10_000)]


class ColumnSums(Agreed):
    """Sums over one client's training rows: how many values each input has, and their sum."""

    count: list[Annotated[int, Ge(0), Le(2**53)]]
    total: list[float]
    missing: list[Annotated[int, Ge(0), Le(2**53)]]


class DeviationSums(Agreed):
    """Sums over one client's training rows of deviations from a common centre, and of their squares."""

    total: list[float]
    squares: list[Annotated[float, Ge(0)]]


# ------------------------------------------------------------------------------------------------ what a client does


def describe_columns(
    columns: Columns, layout: TableLayout, train: Index, who: str, origin: Index | None = None
) -> ClientSchema:
    """What a client's columns are; `origin` says which rows of its file they are.

    Raises:
        DataError: naming client, column and remedy, if a column that is asked for is not there or has gaps.
    """
    for name in (*layout.targets, *layout.features, *layout.categorical):
        if name not in columns:
            raise DataError(f"{who}: column '{name}' is missing.{nearest(name, columns)}")
    names = layout.features or [n for n in columns if n not in layout.roles]
    facts = {}
    for name in names:
        named = name in layout.categorical or name in layout.categories
        facts[name] = _facts(columns[name].take(train), named, MOST_CATEGORIES)
        if layout.missing == "error" and columns[name].missing.any():
            raise DataError(_gap(columns[name], who, origin, "set data.missing to 'drop', 'mean' or 'indicator'"))
    targets = {}
    for name in layout.targets:
        if columns[name].missing.any():
            raise DataError(_gap(columns[name], who, origin, "complete it, or set data.missing = 'drop'", "target"))
        targets[name] = _facts(columns[name], len(layout.targets) == 1, MOST_CATEGORIES)
    return ClientSchema(columns=facts, targets=targets)


def _facts(column: TableColumn, named: bool, most: int) -> ColumnFacts:
    held = column.take(np.flatnonzero(~column.missing)) if column.kind != "other" else column
    numbers = held.as_numbers()
    kind: Any = "other" if column.kind == "other" else "number" if numbers is not None else "text"
    kind = "empty" if kind == "number" and len(held) == 0 else kind
    words = sorted({w for w in held.words() if w is not None}) if named or kind == "text" else []
    words = words if named or kind == "text" else []
    whole = numbers is not None and bool((numbers == np.floor(numbers)).all())
    return ColumnFacts(kind=kind, told=column.told, whole=whole, words=words if len(words) <= most else None)


def _gap(column: TableColumn, who: str, origin: Index | None, remedy: str, what: str = "column") -> str:
    gaps = np.flatnonzero(column.missing)
    first = gaps[0] if origin is None else origin[gaps[0]]
    return f"{who}: {what} '{column.name}' has {len(gaps)} missing value(s), first in row {first}; {remedy}."


def first_sums(x: Matrix) -> ColumnSums:
    """Counts and sums of training rows, leaving out what is missing."""
    here = ~np.isnan(x)
    return ColumnSums(
        count=here.sum(0).tolist(), total=np.where(here, x, 0.0).sum(0).tolist(), missing=(~here).sum(0).tolist()
    )


def second_sums(x: Matrix, centre: Sequence[float]) -> DeviationSums:
    """Sums of training rows about a centre near their mean, where squares lose nothing by cancellation."""
    apart = np.where(np.isnan(x), 0.0, x - np.array(centre))
    return DeviationSums(total=apart.sum(0).tolist(), squares=(apart * apart).sum(0).tolist())


def own_scaling(x: Matrix, given: Scaling, scaled: Sequence[bool]) -> Scaling:
    """Means and deviations of one client's training rows; of inputs without a value the federation's mean."""
    count = np.maximum((~np.isnan(x)).sum(0), 1)
    mean = np.where(np.isnan(x).all(0), np.array(given.mean), np.nansum(x, 0) / count)
    apart = np.where(np.isnan(x), 0.0, x - mean)
    mean = mean + apart.sum(0) / count
    apart = np.where(np.isnan(x), 0.0, x - mean)
    return _scaling(mean, (apart * apart).sum(0) / count, scaled)


def _scaling(mean: Matrix, variance: Matrix, scaled: Sequence[bool]) -> Scaling:
    """Means and deviations; 0 and 1 for inputs that stay as they are, and 1 where nothing varies."""
    on, deviation = np.array(scaled, bool), np.sqrt(np.maximum(variance, 0.0))
    # What is left of a constant by rounding is no deviation.
    deviation = np.where(deviation > 1e-12 * np.abs(mean), deviation, 1.0)
    return Scaling(mean=np.where(on, mean, 0.0).tolist(), scale=np.where(on, deviation, 1.0).tolist())


# ------------------------------------------------------------------------------------------------ what all agree on


def agree(schemas: Mapping[str, ClientSchema], layout: TableLayout) -> tuple[Encoding, dict[str, str]]:
    """What the clients' tables have in common, and for each that differs a sentence with column and remedy.

    Raises:
        DataError: if there is no common ground: nobody has features, or text that cannot be categories.
    """
    faults: dict[str, str] = {}
    names = list(layout.features) or _common_names(schemas, layout, faults)
    columns = [_agreed_column(name, schemas, layout, faults) for name in names]
    classes = _agreed_classes(schemas, layout, faults)
    if not columns:
        raise DataError("Data: a table needs at least one column to predict from. Got none beside target and client.")
    return (
        Encoding(
            columns=columns,
            encode=layout.encode,
            unseen=layout.unseen,
            missing=layout.missing,
            target=list(layout.targets),
            class_names=classes,
        ),
        faults,
    )


def _common_names(schemas: Mapping[str, ClientSchema], layout: TableLayout, faults: dict[str, str]) -> list[str]:
    """Columns that most clients have, in the order of their names; who differs is at fault."""
    held = Counter(name for s in schemas.values() for name in s.columns)
    names = by_name(n for n, count in held.items() if 2 * count > len(schemas))
    for client, schema in schemas.items():
        absent = [n for n in names if n not in schema.columns]
        extra = by_name(n for n in schema.columns if n not in names)
        if absent:
            faults.setdefault(
                client,
                f"column '{absent[0]}' is missing, which {held[absent[0]]} of {len(schemas)} clients have; add it, or"
                " leave it out for all with data.drop.",
            )
        elif extra:
            faults.setdefault(
                client,
                f"column '{extra[0]}' is one that most clients do not have; remove it, or leave it out with data.drop.",
            )
    return names


def _agreed_column(
    name: str, schemas: Mapping[str, ClientSchema], layout: TableLayout, faults: dict[str, str]
) -> InputColumn:
    said = {client: s.columns[name] for client, s in schemas.items() if name in s.columns}
    kinds = Counter(f.kind for f in said.values() if f.kind != "empty")
    if kinds["other"]:
        client = next(c for c, f in said.items() if f.kind == "other")
        raise DataError(
            f"client {client}: column '{name}' must hold numbers or text. Got {said[client].told}; leave it out with"
            " data.drop."
        )
    if name in layout.categories:
        return InputColumn(name=name, categories=_given(layout, name))
    categorical = name in layout.categorical or kinds["text"] > kinds["number"]
    if not categorical:
        for client, f in said.items():
            if f.kind == "text":
                shown = f"{f.words[0]!r:.60}" if f.words else "text"
                faults.setdefault(
                    client,
                    f"column '{name}' must hold numbers, as {kinds['number']} of {len(said)} clients have. Got text,"
                    f" such as {_first_word(f, shown)}; correct it, or name the column in data.categorical.",
                )
        return InputColumn(name=name)
    if name not in layout.categorical:
        for client, f in said.items():
            if f.kind == "number":
                faults.setdefault(
                    client,
                    f"column '{name}' must hold text, as {kinds['text']} of {len(said)} clients have. Got numbers"
                    f" ({f.told}); correct it, or name the column in data.categorical.",
                )
    fine = {c: f for c, f in said.items() if c not in faults}
    words = in_order(w for f in fine.values() for w in f.words or [])
    if any(f.words is None for f in fine.values()) or len(words) > MOST_CATEGORIES:
        raise DataError(
            f"Data: column '{name}' must have at most {MOST_CATEGORIES} different categories. Got more; leave it out"
            " with data.drop, or list those that matter in data.categories."
        )
    return InputColumn(name=name, categories=words)


def _first_word(facts: ColumnFacts, otherwise: str) -> str:
    """A word of a column that is no number, to be shown."""
    for word in facts.words or []:
        try:
            float(word)
        except ValueError:
            return f"{word!r:.60}"
    return otherwise


def _given(layout: TableLayout, name: str) -> list[str]:
    words = [word_of(v) for v in layout.categories[name]]
    if not words or len(set(words)) < len(words):
        raise ConfigError(f"Data: categories.{name} must list every category once. Got {words!s:.80}.")
    return words


def _agreed_classes(
    schemas: Mapping[str, ClientSchema], layout: TableLayout, faults: dict[str, str]
) -> list[str] | None:
    """The classes of the target, None if it is a number."""
    if len(layout.targets) > 1:
        numbers = True
    else:
        said = {c: s.targets[layout.targets[0]] for c, s in schemas.items()}
        fractions = sum(f.kind == "number" and not f.whole for f in said.values())
        numbers = layout.target_type == "number" or (layout.target_type == "auto" and fractions > 0)
    if numbers:
        for name in layout.targets:
            for client, schema in schemas.items():
                f = schema.targets[name]
                if f.kind != "number":
                    got = f"text, such as {_first_word(f, 'words')}" if f.kind == "text" else f.told
                    faults.setdefault(
                        client,
                        f"target '{name}' must hold numbers for regression. Got {got}; correct it, or set"
                        " data.target_type = 'class'.",
                    )
        return None
    name = layout.targets[0]
    if name in layout.categories:
        words = _given(layout, name)
        for client, f in said.items():
            other = [w for w in f.words or [] if w not in words]
            if other:
                faults.setdefault(
                    client,
                    f"target '{name}' must be one of {', '.join(words)[:100]}. Got {other[0]!r:.60}; correct it, or"
                    f" list it in data.categories.{name}.",
                )
        return words
    words = in_order(w for f in said.values() for w in f.words or [])
    if any(f.words is None for f in said.values()) or len(words) > MOST_CATEGORIES:
        raise DataError(
            f"Data: target '{name}' must have at most {MOST_CATEGORIES} different classes. Got more; if it is a number,"
            " set data.target_type = 'number'."
        )
    return words


def centre(sums: Sequence[ColumnSums], encoding: Encoding) -> list[float]:
    """Means of all clients' training rows, to the rounding of the sums.

    Raises:
        DataError: if nobody has a value of some input, or the sums are not of these inputs.
    """
    names = encoding.names
    for s in sums:
        if {len(s.count), len(s.total), len(s.missing)} != {len(names)}:
            raise DataError(f"Data: sums must be of {len(names)} inputs. Got {len(s.count)}.")
    count, total = _added([s.count for s in sums]), _added([s.total for s in sums])
    none = np.flatnonzero(count == 0)
    if len(none):
        raise DataError(
            f"Data: column '{names[none[0]]}' has no value in any client's training rows; leave it out with data.drop."
        )
    means: list[float] = (total / count).tolist()
    return means


def conclude(
    encoding: Encoding,
    layout: TableLayout,
    sums: Sequence[ColumnSums],
    deviations: Sequence[DeviationSums],
) -> Preprocessing:
    """The preprocessing that follows from everybody's sums; without the scalings of single clients."""
    about = np.array(centre(sums, encoding))
    count = _added([s.count for s in sums])
    first, squares = _added([d.total for d in deviations]) / count, _added([d.squares for d in deviations]) / count
    mean, variance = about + first, squares - first * first
    lacking = _added([s.missing for s in sums]) > 0
    indicators = []
    if layout.missing == "indicator":
        at = 0
        for c in encoding.columns:
            width = 1 if c.categories is None else len(encoding.shown(c))
            indicators += [c.name] if width and lacking[at] else []
            at += width
    numbers = encoding.of_numbers
    on = numbers if layout.standardised == "numbers" else np.ones_like(numbers)
    scaling = _scaling(mean, variance, on.tolist())
    how = layout.standardise
    if how == "auto":
        how = "federated" if _needs_scaling(mean[numbers], variance[numbers]) else "none"
    # A category that is not known is none of them where an input of its own says so, and their shares elsewhere.
    fill = np.where(numbers, mean, 0.0) if layout.missing == "indicator" else mean
    return Preprocessing(
        encoding=encoding,
        fill=fill.tolist(),
        indicators=indicators,
        standardise=how,
        scaling=None if how == "none" else scaling,
    )


def _needs_scaling(mean: Matrix, variance: Matrix) -> bool:
    deviation = np.sqrt(np.maximum(variance, 0.0))
    low, high = _USUAL
    return bool(((deviation > high) | ((deviation < low) & (deviation > 0)) | (np.abs(mean) > high)).any())


def _added(parts: Sequence[Sequence[float]]) -> Matrix:
    """Sums added one after another in the order of the clients, so that a deployment adds as a simulation does."""
    total = np.zeros(len(parts[0]))
    for part in parts:
        total = total + np.array(part, np.float64)
    return total
