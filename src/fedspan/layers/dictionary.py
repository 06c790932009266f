"""W_a diag(r ∘ z) W_b: a weight put together from a dictionary of rank-one matrices."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from fedspan.layers.base import Structured
from fedspan.layers.views import Plain


class Dictionary(Structured):
    """W = W_a diag(r ∘ z) W_b of F factors, kernels read as outputs × all the rest; z says which factors are used.

    Columns of W_a and rows of W_b are Gaussian such that W has the variance of the plain layers' start when a share
    `active` of the z is 1; r starts at 1 and z at `active`.
    """

    def __init__(self, like: Plain, factors: int, active: float) -> None:
        super().__init__(like)
        m, n = self.shape[0], math.prod(self.shape[1:])
        self.active = active
        self.Wa = nn.Parameter(like.weight.new_empty(m, factors))
        self.Wb = nn.Parameter(like.weight.new_empty(factors, n))
        self.r = nn.Parameter(like.weight.new_empty(factors))
        self.z = nn.Parameter(like.weight.new_empty(factors))
        self._draw()

    def compose(self) -> Tensor:
        return ((self.Wa * (self.r * self.z)) @ self.Wb).reshape(self.shape)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self._draw()

    def _draw(self) -> None:
        F, n = self.Wb.shape
        # Var W = F · active · s⁴ = 1/(3n), the variance of PyTorch's own start.
        s = (1 / (3 * n * F * self.active)) ** 0.25
        with torch.no_grad():
            nn.init.normal_(self.Wa, 0.0, s)
            nn.init.normal_(self.Wb, 0.0, s)
            self.r.fill_(1.0)
            self.z.fill_(self.active)
