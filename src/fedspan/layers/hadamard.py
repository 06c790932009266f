"""The element-wise product of two matrices of low rank."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from fedspan.layers.base import Structured
from fedspan.layers.views import Plain


class Hadamard(Structured):
    """W = W₁ ∘ W₂ with W_j = X_j Y_jᵀ of rank r, so that W can have rank r². FedPara, Proposition 1 and 3.

    For a convolution W_j[o, i] = Σ_xy T_j[x, y] X_j[o, x] Y_j[i, y], the tensor form. With `plus_one` the weight is
    W₁ ∘ (W₂ + 1), as pFedPara has it. `start` "kaiming": each factor is Gaussian with Kaiming's deviation for its own
    shape, as published; "matched": all factors get the deviation that gives W the variance of Kaiming's.
    """

    def __init__(
        self,
        like: Plain,
        rank: int,
        plus_one: bool = False,
        tanh: bool = False,
        start: Literal["kaiming", "matched"] = "kaiming",
    ) -> None:
        super().__init__(like)
        self.rank, self.plus_one, self.tanh, self.start = rank, plus_one, tanh, start
        o, i, *kernel = self.shape
        for j in (1, 2):
            if self.convolution:
                self.register_parameter(f"T{j}", nn.Parameter(like.weight.new_empty(rank, rank, *kernel)))
            self.register_parameter(f"X{j}", nn.Parameter(like.weight.new_empty(o, rank)))
            self.register_parameter(f"Y{j}", nn.Parameter(like.weight.new_empty(i, rank)))
        self._draw()

    def factor(self, j: int) -> Tensor:
        """W₁ or W₂."""
        X, Y = getattr(self, f"X{j}"), getattr(self, f"Y{j}")
        W: Tensor = torch.einsum("xyhw,ox,iy->oihw", getattr(self, f"T{j}"), X, Y) if self.convolution else X @ Y.T
        return W.tanh() if self.tanh else W

    def compose(self) -> Tensor:
        second = self.factor(2)
        return self.factor(1) * (second + 1 if self.plus_one else second)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self._draw()

    def _draw(self) -> None:
        r, wanted = self.rank, 2 / math.prod(self.shape[1:])
        # Var W = Var W₁ · Var W₂ (+ Var W₁ with the one): the variance each W_j must have.
        one = math.sqrt(wanted) if not self.plus_one else (math.sqrt(1 + 4 * wanted) - 1) / 2
        # Var W_j = r s⁴ for two factors, r² s⁶ for three, when all entries have variance s².
        matched = (one / r**2) ** (1 / 6) if self.convolution else (one / r) ** (1 / 4)
        for name, p in self.named_parameters(recurse=False):
            if name != "bias":
                fan = r * math.prod(p.shape[2:])
                nn.init.normal_(p, 0.0, matched if self.start == "matched" else math.sqrt(2 / fan))
