"""U Vᵀ: a weight of low rank, nothing beside it."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedspan.layers.base import Structured, kernel
from fedspan.layers.views import Plain
from fedspan.learn.folded import OwnParameters
from fedspan.linalg import lowrank


class LowRank(Structured):
    """W = U Vᵀ of rank r; a kernel is read as o·k × i·k, so that it is two convolutions along one axis each.

    It starts as the nearest such weight to the plain layer's, in balanced factors. A convolution is done as V
    along the width and then U along the height where that costs less than one with the composed kernel.
    """

    def __init__(self, like: Plain, rank: int) -> None:
        super().__init__(like)
        self.rank = min(rank, lowrank.full_rank(self.shape))
        U, V = lowrank.leading(like.weight.detach(), self.rank)
        self.U, self.V = nn.Parameter(U), nn.Parameter(V)
        self.apart = U.numel() + V.numel() < like.weight.numel()

    def compose(self) -> Tensor:
        return lowrank.fold(self.U, self.V)

    def forward(self, x: Tensor) -> Tensor:
        """What the plain layer would do with U Vᵀ, at less cost where the rank is small."""
        return self.through(x) if self.apart else super().forward(x)

    def folded(self, x: Tensor, own: OwnParameters) -> Tensor | None:
        """The layer with each client's factors, one after the other where that costs less."""
        if self.convolution or not self.apart:
            return super().folded(x, own)
        return own.linear(own.linear(x, own["V"].mT), own["U"], own.bias)

    def through(self, x: Tensor) -> Tensor:
        """The layer, one factor after the other."""
        if not self.convolution:
            return F.linear(F.linear(x, self.V.T), self.U, self.bias)
        # Zeros are put around the image here as well: a padding may be a word, and is then not the same on all sides.
        if isinstance(self.padding, str) or self.padding_mode != "zeros":
            mode = "constant" if self.padding_mode == "zeros" else self.padding_mode
            x, (ph, pw) = F.pad(x, self.around, mode=mode), (0, 0)
        else:
            ph, pw = self.padding
        (sh, sw), (dh, dw), g = self.stride, self.dilation, self.groups
        along = self.V.permute(2, 0, 1)[:, :, None].repeat(g, 1, 1, 1)  # [g·r, i, 1, k]: every group has its own inputs
        down = kernel(self.U.permute(0, 2, 1)[..., None])  # [o, r, k, 1]
        y = F.conv2d(x, along, None, (1, sw), (0, pw), (1, dw), g)
        return F.conv2d(y, down, self.bias, (sh, 1), (ph, 0), (dh, 1), g)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        dense = self.U.new_empty(self.shape)
        nn.init.kaiming_uniform_(dense, a=math.sqrt(5))
        with torch.no_grad():
            for p, value in zip((self.U, self.V), lowrank.leading(dense, self.rank)):
                p.copy_(value)
