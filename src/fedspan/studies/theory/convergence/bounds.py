"""The two readings of Theorem 1: as printed, and corrected for clients that take part with probability p.

Written out in docs/explanation/theorem-1.md, with the proof of the corrected one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from torch import Tensor

Real: TypeAlias = float | Tensor
"""One problem, or many side by side."""


@dataclass(frozen=True)
class Participation:
    """Who takes part in a round: each of n clients with probability p, independently; nobody: nothing happens."""

    n: int
    p: float

    @property
    def anybody(self) -> float:
        """q = 1 − (1 − p)ⁿ, the probability that a round has a client."""
        return 1 - (1 - self.p) ** self.n

    @property
    def spread(self) -> float:
        """E‖mean over S − mean over all‖² of vectors with mean square distance 1 from their mean, S not empty.

        For m of n drawn without replacement it is (n − m)/(m (n − 1)).
        """
        if self.n == 1:
            return 0.0
        from scipy.stats import binom

        m = np.arange(1, self.n + 1)
        chance = binom.pmf(m, self.n, self.p) / self.anybody
        return float(chance @ ((self.n - m) / (m * (self.n - 1))))


def as_printed(gap: Real, eta: Real, L: Real, T: Real, variance: Real = 0.0) -> Any:
    """Right side of Theorem 1: 2 (F⁰ − F*)/(η T (1 − 2ηL)) + 2 η L σ²/(1 − 2ηL)."""
    return (2 * gap / (eta * T) + 2 * eta * L * variance) / (1 - 2 * eta * L)


def sharpened(gap: Real, eta: Real, L: Real, T: Real, variance: Real = 0.0) -> Any:
    """Right side of the corrected theorem: (F⁰ − F*)/(η T (1 − ηL)) + η L σ²/(1 − ηL); at most half the printed one."""
    return (gap / (eta * T) + eta * L * variance) / (1 - eta * L)
