"""Named minibatch streams: rows of indices into one flat pool, −1 for an empty slot.

Rows are drawn from (seed, round, client) alone, so the simulator and a deployed node see the same batches. All streams
of a round are prefixes of one sequence: a phase that is alone in one method and second in another sees the same data.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedspan import tree
from fedspan.errors import ConfigError
from fedspan.learn.folded import FoldedRows, is_folding, is_mapped, mapped_by_hand, stacked, unwrapped, wrapped
from fedspan.learn.perceptron import StackedRows
from fedspan.randomness import fold, generator
from fedspan.tree import Inputs

Index: TypeAlias = NDArray[np.int64]

TRANSFORMS = 0x7472616E
"""What sets the keys of transforms apart from those of dropout."""


class KeyedTransform(Protocol):
    """A pure function of a batch's inputs and a key; what it draws depends on the key alone."""

    def __call__(self, x: Inputs, key: Tensor) -> Inputs:
        """The inputs a model is trained on."""


@dataclass(frozen=True)
class Epochs:
    """E passes over the client's training data; without a number, the run's `train.epochs`."""

    number: int | None = None
    whole: bool = False
    """Whether it is also over what the plan's `Validation` with a share holds out."""


@dataclass(frozen=True)
class Steps:
    """K minibatches, starting a new pass whenever the data run out."""

    number: int


@dataclass(frozen=True)
class All:
    """One pass over all training examples in their own order, nothing dropped."""

    share: float = 1.0
    """The part of them that it is over, drawn anew in every round."""
    whole: bool = False
    """Whether it is also over what the plan's `Validation` with a share holds out."""


@dataclass(frozen=True)
class Portion:
    """One pass over a random share of the training data, another one in every round."""

    share: float


@dataclass(frozen=True)
class Validation:
    """One pass over the client's validation part in its own order.

    With a `share` it is that part of the training data instead, the same in every round, and the other streams of the
    plan leave it out, unless they are over the `whole`: for methods that hold out examples themselves, whatever the
    partition sets aside for the user.
    """

    share: float | None = None
    least: int | None = None
    """Clients with fewer examples hold out none; if not given, one alone is trained on and held out."""


Amount: TypeAlias = Epochs | Steps | All | Portion | Validation

SHUFFLED = (Epochs, Steps, Portion)
"""Amounts whose examples are transformed; passes in the examples' own order measure or fit."""


@dataclass(frozen=True)
class Batch:
    """One minibatch: inputs, labels, and which slots hold an example.

    `mapped` says that the code runs for many clients at once: there may be empty slots, and gradients come from
    `torch.func`. When not mapped, every slot holds an example.
    """

    x: Inputs
    y: Tensor
    slots: Tensor | None  # row indices, −1 = empty; None when not mapped
    stream: Tensor
    step: int
    rows: FoldedRows | None = field(default=None, compare=False)
    """How inputs and labels lie where clients are folded into the batch axis."""

    @property
    def folded(self) -> FoldedRows | None:
        """`rows`, where inputs and labels are still those that they describe."""
        rows = self.rows
        return rows if rows is not None and rows.x is self.x and rows.y is self.y and is_folding() else None

    @property
    def mapped(self) -> bool:
        """Whether many clients are computed at once."""
        return self.slots is not None

    @property
    def w(self) -> Tensor:
        """1 for an example, 0 for an empty slot."""
        real = (a.dtype for a in tree.leaves(self.x) if a.is_floating_point())
        dtype = next(real, torch.get_default_dtype())
        if self.slots is None:
            return torch.ones(len(self.y), dtype=dtype, device=self.y.device)
        return (self.slots >= 0).to(dtype)

    @property
    def mask(self) -> Tensor | None:
        """True where a slot holds an example; None where all do."""
        return None if self.slots is None else self.slots >= 0

    @property
    def live(self) -> Tensor:
        """Whether there is any example in it."""
        return torch.ones((), dtype=torch.bool) if self.slots is None else (self.slots >= 0).any()

    @property
    def key(self) -> Tensor:
        """A key for random numbers of this step alone."""
        return fold(self.stream, self.step)

    def mean(self, values: Tensor) -> Tensor:
        """Mean of per-example values over the examples; 0 if there is none."""
        if self.slots is None:
            return values.mean()
        w = self.w
        return (values * w).sum() / w.sum().clamp_min(1)


@dataclass(frozen=True)
class Batches:
    """K minibatches of one client. Iterating gives `Batch`es; when not mapped, empty slots are left out altogether."""

    x: Inputs
    y: Tensor
    rows: Tensor  # [K, B] indices into x and y, −1 = empty slot, only at the end of a row
    key: Tensor
    relabel: Tensor | None = None
    mapped: bool = False
    transform: KeyedTransform | None = None

    def __len__(self) -> int:
        return self.rows.shape[0]

    def __iter__(self) -> Iterator[Batch]:
        if self._foldable:
            yield from self._fetch_folded(self.rows)
            return
        sizes = None if self.mapped else (self.rows >= 0).sum(1).tolist()
        for k, row in enumerate(self.rows.unbind(0)):
            if sizes is None:
                yield self._fetch(row, k)
            elif sizes[k]:
                yield self._fetch(row[: sizes[k]], k)

    @property
    def _foldable(self) -> bool:
        return self.mapped and is_folding() and isinstance(self.x, Tensor) and is_mapped(self.rows)

    def _fetch_folded(self, rows: Tensor) -> Iterator[Batch]:
        """Minibatches [K, B] of all clients at once, without vmap: one selection of rows for each."""
        pool, labels, at, counts = self._places(rows)
        for k, row in enumerate(rows.unbind(0)):
            with mapped_by_hand():
                x, y = (a.index_select(0, at[k].view(-1)).view(*at[k].shape, *a.shape[1:]) for a in (pool, labels))
            yield self._batch(wrapped(x), wrapped(y), row, k, counts[k])

    def _places(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, list[tuple[int, ...]]]:
        """Inputs, labels, where in them the examples of minibatches [K, B] are, [K, C, B], and how many of each."""
        (slots, _), (pool, own), (labels, _) = unwrapped(rows), unwrapped(self.x), unwrapped(self.y)
        with mapped_by_hand():
            counts = [tuple(row) for row in (slots >= 0).sum(2).T.tolist()]
            at = slots.clamp_min(0).transpose(0, 1).contiguous()
            if own:  # every client has examples of its own, features say
                at += pool.shape[1] * torch.arange(len(slots), device=at.device)[:, None]
                pool, labels = pool.flatten(0, 1), labels.flatten(0, 1)
        return pool, labels, at, counts

    def of_clients(self, flat: bool) -> StackedRows | None:
        """Minibatches of all folded clients for classifiers of vectors; None where inputs or labels are not such.

        Args:
            flat: whether inputs of any shape are taken as vectors.
        """
        if not self._foldable or self.transform is not None:
            return None
        pool, labels, at, counts = self._places(self.rows)
        names, own = (None, True) if self.relabel is None else unwrapped(self.relabel)
        vectors = pool.is_contiguous() and pool.is_floating_point() and (flat or pool.ndim == 2)
        if not own or not vectors or labels.ndim != 1 or labels.dtype != torch.int64:
            return None
        with mapped_by_hand():
            return StackedRows(pool.view(len(pool), -1), labels, at, counts, names)

    def _fetch(self, row: Tensor, step: int) -> Batch:
        if self.mapped:
            at = row.clamp_min(0)
            x, y = tree.take(self.x, at), self.y[at]
        else:
            x, y = tree.map(lambda a: a.index_select(0, row), self.x), self.y.index_select(0, row)
        return self._batch(x, y, row, step)

    def _batch(self, x: Inputs, y: Tensor, row: Tensor, step: int, counts: Sequence[int] | None = None) -> Batch:
        if self.transform is not None:
            x = self.transform(x, fold(fold(self.key, TRANSFORMS), step))
        if self.relabel is not None:
            y = self.relabel[y]
        rows = FoldedRows(x, y, counts) if counts is not None and is_mapped(x) and is_mapped(y) else None
        return Batch(x, y, row if self.mapped else None, self.key, step, rows)

    def first(self, k: int) -> Batches:
        """The first k of them."""
        return replace(self, rows=self.rows[:k])

    def narrow(self, examples: int) -> Batches:
        """The first minibatch alone, and of it so many examples at most."""
        return replace(self, rows=self.rows[:1, :examples])

    def shifted(self, by: int) -> Batches:
        """The same minibatches starting `by` later, the first ones at the end; empty ones stay at the end."""
        live = (self.rows >= 0).any(1)
        turned = (torch.arange(len(self.rows), device=self.rows.device) + by) % live.sum().clamp_min(1)
        rows = torch.where(live[:, None], self.rows[turned], self.rows)
        return replace(self, rows=rows)

    @property
    def examples(self) -> Tensor:
        """How many examples they hold together, each as often as it comes."""
        return (self.rows >= 0).sum()

    def whole(self) -> Batch:
        """All of them as one batch."""
        row = self.rows.reshape(-1)
        if self._foldable:
            return next(self._fetch_folded(stacked(_filled_first, row)[None]))
        return self._fetch(row if self.mapped else row[row >= 0], 0)


def _filled_first(rows: Tensor) -> Tensor:
    """Rows [C, n] with their empty slots at the end, no wider than the fullest."""
    empty = rows < 0
    width = max(1, int((~empty).sum(1).max()))
    return rows.gather(1, empty.to(torch.int8).argsort(dim=1, stable=True)[:, :width])


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
        drop_last: for batch normalisation: leave out a last batch that is not full (unless it is the only one), and
            never make a batch of one example; a client that has only one takes no steps.
    """
    held = next((a for a in plan.values() if isinstance(a, Validation) and a.share is not None), None)
    everything = train
    if held is not None:
        train, validation = _hold_out(train, held, seed, client)
    some, both = (
        _Passes(own, batch_size, drop_last, generator(seed, "batches", round, client)) for own in (train, everything)
    )
    streams = {}
    for name, amount in plan.items():
        own = both if getattr(amount, "whole", False) else some
        match amount:
            case Epochs(number):
                streams[name] = own.shuffled(own.per_pass * (epochs if number is None else number))
            case Steps(number):
                streams[name] = own.shuffled(number)
            case Portion(share):
                drawn = _drawn(own.index, share, generator(seed, "part", round, client))
                streams[name] = own.in_order(drawn)
            case All(share):
                part = own.index
                if share < 1:
                    part = part[np.sort(_drawn(np.arange(len(part)), share, generator(seed, "all", round, client)))]
                streams[name] = own.in_order(part)
            case Validation(share):
                if len(validation) == 0 and share is None:
                    raise ConfigError(
                        f"Batches: client {client} has no validation examples, which stream '{name}' needs."
                        " Set partition.validation to a fraction above 0."
                    )
                streams[name] = rows_of(validation, min(batch_size or len(validation), len(validation)))
    return streams


class _Passes:
    """Passes over examples, shuffled or in their order, cut into rows of one width."""

    def __init__(self, index: Index, batch_size: int | None, drop_last: bool, rng: np.random.Generator) -> None:
        self.index, self.drop_last, self._rng = index, drop_last, rng
        n = len(index)
        self.width = n if batch_size is None else min(batch_size, n)
        self.per_pass = (n // self.width if self.width > 1 else 0) if drop_last else -(-n // self.width)
        self._passes: list[Index] = []

    def shuffled(self, steps: int) -> Index:
        """The first rows of one sequence of shuffled passes."""
        steps = steps if self.per_pass else 0
        while len(self._passes) * self.per_pass < steps:
            self._passes.append(rows_of(self._rng.permutation(self.index), self.width)[: self.per_pass])
        if not steps:
            return np.empty((0, self.width), np.int64)
        return self._passes[0][:steps] if steps <= self.per_pass else np.concatenate(self._passes)[:steps]

    def in_order(self, index: Index) -> Index:
        """Rows of these examples as they stand."""
        rows = rows_of(index, self.width)
        return _no_single(rows) if self.drop_last else rows


def _drawn(index: Index, share: float, rng: np.random.Generator) -> Index:
    """A random share of examples, at least one."""
    return rng.permutation(index)[: max(1, math.ceil(share * len(index) - 1e-9))]


def _hold_out(train: Index, held: Validation, seed: int, client: int) -> tuple[Index, Index]:
    """Training rows without a share of them, and that share, at least one; a lone example serves as both."""
    assert held.share is not None
    if held.least is not None and len(train) < held.least:
        return train, train[:0]
    if len(train) < 2:
        return train, train
    shuffled = generator(seed, "validation", client).permutation(train)
    n = min(max(1, round(len(train) * held.share)), len(train) - 1)
    return np.sort(shuffled[n:]), np.sort(shuffled[:n])


def rows_of(index: Index, width: int) -> Index:
    """Cut a list of indices into rows of `width`, the last one padded by −1."""
    width = max(1, width)
    steps = -(-len(index) // width)
    out = np.full(steps * width, -1, np.int64)
    out[: len(index)] = index
    return out.reshape(steps, width)


def _no_single(rows: Index) -> Index:
    """Rows of which none holds one example alone: it joins the row before, or is left out if there is none."""
    if len(rows) == 0 or (rows[-1] >= 0).sum() != 1:
        return rows
    if len(rows) == 1:
        return rows[:0]
    joined = np.full((len(rows) - 1, rows.shape[1] + 1), -1, np.int64)
    joined[:, :-1] = rows[:-1]
    joined[-1, -1] = rows[-1, 0]
    return joined


def pad(streams: Sequence[Index]) -> Tensor:
    """Stack one stream of several clients to [C, K, B] with the smallest K and B that hold them all."""
    steps, width = max(len(s) for s in streams), max(s.shape[1] for s in streams)
    out = np.full((len(streams), steps, width), -1, np.int64)
    for k, s in enumerate(streams):
        out[k, : s.shape[0], : s.shape[1]] = s
    return torch.from_numpy(out)
