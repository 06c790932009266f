"""Get a known data set once: from a folder that mirrors it, or from the Hugging Face hub."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from fedspan.data.formats.arrays import find_idx
from fedspan.data.formats.parquet import need, parquet
from fedspan.data.formats.part import short
from fedspan.data.sources.catalog import KNOWN, Known
from fedspan.data.sources.load import HELD, MAX_BYTES
from fedspan.errors import ConfigError, DataError, nearest, safe_name
from fedspan.storage.atomic import make_directory, replacing, writing


class Fetched(NamedTuple):
    """Where a data set is now, what its files are, and where they came from."""

    place: Path
    files: list[str]
    origin: str


def data_root(root: str | Path | None) -> Path:
    """The folder that data sets are put into and looked for: as given, or $FEDSPAN_DATA.

    Raises:
        ConfigError: if neither says it.
    """
    base = root if root is not None else os.environ.get("FEDSPAN_DATA")
    if not base:
        raise ConfigError(
            "Data: there must be a folder for data sets. Got none; set $FEDSPAN_DATA, or give --root DIR."
        )
    return Path(base).expanduser()


def fetch(name: str, root: str | Path | None = None, mirror: str | Path | None = None) -> Fetched:
    """Put a data set of `KNOWN` under ROOT/NAME, unless it is there.

    Args:
        mirror: a folder that holds it, as NAME/train.parquet and NAME/test.parquet (or IDX files); without it the hub
            is asked, which needs the `datasets` library and a network.

    Raises:
        ConfigError: for a name that is not known, or if no folder is given.
        DataError: if it cannot be had, with what is needed.
        WriteError: if it cannot be written.
    """
    if name == "digits":
        return Fetched(Path(), [], "scikit-learn, which bundles it; nothing has to be put anywhere")
    if name not in KNOWN:
        raise ConfigError(f"Data: '{name[:60]}' is no data set that can be had by name.{nearest(name[:60], KNOWN)}")
    place = data_root(root) / safe_name(name, "Data: a data set")
    held = _files(place)
    if held:
        return Fetched(place, [p.name for p in held], "an earlier time")
    if mirror is not None:
        files, origin = _from_mirror(name, Path(mirror).expanduser(), place), str(mirror)
    else:
        files, origin = _from_hub(name, KNOWN[name], place), f"the hub, {KNOWN[name].hub}"
    for path in files:
        if path.suffix == ".parquet":
            parquet(path, MAX_BYTES)  # a damaged copy is said now, not when it is trained on
    return Fetched(place, [p.name for p in files], origin)


def _files(folder: Path) -> list[Path]:
    """The files of a folder that a data set is read from; none unless there is a training part."""
    if not folder.is_dir():
        return []
    tables = sorted({p for part in ("train", *HELD) for p in folder.glob(f"{part}*.parquet")})
    if any(p.name.startswith("train") for p in tables):
        return tables
    idx, digits = find_idx(folder), sorted(folder.glob("*_32x32.mat"))
    return sorted(idx.values()) if idx else digits if any(p.name.startswith("train") for p in digits) else []


def _from_mirror(name: str, mirror: Path, place: Path) -> list[Path]:
    found = _files(mirror / name) or _files(mirror)
    if not found:
        raise DataError(
            f"Data: '{name}' was not found in the mirror. Looked at: {mirror / name}, {mirror}. It must hold"
            " train.parquet and test.parquet, or IDX files."
        )
    made = []
    with writing(place):
        make_directory(place)
    for source in sorted(found, key=lambda p: p.name.startswith("train")):  # what counts as having it comes last
        with replacing(place / source.name) as temporary:
            shutil.copyfile(source, temporary)
        made.append(place / source.name)
    return made


def _from_hub(name: str, known: Known, place: Path) -> list[Path]:
    datasets = need("datasets")
    try:
        found: Any = (
            datasets.load_dataset(known.hub, known.hub_config) if known.hub_config else datasets.load_dataset(known.hub)
        )
    except Exception as error:  # no network, gated, moved: the library has its own kinds
        raise DataError(
            f"Data: '{name}' could not be had from the Hugging Face hub ({known.hub}): {short(error)}. It needs a"
            f" network; or give a folder that holds it: fedspan data get {name} --mirror DIR."
        ) from None
    if "train" not in found:
        raise DataError(f"Data: '{known.hub}' must have a split called train. Got {', '.join(found)}.")
    held = next((s for s in HELD if s in found), None)
    made = []
    with writing(place):
        make_directory(place)
    for split, file in ((held, "test.parquet"), ("train", "train.parquet")):
        if split is not None:
            with replacing(place / file) as temporary:
                found[split].to_parquet(str(temporary))
            made.append(place / file)
    return made
