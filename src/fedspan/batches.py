"""Named minibatch streams: rows of indices into one flat pool, −1 for an empty slot.

Rows are drawn from (seed, round, client) alone, so the simulator and a deployed node see the same batches. All streams
of a round are prefixes of one sequence: a phase that is alone in one method and second in another sees the same data.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedspan.errors import ConfigError
from fedspan.randomness import fold, generator

Index: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True)
class Epochs:
    """E passes over the client's training data; without a number, the run's `train.epochs`."""

    number: int | None = None


@dataclass(frozen=True)
class Steps:
    """K minibatches, starting a new pass whenever the data run out."""

    number: int


@dataclass(frozen=True)
class All:
    """One pass over all training examples in their own order, nothing dropped."""


@dataclass(frozen=True)
class Validation:
    """One pass over the client's validation part in its own order."""


Amount: TypeAlias = Epochs | Steps | All | Validation


@dataclass(frozen=True)
class Batch:
    """One minibatch: inputs, labels, and weights that are 1 for an example and 0 for an empty slot.

    `mapped` says that the code runs for many clients at once, where gradients come from `torch.func`.
    """

    x: Tensor
    y: Tensor
    w: Tensor
    key: Tensor
    mapped: bool = False

    @property
    def live(self) -> Tensor:
        """Whether there is any example in it."""
        return self.w.any()


@dataclass(frozen=True)
class Batches:
    """K minibatches of one client. Iterating gives `Batch`es; when not mapped, empty slots are left out altogether."""

    x: Tensor
    y: Tensor
    rows: Tensor  # [K, B] indices into x and y, −1 = empty slot
    key: Tensor
    relabel: Tensor | None = None
    mapped: bool = False

    def __len__(self) -> int:
        return self.rows.shape[0]

    def __iter__(self) -> Iterator[Batch]:
        for k, row in enumerate(self.rows.unbind(0)):
            if not self.mapped:
                row = row[row >= 0]
                if len(row) == 0:
                    continue
            yield self._fetch(row, k)

    def _fetch(self, row: Tensor, step: int) -> Batch:
        at = row.clamp_min(0) if self.mapped else row
        y = self.y[at]
        if self.relabel is not None:
            y = self.relabel[y]
        dtype = self.x.dtype if self.x.is_floating_point() else torch.get_default_dtype()
        w = (row >= 0).to(dtype) if self.mapped else torch.ones(len(row), dtype=dtype, device=self.x.device)
        return Batch(self.x[at], y, w, fold(self.key, step), self.mapped)

    def first(self, k: int) -> Batches:
        """The first k of them."""
        return Batches(self.x, self.y, self.rows[:k], self.key, self.relabel, self.mapped)

    def whole(self) -> Batch:
        """All of them as one batch."""
        row = self.rows.reshape(-1)
        return self._fetch(row if self.mapped else row[row >= 0], 0)


def draw(
    train: Index,
    validation: Index,
    plan: Mapping[str, Amount],
    *,
    seed: int,
    round: int,
    client: int,
    batch_size: int | None,
    epochs: int,
    drop_last: bool = False,
) -> dict[str, Index]:
    """The index rows of every stream of one client in one round, each of shape [K, B], padded by −1.

    Args:
        batch_size: None means all examples in one batch.
        drop_last: leave out a last batch that is not full (unless it is the only one), for batch normalisation.
    """
    n = len(train)
    width = n if batch_size is None else min(batch_size, n)
    per_pass = n // width if drop_last else -(-n // width)
    passes: list[Index] = []
    rng = generator(seed, "batches", round, client)

    def shuffled(steps: int) -> Index:
        while len(passes) * per_pass < steps:
            passes.append(rows_of(rng.permutation(train), width)[:per_pass])
        if not steps:
            return np.empty((0, width), np.int64)
        return passes[0][:steps] if steps <= per_pass else np.concatenate(passes)[:steps]

    streams = {}
    for name, amount in plan.items():
        match amount:
            case Epochs(number):
                streams[name] = shuffled(per_pass * (epochs if number is None else number))
            case Steps(number):
                streams[name] = shuffled(number)
            case All():
                streams[name] = rows_of(train, width)
            case Validation():
                if len(validation) == 0:
                    raise ConfigError(
                        f"Batches: client {client} has no validation examples, which stream '{name}' needs."
                        " Set partition.validation to a fraction above 0."
                    )
                streams[name] = rows_of(validation, min(batch_size or len(validation), len(validation)))
    return streams


def rows_of(index: Index, width: int) -> Index:
    """Cut a list of indices into rows of `width`, the last one padded by −1."""
    width = max(1, width)
    steps = -(-len(index) // width)
    out = np.full(steps * width, -1, np.int64)
    out[: len(index)] = index
    return out.reshape(steps, width)


def pad(streams: Sequence[Index]) -> Tensor:
    """Stack one stream of several clients to [C, K, B] with the smallest K and B that hold them all."""
    steps, width = max(len(s) for s in streams), max(s.shape[1] for s in streams)
    out = np.full((len(streams), steps, width), -1, np.int64)
    for k, s in enumerate(streams):
        out[k, : s.shape[0], : s.shape[1]] = s
    return torch.from_numpy(out)
