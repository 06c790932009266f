"""Where examples come from: `load` turns a name, a path or a hub id into one normalised pool of examples."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from fedspan.data.formats import arrays as files
from fedspan.data.formats import imagenet, leaf, matlab
from fedspan.data.formats import parquet as tables
from fedspan.data.formats.part import FilePart, join
from fedspan.data.formats.play import play_parts
from fedspan.data.sources.assemble import Source, assemble
from fedspan.data.sources.catalog import KNOWN, SOURCES, Known
from fedspan.errors import ConfigError, DataError, inside, nearest
from fedspan.method.named_code import brief, describe_object, installed, load_installed

__all__ = ["MAX_BYTES", "SOURCES", "Source", "load"]

MAX_BYTES = 4 * 2**30
HELD = ("test", "validation", "valid")
"""What files of the part that is held out may be called; the first that is there is read."""
GROUP = "fedspan.data"
"""The entry points by which an installed package brings sources."""


def load(
    source: str,
    root: str | Path | None = None,
    *,
    size: int | None = None,
    limit: int | None = None,
    seed: int = 0,
    classes: int | None = None,
    columns: Mapping[str, str] | None = None,
    max_bytes: int = MAX_BYTES,
) -> Source:
    """Load a source of `SOURCES`: a known name, one of an installed package, a path (.npz, .parquet, a folder), or a
    hub id `OWNER/NAME`.

    Args:
        root: the folder that holds the known data sets; without it $FEDSPAN_DATA, then the Hugging Face cache.
        size: shrink pictures to size × size by averaging.
        limit: keep this many examples, balanced over the classes, chosen by `seed`.
        classes: how many classes there are, when the file does not say and not all of them occur.
        columns: names of table columns that are not found by themselves, e.g. {"label": "digit", "client": "writer"}.
        max_bytes: refuse files that declare more than this.

    Raises:
        ConfigError: for an unknown source or an option that cannot be.
        DataError: if the data are missing (naming the places looked at) or not usable (naming file and value).
    """
    for name, value in (("size", size), ("limit", limit), ("classes", classes), ("max_bytes", max_bytes)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ConfigError(f"Data: {name} must be an integer >= 1. Got {value!r}.")
    for name in columns or {}:
        if name not in tables.COLUMNS:
            raise ConfigError(f"Data: unknown key '{name}' in columns.{nearest(name, tables.COLUMNS)}")
    known = KNOWN.get(source)
    if source == "digits":
        train, test = _digits(), None
    elif known is not None:
        train, test = _known(source, known, root, max_bytes)
    elif source in installed(GROUP):
        train, test = _installed(source, None if root is None else Path(root).expanduser())
    else:
        train, test = _own(source, root, columns or {}, max_bytes)
    return assemble(source, train, test, known, size=size, limit=limit, seed=seed, classes=classes)


def _installed(name: str, root: Path | None) -> tuple[FilePart, FilePart | None]:
    """Train and test part of a source that an installed package offers.

    Its entry point is a function of `root` that returns the arrays of an .npz file: x, y, and perhaps x_test, y_test,
    client, client_test, domain, domain_test.
    """
    who = f"Data {name}"
    read = load_installed(GROUP, name, who)
    if not inspect.isfunction(read):
        raise ConfigError(f"{who}: its entry point must be a function. Got {describe_object(read)}.")
    try:
        made = read(root)
    except Exception as error:
        raise DataError(f"{who}: its package could not load it ({brief(error)}).") from error
    if not isinstance(made, Mapping):
        raise DataError(f"{who}: its function must return a dict of arrays. Got {describe_object(made)}.")
    return files.array_parts(who, {str(k): np.asarray(v) for k, v in made.items()})


def _digits() -> FilePart:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    x = bunch.images.reshape(-1, 1, 8, 8) / 16.0
    return FilePart(where="digits", x=x, y=bunch.target, class_names=tuple("0123456789"))


def _known(name: str, known: Known, root: str | Path | None, limit: int) -> tuple[FilePart, FilePart | None]:
    places: list[Path] = []
    base = root if root is not None else os.environ.get("FEDSPAN_DATA")
    if base:
        places += [Path(base).expanduser() / name, Path(base).expanduser()]
    places += [Path(folder) for folder in known.folders]
    for i, place in enumerate(places):
        found = _folder(place, known, {}, limit, parquet=not base or i != 1)
        if found is not None:
            return found
    looked = [str(p) for p in places]
    if root is None:
        try:
            train, test = tables.hub(known.hub, known.hub_config)
            return (
                tables.table_part(train, limit, known.shape),
                None if test is None else tables.table_part(test, limit, known.shape),
            )
        except DataError as error:
            looked.append(f"the Hugging Face cache ({error})")
    also = "LEAF's .json" if known.leaf else "train_32x32.mat and test_32x32.mat" if known.mat else "the IDX"
    also = "the published archive's" if known.tiny else also
    raise DataError(
        f"Data: '{name}' was not found. Looked at: {', '.join(looked)}. Put train.parquet and test.parquet (or {also}"
        f" files) into ROOT/{name} and set data.root or $FEDSPAN_DATA to ROOT, or use source 'digits'."
    )


def _folder(
    folder: Path, known: Known | None, columns: Mapping[str, str], limit: int, parquet: bool = True
) -> tuple[FilePart, FilePart | None] | None:
    """Train and test parts of a folder with parquet, IDX or LEAF's JSON files, or None if it has none of them."""
    if not folder.is_dir():
        return None
    shape = None if known is None else known.shape
    parts: list[FilePart | None] = []
    for names in (("train",), HELD):
        files_of = (sorted({*folder.glob(f"{n}.parquet"), *folder.glob(f"{n}-*-of-*.parquet")}) for n in names)
        found = next(filter(None, files_of), []) if parquet else []
        pieces = [tables.table_part(tables.parquet(p, limit), limit, shape, columns) for p in found]
        parts.append(join(pieces) if pieces else None)
    if parts[0] is not None:
        return parts[0], parts[1]
    if known is not None and known.mat and (held := matlab.find_svhn(folder)):
        return matlab.svhn_parts(held, limit)
    if known is not None and known.tiny and (place := imagenet.find_tiny(folder)):
        return imagenet.tiny_parts(place, limit, shape)
    idx = files.find_idx(folder)
    if idx:
        return files.idx_parts(idx, limit)
    # Not in the root itself (parquet=False): other data sets may keep JSON there.
    wanted = parquet and (known is None or known.leaf)
    return leaf.leaf_parts(folder, limit, shape) if wanted else None


def find_source(source: str, root: str | Path | None, what: str) -> Path:
    """The file or folder that a source names, as it is or under `root` or $FEDSPAN_DATA.

    Raises:
        DataError: if there is none, naming the places looked at.
    """
    path = Path(source).expanduser()
    if path.exists():
        return path
    base = root if root is not None else os.environ.get("FEDSPAN_DATA")
    if base and not path.is_absolute():
        under = inside(Path(base).expanduser(), source, "data.source")
        if under.exists():
            return under
    looked = f"{path} and {Path(base).expanduser() / source}" if base and not path.is_absolute() else str(path)
    raise DataError(
        f"Data: {what} '{source}' was not found. Looked at: {looked}. Write its path, or set data.root or"
        " $FEDSPAN_DATA to the folder that holds it."
    )


def _own(
    source: str, root: str | Path | None, columns: Mapping[str, str], limit: int
) -> tuple[FilePart, FilePart | None]:
    if not source or "\0" in source:
        raise ConfigError(f"Data: source must be a name, a path or a hub id. Got {source!r}.")
    if source.lower().endswith((".txt", ".txt.gz")):
        return play_parts(find_source(source, root, "the text"), limit)
    path = Path(source).expanduser()
    if not path.exists() and root is not None and not path.is_absolute():
        path = inside(Path(root).expanduser(), source, "data.source")
    if source.lower().endswith((".csv", ".csv.gz", ".tsv", ".tsv.gz")):
        raise ConfigError(
            f"Data: a table needs its target, the column to be predicted. Got {source!r:.80}; set data.target."
        )
    if path.is_dir():
        train, test = files.folder_parts(path, limit)
        if train:
            return join(train), join(test) if test else None
        found = _folder(path, None, columns, limit)
        if found is None:
            raise DataError(f"Data: folder {path} must hold .npz files, train.parquet, IDX or LEAF files. Got none.")
        return found
    if path.suffix == ".npz" and path.is_file():
        return files.npz_parts(path, limit)
    if path.suffix == ".parquet" and path.is_file():
        return tables.table_part(tables.parquet(path, limit), limit, None, columns), None
    if path.suffix in (".npz", ".parquet") or path.is_absolute() or source.startswith((".", "~")):
        what = "there is no such file" if not path.exists() else "must be .npz, .parquet or a folder"
        raise DataError(f"Data: source {source}: {what}.")
    if source.count("/") == 1:
        first, second = tables.hub(source)
        held = None if second is None else tables.table_part(second, limit, None, columns)
        return tables.table_part(first, limit, None, columns), held
    raise ConfigError(f"Data: unknown source '{source[:60]}'.{nearest(source[:60], [*SOURCES, *installed(GROUP)])}")
