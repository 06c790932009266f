"""What every file reader hands over: the examples of one file, before train and test are put together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedspan.errors import DataError

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class FilePart:
    """One file: inputs as stored (uint8 images [N, C, H, W] or numbers), labels, and what else it says per example."""

    where: str
    x: Array
    y: Array
    coarse: Array | None = None
    client: Array | None = None
    domain: Array | None = None
    class_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.x.ndim < 2:
            raise DataError(
                f"{self.where}: x must have one row per example and at least one feature. Got shape {self.x.shape}."
            )
        if self.y.ndim != 1 or len(self.y) != len(self.x):
            raise DataError(
                f"{self.where}: y must hold one label per example, shape ({len(self.x)},). Got {self.y.shape}."
            )
        if self.y.dtype.kind not in "iub":
            raise DataError(
                f"{self.where}: labels must be integers. Got {self.y.dtype}; convert class labels with"
                " y.astype('int64'), and give real-valued targets through FederatedData.from_arrays."
            )
        for name in ("coarse", "client", "domain"):
            value = getattr(self, name)
            if value is not None and value.shape != self.y.shape:
                raise DataError(f"{self.where}: {name} must have shape {self.y.shape} like y. Got {value.shape}.")


def as_images(x: Array) -> Array:
    """Bytes are taken as pictures: grey [N, H, W] and channels-last [N, H, W, C] become [N, C, H, W]."""
    if x.dtype != np.uint8:
        return x
    if x.ndim == 3:
        return x[:, None]
    if x.ndim == 4 and x.shape[1] not in (1, 3) and x.shape[3] in (1, 3):
        return np.ascontiguousarray(x.transpose(0, 3, 1, 2))
    return x


def join(parts: list[FilePart]) -> FilePart:
    """Several files as one; a column that only some of them have is dropped.

    Raises:
        DataError: naming the file whose examples have another shape or type than those of the first.
    """
    first = parts[0]
    for part in parts[1:]:
        if part.x.shape[1:] != first.x.shape[1:]:
            raise DataError(
                f"{part.where}: examples must have shape {first.x.shape[1:]} like those of {first.where}."
                f" Got {part.x.shape[1:]}."
            )
        if (part.x.dtype == np.uint8) != (first.x.dtype == np.uint8):
            # Bytes are rescaled and floats are not, so a mixture would be two different features.
            raise DataError(f"{part.where}: x must be of type {first.x.dtype} like {first.where}. Got {part.x.dtype}.")
    if len(parts) == 1:
        return first

    def column(name: str) -> Array | None:
        values = [getattr(p, name) for p in parts]
        return None if any(v is None for v in values) else np.concatenate(values)

    return FilePart(
        where=first.where,
        x=np.concatenate([p.x for p in parts]),
        y=np.concatenate([p.y.astype(np.int64) for p in parts]),
        coarse=column("coarse"),
        client=column("client"),
        domain=column("domain"),
        class_names=first.class_names,
    )


def short(error: BaseException) -> str:
    """The first line of another library's error, to end one of our sentences with."""
    lines = str(error).strip().splitlines()
    return printable([lines[0].rstrip(".")])[0] if lines else type(error).__name__


def printable(names: list[Any]) -> list[str]:
    """Names out of a file, safe to print: no control characters (terminal escapes), at most 100 characters each."""
    return ["".join(c if c.isprintable() else "?" for c in str(n))[:100] for n in names]
