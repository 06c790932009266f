"""Averages of client uploads: weighted means (with rank-one leaves), per-client mixing, cluster means."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedspan import tree
from fedspan.tree import Outer, Tree


def weighted_sum(stacked: Any, weights: Tensor, keep_factors: bool = False) -> Any:
    """Σ_k w_k x_k over the leading axis. A leaf `Outer(a, b)` adds up w_k a_k b_kᵀ and becomes a matrix.

    With `keep_factors` an `Outer` of fewer members than its matrix has columns stays a (longer) list of factors.
    """
    if isinstance(stacked, dict):
        return {k: weighted_sum(v, weights, keep_factors) for k, v in stacked.items()}
    if isinstance(stacked, Outer):
        a, b = stacked
        scaled = b * weights.to(b.dtype)[:, None]  # the short factor
        return Outer(a, scaled) if keep_factors and len(b) < b.shape[1] else a.T @ scaled
    return torch.tensordot(weights.to(stacked.dtype), stacked, 1)


def weighted_mean(stacked: Any, weights: Tensor) -> Any:
    """Σ_k w_k x_k / Σ_k w_k over the leading axis.

    >>> weighted_mean({"a": torch.tensor([[1.0], [4.0]])}, torch.tensor([2.0, 1.0]))
    {'a': tensor([2.])}
    """
    total = weights.sum()
    return tree.map(lambda a: a / total.to(a.dtype), weighted_sum(stacked, weights))


class Mean:
    """A weighted mean that takes partial sums one after another and adds them up in that order."""

    def __init__(self) -> None:
        self.total: Any = None
        self.weight = 0.0

    def add(self, total: Tree, weight: float) -> None:
        """Add a partial weighted sum (from `weighted_sum`) and the weight behind it."""
        self.total = _open(total) if self.total is None else _join(self.total, total)
        self.weight += weight

    def result(self) -> Tree:
        """The mean; empty if nothing was added."""
        if self.total is None:
            return {}
        result: Tree = _close(self.total, self.weight)
        return result


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


def _close(x: Any, weight: float) -> Any:
    return {k: _close(v, weight) for k, v in x.items()} if isinstance(x, dict) else _matrix(x) / weight


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
