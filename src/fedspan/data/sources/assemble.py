"""One normalised pool of examples out of what the file readers hand over."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from fedspan.data.federated import Index, count_classes
from fedspan.data.formats.part import Array, FilePart, join, printable
from fedspan.data.sources.catalog import DOMAINS, Known
from fedspan.errors import ConfigError, DataError
from fedspan.randomness import generator

_MAX_CLASSES = 1_000_000
_NONE = np.empty(0, np.int64)


@dataclass(frozen=True, eq=False, kw_only=True)
class Source:
    """One pool of examples: normalised float32 inputs [N, ...] and integer labels [N].

    `test_rows` are the rows of the source's own test file. `client`, `domain` and `coarse` are per example, −1 where
    it has none; their names are in the lists beside them. `mean` and `std` are the constants x was normalised with.
    """

    name: str
    x: Tensor
    y: Tensor
    classes: int
    test_rows: Index = field(default_factory=lambda: _NONE)
    class_names: list[str] = field(default_factory=list)
    coarse: Index | None = None
    coarse_names: list[str] = field(default_factory=list)
    client: Index | None = None
    client_names: list[str] = field(default_factory=list)
    domain: Index | None = None
    domain_names: list[str] = field(default_factory=list)
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)

    def __len__(self) -> int:
        return len(self.y)

    @property
    def train_rows(self) -> Index:
        """The rows that are not of the source's own test file."""
        return np.setdiff1d(np.arange(len(self), dtype=np.int64), self.test_rows)

    def take(self, rows: Index) -> Source:
        """The same source with only these rows, in this order."""
        keep = torch.from_numpy(rows)
        return replace(
            self,
            x=self.x[keep],
            y=self.y[keep],
            test_rows=np.flatnonzero(np.isin(rows, self.test_rows)),
            coarse=None if self.coarse is None else self.coarse[rows],
            client=None if self.client is None else self.client[rows],
            domain=None if self.domain is None else self.domain[rows],
        )


def assemble(
    name: str,
    train: FilePart,
    test: FilePart | None,
    known: Known | None,
    *,
    size: int | None,
    limit: int | None,
    seed: int,
    classes: int | None,
) -> Source:
    """One pool from a train and perhaps a test file: checked, limited, shrunk and normalised (see `sources.load`).

    Raises:
        DataError: naming file and row, if shapes, labels or values are not usable.
    """
    if known is not None and train.x.shape[1:] != known.shape:
        raise DataError(f"{train.where}: pictures of {name} must be {known.shape}. Got {train.x.shape[1:]}.")
    n_train = len(train.x)
    both = [train] if test is None else [train, test]
    join([replace(p, x=p.x[:0], y=p.y[:0], coarse=None, client=None, domain=None) for p in both])  # same shape and type
    x = [p.x for p in both]
    y = np.concatenate([p.y.astype(np.int64) for p in both])
    if len(y) == 0:
        raise DataError(f"{train.where}: there must be at least one example. Got none.")
    names = list(train.class_names or (known.class_names if known is not None else ()))
    count = _count_classes(train.where, y, len(names) or None, classes)
    client, client_names = _ids([p.client for p in both], [len(p.y) for p in both])
    domain, domain_names = _ids([p.domain for p in both], [len(p.y) for p in both])
    coarse, _ = _ids([p.coarse for p in both], [len(p.y) for p in both], numbers=True)
    coarse_names = list(known.coarse_names) if known is not None else []
    if coarse is not None and coarse_names:
        domain, domain_names = _superclass_domains(coarse, coarse_names)
    rows = np.arange(len(y), dtype=np.int64)
    if limit is not None and limit < len(y):
        rows = balanced(y, n_train, limit, seed)
        x = [np.concatenate(x)[rows]]
    mean, std = _constants(name, x[0], known)
    return Source(
        name=name,
        x=_normalise(train.where, x, mean, std, size),
        y=torch.from_numpy(y[rows]),
        classes=count,
        test_rows=np.flatnonzero(rows >= n_train),
        class_names=printable(names) if names and len(names) == count else [str(i) for i in range(count)],
        coarse=None if coarse is None else coarse[rows],
        coarse_names=coarse_names,
        client=None if client is None else client[rows],
        client_names=client_names,
        domain=None if domain is None else domain[rows],
        domain_names=domain_names,
        mean=mean,
        std=std,
    )


def _count_classes(where: str, y: Array, named: int | None, given: int | None) -> int:
    count = given or named
    high = _MAX_CLASSES if count is None else count
    bad = np.flatnonzero((y < 0) | (y >= high))
    if len(bad):
        raise DataError(f"{where}: labels must lie in 0..{high - 1}. Got {y[bad[0]]} in row {bad[0]}.")
    return count or count_classes(y, where)


def _ids(columns: list[Array | None], lengths: list[int], numbers: bool = False) -> tuple[Index | None, list[str]]:
    """Per-example ids 0..k−1 in sorted order of their names; −1 for a file that does not say."""
    if columns[0] is None:
        return None, []
    if numbers:
        plain = [np.full(n, -1, np.int64) if c is None else c.astype(np.int64) for c, n in zip(columns, lengths)]
        return np.concatenate(plain), []
    said = np.concatenate([c if c.dtype.kind in "iu" else c.astype(str) for c in columns if c is not None])
    names, ids = np.unique(said, return_inverse=True)
    missing = sum(n for c, n in zip(columns, lengths) if c is None)  # only the test file can lack a column
    return np.concatenate([ids.astype(np.int64), np.full(missing, -1, np.int64)]), printable(names.tolist())


def _superclass_domains(coarse: Index, names: list[str]) -> tuple[Index, list[str]]:
    domain = np.full(len(coarse), -1, np.int64)
    for d, members in enumerate(DOMAINS.values()):
        domain[np.isin(coarse, [names.index(m) for m in members])] = d
    return domain, list(DOMAINS)


def balanced(y: Array, n_train: int, limit: int, seed: int) -> Index:
    """A keyed subset: train and test file in proportion, and inside each as equal over the classes as they allow."""
    kept: list[Index] = []
    n_test = round(limit * (len(y) - n_train) / len(y))
    for start, stop, n in ((0, n_train, limit - n_test), (n_train, len(y), n_test)):
        rows = generator(seed, "limit", start).permutation(np.arange(start, stop, dtype=np.int64))
        rank = np.empty(len(rows), np.int64)
        for label in np.unique(y[rows]):
            where = np.flatnonzero(y[rows] == label)
            rank[where] = np.arange(len(where))
        kept.append(np.sort(rows[np.argsort(rank, kind="stable")[:n]]))
    return np.concatenate(kept)


def _constants(name: str, x: Array, known: Known | None) -> tuple[tuple[float, ...], tuple[float, ...]]:
    if known is not None:
        return known.mean, known.std
    if name == "digits":
        return (0.3053,), (0.3760,)
    # Unknown pictures go to [−1, 1]; numbers are the user's own and stay as they are.
    return ((0.5,), (0.5,)) if x.dtype == np.uint8 else ((0.0,), (1.0,))


def _normalise(
    where: str, parts: list[Array], mean: tuple[float, ...], std: tuple[float, ...], size: int | None
) -> Tensor:
    """Float32 inputs of all parts; slices are changed where they lie, as touching fresh memory costs the most."""
    shape = parts[0].shape[1:]
    if size is not None:
        if len(shape) != 3 or size > min(shape[1:]):
            raise ConfigError(
                f"Data: size can only shrink pictures. Got size={size} for inputs of shape {tuple(shape)}."
            )
        shape = (shape[0], size, size)
    out = torch.empty(sum(map(len, parts)), *shape)
    pixels = parts[0].dtype == np.uint8
    per_channel = (1, -1, *([1] * (len(shape) - 1))) if len(mean) > 1 else (1,)
    shift, scale = torch.tensor(mean).reshape(per_channel), torch.tensor(std).reshape(per_channel)
    end = 0
    for given in (x[at : at + 1024] for x in parts for at in range(0, len(x), 1024)):
        start, end = end, end + len(given)
        piece = out[start:end]
        whole = piece if size is None else torch.empty(given.shape)
        with np.errstate(over="ignore"):  # too large for float32 becomes infinite and is refused below
            np.copyto(whole.numpy(), given, casting="unsafe")
        if not pixels:
            bad = (~torch.isfinite(whole.flatten(1)).all(1)).nonzero()
            if len(bad):
                raise DataError(
                    f"{where}: features must be finite. Got NaN or infinity, first in row {start + int(bad[0])}."
                    " Clean or drop such examples."
                )
        if size is not None:
            piece.copy_(torch.nn.functional.adaptive_avg_pool2d(whole, size))
        if pixels:
            piece.div_(255.0)
        piece.sub_(shift).div_(scale)
    return out
