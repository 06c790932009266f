"""A step size for each row: the same number of trials for all, and values on both sides of the winner.

Trials begin with a grid. Each further one goes beyond the winner's end of the values tried, if the winner lies at an
end, and otherwise into the wider gap beside it. So every row has spent the same, and what is still at an end
after the last trial is marked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Try = Callable[[float], float | None]
"""Validation measure of a step size, higher is better; None if it diverged."""


@dataclass(frozen=True)
class ChosenStep:
    """The step size of a row, and all that were tried."""

    tried: dict[float, float | None]
    lr: float | None
    """None if every trial diverged."""

    @property
    def edge(self) -> str | None:
        """Whether nothing brackets it: `smallest` or `largest` of all tried."""
        if self.lr is None:
            return None
        return {min(self.tried): "smallest", max(self.tried): "largest"}.get(self.lr)

    @property
    def diverged(self) -> int:
        """How many trials did."""
        return sum(v is None for v in self.tried.values())


def choose_step(grid: Sequence[float], trials: int, attempt: Try) -> ChosenStep:
    """Spend exactly that many trials and take the best; of equals the smallest step."""
    tried: dict[float, float | None] = {}
    for lr in grid:
        tried[lr] = attempt(lr)
    while len(tried) < trials:
        lr = _next(tried)
        tried[lr] = attempt(lr)
    return ChosenStep(dict(sorted(tried.items())), _best(tried))


def confirm_step(chosen: ChosenStep, holds: Callable[[float], bool]) -> ChosenStep:
    """The best step that does not diverge elsewhere either; those that were asked and do count as diverged."""
    tried, best = dict(chosen.tried), chosen.lr
    while best is not None and not holds(best):
        tried[best] = None
        best = _best(tried)
    return ChosenStep(tried, best)


def _best(tried: dict[float, float | None]) -> float | None:
    known = [(v, -lr) for lr, v in tried.items() if v is not None]
    return -max(known)[1] if known else None


def _next(tried: dict[float, float | None]) -> float:
    steps, best = sorted(tried), _best(tried)
    if best is None or best == steps[0]:
        return rounded(steps[0] ** 2 / steps[1])
    if best == steps[-1]:
        return rounded(steps[-1] ** 2 / steps[-2])
    at = steps.index(best)
    left, right = steps[at - 1], steps[at + 1]
    # The wider gap is halved; of gaps alike the one beside the better neighbour.
    worth = {lr: -math.inf if (value := tried[lr]) is None else value for lr in (left, right)}
    order = sorted((left, right), key=lambda lr: (round(abs(math.log(lr / best)), 1), worth[lr]), reverse=True)
    for beside in order:
        middle = rounded(math.sqrt(best * beside))
        if middle not in tried:
            return middle
    return rounded(steps[-1] ** 2 / steps[-2])


def rounded(lr: float) -> float:
    """Three digits, as a person would write it down."""
    return float(f"{lr:.3g}")
