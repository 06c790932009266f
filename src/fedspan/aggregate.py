"""Averages of client uploads: weighted means (with rank-one leaves), per-client mixing, cluster means."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedspan import tree
from fedspan.tree import Outer, Tree


def weighted_sum(stacked: Any, weights: Tensor) -> Any:
    """Σ_k w_k x_k over the leading axis. A leaf `Outer(a, b)` adds up w_k a_k b_kᵀ and becomes a matrix."""
    if isinstance(stacked, dict):
        return {k: weighted_sum(v, weights) for k, v in stacked.items()}
    if isinstance(stacked, Outer):
        a, b = stacked
        return (a * weights.to(a.dtype)[:, None]).T @ b
    return torch.tensordot(weights.to(stacked.dtype), stacked, 1)


def weighted_mean(stacked: Any, weights: Tensor) -> Any:
    """Σ_k w_k x_k / Σ_k w_k over the leading axis.

    >>> weighted_mean({"a": torch.tensor([[1.0], [4.0]])}, torch.tensor([2.0, 1.0]))
    {'a': tensor([2.])}
    """
    total = weights.sum()
    return tree.map(lambda a: a / total.to(a.dtype), weighted_sum(stacked, weights))


class Mean:
    """A weighted mean that takes uploads in groups and keeps one tree: sum and total weight."""

    def __init__(self) -> None:
        self.total: Tree | None = None
        self.weight = 0.0

    def add(self, total: Tree, weight: float) -> None:
        """Add a partial weighted sum and the weight behind it."""
        self.total = total if self.total is None else tree.add(self.total, total)
        self.weight += weight

    def result(self) -> Tree:
        """The mean; empty if nothing was added."""
        return {} if self.total is None else tree.map(lambda a: a / self.weight, self.total)


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
