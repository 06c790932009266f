"""Tiny-ImageNet as it is published: train/ID/images/*.JPEG, val/images/*.JPEG with val_annotations.txt, wnids.txt.

Files are untrusted. Names in the annotations must be plain file names; pictures are refused before they are decoded if
they are not of the common size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedspan.data.formats.arrays import too_big
from fedspan.data.formats.parquet import Shape, Table, need, table_part
from fedspan.data.formats.part import FilePart, printable, short
from fedspan.errors import DataError

FOLDER = "tiny-imagenet-200"
_ENDINGS = (".jpeg", ".jpg", ".png")
_LONGEST_LIST = 64 << 20


def find_tiny(folder: Path) -> Path | None:
    """The folder with wnids.txt and train/, here or in the archive's own folder below; None if it is not there."""
    found = (place for place in (folder, folder / FOLDER) if (place / "wnids.txt").is_file())
    return next((place for place in found if (place / "train").is_dir()), None)


def tiny_parts(folder: Path, limit: int, shape: Shape | None) -> tuple[FilePart, FilePart | None]:
    """Training pictures, and the validation pictures as the test part; classes are numbered as wnids.txt lists them.

    Raises:
        DataError: naming the file, if a list is damaged, a picture is missing, or there are too many bytes.
    """
    names = _lines(folder / "wnids.txt")
    number = {name: k for k, name in enumerate(names)}
    if not names or len(number) < len(names):
        raise DataError("wnids.txt: must list every class once. Got none, or one of them twice.")
    train: list[tuple[Path, int]] = []
    for name in names:
        place = folder / "train" / _plain(name, "wnids.txt")
        place = place / "images" if (place / "images").is_dir() else place
        if not place.is_dir():
            raise DataError(f"wnids.txt: every class must have a folder in train. Got none for {printable([name])[0]}.")
        pictures = sorted(p for p in place.iterdir() if p.suffix.lower() in _ENDINGS)
        train += [(p, number[name]) for p in pictures]
    held = _validation(folder / "val", number)
    first = _part(train, "train", limit, shape, names)
    return first, _part(held, "val", limit - first.x.nbytes, shape, names) if held else None


def _validation(folder: Path, number: dict[str, int]) -> list[tuple[Path, int]]:
    listed = folder / "val_annotations.txt"
    if not listed.is_file():
        return []
    found = []
    for k, line in enumerate(_lines(listed)):
        name, _, rest = line.partition("\t")
        label = rest.split("\t")[0]
        if label not in number:
            shown = printable([label])[0]
            raise DataError(f"val_annotations.txt: line {k + 1} must name a class of wnids.txt. Got '{shown}'.")
        found.append((folder / "images" / _plain(name, "val_annotations.txt"), number[label]))
    return found


def _lines(path: Path) -> list[str]:
    if path.stat().st_size > _LONGEST_LIST:
        raise too_big(path.name, path.stat().st_size, _LONGEST_LIST)
    try:
        return [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except UnicodeDecodeError as error:
        raise DataError(f"{path.name}: must be text. Got: {short(error)}.") from None


def _plain(name: str, where: str) -> str:
    """A name out of a list, as a file name that leads nowhere else."""
    if not name or name in (".", "..") or Path(name).name != name or not name.isprintable():
        raise DataError(f"{where}: names must be plain file names. Got '{printable([name])[0]}'.")
    return name


def _part(pictures: list[tuple[Path, int]], split: str, limit: int, shape: Shape | None, names: list[str]) -> FilePart:
    """Pictures read through a table, so that they are decoded, checked and kept in the cache like all others."""
    pa = need("pyarrow")
    if not pictures:
        raise DataError(f"{split}: must hold JPEG or PNG pictures. Got none.")
    h, size = hashlib.blake2b(digest_size=16), 0
    for path, label in pictures:
        try:
            stat = path.stat()
        except OSError:
            raise DataError(f"{split}: picture {printable([path.name])[0]} must be there. It is not.") from None
        h.update(f"{path}|{stat.st_size}|{stat.st_mtime_ns}|{label}\n".encode())
        size += stat.st_size
    if size > limit:
        raise too_big(split, size, limit)
    schema = pa.schema([("image", pa.binary()), ("label", pa.int64())])

    def batches(wanted: list[str]) -> Iterator[Any]:
        for k in range(0, len(pictures), 1024):
            some = pictures[k : k + 1024]
            columns = [
                pa.array([p.read_bytes() if name == "image" else y for p, y in some], schema.field(name).type)
                for name in wanted
            ]
            yield pa.record_batch(columns, names=wanted)

    table = Table(split, schema, len(pictures), batches, h.hexdigest())
    return replace(table_part(table, limit, shape), class_names=tuple(printable(names)))
