"""One client's own examples, prepared as those of an experiment's source."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedspan.data.federated import FederatedData, Index, split
from fedspan.data.formats.arrays import npz_parts
from fedspan.data.sources.assemble import Source, assemble
from fedspan.data.sources.catalog import KNOWN
from fedspan.data.sources.load import MAX_BYTES, load
from fedspan.data.tables.arrow_files import ENDINGS, is_table, read_table
from fedspan.data.tables.preprocessing import Preprocessing
from fedspan.data.tables.table_columns import columns_of
from fedspan.data.tables.table_federation import examples_of_one, one_client
from fedspan.errors import DataError

if TYPE_CHECKING:
    from fedspan.config import RunConfig


def read_own_table(path: Path, config: RunConfig, agreed: Preprocessing) -> FederatedData:
    """A client's own table, prepared as those of a run were; without a split column a part of its rows is for testing.

    Raises:
        DataError: naming column and row, if it is not like the run's tables.
    """
    if not is_table(path):
        raise DataError(f"Data: a client's own data must be a table ({', '.join(ENDINGS)}). Got {path.name!r}.")
    columns = columns_of(read_table(path, MAX_BYTES), path.name)
    layout = config.data.table
    if layout.split is not None and layout.split not in columns:
        layout = replace(layout, split=None)

    def divided(n: int) -> tuple[Index, Index, Index]:
        return split(np.arange(n, dtype=np.int64), 0, config.seed, config.partition.test)

    columns, parts = one_client(columns, layout, path.name, divided)
    return examples_of_one(columns, parts, layout, agreed, path.name)


def read_own(path: Path, config: RunConfig, classes: int | None, compare: bool = False) -> tuple[Source, str]:
    """A client's npz prepared as the experiment's source is, and in words how; test examples come last.

    `compare` loads a source that is not a known one, to see that the file is of the same kind of numbers.

    Raises:
        DataError: if the file cannot be used, or is of another type than the source.
    """
    if path.suffix != ".npz":
        raise DataError(f"Data: a client's own data must be an .npz file. Got {path.name!r}.")
    d = config.data
    train, test = npz_parts(path, MAX_BYTES)
    made = assemble(d.source, train, test, KNOWN.get(d.source), size=d.size, limit=None, seed=0, classes=classes)
    if compare and d.source != "digits" and d.source not in KNOWN:
        # Bytes of unknown sources are scaled and numbers are not: both must be of one kind to mean the same.
        source = load(d.source, d.root, classes=d.classes, columns=d.columns)
        if (source.mean, source.std) != (made.mean, made.std):
            kind = "bytes (uint8)" if train.x.dtype != "uint8" else "numbers, not bytes"
            raise DataError(f"{path.name}: x must hold {kind}, like the run's source. Got {train.x.dtype}.")
    mean, std = ("/".join(f"{v:g}" for v in t) for t in (made.mean, made.std))
    if (made.mean, made.std) == ((0.0,), (1.0,)):
        return made, f"{train.x.dtype}, taken as it is, like the run's source"
    kind = "bytes, divided by 255" if train.x.dtype == "uint8" else f"{train.x.dtype}, taken to lie in 0..1"
    return made, f"{kind}, normalised with the run's constants (mean {mean}, deviation {std})"
