"""What a check gives back, and the files it leaves."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedspan.storage.atomic import write_atomic

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLUE, RED, GREEN, GOLD, GREY = "#0072b2", "#d55e00", "#009e73", "#e0a800", "#8a8f98"
"""Colours that people with any colour vision tell apart; those of the paper's Figure 1 where it has them."""


@dataclass(frozen=True)
class Outcome:
    """A finished check: its table, what it shows in a sentence, its numbers, and how to draw it."""

    titles: Sequence[str]
    rows: Sequence[Sequence[str]]
    says: str
    numbers: dict[str, Any]
    draw: Callable[[], Figure]

    def facts(self) -> dict[str, Any]:
        """Everything but the figure, for JSON."""
        return {"titles": list(self.titles), "rows": [list(r) for r in self.rows], "says": self.says} | {
            "numbers": self.numbers
        }

    def write(self, path: Path) -> Path:
        """Write the numbers as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(self.numbers, indent=1, allow_nan=False) + "\n")
        return path


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """The slope of a straight line through the points in log-log scale, by least squares."""
    u, v = [math.log(a) for a in x], [math.log(b) for b in y]
    mu, mv = sum(u) / len(u), sum(v) / len(v)
    return sum((a - mu) * (b - mv) for a, b in zip(u, v)) / sum((a - mu) ** 2 for a in u)
