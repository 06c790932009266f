"""U Vᵀ with kernels read as outputs × all the rest, of any number of columns."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedspan.layers.base import Structured
from fedspan.layers.views import Plain


def triples(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """U √σ [o, R], V √σ [n, R] and σ [R] of a weight, all of them; signs are fixed by the largest entry of U."""
    P, s, Q = torch.linalg.svd(weight.flatten(1), full_matrices=False)
    peak = P.gather(0, P.abs().argmax(0, keepdim=True))
    turn = torch.where(peak < 0, -torch.ones_like(peak), torch.ones_like(peak))
    return P * turn * s.sqrt(), Q.T * turn * s.sqrt(), s


class Principal(Structured):
    """W = U Vᵀ, beginning as the plain layer's weight in balanced factors: one column for each singular triple."""

    def __init__(self, like: Plain) -> None:
        super().__init__(like)
        U, V, _ = triples(like.weight.detach())
        self.U, self.V = nn.Parameter(U.contiguous()), nn.Parameter(V.contiguous())

    def compose(self) -> Tensor:
        return (self.U @ self.V.T).reshape(self.shape)
