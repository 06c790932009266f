"""What FedARA's clients minimise: L = L_CE + λ_t L_FAC + ρ/2 Σ_q ‖U_q V_qᵀ‖², with anchors given by the received ω."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from fedspan.layers.decay import fit_decayed
from fedspan.learn.batches import Batch, Batches
from fedspan.learn.class_features import class_matrix, class_means_and_square
from fedspan.learn.optimizer import Optimizer
from fedspan.learn.sgd import Loss
from fedspan.learn.task import Task
from fedspan.method.fields import AtLeast1, NonNegative
from fedspan.tree import Params


class Anchors(NamedTuple):
    """What the received extractor says of a client's examples, from one pass over them and without a gradient."""

    table: Tensor
    """a_{k,c}, the mean feature of every class, [C, D]."""
    square: Tensor
    """(1/n_k) Σ ‖F(ω̄; x)‖², the mean squared norm of the features."""


@dataclass(frozen=True, kw_only=True)
class Alignment:
    """How strongly features are held near the anchors of their classes: a value that FedARA holds."""

    KEYS: ClassVar[Mapping[str, str]] = {k: k for k in ("lam", "warmup", "fac_reduction", "watch")}

    lam: NonNegative = 10.0
    """λ, the weight of the distance to the anchors in a client's loss."""
    warmup: AtLeast1 = 10
    """Rounds after the first in which that weight rises from 0 to λ, in equal steps."""
    fac_reduction: Literal["mse", "sum", "relative"] = "mse"
    """Whether a squared distance is the mean or the sum over features, or that sum over their mean squared norm."""
    watch: bool = False
    """Whether the distance to the anchors after training is recorded, for one more pass over the data."""

    @property
    def used(self) -> bool:
        """Whether anchors are asked for in any round."""
        return bool(self.lam) or self.watch

    def strength(self, round: int) -> float:
        """λ_t: 0 in the first round, rising in equal steps to λ in round `warmup` + 1."""
        return self.lam * min(1.0, (round - 1) / self.warmup)  # λ_t = λ min(1, (t − 1)/warmup)

    def factor(self, features: int, square: Tensor) -> Tensor:
        """What ‖R_i − a_{k,y_i}‖² of D features is multiplied with; half the curvature of the term in a feature.

        Features that are all 0 have no scale to be relative to: there the term is 0, and not 0/0.
        """
        if self.fac_reduction == "relative":
            return torch.where(square > 0, 1 / square.clamp_min(torch.finfo(square.dtype).tiny), 0 * square)
        return torch.ones_like(square) / (features if self.fac_reduction == "mse" else 1)

    def distance(self, features: Tensor, near: Anchors, y: Tensor) -> Tensor:
        """‖R_i − a_{k,y_i}‖² of each example, reduced over the D features."""
        far = (features - near.table[y]).square()
        if self.fac_reduction == "relative":
            return far.sum(1) * self.factor(far.shape[1], near.square)
        return far.mean(1) if self.fac_reduction == "mse" else far.sum(1)

    def loss(self, task: Task, near: Anchors | None, lam: float) -> Loss:
        """L_CE + λ_t L_FAC, the latter a mean over the examples of a batch."""
        if near is None or not lam:
            return task.loss

        def aligned(p: Params, batch: Batch) -> Tensor:
            features, output = task.features_and_output(p, batch)
            losses = task.example_loss(output, batch.y, batch.mask)
            return batch.mean(losses + lam * self.distance(features, near, batch.y))

        return aligned

    def gap(self, task: Task, params: Params, near: Anchors, stream: Batches) -> Tensor:
        """L_FAC over all training examples, in evaluation mode."""
        total, n = torch.zeros_like(near.square), torch.zeros_like(near.square)
        with torch.no_grad():
            for batch in stream:
                total = total + (self.distance(task.features(params, batch.x), near, batch.y) * batch.w).sum()
                n = n + batch.w.sum()
        return total / n.clamp_min(1)


@dataclass(frozen=True, kw_only=True)
class FactorDecay:
    """The decay of what factors make: a value that FedARA holds."""

    KEYS: ClassVar[Mapping[str, str]] = {k: k for k in ("rho", "rho_rule", "decay_every")}

    rho: NonNegative = 1e-3
    """ρ, the weight of ‖U Vᵀ‖² in a client's loss; `weight_decay` acts on what is not decomposed."""
    rho_rule: Literal["half", "whole"] = "half"
    """Whether the decay is ρ/2 ‖U Vᵀ‖², or ρ ‖U Vᵀ‖²."""
    decay_every: AtLeast1 = 1
    """Steps from one decay of U Vᵀ to the next, each so many times as strong."""

    def strengths(self, optimizer: Optimizer) -> tuple[float, float]:
        """What halves of ‖U Vᵀ‖² and of ‖p‖² of all other parameters are multiplied with."""
        return self.rho * (1 if self.rho_rule == "half" else 2), optimizer.weight_decay

    def fit(self, optimizer: Optimizer, task: Task, loss: Loss, start: Params, batches: Batches, lr: float) -> Params:
        """Train a client's model on a loss with this decay."""
        return fit_decayed(optimizer, task, loss, start, batches, lr, self.strengths(optimizer), self.decay_every)


def anchors(task: Task, received: Params, stream: Batches, who: str = "FedAra") -> Anchors:
    """Anchors and the scale of the features under the extractor as received, in evaluation mode, from one pass."""
    if task.stats:  # kept at home, they belong to the weights of the last visit
        received = task.estimate_statistics(received, stream)
    table, _, square = class_means_and_square(task, received, stream, received[class_matrix(task, who)])
    return Anchors(table, square)
