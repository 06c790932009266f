"""SVHN's cropped digits as they are published: MATLAB files with X [32, 32, 3, n] and y [n, 1], where 10 stands for 0.

Files are untrusted. Only X and y are read, after the sizes that their headers declare have been checked.
"""

from __future__ import annotations

import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np

from fedspan.data.formats.arrays import npz_parts, too_big
from fedspan.data.formats.matlab5 import read_matrices
from fedspan.data.formats.part import FilePart, short
from fedspan.errors import DataError

FILES = ("train_32x32.mat", "test_32x32.mat")


def find_svhn(folder: Path) -> list[Path]:
    """What a folder holds of SVHN: an npz, or the MATLAB files, of which the one for training must be there."""
    if (folder / "svhn.npz").is_file():
        return [folder / "svhn.npz"]
    found = [folder / name for name in FILES]
    return [path for path in found if path.is_file()] if found[0].is_file() else []


def svhn_parts(found: list[Path], limit: int) -> tuple[FilePart, FilePart | None]:
    """Train and test part from the files that `find_svhn` found."""
    if found[0].suffix == ".npz":
        train, test = npz_parts(found[0], limit)
        return _digits(train), None if test is None else _digits(test)
    parts = [read_mat(path, limit) for path in found]
    return parts[0], parts[1] if len(parts) > 1 else None


def read_mat(path: Path, limit: int) -> FilePart:
    """One file of cropped digits (MATLAB 5 to 7.2), as pictures [n, 3, 32, 32] with labels 0 to 9.

    Raises:
        DataError: if the file is damaged, oversized, or holds something else.
    """
    try:
        size = path.stat().st_size
        if size > limit:
            raise too_big(path.name, size, limit)
        held = read_matrices(path.read_bytes(), ("X", "y"), limit, path.name)
    except DataError:
        raise
    except (OSError, ValueError, zlib.error) as error:  # version 7.3 is HDF5, and begins otherwise
        raise DataError(
            f"{path.name}: must be a MATLAB file of version 5 to 7.2, as SVHN is published. Got: {short(error)}."
        ) from None
    if not {"X", "y"} <= held.keys():
        raise DataError(f"{path.name}: must hold the variables X and y. Got {short_list(list(held))}.")
    X, y = held["X"], held["y"].reshape(-1)
    if X.ndim != 4 or X.dtype != np.uint8:
        raise DataError(f"{path.name}: X must be bytes of shape (32, 32, 3, n). Got {X.dtype} of shape {X.shape}.")
    if len(y) != X.shape[3] or not np.array_equal(y, np.round(y.astype(np.float64))):
        raise DataError(f"{path.name}: y must hold {X.shape[3]} whole numbers, one per picture. Got {y.shape}.")
    x = np.ascontiguousarray(X.transpose(3, 2, 0, 1))  # [height, width, channel, n] -> [n, channel, height, width]
    return _digits(FilePart(where=path.name, x=x, y=y.astype(np.int64)))


def _digits(part: FilePart) -> FilePart:
    """MATLAB counts from 1, so the published labels call the digit 0 ten."""
    return replace(part, y=np.where(part.y == 10, 0, part.y.astype(np.int64)))


def short_list(names: list[str]) -> str:
    """A few names out of a file, fit to be printed."""
    return short(ValueError(", ".join(names[:5]))) if names else "none"
