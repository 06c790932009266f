"""CSV and parquet files as arrow tables. Files are untrusted: sizes are checked first, and errors are ours."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path
from typing import Any

from fedspan.data.formats.arrays import too_big
from fedspan.data.formats.parquet import need, parquet
from fedspan.data.formats.part import printable, short
from fedspan.errors import DataError

ENDINGS = (".csv", ".csv.gz", ".tsv", ".tsv.gz", ".parquet")
"""Of the files that can be tables."""

MISSING = ["", "?", "NA", "N/A", "n/a", "#N/A", "NaN", "nan", "null", "NULL", "None"]
"""What a CSV file may write for a value that is not there."""


def is_table(path: Path) -> bool:
    """Whether a file is a table by its name."""
    return path.name.lower().endswith(ENDINGS)


def stem(path: Path) -> str:
    """A table's name without its ending."""
    ending = next((e for e in sorted(ENDINGS, key=len, reverse=True) if path.name.lower().endswith(e)), "")
    return path.name[: len(path.name) - len(ending)]


def read_table(path: Path, limit: int) -> Any:
    """A CSV or parquet file as an arrow table.

    Raises:
        DataError: if it is not there, damaged, empty, too large, or names a column twice.
    """
    if not path.is_file():
        raise DataError(f"Data: table {path}: there is no such file.")
    table = _parquet(path, limit) if path.name.lower().endswith(".parquet") else _csv(path, limit)
    try:
        names = printable(list(table.column_names))
    except UnicodeDecodeError:
        raise DataError(
            f"{path.name}: names of columns must be UTF-8. Got other bytes; save the file as UTF-8."
        ) from None
    twice = sorted({n for n in names if names.count(n) > 1})
    if twice:
        raise DataError(f"{path.name}: every column must have a name of its own. Got '{twice[0]}' twice.")
    if "" in names:
        raise DataError(f"{path.name}: every column must have a name. Got none for column {names.index('') + 1}.")
    if table.num_rows == 0:
        raise DataError(f"{path.name}: a table must have at least one row. Got none.")
    return table.rename_columns(names)


def _parquet(path: Path, limit: int) -> Any:
    pa = need("pyarrow")
    opened = parquet(path, limit)
    try:
        return pa.Table.from_batches(list(opened.batches(opened.schema.names)), opened.schema)
    except Exception as error:  # pyarrow raises many kinds on damaged pages
        raise DataError(
            f"{path.name}: the table must be readable to its end. Got: {short(error)}; the file is damaged, fetch it"
            " again."
        ) from None


def _csv(path: Path, limit: int) -> Any:
    pa, csv = need("pyarrow"), need("pyarrow.csv")
    try:
        with gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb") as stream:
            raw = stream.read(limit + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path.name}: cannot be read: {short(error)}.") from None
    if len(raw) > limit:
        raise too_big(path.name, len(raw), limit)
    header = raw.partition(b"\n")[0]
    tabs, semicolons = ".tsv" in path.name.lower() or b"," not in header, b";" in header and b"," not in header
    delimiter = ";" if semicolons else "\t" if tabs and b"\t" in header else ","
    try:
        return csv.read_csv(
            pa.BufferReader(raw),
            # One block: a column's type is then that of all its values, not of the first megabyte.
            csv.ReadOptions(use_threads=False, block_size=min(max(len(raw) + 1, 1 << 20), 2**31 - 1)),
            csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
            csv.ConvertOptions(null_values=MISSING, strings_can_be_null=True, quoted_strings_can_be_null=False),
        )
    except Exception as error:  # pyarrow raises many kinds
        raise DataError(f"{path.name}: must be a CSV file with a header. Got: {short(error)}.") from None
