"""A weight W beside which small factors are trained."""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedspan.layers.base import Structured, kernel
from fedspan.layers.views import Plain
from fedspan.learn.folded import OwnParameters
from fedspan.linalg import lowrank

AdapterKind: TypeAlias = Literal["lora", "loha", "lokr"]
"""A B, (A1 B1) ∘ (A2 B2), or C ⊗ (A B)."""

AdapterStart: TypeAlias = Literal["gaussian", "identity"]


class Adapter(Structured):
    """W + α · (what the factors make) + α_p L U, W read as outputs × all the rest.

    `kind` says what the factors are; they start with a product of zero. W is a constant unless `train_base`. L and U
    are there if `own_rank` > 0, the factors if `rank` > 0. A pair of small rank is applied one factor after the other:
    B as a convolution with r outputs, then A as one of 1×1; a pair for which that costs more is added to W first.
    """

    A: Tensor
    B: Tensor
    L: Tensor
    U: Tensor

    def __init__(
        self,
        like: Plain,
        rank: int,
        kind: AdapterKind = "lora",
        alpha: float = 1.0,
        own_rank: int = 0,
        own_alpha: float = 1.0,
        start: AdapterStart = "gaussian",
        train_base: bool = False,
    ) -> None:
        super().__init__(like)
        self.kind, self.alpha, self.own_alpha, self.start = kind, alpha, own_alpha, start
        self.weight = nn.Parameter(like.weight.detach().clone(), requires_grad=train_base)
        self.factors = lowrank.FACTORS[kind] if rank else ()
        wanted = lowrank.shapes(kind, self.shape, rank) if rank else {}
        m, n = self.shape[0], math.prod(self.shape[1:])
        if own_rank:
            wanted |= {"L": (m, own_rank), "U": (own_rank, n)}
        for name, shape in wanted.items():
            self.register_parameter(name, nn.Parameter(like.weight.new_empty(shape)))
        self.own = own_rank > 0

        def apart(r: int) -> bool:
            # A trained weight has its gradient anyway. Otherwise a step costs 3mn per pixel with the pair added to W,
            # 2mn + 3r(m + n) with the pair beside it, as W needs no gradient.
            return not train_base and 3 * r * (m + n) < m * n

        self.beside = {"A": rank > 0 and kind == "lora" and apart(rank), "L": self.own and apart(own_rank)}
        self._draw()

    def compose(self) -> Tensor:
        return self._base(added=True)

    def _base(self, added: bool) -> Tensor:
        """W with the pairs that are not applied beside it, or with all of them."""
        weight: Tensor = self.weight
        if self.factors and (added or not self.beside["A"]):
            weight = weight + self.alpha * lowrank.compose({f: getattr(self, f) for f in self.factors}, self.shape)
        if self.own and (added or not self.beside["L"]):
            weight = weight + self.own_alpha * lowrank.compose({"A": self.L, "B": self.U}, self.shape)
        return weight

    def forward(self, x: Tensor) -> Tensor:
        """What the plain layer would do with the composed weight, at less cost where ranks are small."""
        y = self.apply_weight(x, self._base(added=False))
        if self.beside["A"]:
            y = y + self.alpha * self.through(x, self.A, self.B)
        if self.beside["L"]:
            y = y + self.own_alpha * self.through(x, self.L, self.U)
        return y

    def folded(self, x: Tensor, own: OwnParameters) -> Tensor | None:
        """The layer with each client's factors; W is one product for all of them where they have it in common."""
        if self.convolution:
            return None
        added = (bool(self.factors) and not self.beside["A"]) or (self.own and not self.beside["L"])
        weight, bias = own.composed(lambda: self._base(added=False)) if added else own["weight"], own.bias
        pairs = [(self.alpha, "A", "B")] if self.beside["A"] else []
        pairs += [(self.own_alpha, "L", "U")] if self.beside["L"] else []
        parts = []
        for scale, left, right in pairs:
            inner = own.linear(x, own[right])
            parts.append(own.linear(inner if scale == 1 else scale * inner, own[left], bias))
            bias = None  # it goes with the first pair
        y = own.linear(x, weight, bias)
        for part in parts:
            y = y + part
        return y

    def through(self, x: Tensor, A: Tensor, B: Tensor) -> Tensor:
        """A (B x): the layer with weight A B and no bias, one factor after the other."""
        if not self.convolution:
            return F.linear(F.linear(x, B), A)
        x, padding = self.padded(x)
        first = B.reshape(-1, *self.shape[1:]).repeat(self.groups, 1, 1, 1)  # every group has its own inputs
        y = F.conv2d(x, first, None, self.stride, padding, self.dilation, self.groups)
        return F.conv2d(y, kernel(A[:, :, None, None]), groups=self.groups)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        self._draw()

    def _draw(self) -> None:
        with torch.no_grad():
            for name, p in self.named_parameters(recurse=False):
                if name in ("weight", "bias"):
                    continue
                size = lowrank.deviation(name, p.shape)
                if size and self.start == "identity":
                    nn.init.eye_(p)
                else:
                    nn.init.normal_(p, 0.0, size) if size else nn.init.zeros_(p)
