"""Colours that people with any colour vision tell apart, the same for a method in every figure and table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fedspan.report.registered import role
from fedspan.report.runs import Group

Dash = tuple[float, tuple[float, ...]] | Literal["-"]

INK, SOFT, GRID, PAPER = "#1b1f24", "#57606a", "#e3e6ea", "#ffffff"
# Okabe and Ito without yellow (too faint on white), two hues of Tol instead; sky and orange slightly darker.
# Beside each the same hue, light enough to be seen on a dark page.
_COLOURS = (
    ("#0072b2", "#4da6e0"),
    ("#d55e00", "#ff8a3d"),
    ("#009e73", "#2fcf9f"),
    ("#aa4499", "#dd8ccd"),
    ("#e08e00", "#f2b84b"),
    ("#3fa0d8", "#9bd6f7"),
    ("#882255", "#d9739f"),
    ("#332288", "#a497f0"),
)
PLAIN = tuple(light for light, _ in _COLOURS)
_DASHES: tuple[Dash, ...] = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)))
# Yardsticks everybody knows stay in the background.
_QUIET: dict[str | None, tuple[str, Dash, str]] = {
    "alone": ("#8a8f98", (0, (1.2, 1.4)), "#9aa2ad"),
    "common": ("#454b54", (0, (5, 2)), "#ccd3db"),
}
_THEMES: dict[str, dict[str, Any]] = {
    "light": {"ink": INK, "soft": SOFT, "grid": GRID, "card": "#ffffff", "low": "#f3f6fa", "high": "#08519c"},
    "dark": {
        "ink": "#e8ebef",
        "soft": "#a3acb8",
        "grid": "#2c343d",
        "card": "#181d23",
        "low": "#1f262e",
        "high": "#9bd6f7",
    },
}


@dataclass(frozen=True)
class Look:
    """How a group is drawn; `dark` is its colour on a dark page."""

    colour: str
    dash: Dash
    dark: str = "#9aa2ad"

    @property
    def text(self) -> str:
        """The colour, dark enough for letters on white."""
        r, g, b = (int(self.colour[i : i + 2], 16) for i in (1, 3, 5))
        return "#" + "".join(f"{int(0.72 * c):02x}" for c in (r, g, b))

    @property
    def pattern(self) -> str:
        """The dashes as SVG and plotly write them; empty for a solid line."""
        return "" if isinstance(self.dash, str) else ",".join(f"{2.2 * d:g}px" for d in self.dash[1])


def stays_behind(label: str) -> bool:
    """Whether a label is that of a yardstick that is drawn in grey."""
    return role(label) in _QUIET


def looks(groups: Sequence[Group]) -> dict[str, Look]:
    """A look per label, in order of appearance."""
    out: dict[str, Look] = {}
    k = 0
    for g in groups:
        if stays_behind(g.label):
            out[g.label] = Look(*_QUIET[role(g.label)])
        else:
            colour, dark = _COLOURS[k % len(_COLOURS)]
            out[g.label] = Look(colour, _DASHES[k // len(_COLOURS) % len(_DASHES)], dark)
            k += 1
    return out


def themes(look: Sequence[Look]) -> dict[str, dict[str, Any]]:
    """The colours of the light and of the dark page, those of the methods in their order."""
    return {
        "light": {**_THEMES["light"], "colours": [each.colour for each in look]},
        "dark": {**_THEMES["dark"], "colours": [each.dark for each in look]},
    }
