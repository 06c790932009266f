"""Array files: npz without pickle, IDX, and a folder with one npz per client.

Files are untrusted. Sizes are taken from the declared headers and checked before anything is allocated.
"""

from __future__ import annotations

import gzip
import math
import zipfile
import zlib
from pathlib import Path
from typing import IO, Any

import numpy as np

from fedspan.data.formats.part import Array, FilePart, as_images, printable, short
from fedspan.errors import DataError, inside, nearest

ARRAYS = ("x", "y", "x_test", "y_test", "client", "client_test", "domain", "domain_test", "class_names")


def too_big(where: str, size: int, limit: int) -> DataError:
    """The one sentence for every file that declares more than the limit."""
    return DataError(
        f"{where}: the data must take at most {limit / 2**30:.3g} GiB. Got {size / 2**30:.3g} GiB declared;"
        " raise max_bytes if you trust the file."
    )


def _header(stream: IO[bytes], where: str) -> tuple[tuple[int, ...], np.dtype[Any], int]:
    """Shape, type and header length of an npy stream, without reading its data."""
    version = np.lib.format.read_magic(stream)
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in readers:
        raise DataError(f"{where}: npy format version must be 1.0 or 2.0. Got {version[0]}.{version[1]}.")
    shape, _, dtype = readers[version](stream)
    return shape, dtype, stream.tell()


def _read_entry(archive: zipfile.ZipFile, info: zipfile.ZipInfo, where: str, limit: int) -> Array:
    with archive.open(info) as stream:
        shape, dtype, start = _header(stream, where)
    if dtype.hasobject:
        raise DataError(
            f"{where}: arrays must hold plain numbers. Got Python objects, which would need pickle; save with"
            " numbers of one type and one shape."
        )
    if dtype.kind not in "biufU" or dtype.itemsize == 0:
        raise DataError(f"{where}: arrays must hold numbers (or text for names). Got type {dtype}.")
    size = math.prod(shape) * dtype.itemsize
    if size > limit:
        raise too_big(where, size, limit)
    if start + size != info.file_size:
        raise DataError(
            f"{where}: the header must describe what is stored. Got {size} bytes declared, {info.file_size - start}"
            " stored; the file is damaged."
        )
    with archive.open(info) as stream:
        array: Array = np.lib.format.read_array(stream, allow_pickle=False)
    return array


def read_npz(path: Path, limit: int, labels: bool = True) -> dict[str, Array]:
    """The arrays of an npz file by name; no pickle, no more than `limit` bytes in all.

    Args:
        labels: whether y must be there.

    Raises:
        DataError: for object arrays, oversized or damaged files, unknown array names, or missing x or y.
    """
    arrays: dict[str, Array] = {}
    left = limit
    try:
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                name = info.filename.removesuffix(".npy")
                if name not in ARRAYS:
                    shown = printable([name])[0]
                    raise DataError(f"{path.name}: unknown array '{shown}'.{nearest(shown, ARRAYS)}")
                if name in arrays:
                    raise DataError(f"{path.name}: every array must appear once. Got '{name}' twice.")
                arrays[name] = _read_entry(archive, info, f"{path.name}, array '{name}'", left)
                left -= arrays[name].nbytes
    except DataError:
        raise
    except FileNotFoundError:
        raise DataError(f"{path}: there is no such file.") from None
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, NotImplementedError, RuntimeError) as error:
        # RuntimeError and NotImplementedError: encrypted entries and unknown compression.
        raise DataError(f"{path.name}: must be an npz file as numpy.savez writes it. Got: {short(error)}.") from None
    _check(path.name, arrays, ("x", "y") if labels else ("x",))
    return arrays


def _check(where: str, arrays: dict[str, Array], needed: tuple[str, ...]) -> None:
    for name in needed:
        if name not in arrays:
            what = "the arrays x and y" if len(needed) > 1 else "the array x"
            raise DataError(f"{where}: an npz needs {what}. Got {', '.join(sorted(arrays)) or 'none'}.")
    if ("x_test" in arrays) != ("y_test" in arrays):
        raise DataError(f"{where}: x_test and y_test must come together. Got only one of them.")
    for name in ("x", "x_test"):
        if name in arrays and arrays[name].dtype.kind not in "biuf":
            raise DataError(f"{where}: {name} must hold numbers. Got type {arrays[name].dtype}.")


def _part(where: str, arrays: dict[str, Array], test: bool, client: str | None) -> FilePart:
    end = "_test" if test else ""
    x, y = as_images(arrays["x" + end]), arrays["y" + end]
    return FilePart(
        where=f"{where} ({'test' if test else 'train'})",
        x=x,
        y=y,
        client=np.full(len(x), client) if client is not None else arrays.get("client" + end),
        domain=arrays.get("domain" + end),
        class_names=tuple(str(n) for n in arrays.get("class_names", np.empty(0, "U1")).ravel()),
    )


def npz_parts(path: Path, limit: int, client: str | None = None) -> tuple[FilePart, FilePart | None]:
    """Train part and, if the file has one, test part of an npz; `client` names the owner of all its examples."""
    return _parts(path.name, read_npz(path, limit), client)


def array_parts(where: str, arrays: dict[str, Array]) -> tuple[FilePart, FilePart | None]:
    """Train part and, if there is one, test part of arrays that are named as those of an npz.

    Raises:
        DataError: for unknown names, or arrays that cannot be examples.
    """
    for name in arrays:
        if name not in ARRAYS:
            raise DataError(f"{where}: unknown array '{name[:60]}'.{nearest(name[:60], ARRAYS)}")
    _check(where, arrays, ("x", "y"))
    return _parts(where, arrays, None)


def _parts(where: str, arrays: dict[str, Array], client: str | None) -> tuple[FilePart, FilePart | None]:
    train = _part(where, arrays, False, client)
    return train, _part(where, arrays, True, client) if "x_test" in arrays else None


def folder_parts(folder: Path, limit: int) -> tuple[list[FilePart], list[FilePart]]:
    """Train and test parts of a folder that holds one npz per client; the file's stem is the client's name.

    Raises:
        DataError: if a file is empty, or is a link that leads out of the folder.
    """
    train: list[FilePart] = []
    test: list[FilePart] = []
    for path in sorted(folder.glob("*.npz")):
        real = inside(folder, path.name, "client file")
        own, held = npz_parts(real, limit, path.stem)
        if len(own.x) == 0:
            raise DataError(f"{path.name}: client '{path.stem}' has no training examples. Remove the file.")
        train.append(own)
        limit -= own.x.nbytes + (0 if held is None else held.x.nbytes)
        if held is not None:
            test.append(held)
    return train, test


def read_idx(path: Path, ndim: int, limit: int) -> Array:
    """One IDX file of bytes with `ndim` dimensions, gzipped or not.

    Raises:
        DataError: for another magic number, an oversized or a damaged file.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
            magic = stream.read(4)
            if magic != bytes((0, 0, 8, ndim)):
                raise DataError(
                    f"{path.name}: must be an IDX file of bytes with {ndim} dimension(s). Got magic 0x{magic.hex()}."
                )
            header = stream.read(4 * ndim)
            if len(header) < 4 * ndim:
                raise DataError(f"{path.name}: the header must hold {ndim} sizes. Got its end; the file is damaged.")
            shape = tuple(int(n) for n in np.frombuffer(header, ">u4"))
            size = math.prod(shape)
            if size > limit:
                raise too_big(path.name, size, limit)
            data = stream.read(size + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path.name}: cannot be read: {short(error)}.") from None
    if len(data) != size:
        raise DataError(f"{path.name}: must hold {size} bytes of data. Got {len(data)}; the file is damaged.")
    return np.frombuffer(data, np.uint8).reshape(shape).copy()


def find_idx(folder: Path) -> dict[str, Path]:
    """The four IDX files of a folder by role ('train-images', ...); empty unless both training files are there."""
    found: dict[str, Path] = {}
    for part in ("train", "t10k"):
        for what, ndim in (("images", 3), ("labels", 1)):
            for dash in ("-", "."):
                for end in ("", ".gz"):
                    path = folder / f"{part}-{what}{dash}idx{ndim}-ubyte{end}"
                    if path.is_file():
                        found.setdefault(f"{part}-{what}", path)
    return found if {"train-images", "train-labels"} <= set(found) else {}


def idx_parts(files: dict[str, Path], limit: int) -> tuple[FilePart, FilePart | None]:
    """Train and test part from the files that `find_idx` found."""
    parts: list[FilePart | None] = []
    for part in ("train", "t10k"):
        if f"{part}-images" not in files or f"{part}-labels" not in files:
            parts.append(None)
            continue
        x = read_idx(files[f"{part}-images"], 3, limit)
        y = read_idx(files[f"{part}-labels"], 1, limit)
        parts.append(FilePart(where=files[f"{part}-images"].name, x=as_images(x), y=y))
        limit -= x.nbytes
    assert parts[0] is not None
    return parts[0], parts[1]
