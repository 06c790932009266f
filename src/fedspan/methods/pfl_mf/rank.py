"""The rank of the subspace, found while training: cut once where the singular values of U C^{1/2} have a clear gap."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge, Gt
from torch import Tensor

from fedspan.linalg import subspace
from fedspan.method.fields import AtLeast1


@dataclass(frozen=True, kw_only=True)
class RankSearch:
    """When and where `rank = "auto"` cuts: surplus directions do not vanish by themselves, but their gap shows."""

    KEYS: ClassVar[Mapping[str, str]] = {"rank_start": "start", "rank_round": "round", "rank_gap": "gap"}

    start: Annotated[int, Ge(2)] = 30
    """The rank that `rank = "auto"` begins with."""
    round: AtLeast1 = 10
    """The first round in which `rank = "auto"` may cut the rank."""
    gap: Annotated[float, Gt(1)] = 1.25
    """The ratio of neighbouring singular values that counts as a clear gap for `rank = "auto"`."""

    def seen(self, gaps: Tensor, U: Tensor, C: Tensor) -> Tensor:
        """Average the gaps over rounds: one round's are mostly chance, each time elsewhere, and the real one stays."""
        return 0.8 * gaps + 0.2 * subspace.gaps(subspace.spectrum(U, C))

    def found(self, gaps: Tensor, t: int) -> int | None:
        """Return the rank to cut to in round t; None while no gap is clear."""
        return subspace.clear_gap(gaps, self.gap) if t >= self.round else None


def no_gaps(U: Tensor) -> Tensor:
    """Return the averaged gaps before the first round."""
    return torch.zeros(U.shape[1] - 1, dtype=U.dtype)
