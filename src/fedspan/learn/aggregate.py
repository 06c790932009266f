"""Averages of client uploads: weighted means (with rank-one leaves), per-client mixing, cluster means."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedspan import tree
from fedspan.errors import ConfigError
from fedspan.tree import EMPTY, Outer, Tree


def weighted_sum(stacked: Any, weights: Tensor, keep_factors: bool = False) -> Any:
    """Σ_k w_k x_k over the leading axis. A leaf `Outer(a, b)` adds up w_k a_k b_kᵀ and becomes a matrix.

    With `keep_factors` an `Outer` of fewer members than its matrix has columns stays a (longer) list of factors.
    Weights of more axes than one belong to the leading axes of every leaf.
    """
    if isinstance(stacked, dict):
        return {k: weighted_sum(v, weights, keep_factors) for k, v in stacked.items()}
    if isinstance(stacked, Outer):
        if weights.ndim > 1:
            raise ConfigError("Sent: a part with an Outer must have one number as its weight. Use a scalar.")
        a, b = stacked
        scaled = b * weights.to(b.dtype)[:, None]  # the short factor
        return Outer(a, scaled) if keep_factors and len(b) < b.shape[1] else a.T @ scaled
    if weights.ndim > 1:
        return (_over(weights, stacked) * stacked).sum(0)
    return torch.tensordot(weights.to(stacked.dtype), stacked, 1)


def sums_by_part(stacked: Tree, weights: Tensor, own: Tree, keep_factors: bool = False) -> tuple[Tree, Tree]:
    """Σ_k w_k x_k of every part, each with the weights in `own` under its name or else `weights`; and Σ_k own_k.

    Raises:
        ConfigError: if weights are named after no part, or do not fit its leaves.
    """
    for name, w in own.items():
        if name not in stacked:
            raise ConfigError(f"Sent: weights must be named after parts of `mean`. Got '{name}', not in {[*stacked]}.")
        for path, x in tree.items(stacked[name]):
            if tuple(x.shape[: w.ndim]) != tuple(w.shape):
                raise ConfigError(
                    f"Sent: weights of '{name}' must have the leading axes of every leaf. Got {list(w.shape[1:])} for"
                    f" '{path or name}' of shape {list(x.shape[1:])}."
                )
    sums = {name: weighted_sum(part, own.get(name, weights), keep_factors) for name, part in stacked.items()}
    return sums, {name: w.sum(0) for name, w in own.items()}


def times_own(mean: Tree, own: Tree) -> Tree:
    """One upload with the parts that have weights of their own multiplied by them: what it adds to the sums."""
    return {k: _times(v, own[k]) if k in own else v for k, v in mean.items()}


def _times(x: Any, w: Tensor) -> Any:
    if isinstance(x, dict):
        return {k: _times(v, w) for k, v in x.items()}
    return Outer(x.a, x.b * w.to(x.b.dtype)) if isinstance(x, Outer) else _over(w, x) * x


def _over(weights: Tensor, x: Tensor) -> Tensor:
    """Weights of leading axes, ready to be multiplied with a tensor."""
    return weights.to(x.dtype).reshape((*weights.shape, *[1] * (x.ndim - weights.ndim)))


def weighted_mean(stacked: Any, weights: Tensor) -> Any:
    """Σ_k w_k x_k / Σ_k w_k over the leading axis.

    >>> weighted_mean({"a": torch.tensor([[1.0], [4.0]])}, torch.tensor([2.0, 1.0]))
    {'a': tensor([2.])}
    """
    total = weights.sum()
    return tree.map(lambda a: a / total.to(a.dtype), weighted_sum(stacked, weights))


class Mean:
    """A weighted mean that takes partial sums one after another and adds them up in that order.

    Attributes:
        totals: Σ w of the parts that have weights of their own.
    """

    def __init__(self) -> None:
        self.total: Any = None
        self.weight = 0.0
        self.totals: Tree = {}

    def add(self, total: Tree, weight: float, totals: Tree = EMPTY) -> None:
        """Add a partial weighted sum (`weighted_sum`, `sums_by_part`) and the weights behind it."""
        self.total = _open(total) if self.total is None else _join(self.total, total)
        self.weight += weight
        self.totals = {name: self.totals[name] + w if name in self.totals else w for name, w in totals.items()}

    def result(self) -> Tree:
        """The mean; empty if nothing was added."""
        if self.total is None:
            return {}
        return {name: _close(part, self.totals.get(name, self.weight)) for name, part in self.total.items()}


def _open(x: Any) -> Any:
    """Factors are collected in lists and multiplied once at the end."""
    if isinstance(x, dict):
        return {k: _open(v) for k, v in x.items()}
    return [x] if isinstance(x, Outer) else x


def _join(x: Any, y: Any) -> Any:
    if isinstance(x, dict):
        return {k: _join(x[k], y[k]) for k in x}
    if isinstance(x, list) and isinstance(y, Outer):
        return [*x, y]
    return _matrix(x) + _matrix(y)


def _close(x: Any, weight: float | Tensor) -> Any:
    if isinstance(x, dict):
        return {k: _close(v, weight) for k, v in x.items()}
    total = _matrix(x)
    if not isinstance(weight, Tensor):
        return total / weight
    w = _over(weight, total)
    return torch.where(w > 0, total / torch.where(w > 0, w, torch.ones_like(w)), torch.zeros_like(total))


def _matrix(x: Any) -> Tensor:
    if isinstance(x, list):
        return torch.cat([o.a for o in x]).T @ torch.cat([o.b for o in x])
    matrix: Tensor = x.a.T @ x.b if isinstance(x, Outer) else x
    return matrix


def mix(stacked: Tree, omega: Tensor) -> Tree:
    """Row k of the result is Σ_i omega[k, i] · row i: one personalised average per row of a row-stochastic matrix."""
    result: Tree = tree.map(lambda a: torch.tensordot(omega.to(a.dtype), a, 1), stacked)
    return result


def cluster_mean(stacked: Tree, weights: Tensor, cluster: Tensor, clusters: int, old: Tree) -> Tree:
    """Weighted mean inside each cluster, stacked over clusters; a cluster nobody reported for keeps its `old` row."""
    member = torch.nn.functional.one_hot(cluster, clusters).to(torch.float64) * weights.to(torch.float64)[:, None]
    total = member.sum(0)  # [clusters]
    omega = (member / total.clamp_min(torch.finfo(torch.float64).tiny)).T
    empty = total == 0

    def keep(new: Tensor, before: Tensor) -> Tensor:
        return torch.where(empty.reshape(-1, *[1] * (new.ndim - 1)), before, new)

    result: Tree = tree.map(keep, mix(stacked, omega), old)
    return result
