"""Parquet files and Hugging Face data sets: columns are found by name, pictures decoded once and kept in a cache."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedspan.data.formats.arrays import too_big
from fedspan.data.formats.part import Array, FilePart, short
from fedspan.errors import DataError

COLUMNS: dict[str, tuple[str, ...]] = {
    "image": ("image", "img"),
    "label": ("label", "fine_label", "labels", "y", "target", "character"),
    "coarse": ("coarse_label",),
    "client": ("client", "client_id", "writer_id", "user", "user_id"),
    "domain": ("domain",),
}
Shape = tuple[int, int, int]


@dataclass(frozen=True, eq=False)
class Table:
    """A table in pieces: its arrow schema, number of rows, and a way to read some columns batch by batch."""

    where: str
    schema: Any
    rows: int
    batches: Callable[[list[str]], Iterator[Any]]
    cache_key: str | None = None


def need(module: str) -> Any:
    """Import an optional library, or say in one sentence how to get it."""
    try:
        return __import__(module, fromlist=["_"])
    except ImportError:
        name = module.split(".")[0]
        raise DataError(f"Data: this source needs {name}. Install it with: pip install 'fedspan[data]'") from None


def parquet(path: Path, limit: int) -> Table:
    """A parquet file as a table, refused if its metadata declare more than `limit` bytes."""
    pq = need("pyarrow.parquet")
    try:
        file = pq.ParquetFile(path)
        meta = file.metadata
        size = sum(meta.row_group(i).total_byte_size for i in range(meta.num_row_groups))
    except Exception as error:  # pyarrow raises many kinds on damaged files
        raise DataError(f"{path.name}: must be a readable parquet file. Got: {short(error)}.") from None
    if max(size, meta.num_rows) > limit:
        raise too_big(path.name, max(size, meta.num_rows), limit)
    stat = path.stat()
    return Table(
        where=path.name,
        schema=file.schema_arrow,
        rows=meta.num_rows,
        batches=lambda names: file.iter_batches(batch_size=1024, columns=names),
        cache_key=f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}",
    )


def hub(name: str, config: str | None = None) -> tuple[Table, Table | None]:
    """Train and test table of a hub data set (of one of its configurations), through the `datasets` library."""
    datasets = need("datasets")
    try:
        found = datasets.load_dataset(name) if config is None else datasets.load_dataset(name, config)
    except Exception as error:  # no network, unknown name, gated: the library has its own kinds
        raise DataError(f"Data: '{name}' could not be had from the Hugging Face hub: {short(error)}.") from None
    if "train" not in found:
        raise DataError(f"Data: '{name}' must have a split called train. Got {', '.join(found)}.")

    def table(split: str) -> Table:
        data = found[split].with_format("arrow")
        return Table(
            where=f"{name} ({split})",
            schema=data.features.arrow_schema,
            rows=len(data),
            batches=lambda names: data.select_columns(names).iter(batch_size=1024),
        )

    return table("train"), next((table(s) for s in ("test", "validation", "valid") if s in found), None)


def _is_image(kind: Any) -> bool:
    text = str(kind)
    return text in ("binary", "large_binary") or (text.startswith("struct<") and "bytes: " in text)


def _find(table: Table, what: str, columns: Mapping[str, str]) -> str | None:
    names = list(table.schema.names)
    if what in columns:
        if columns[what] not in names:
            raise DataError(f"{table.where}: column '{columns[what]}' is not there. Got {', '.join(names)}.")
        return columns[what]
    known = [n for n in COLUMNS[what] if n in names]
    if what == "image":
        known = [n for n in [*known, *names] if _is_image(table.schema.field(n).type)]
    return known[0] if known else None


def _class_names(table: Table, label: str) -> tuple[str, ...]:
    """The hub writes class names as JSON into the schema; anything else there is simply not used."""
    try:
        features = json.loads(table.schema.metadata[b"huggingface"])["info"]["features"]
        return tuple(str(n) for n in features[label]["names"])
    except (KeyError, TypeError, ValueError):
        return ()


def table_part(
    table: Table, limit: int, shape: Shape | None = None, columns: Mapping[str, str] | None = None
) -> FilePart:
    """Read a table: its picture column (or all numeric columns), labels, and client, domain and coarse columns.

    Raises:
        DataError: if there is no label column, a picture cannot be decoded or has another size than the others, or the
            table is damaged.
    """
    try:
        return _table_part(table, limit, shape, columns or {})
    except DataError:
        raise
    except Exception as error:  # pyarrow raises many kinds on damaged pages, and numpy on what comes out of them
        raise DataError(
            f"{table.where}: the table must be readable to its end. Got: {short(error)}; the file is damaged, fetch it"
            " again."
        ) from None


def _table_part(table: Table, limit: int, shape: Shape | None, columns: Mapping[str, str]) -> FilePart:
    found = {what: _find(table, what, columns) for what in COLUMNS}
    label, image = found["label"], found["image"]
    if label is None:
        raise DataError(
            f"{table.where}: a label column is needed, one of {', '.join(COLUMNS['label'])}, or named in columns."
            f" Got {', '.join(table.schema.names)}."
        )
    kept = {w: n for w, n in found.items() if n is not None and w != "image"}
    values: dict[str, list[Array]] = {what: [] for what in kept}
    for batch in table.batches(sorted(set(kept.values()))):
        for what, name in kept.items():
            values[what].append(_values(batch.column(name)))
    extra = {what: np.concatenate(v) if v else np.empty(0, np.int64) for what, v in values.items()}
    extra = {what: v.astype(str) if v.dtype == object else v for what, v in extra.items()}
    x = _numbers(table, set(kept.values()), limit) if image is None else _pictures(table, image, shape, limit)
    y = extra.pop("label")
    return FilePart(where=table.where, x=x, y=y, class_names=_class_names(table, label), **extra)


def _values(column: Any) -> Array:
    """A column as an array; whole numbers by their memory, as pyarrow's own way imports pandas for half a second."""
    kind = str(column.type)
    if len(column) and column.null_count == 0 and kind.startswith(("int", "uint")) and hasattr(column, "buffers"):
        return np.frombuffer(column.buffers()[1], kind)[column.offset : column.offset + len(column)]
    return np.asarray(column.to_numpy(zero_copy_only=False))


def _numbers(table: Table, without: set[str], limit: int) -> Array:
    kinds = ("int", "uint", "float", "double", "halffloat", "bool")
    names = [n for n in table.schema.names if n not in without and str(table.schema.field(n).type).startswith(kinds)]
    if not names:
        raise DataError(f"{table.where}: a picture column or numeric columns are needed. Got {table.schema.names}.")
    if table.rows * len(names) * 4 > limit:
        raise too_big(table.where, table.rows * len(names) * 4, limit)
    pieces = [
        np.stack([b.column(n).to_numpy(zero_copy_only=False).astype(np.float32) for n in names], 1)
        for b in table.batches(names)
    ]
    return np.concatenate(pieces) if pieces else np.empty((0, len(names)), np.float32)


def _pictures(table: Table, column: str, shape: Shape | None, limit: int) -> Array:
    cache = None if table.cache_key is None else _cache_file(f"1|{table.cache_key}|{column}|{shape}")
    if cache is not None:
        kept = _from_cache(cache, table.rows, limit)
        if kept is not None:
            return kept
    x = _decode(table, column, shape, limit)
    if cache is not None:
        _to_cache(cache, x)
    return x


def _decode(table: Table, column: str, shape: Shape | None, limit: int) -> Array:
    image = need("PIL.Image")
    out: Array | None = None
    row = 0
    for batch in table.batches([column]):
        for cell in batch.column(column).to_pylist():
            blob = cell.get("bytes") if isinstance(cell, dict) else cell
            try:
                if blob is None:
                    raise ValueError("the cell is empty")
                with image.open(io.BytesIO(blob), formats=("PNG", "WEBP", "JPEG")) as picture:
                    if out is None:
                        shape = shape or (1 if picture.mode in ("1", "L") else 3, picture.height, picture.width)
                        if table.rows * shape[0] * shape[1] * shape[2] > limit:
                            raise too_big(table.where, table.rows * shape[0] * shape[1] * shape[2], limit)
                        out = np.empty((table.rows, *shape), np.uint8)
                    if (picture.height, picture.width) != out.shape[2:]:  # before decoding, so a bomb never unfolds
                        raise ValueError(f"it is {picture.width}x{picture.height}, not {out.shape[3]}x{out.shape[2]}")
                    pixels = np.asarray(picture.convert("L" if out.shape[1] == 1 else "RGB"))
            except DataError:
                raise
            except Exception as error:  # pillow raises many kinds on damaged pictures
                raise DataError(
                    f"{table.where}: row {row} must hold a PNG, WebP or JPEG picture of the common size."
                    f" Got: {short(error)}."
                ) from None
            out[row] = pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
            row += 1
    return np.empty((0, *(shape or (1, 1, 1))), np.uint8) if out is None else out


def _cache_file(key: str) -> Path | None:
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        folder = Path(base) if base else Path.home() / ".cache"
    except RuntimeError:  # no home directory
        return None
    return folder / "fedspan" / f"{hashlib.blake2b(key.encode(), digest_size=16).hexdigest()}.npy"


def _from_cache(path: Path, rows: int, limit: int) -> Array | None:
    try:
        kept: Array = np.load(path, mmap_mode="r", allow_pickle=False)
        if kept.dtype != np.uint8 or kept.ndim != 4 or len(kept) != rows or kept.nbytes > limit:
            return None
        return kept  # as pages of the file, which is only ever replaced as a whole: nothing is copied
    except (OSError, ValueError, EOFError):  # not there, or damaged: decode again
        return None


def _to_cache(path: Path, x: Array) -> None:
    """Written beside its place and renamed, so that nobody reads half a file; a full or closed disk is no fault."""
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        with os.fdopen(handle, "wb") as stream:
            np.save(stream, x, allow_pickle=False)
        os.replace(temporary, path)
    except OSError:
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)
