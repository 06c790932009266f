"""u v + μ: a matrix of low rank and a sparse correction."""

from __future__ import annotations

import math
import warnings
from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedspan.layers.base import Structured
from fedspan.layers.views import LAYOUTS, Layout, Plain, matrix_dims
from fedspan.learn.folded import OwnParameters

MuStart: TypeAlias = Literal["zeros", "xavier", "dense"]


class Factorized(Structured):
    """W = u v + μ: a matrix of rank γ and a correction that is meant to be sparse. Factorized-FL, eq. (2) and (3).

    u [rows, γ] and v [γ, columns] make a matrix that `layout` turns into the weight; μ has the shape of the weight,
    which is the paper's matrix up to that rearrangement. A linear layer is read as inputs × outputs.
    """

    def __init__(
        self,
        like: Plain,
        gamma: int = 1,
        layout: Layout = "space_by_channel",
        mu: bool = True,
        mu_start: MuStart = "zeros",
    ) -> None:
        super().__init__(like)
        self.view, self.mu_start = LAYOUTS[layout], mu_start
        rows, columns = matrix_dims(like, layout)
        rank = min(gamma, rows, columns)
        if rank < gamma:
            warnings.warn(
                f"Factorized: a matrix of {rows} x {columns} has at most rank {rank}; gamma = {gamma} is cut to that.",
                stacklevel=2,
            )
        self.apart = not self.convolution and 3 * rank * (rows + columns) < rows * columns
        self.u = nn.Parameter(like.weight.new_empty(rows, rank))
        self.v = nn.Parameter(like.weight.new_empty(rank, columns))
        self.mu = nn.Parameter(torch.empty_like(like.weight)) if mu else None
        self._draw(like.weight.detach())

    def product(self) -> Tensor:
        """The part of low rank, in the shape of the weight."""
        matrix = self.u @ self.v
        if not self.convolution:
            return matrix.T
        o, i, h, w = self.shape
        return self.view.kernel(matrix, (o, i, h, w))

    def compose(self) -> Tensor:
        return self.product() if self.mu is None else self.product() + self.mu

    def forward(self, x: Tensor) -> Tensor:
        """What the plain layer would do with u v + μ; a linear layer of low rank never puts them together."""
        if not self.apart:
            return super().forward(x)
        low = F.linear(F.linear(x, self.u.T), self.v.T, self.bias)
        return low if self.mu is None else low + F.linear(x, self.mu)

    def folded(self, x: Tensor, own: OwnParameters) -> Tensor | None:
        """The layer with each client's factors and correction."""
        if not self.apart:
            return super().folded(x, own)
        low = own.linear(own.linear(x, own["u"].mT), own["v"].mT, own.bias)
        return low if self.mu is None else low + own.linear(x, own["mu"])

    def reset_parameters(self) -> None:
        super().reset_parameters()
        dense = self.u.new_empty(self.shape)
        nn.init.kaiming_uniform_(dense, a=math.sqrt(5))
        self._draw(dense)

    def _draw(self, dense: Tensor) -> None:
        nn.init.xavier_uniform_(self.u)
        nn.init.xavier_uniform_(self.v)
        with torch.no_grad():
            if not dense.any():  # a layer that starts from zero, say a head, does so in this form too
                self.v.zero_()
            if self.mu is None:
                return
            if not dense.any() or self.mu_start == "zeros" or (self.mu_start == "xavier" and self.convolution):
                self.mu.zero_()
            elif self.mu_start == "xavier":  # what the public code does, in dense layers only
                nn.init.xavier_uniform_(self.mu)
            else:
                self.mu.copy_(dense - self.product())  # starts as the plain network, exactly
