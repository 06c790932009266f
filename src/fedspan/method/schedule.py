"""Step sizes that fall over the rounds."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fedspan.errors import ConfigError
from fedspan.method import Averaging, Sharing, Visit


@dataclass(frozen=True, kw_only=True)
class Cosine(Averaging):
    """A method whose step size falls from `lr` to `lr_min` along a cosine in `cycle` rounds, then starts anew.

    Without a cycle it is `lr` throughout.
    """

    lr_min: float = 0.001
    cycle: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("lr_min", 0.0, allow_zero=True)
        if self.cycle is None:
            return
        self.count("cycle", 1)
        if self.lr_min > self.lr:
            raise ConfigError(
                f"{type(self).__name__}: lr_min must be at most lr = {self.lr} with a cycle. Got {self.lr_min}."
            )

    def rate(self, visit: Visit) -> float:
        """The step size of a round."""
        if self.cycle is None:
            return self.lr
        done = (int(visit.round) - 1) % self.cycle / self.cycle
        return self.lr_min + (self.lr - self.lr_min) * (1 + math.cos(math.pi * done)) / 2


@dataclass(frozen=True, kw_only=True)
class Annealed(Cosine, Sharing):
    """A sharing method whose step size can fall along a cosine."""
