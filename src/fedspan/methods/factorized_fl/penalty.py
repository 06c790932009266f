"""The penalty λ‖M‖₁ of eq. (6), which makes μ sparse: as a proximal step, as a part of the gradient, or not at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedspan.learn.batches import Batch
from fedspan.learn.sgd import Loss, Prox
from fedspan.method.fields import NonNegative
from fedspan.tree import Params


@dataclass(frozen=True, kw_only=True)
class Penalty:
    """λ‖M‖₁, and how it is minimised."""

    KEYS: ClassVar[Mapping[str, str]] = {"lam": "lam", "penalty": "rule", "eval_prune": "prune"}

    lam: NonNegative = 5e-4
    """λ, the weight of ‖M‖₁; the larger, the fewer entries of μ are not zero."""
    rule: Literal["prox", "subgradient", "none"] = "prox"
    """How μ is penalised: by soft thresholding after every step, which leaves true zeros, by a subgradient, or not at
    all, as in the public code."""
    prune: bool = False
    """Whether entries of μ below λ are left out when the model is used, as in the public code."""

    def objective(self, loss: Loss, mus: Sequence[str]) -> Loss:
        """The loss, with the penalty if that is a part of the gradient."""
        if self.rule != "subgradient" or not mus:
            return loss

        def sparse(params: Params, batch: Batch) -> Tensor:
            size = sum(params[k].abs().sum() for k in mus)
            return loss(params, batch) + self.lam * size  # eq. (6)

        return sparse

    def prox(self, mus: Sequence[str], lr: float, momentum: float) -> Prox:
        """Soft thresholding of μ after every step: the proximal step of λ‖M‖₁ in eq. (6)."""
        if self.rule != "prox":
            return {}
        # With momentum a lasting gradient moves a weight by lr / (1 − momentum) a step; so must the penalty.
        t = lr * self.lam / (1 - momentum)

        def soft(x: Tensor) -> Tensor:
            return x - x.clamp(-t, t)

        return dict.fromkeys(mus, soft)

    def pruned(self, params: Params, mus: Sequence[str]) -> Params:
        """The parameters a client predicts with."""
        if not self.prune:
            return params
        return params | {
            k: torch.where(params[k].abs() < self.lam, torch.zeros_like(params[k]), params[k]) for k in mus
        }
