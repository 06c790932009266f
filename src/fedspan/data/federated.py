"""What a federation's data look like to everything else: one pool of examples, and who holds which."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedspan import tree
from fedspan.errors import DataError
from fedspan.learn.transforms import OwnTransform, Transforms
from fedspan.method.fields import build
from fedspan.randomness import generator
from fedspan.tree import Inputs

if TYPE_CHECKING:
    from fedspan.data.tables.preprocessing import Preprocessing

Index = NDArray[np.int64]

MANY_CLASSES = 1000
"""Beyond so many classes labels must fill a tenth of them, or somebody must say how many there are."""


@dataclass(frozen=True)
class FederatedData:
    """One flat pool of examples and, per client, the rows it trains, validates and tests on.

    `relabel[i]` is client i's own naming of the classes (a permutation): its label for pool row e is
    `relabel[i][y[e]]`. `groups[i]` is the true group of client i in scenarios that know it. `y` is [n], or [n, k] for
    several targets. `x` is a tensor, or a dict or tuple of them, which a model is called with by name or by place.
    `task` says what kind of task the targets look like, where whoever made the data knows; how rows of a table became
    examples is in `preprocessing`; `transforms` change inputs while training.
    """

    x: Inputs
    y: Tensor
    train: list[Index]
    test: list[Index]
    validation: list[Index] = field(default_factory=list)
    classes: int | None = None
    relabel: Tensor | None = None
    groups: Tensor | None = None
    names: list[str] = field(default_factory=list)
    class_names: list[str] = field(default_factory=list)
    source: str = "arrays"
    task: str | None = None
    preprocessing: Preprocessing | None = None
    transforms: Transforms | None = None
    membership: Tensor | None = None
    """Where clients mix groups: each one's shares of them [clients, groups]; `groups` is then its main group."""
    group_names: list[str] = field(default_factory=list)
    """How each group sees its examples, where that differs."""

    def __post_init__(self) -> None:
        if not self.validation:
            object.__setattr__(self, "validation", [np.empty(0, np.int64) for _ in self.train])
        check(self)
        if not self.names:
            object.__setattr__(self, "names", [str(i) for i in range(len(self.train))])

    @property
    def clients(self) -> int:
        """Number of clients."""
        return len(self.train)

    @property
    def sizes(self) -> Index:
        """Number of training examples of each client."""
        return self._sizes.copy()

    @cached_property
    def _sizes(self) -> Index:
        return np.array([len(i) for i in self.train], np.int64)

    def labels(self, client: int, part: str = "train") -> Tensor:
        """The labels of one client as that client names them; `part` is train, validation or test."""
        y = self.y[torch.from_numpy(getattr(self, part)[client])]
        return y if self.relabel is None else self.relabel[client][y]

    def to(self, dtype: torch.dtype) -> FederatedData:
        """The same data with floating inputs (and real-valued targets) in another precision."""
        x = tree.map(lambda a: a.to(dtype) if a.is_floating_point() else a, self.x)
        y = self.y.to(dtype) if self.y.is_floating_point() else self.y
        return replace(self, x=x, y=y)

    def transformed(self, *functions: OwnTransform, **changes: Any) -> FederatedData:
        """The same data, whose training inputs are changed at random: `data.transformed(my_function, crop=2)`.

        Args:
            functions: own ones of (inputs, key), called last; see `fedspan.Transforms` for the others.
        """
        made = build(Transforms, changes, "Transforms")
        made = replace(made, functions=(*made.functions, *functions))
        return replace(self, transforms=made if made else None)

    @staticmethod
    def from_arrays(
        clients: Sequence[tuple[Any, Tensor | NDArray[np.generic]]],
        *,
        test: Sequence[tuple[Any, Tensor | NDArray[np.generic]]] | None = None,
        test_fraction: float = 0.25,
        validation_fraction: float = 0.0,
        groups: Sequence[int] | None = None,
        classes: int | None = None,
        seed: int = 0,
    ) -> FederatedData:
        """One (x, y) pair per client. Without `test`, each client's examples are split by a keyed shuffle.

        x is an array, or a dict or tuple of them; `fedspan.federate` also takes data sets and frames. Integer labels
        are classes (0..`classes`−1, by default up to the largest seen), real ones regression targets.

        Raises:
            DataError: naming the client, if shapes, types, labels or values are not usable.
        """
        if not clients:
            raise DataError("Data: there must be at least one client. Got none.")
        xs: list[Inputs] = []
        ys: list[Tensor] = []
        train, held, valid = list[Index](), list[Index](), list[Index]()
        start = 0
        for part, pairs in (("train", clients), ("test", test or [])):
            if part == "test" and test is not None and len(test) != len(clients):
                raise DataError(f"Data: test needs one pair per client ({len(clients)}). Got {len(test)}.")
            for i, pair in enumerate(pairs):
                if not isinstance(pair, tuple | list) or len(pair) != 2:
                    raise DataError(
                        f"Data: client {i} must be an (x, y) pair. Got {type(pair).__name__}; use fedspan.federate for"
                        " data sets and frames."
                    )
                x = tree.map(lambda a, i=i: _tensor(a, i, "examples"), pair[0])
                y = _tensor(pair[1], i, "labels")
                lengths = {len(a) for a in tree.leaves(x)}
                if lengths == {0} and part == "train":
                    raise DataError(f"Data: client {i} has no training examples. Remove it.")
                if ys and y.is_floating_point() != ys[0].is_floating_point():
                    # Joined, integers would silently become real-valued targets.
                    raise DataError(
                        f"Data: labels of client {i} must be of the same kind as those of client 0 ({ys[0].dtype})."
                        f" Got {y.dtype}."
                    )
                if lengths != {len(y)}:
                    many = " and ".join(str(n) for n in sorted(lengths))
                    raise DataError(f"Data: client {i} must have as many labels as examples. Got {many} and {len(y)}.")
                if xs and shape_of(x) != shape_of(xs[0]):
                    raise DataError(
                        f"Data: examples of client {i} must have shape {shape_of(xs[0])} like those of the other"
                        f" clients. Got {shape_of(x)}."
                    )
                rows = np.arange(start, start + len(y), dtype=np.int64)
                start += len(y)
                xs.append(x)
                ys.append(y)
                if part == "test":
                    held.append(rows)
                else:
                    a, b, c = split(rows, i, seed, test_fraction if test is None else 0.0, validation_fraction)
                    train.append(a)
                    valid.append(b)
                    if test is None:
                        held.append(c)
        x, y = tree.map(lambda *a: torch.cat(a), *xs), torch.cat(ys)
        # Other integers are tokens or ids and stay; among several inputs truth values are masks.
        whole = (torch.uint8, torch.float64, *([torch.bool] if isinstance(x, Tensor) else []))
        x = tree.map(lambda a: a.float() if a.dtype in whole else a, x)
        if y.is_floating_point():
            classes = None
        elif classes is None:
            classes = count_classes(y.numpy(), "Data")
        return FederatedData(
            x=x,
            y=y if y.is_floating_point() else y.long(),
            train=train,
            test=held,
            validation=valid,
            classes=classes,
            groups=None if groups is None else torch.as_tensor(groups),
        )


def count_classes(y: NDArray[np.generic], who: str) -> int:
    """How many classes integer labels have when nobody says it: one more than the largest.

    Raises:
        DataError: if one label lies so far outside the others that a model would have a thousand outputs for nothing.
    """
    labels = np.unique(y)  # rows of tokens are no single labels: they hold few of a vocabulary
    count = max(1, int(labels[-1]) + 1)
    if y.ndim == 1 and count > MANY_CLASSES and count > 10 * len(labels):
        held = f"of {len(labels)} different labels the largest is {labels[-1]}"
        held += f" and the next {labels[-2]}" if len(labels) > 1 else ""
        raise DataError(
            f"{who}: labels must be numbers from 0 on, one for each class. Got {count} classes, but {held}; correct it,"
            " or say how many classes there are (data.classes)."
        )
    return count


def shape_of(x: Inputs) -> Any:
    """The shape of an example; of several inputs by name."""
    if isinstance(x, Tensor):
        return tuple(x.shape[1:])
    return {path: tuple(leaf.shape[1:]) for path, leaf in tree.items(x)}


def _tensor(value: Tensor | NDArray[np.generic], client: int, what: str) -> Tensor:
    """A tensor with one row per example, or a sentence that names the client."""
    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"Data: {what} of client {client} must be an array of numbers. Got: {error}.") from None
    if tensor.ndim == 0 or tensor.is_complex():
        raise DataError(
            f"Data: {what} of client {client} must be an array of real numbers, one row per example."
            f" Got {tensor.dtype} of shape {tuple(tensor.shape)}."
        )
    return tensor


def split(
    rows: Index, client: int, seed: int, test_fraction: float = 0.25, validation_fraction: float = 0.0
) -> tuple[Index, Index, Index]:
    """Split one client's rows into train, validation, test by a shuffle keyed by (seed, client).

    One example is always left for training, and of two or more at least one is for testing (if a test is wanted).
    """
    if test_fraction == 0 and validation_fraction == 0:
        return rows, rows[:0], rows[:0]
    rows = generator(seed, "split", client).permutation(rows)
    n = len(rows)
    n_test = min(round(n * test_fraction), max(0, n - 1))
    if test_fraction > 0 and n >= 2:
        n_test = max(1, n_test)
    n_valid = min(round(n * validation_fraction), max(0, n - 1 - n_test))
    n_train = n - n_test - n_valid
    return rows[:n_train], rows[n_train : n_train + n_valid], rows[n_train + n_valid :]


def check(data: FederatedData) -> None:
    """Refuse data that cannot be trained on, naming the client and the value.

    Raises:
        DataError: for non-finite inputs, labels outside 0..classes−1, rows outside the pool, or clients without
            any training example.
    """
    n = len(data.y)
    for leaf in tree.leaves(data.x):
        if len(leaf) != n:
            raise DataError(f"Data: the pool must have as many labels as examples. Got {len(leaf)} and {n}.")
    if not data.train:
        raise DataError("Data: there must be at least one client. Got none.")
    if len(data.test) != len(data.train):
        raise DataError(f"Data: every client needs a test part. Got {len(data.test)} for {len(data.train)} clients.")
    for name, count in (
        ("validation", len(data.validation)),
        ("names", len(data.names) or len(data.train)),
        ("groups", len(data.train) if data.groups is None else len(data.groups)),
    ):
        if count != len(data.train):
            raise DataError(f"Data: {name} must have one entry per client ({len(data.train)}). Got {count}.")
    if data.classes is not None and data.classes < 1:
        raise DataError(f"Data: classes must be at least 1. Got {data.classes}.")
    if data.relabel is not None and tuple(data.relabel.shape) != (len(data.train), data.classes):
        raise DataError(
            f"Data: relabel must have shape (clients, classes) = {(len(data.train), data.classes)}."
            f" Got {tuple(data.relabel.shape)}."
        )
    owner = np.full(n, -1, np.int64)
    for i, parts in enumerate(zip(data.train, data.test, data.validation)):
        if len(parts[0]) == 0:
            raise DataError(
                f"Data: client {i} has no training examples. Remove it, or raise min_samples in [partition]."
            )
        for rows in parts:
            if len(rows) and (rows.min() < 0 or rows.max() >= n):
                raise DataError(f"Data: rows of client {i} must lie in 0..{n - 1}. Got {rows.min()}..{rows.max()}.")
            owner[rows] = i
    for leaf in tree.leaves(data.x):
        if not leaf.is_floating_point():
            continue
        flat = leaf.reshape(n, -1)
        # Summing first is one cheap pass; only a non-finite sum needs the search for the culprit.
        if not bool(torch.isfinite(flat.sum())):
            bad = (~torch.isfinite(flat).all(1)).nonzero()
            if len(bad):
                e = int(bad[0])
                raise DataError(
                    f"Data: features must be finite. Got NaN or infinity in {len(bad)} example(s), first in pool row"
                    f" {e} of client {owner[e]}. Clean or drop them."
                )
    if data.classes is not None:
        if data.y.is_floating_point():
            raise DataError(f"Data: class labels must be integers. Got {data.y.dtype}.")
        bad = ((data.y < 0) | (data.y >= data.classes)).nonzero()
        if len(bad) and data.y.ndim == 1:
            e = int(bad[0])
            raise DataError(
                f"Data: labels must lie in 0..{data.classes - 1}. Got {int(data.y[e])} in pool row {e} of client"
                f" {owner[e]}."
            )
    elif data.y.is_floating_point() and not bool(torch.isfinite(data.y).all()):
        e = int((~torch.isfinite(data.y.reshape(n, -1)).all(1)).nonzero()[0])
        raise DataError(f"Data: targets must be finite. Got NaN or infinity in pool row {e} of client {owner[e]}.")
