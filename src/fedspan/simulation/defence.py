"""A first defence against clients that lie: changes are clipped to what is usual, and weights are capped.

Judged is what an upload changes of what its client was sent, not the upload as a whole. Every part of it (parameters,
a gradient, a prototype) is cut to a quantile of recent norms of that part, and a client's weight to a multiple of the
recent median. A bound comes from rounds before, so that uploads can be added up as they come; what has no past (the
first round, a part that was zero so far) waits until the round is in, and is then judged by the round itself.

Parts have bounds of their own, as they are of different kinds: coefficients of the size of one beside a change a
hundredth of that, and one bound for both would leave the change free.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
import torch
from annotated_types import Ge, Le
from torch import Tensor

from fedspan import tree
from fedspan.data.federated import Index
from fedspan.errors import CheckpointError
from fedspan.method import Abilities, Capacity, Sent
from fedspan.method.fields import AtLeast1, Share, check
from fedspan.tree import Outer, Tree

FEW = 3
"""From so many values on, their quantile says what is usual."""

WEIGHT = "weight"
"""The key of an upload's weight; that of a part's own weights is `weight of NAME`, that of a part's change its name."""

MOST_NAMED = 10
"""Clients that a round's line names, those cut most; all are counted."""

Values: TypeAlias = dict[str, list[float]]
"""Of one round: the norms of each part's changes and the weights, by key; zeros say nothing and are left out."""

Bounds: TypeAlias = Mapping[str, float]
"""The largest norm of each part's change and the largest weights, by key; a key without one is not known yet."""


@dataclass(frozen=True, kw_only=True)
class Defence:
    """`[defence]`: how the server guards itself against uploads that are well-formed and false."""

    rule: Literal["none", "clip"] = "none"
    """`none` believes every upload; `clip` cuts each part's change to a usual norm, and weights to a usual size."""
    quantile: Share = 0.6
    """Of recent norms of a part's change, the one that no change may exceed; 0.5 is the median, 1 the largest."""
    window: AtLeast1 = 3
    """Rounds whose norms and weights are recent."""
    most_weight: Annotated[float, Ge(1), Le(math.inf)] = 2.0
    """The most that an upload may weigh, in medians of recent weights; `inf` sets no limit."""

    def __post_init__(self) -> None:
        check(self, "Defence")

    @property
    def on(self) -> bool:
        """Whether uploads are judged at all."""
        return self.rule != "none"

    def bounds(self, rounds: Iterable[Values]) -> dict[str, float]:
        """What changes and weights may be after these rounds; keys of which too little is known are left out."""
        pooled: Values = {}
        for values in rounds:
            for key, some in values.items():
                pooled.setdefault(key, []).extend(some)
        return {key: self._bound(key, some) for key, some in pooled.items() if len(some) >= FEW}

    def _bound(self, key: str, values: list[float]) -> float:
        if _is_weight(key):
            return self.most_weight * float(np.median(values))
        return float(np.quantile(values, self.quantile))

    def capped_sizes(self, sizes: Index) -> Index:
        """Registered numbers of examples, none beyond the most that an upload may weigh."""
        known = sizes[sizes > 0]
        if not self.on or len(known) < FEW or math.isinf(self.most_weight):
            return sizes
        return np.minimum(sizes, np.int64(self.most_weight * float(np.median(known))))


@dataclass(frozen=True)
class Measured:
    """What is judged of one upload, by key."""

    values: Mapping[str, float]

    def known(self, bounds: Bounds) -> bool:
        """Whether there is a bound for everything in it that is not zero."""
        return all(key in bounds for key, value in self.values.items() if value > 0)

    def shares(self, bounds: Bounds) -> dict[str, float]:
        """What is left of everything that exceeds its bound, in [0, 1)."""
        over = {k: bounds[k] / v for k, v in self.values.items() if v > bounds.get(k, math.inf)}
        return {k: share if math.isfinite(share) else 0.0 for k, share in over.items()}


@dataclass(frozen=True)
class Judgement:
    """Uploads of a chunk after the defence, stacked as before, with what was cut, by client and key."""

    sent: Sent
    cut: dict[int, dict[str, float]]


# ---------------------------------------------------------------------------------------------------- one upload


def measure(able: Abilities, sent: Sent, down: Tree) -> Measured:
    """The norms of what one upload changes, part by part, and its weights."""
    unchanged = able.judged.unchanged(sent, down)
    values = {WEIGHT: float(sent.weight)}
    for name, part in (*sent.mean.items(), *sent.each.items()):
        squares = list(_squares(part, unchanged.get(name), sent.weights.get(name)))
        values[name] = math.sqrt(math.fsum(squares)) if all(map(math.isfinite, squares)) else math.inf
    for name, own in sent.weights.items():
        values[_weight_of(name)] = float(own.sum(dtype=torch.float64))
    return Measured(values)


def cut(able: Abilities, sent: Sent, down: Tree, shares: Mapping[str, float]) -> Sent:
    """One upload of whose changes and weights only these shares are left; everything else is as it was."""
    unchanged = able.judged.unchanged(sent, down)

    def parts(of: Tree) -> Tree:
        return {k: _towards(v, unchanged.get(k), shares[k]) if k in shares else v for k, v in of.items()}

    own = {k: _times(w, shares[_weight_of(k)]) if _weight_of(k) in shares else w for k, w in sent.weights.items()}
    weight = _times(sent.weight, shares[WEIGHT]) if WEIGHT in shares else sent.weight
    return Sent(weight, parts(sent.mean), parts(sent.each), own)


def change_of(able: Abilities, sent: Sent, down: Tree, capacity: Capacity = None) -> Sent:
    """What one upload changes. Of ranks that differ from client to client it is lifted first, to one form for all."""
    if able.lifts is not None and capacity is not None:
        sent = sent._replace(mean=able.lifts.lift(sent.mean, down, capacity))
    unchanged = able.judged.unchanged(sent, down)

    def parts(of: Tree) -> Tree:
        return {k: _difference(v, unchanged.get(k)) for k, v in of.items()}

    return sent._replace(mean=parts(sent.mean), each=parts(sent.each))


def _difference(part: Any, base: Any) -> Any:
    if isinstance(part, dict):
        return {k: _difference(v, _below(base, k)) for k, v in part.items()}
    return part if isinstance(part, Outer) or not part.is_floating_point() else _change(part, base)


def _below(base: Any, name: str) -> Any:
    return base.get(name) if isinstance(base, dict) else None


def _is_weight(key: str) -> bool:
    return key == WEIGHT or key.startswith(_weight_of(""))


def _weight_of(name: str) -> str:
    return f"{WEIGHT} of {name}"


def _squares(part: Any, base: Any, weights: Tensor | None) -> Iterable[float]:
    """Squared norms of the leaves' changes; entries that weigh nothing change nothing."""
    if isinstance(part, dict):
        for k, v in part.items():
            yield from _squares(v, _below(base, k), weights)
    elif isinstance(part, Outer):
        a, b = (float(torch.linalg.vector_norm(_own(t))) for t in part)
        yield (a * b) ** 2
    elif part.is_floating_point():
        change = _change(part, base)
        if weights is not None:
            change = change * (weights > 0).reshape((*weights.shape, *[1] * (part.ndim - weights.ndim)))
        yield float(torch.linalg.vector_norm(change)) ** 2


def _towards(part: Any, base: Any, share: float) -> Any:
    """A part that has gone only this share of its way from what was sent."""
    if isinstance(part, dict):
        return {k: _towards(v, _below(base, k), share) for k, v in part.items()}
    if isinstance(part, Outer):
        return Outer(_times(part.a, share), part.b)
    if not part.is_floating_point():
        return part
    if not _comparable(part, base):
        return _times(part, share)
    start = base.to(torch.float64)
    return (start + share * _change(part, base)).to(part.dtype) if share else base.clone()


def _change(part: Tensor, base: Any) -> Tensor:
    """What a tensor changes, in double precision: a difference of two large numbers must not be lost or overflow."""
    return _own(part) - base.to(torch.float64) if _comparable(part, base) else _own(part)


def _own(t: Tensor) -> Tensor:
    return t.to(torch.float64).contiguous()


def _comparable(part: Tensor, base: Any) -> bool:
    return isinstance(base, Tensor) and base.shape == part.shape and base.dtype == part.dtype


def _times(t: Tensor, share: float) -> Tensor:
    return (t.to(torch.float64) * share).to(t.dtype)


# ---------------------------------------------------------------------------------------------------- a chunk, a round


def downloads(shared: Tree, own: Tree, clients: int) -> list[Tree]:
    """What each client of a chunk was sent; `own` is stacked."""
    return [{**shared, **tree.take(own, k)} for k in range(clients)]


def judge(
    able: Abilities,
    ids: Sequence[int],
    sent: Sent,
    downs: Sequence[Tree],
    measured: Sequence[Measured],
    bounds: Bounds,
) -> Judgement:
    """Uploads of a chunk, stacked, of which nothing exceeds its bound; those that keep to them stay as they are."""
    shares = [one.shares(bounds) for one in measured]
    if not any(shares):
        return Judgement(sent, {})
    rows = [tree.take(sent, k) for k in range(len(ids))]
    kept = [cut(able, row, down, share) if share else row for row, down, share in zip(rows, downs, shares)]
    return Judgement(tree.stack(kept), {i: share for i, share in zip(ids, shares) if share})


class DefenceHistory:
    """Norms and weights of recent rounds, as a checkpoint holds them, and what follows from them for this round.

    Args:
        rounds: what was kept of the rounds before; changed in place when a round is noted.
    """

    def __init__(self, defence: Defence, rounds: list[Values]) -> None:
        self.defence, self.rounds = defence, rounds
        _check_rounds(rounds)
        self.before = defence.bounds(rounds) if defence.on else {}

    def with_round(self, measured: Iterable[Measured]) -> dict[str, float]:
        """All bounds of this round: what was not known before comes from the round itself."""
        return self.defence.bounds([*self.rounds, _values(measured)]) | self.before

    def note(self, measured: Iterable[Measured]) -> None:
        """Remember what was judged in a round, before it was cut; a round without uploads is none."""
        values = _values(measured)
        if values:
            self.rounds[:] = [*self.rounds, values][-self.defence.window :]


def said(bounds: Bounds, cuts: Mapping[int, Mapping[str, float]], names: Sequence[str]) -> dict[str, Any]:
    """What a round's line of metrics says of its defence."""
    parts = [{k: s for k, s in shares.items() if not _is_weight(k)} for shares in cuts.values()]
    most = sorted(cuts, key=lambda i: (min(cuts[i].values()), i))[:MOST_NAMED]
    return {
        "clipped": sum(bool(p) for p in parts),
        "capped": sum(len(p) < len(shares) for p, shares in zip(parts, cuts.values())),
        "bounds": {k: bounds[k] for k in sorted(bounds) if math.isfinite(bounds[k])},
        "most_cut": {names[i]: dict(sorted(cuts[i].items())) for i in most},
    }


def _values(measured: Iterable[Measured]) -> Values:
    values: Values = {}
    for one in measured:
        for key, value in one.values.items():
            if 0 < value < math.inf:
                values.setdefault(key, []).append(value)
    return values


def _check_rounds(rounds: Any) -> None:
    """Refuse what no run wrote.

    Raises:
        CheckpointError: in one sentence.
    """
    good = isinstance(rounds, list) and all(isinstance(values, dict) for values in rounds)
    numbers = [v for values in rounds for some in values.values() for v in some] if good else [math.nan]
    if not all(isinstance(v, int | float) and 0 < v < math.inf for v in numbers):
        raise CheckpointError("Checkpoint: what it holds of recent norms is damaged. Start afresh with --fresh.")
