"""Colours that people with any colour vision tell apart, the same for a method in every figure and table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fedspan.report.runs import Group

Dash = tuple[float, tuple[float, ...]] | Literal["-"]

INK, SOFT, GRID, PAPER = "#1b1f24", "#57606a", "#e3e6ea", "#ffffff"
# Okabe and Ito without yellow (too faint on white), two hues of Tol instead; sky and orange slightly darker.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#aa4499", "#e08e00", "#3fa0d8", "#882255", "#332288")
_DASHES: tuple[Dash, ...] = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)))
# Baselines everybody knows stay in the background.
BASELINES: dict[str, tuple[str, Dash]] = {"local": ("#8a8f98", (0, (1.2, 1.4))), "fedavg": ("#454b54", (0, (5, 2)))}


@dataclass(frozen=True)
class Look:
    """How a group is drawn."""

    colour: str
    dash: Dash

    @property
    def text(self) -> str:
        """The colour, dark enough for letters on white."""
        r, g, b = (int(self.colour[i : i + 2], 16) for i in (1, 3, 5))
        return "#" + "".join(f"{int(0.72 * c):02x}" for c in (r, g, b))


def looks(groups: Sequence[Group]) -> dict[str, Look]:
    """A look per label, in order of appearance."""
    out: dict[str, Look] = {}
    k = 0
    for g in groups:
        if g.label in BASELINES:
            out[g.label] = Look(*BASELINES[g.label])
        else:
            out[g.label] = Look(_COLOURS[k % len(_COLOURS)], _DASHES[k // len(_COLOURS) % len(_DASHES)])
            k += 1
    return out
