"""A federation out of tables: rows are dealt to clients, who agree on columns and sums, and become examples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

from fedspan.data.federated import FederatedData, Index
from fedspan.data.partitions.divide import partition
from fedspan.data.sources.assemble import Source, balanced
from fedspan.data.sources.load import MAX_BYTES, find_source
from fedspan.data.tables.arrow_files import ENDINGS, is_table, read_table, stem
from fedspan.data.tables.preprocessing import Matrix, Preprocessing, Scaling, Who, rows_in, taken
from fedspan.data.tables.schema_agreement import (
    agree,
    centre,
    conclude,
    describe_columns,
    first_sums,
    own_scaling,
    second_sums,
)
from fedspan.data.tables.table_columns import Columns, columns_of, in_order, joined, word_of
from fedspan.data.tables.table_layout import TableLayout
from fedspan.errors import ConfigError, DataError, nearest

_SPLITS = {"train": 0, "training": 0, "validation": 1, "valid": 1, "val": 1, "dev": 1, "test": 2, "testing": 2}

Divide: TypeAlias = Callable[[Source, str], FederatedData]
"""Deals the rows of a source to clients; told where the test part comes from."""


def table_data(
    source: str,
    layout: TableLayout,
    *,
    root: str | Path | None = None,
    kind: str = "natural",
    clients: int | None = None,
    seed: int = 0,
    split: str = "client",
    validation: float = 0.0,
    test: float = 0.25,
    limit: int | None = None,
    **options: Any,
) -> FederatedData:
    """The federation of a CSV or parquet file, or of a folder with one such file per client.

    Args:
        layout: what its columns are.
        kind: how rows are dealt; `natural` by the client column or the files, others as `partition` deals examples.

    Raises:
        DataError: naming client, column and remedy, if tables cannot be read or do not fit together.
    """
    if kind == "natural":
        options = {"min_samples": 1, **options}
    tables = read_tables(find_source(source, root, "table"), MAX_BYTES)

    def divide(rows: Source, where: str) -> FederatedData:
        return partition(rows, kind, clients, seed, where, validation, test, **options)

    if split == "global" and layout.split is None:
        raise ConfigError("Partition: split 'global' needs a table with a split column. Got none; set data.split.")
    return federate_tables(
        tables, layout, divide, natural=kind == "natural", split=split, limit=limit, seed=seed, name=source
    )


def read_tables(path: Path, limit: int) -> dict[str, Any]:
    """The arrow tables of a path by name: one, or one for every client of a folder.

    Raises:
        DataError: if there is none, or one cannot be read.
    """
    if not path.is_dir():
        return {"": read_table(path, limit)}
    files = sorted(p for p in path.iterdir() if p.is_file() and is_table(p))
    if not files:
        raise DataError(f"Data: folder {path} must hold tables ({', '.join(ENDINGS)}), one per client. Got none.")
    found: dict[str, Any] = {}
    for file in files:
        name = stem(file)
        if name in found:
            raise DataError(f"Data: every client must have one table. Got two called '{name}' in {path}; remove one.")
        found[name] = read_table(file, limit)
        limit = max(0, limit - found[name].nbytes)
    return found


def federate_tables(
    tables: Mapping[str, Any],
    layout: TableLayout,
    divide: Divide,
    *,
    natural: bool = True,
    split: str = "client",
    limit: int | None = None,
    seed: int = 0,
    name: str = "table",
) -> FederatedData:
    """A federation out of arrow tables: one for all clients (its name is empty), or one by the name of each.

    Raises:
        DataError: naming client, column and remedy.
        ConfigError: if the layout cannot be that of these tables.
    """
    parts = {client: columns_of(table, _called(client) if client else name) for client, table in tables.items()}
    for client, columns in parts.items():
        _need_columns(columns, layout, _called(client) if client else name)
    owners = _owners(parts, layout, natural, name)
    pool = _joined(parts, layout)
    marks = _marks(pool, layout)
    origin = np.concatenate([np.arange(rows_in(c), dtype=np.int64) for c in parts.values()])  # rows of their files
    if layout.missing == "drop":
        kept = np.flatnonzero(~_gaps(pool, layout))
        if len(kept) == 0:
            raise DataError(f"{name}: missing = 'drop' leaves no row; use 'mean' or 'indicator', or drop columns.")
        pool, owners, origin = taken(pool, kept), owners[kept], origin[kept]
        marks = None if marks is None else marks[kept]
    rough = _rough_labels(pool, layout)
    if limit is not None and limit < len(owners):
        kept = balanced(rough, len(rough), limit, seed)
        pool, owners, origin, rough = taken(pool, kept), owners[kept], origin[kept], rough[kept]
        marks = None if marks is None else marks[kept]
    dealt = _deal(owners, rough, marks, divide, natural, len(parts) > 1, split, name)
    return _examples(pool, layout, dealt, origin, name)


def _called(client: str) -> str:
    return f"client {client}"


def _need_columns(columns: Columns, layout: TableLayout, who: str, client: bool = True) -> None:
    """Refuse a table without the columns that say whose a row is and what it is for."""
    for name in (
        layout.client if client else None,
        layout.split,
        *layout.targets,
        *layout.features,
        *layout.categorical,
    ):
        if name is not None and name not in columns:
            raise DataError(f"{who}: column '{name}' is missing.{nearest(name, columns)}")
    for name in layout.categories:
        if name not in columns:
            raise DataError(f"{who}: column '{name}' of data.categories is missing.{nearest(name, columns)}")


def _owners(parts: Mapping[str, Columns], layout: TableLayout, natural: bool, name: str) -> Any:
    """Whose every row is, by name; '' where nobody says."""
    if layout.client is None:
        if natural and list(parts) == [""]:
            raise DataError(
                f"{name}: a table of several clients must say whose a row is. Got no data.client; name the column, or"
                " divide the rows with another partition.kind."
            )
        return np.concatenate([np.full(rows_in(c), client, object) for client, c in parts.items()])
    if list(parts) != [""]:
        raise ConfigError("Data: with one table per client no column says whose a row is. Got data.client; remove it.")
    column = parts[""][layout.client]
    gaps = np.flatnonzero(column.missing)
    if column.kind == "other" or len(gaps):
        got = column.told if column.kind == "other" else f"none in row {gaps[0]}"
        raise DataError(
            f"{name}: column '{layout.client}' must hold a client's name or number in every row. Got {got}."
        )
    return np.array(column.words(), object)


def _joined(parts: Mapping[str, Columns], layout: TableLayout) -> Columns:
    """All rows under each other; where a client lacks a column, all say what they have and it is refused by name."""
    if len(parts) == 1:
        return next(iter(parts.values()))
    schemas = {
        client: describe_columns(columns, replace(layout, missing="mean"), np.arange(rows_in(columns)), _called(client))
        for client, columns in parts.items()
    }
    _, faults = agree(schemas, layout)
    _refuse(faults)
    names = [n for n in next(iter(parts.values())) if all(n in columns for columns in parts.values())]
    return {n: joined([columns[n] for columns in parts.values()]) for n in names}


def _refuse(faults: Mapping[str, str]) -> None:
    for client, why in faults.items():
        raise DataError(f"{_called(client)}: {why}")


def _marks(pool: Columns, layout: TableLayout) -> Index | None:
    """0 for training, 1 for validation, 2 for test; None without a split column."""
    if layout.split is None:
        return None
    marks = split_marks(pool, layout, "Data")
    for mark, what in ((0, "train"), (2, "test")):
        if not (marks == mark).any():
            raise DataError(f"Data: column '{layout.split}' must mark rows as {what}. Got none; correct it.")
    return marks


def split_marks(columns: Columns, layout: TableLayout, who: str) -> Index:
    """What every row is for, by the split column: 0 training, 1 validation, 2 test.

    Raises:
        DataError: naming column and row, for what is none of them.
    """
    assert layout.split is not None
    column = columns[layout.split]
    if column.kind == "number" and column.whole and not column.missing.any() and column.told != "bool":
        if not (column.values == layout.fold).any():
            folds = ", ".join(word_of(v) for v in np.unique(column.values)[:20])
            raise DataError(
                f"{who}: data.fold must be one of the folds of column '{layout.split}', {folds}. Got {layout.fold}."
            )
        return np.where(column.values == layout.fold, 2, 0).astype(np.int64)
    words = column.words()
    marks = np.array([-1 if w is None else _SPLITS.get(w.lower(), -1) for w in words], np.int64)
    if (marks < 0).any():
        row = int(np.flatnonzero(marks < 0)[0])
        raise DataError(
            f"{who}: column '{layout.split}' must say train, validation or test, or the number of a fold. Got"
            f" {words[row]!r:.60} in row {row}; correct it."
        )
    return marks


def _gaps(pool: Columns, layout: TableLayout) -> Any:
    """Rows in which something that is used is missing."""
    names = [*(layout.features or (n for n in pool if n not in layout.roles)), *layout.targets]
    return np.any([pool[n].missing for n in names if pool[n].kind != "other"], axis=0)


def _rough_labels(pool: Columns, layout: TableLayout) -> Index:
    """Labels to deal rows by, before the clients are known; all 0 where the target is a number."""
    column = pool[layout.targets[0]]
    fractions = column.kind == "number" and not column.whole
    if len(layout.targets) > 1 or layout.target_type == "number" or (layout.target_type == "auto" and fractions):
        return np.zeros(len(column), np.int64)
    _, labels = np.unique(np.array([str(w) for w in column.words()]), return_inverse=True)
    return labels.astype(np.int64)


def _deal(
    owners: Any,
    labels: Index,
    marks: Index | None,
    divide: Divide,
    natural: bool,
    given_order: bool,
    split: str,
    name: str,
) -> FederatedData:
    """Who trains, validates and tests on which rows."""
    names = list(dict.fromkeys(owners.tolist())) if given_order else in_order(owners.tolist())
    place = {client: k for k, client in enumerate(names)}
    rows = np.arange(len(labels), dtype=np.int64)
    kept = rows if marks is None else np.flatnonzero(marks != 1)
    whole = Source(
        name=name,
        x=torch.zeros(len(labels), 1),
        y=torch.from_numpy(labels),
        classes=int(labels.max()) + 1,
        test_rows=rows[:0] if marks is None else np.flatnonzero(marks == 2),
        client=np.array([place[o] for o in owners], np.int64) if natural else None,
        client_names=names,
    )
    given = divide(whole.take(kept), "global" if marks is not None else split)
    back = {part: [kept[r] for r in getattr(given, part)] for part in ("train", "validation", "test")}
    if marks is not None and natural:
        # A client's rows that the file marks for validation join those that were drawn.
        at = {n: k for k, n in enumerate(given.names)}
        for row in np.flatnonzero(marks == 1):
            owner = at.get(str(owners[row]))
            if owner is not None:
                back["validation"][owner] = np.append(back["validation"][owner], row)
    y = torch.from_numpy(labels)
    return replace(given, x=torch.zeros(len(labels), 1), y=y, **back)  # type: ignore[arg-type]


def _examples(pool: Columns, layout: TableLayout, dealt: FederatedData, origin: Index, name: str) -> FederatedData:
    """The examples of rows that are dealt: what the clients agree on is found from their training rows alone."""
    called = [_called(n) for n in dealt.names]
    owner = np.full(rows_in(pool), -1, np.int64)
    for i in range(dealt.clients):
        for part in (dealt.train, dealt.validation, dealt.test):
            owner[part[i]] = i

    def who(row: int) -> str:
        return f"{called[owner[row]] if owner[row] >= 0 else name}, row {origin[row]}"

    schemas = {}
    for i, client in enumerate(dealt.names):
        rows = np.unique(np.concatenate([dealt.train[i], dealt.validation[i], dealt.test[i]]))
        train = np.searchsorted(rows, np.sort(dealt.train[i]))
        schemas[client] = describe_columns(taken(pool, rows), layout, train, called[i], origin[rows])
    encoding, faults = agree(schemas, layout)
    _refuse(faults)
    used = np.flatnonzero(owner >= 0)  # rows of clients that were left out are not looked at
    inside = taken(pool, used)
    x = np.full((len(owner), len(encoding.names)), np.nan)
    x[used] = encoding.matrix(inside, _whose(who, used))
    made = fit_preprocessing([x[np.sort(t)] for t in dealt.train], dealt.names, encoding, layout)
    y = _targets(encoding.targets(inside, _whose(who, used)), used, len(owner))
    done = np.zeros((len(owner), len(made.names)))
    if made.standardise == "client":
        _own_rows(dealt)
        for i, client in enumerate(dealt.names):
            own = np.flatnonzero(owner == i)
            done[own] = made.finish(x[own], made.scaling_of(client), _whose(who, own))
    else:
        done[used] = made.finish(x[used], made.scaling, _whose(who, used))
    return replace(
        dealt,
        x=torch.from_numpy(done).float(),
        y=y,
        classes=None if encoding.class_names is None else len(encoding.class_names),
        class_names=made.class_names,
        preprocessing=made,
        task=task_hint(y, encoding.class_names),
    )


def _whose(who: Who, rows: Index) -> Who:
    """Whose rows are that were taken out of others."""
    return lambda row: who(int(rows[row]))


def task_hint(y: torch.Tensor, class_names: Sequence[str] | None) -> str:
    """What kind of task targets look like: classes, numbers, or several numbers that are all 0 or 1."""
    if class_names is not None:
        return "classification"
    return "multi-label" if y.ndim == 2 and bool(((y == 0) | (y == 1)).all()) else "regression"


def _targets(y: Any, used: Index, rows: int) -> torch.Tensor:
    whole = np.zeros((rows, *y.shape[1:]), y.dtype)
    whole[used] = y
    found = torch.from_numpy(whole)
    return found.float() if found.is_floating_point() else found


def _own_rows(dealt: FederatedData) -> None:
    """Refuse rows of several clients where each would scale them in its own way."""
    held = np.concatenate([np.unique(np.concatenate(p)) for p in zip(dealt.train, dealt.validation, dealt.test)])
    if len(np.unique(held)) < len(held):
        raise ConfigError(
            "Data: standardise = 'client' needs rows of which each is one client's. Got test rows that several are"
            " judged by; use standardise = 'federated', or partition.split = 'client'."
        )


def fit_preprocessing(
    training: Sequence[Matrix], names: Sequence[str], encoding: Any, layout: TableLayout
) -> Preprocessing:
    """The preprocessing that clients with these training rows agree on, from sums alone."""
    sums = [first_sums(x) for x in training]
    about = centre(sums, encoding)
    made = conclude(encoding, layout, sums, [second_sums(x, about) for x in training])
    return with_own_scalings(made, layout, dict(zip(names, training)))


def with_own_scalings(made: Preprocessing, layout: TableLayout, training: Mapping[str, Matrix]) -> Preprocessing:
    """The preprocessing with the scaling of each client's own training rows, where that is asked for."""
    if made.standardise != "client":
        return made
    assert made.scaling is not None
    on = made.encoding.of_numbers if layout.standardised == "numbers" else np.ones(len(made.fill), bool)
    own: dict[str, Scaling] = {n: own_scaling(x, made.scaling, on.tolist()) for n, x in training.items()}
    return made.model_copy(update={"clients": own})


def one_client(
    columns: Columns, layout: TableLayout, who: str, parts: Callable[[int], tuple[Index, Index, Index]]
) -> tuple[Columns, tuple[Index, Index, Index]]:
    """The rows that one client uses, and which of them train, validate and test.

    Args:
        parts: divides so many rows, where no split column says it.
    """
    _need_columns(columns, layout, who, client=False)
    if layout.missing == "drop":
        columns = taken(columns, np.flatnonzero(~_gaps(columns, layout)))
    n = rows_in(columns)
    if layout.split is None:
        return columns, parts(n)
    marks = split_marks(columns, layout, who)
    train, validation, test = (np.flatnonzero(marks == k) for k in range(3))
    return columns, (train, validation, test)


def examples_of_one(
    columns: Columns, parts: tuple[Index, Index, Index], layout: TableLayout, agreed: Preprocessing, who: str
) -> FederatedData:
    """The examples of one client's rows, prepared as others agreed, as a federation of one.

    Raises:
        DataError: naming column and row, for rows that are not as agreed.
    """
    named: Who = lambda row: f"{who}, row {row}"
    x = agreed.encoding.matrix(columns, named)
    own = with_own_scalings(agreed, layout, {who: x[np.sort(parts[0])]})
    y = torch.from_numpy(agreed.encoding.targets(columns, named))
    names = agreed.encoding.class_names
    return FederatedData(
        x=torch.from_numpy(own.finish(x, own.scaling_of(who), named)).float(),
        y=y.float() if y.is_floating_point() else y,
        train=[parts[0]],
        validation=[parts[1]],
        test=[parts[2]],
        classes=None if names is None else len(names),
        class_names=list(names or []),
        source="table",
        task=task_hint(y, names),
        preprocessing=own,
    )
