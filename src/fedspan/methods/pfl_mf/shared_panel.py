"""What adaptive pFL-MF found: how much of the heads is shared, and how much is personal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from fedspan.method import Findings, Panel, Seen
from fedspan.method.panels import BarChart, Drawing, LineChart
from fedspan.methods.pfl_mf.head_prior import clear_directions
from fedspan.tree import Tree

WIDE = ((0.0, "none"), (1.0, "narrow"), (10.0, "wide"))
"""Up to which τ a residual is called what; beyond, it is nearly free."""


def shared_panel(pairs: Sequence[tuple[float, float]], choice: Callable[[Tree], int]) -> Panel:
    """The panel of a method whose server keeps the deviations s of the heads and scores S of pairs (κ, τ)."""

    def look(seen: Seen) -> Findings:
        s, (kappa, tau) = seen.server["s"].double(), pairs[choice(seen.server)]
        clear, final = clear_directions(s), bool(seen.server["frozen"])
        says = sentence(kappa, tau, clear, len(s) - 1)
        held = float(seen.server["held"])
        told = {name: dict(seen.monitored.get(name, ())) for name in ("kappa", "tau")}
        table = [
            ("after round", str(seen.round)),
            ("κ, τ", f"{kappa:g}, {tau:g} ({'final' if final else 'not final yet'})"),
            ("clear directions", f"{clear} of at most {len(s) - 1}"),
            ("deviations of the heads", ", ".join(f"{v:.3g}" for v in s[:8].tolist()) + (", …" if len(s) > 8 else "")),
            ("held-out examples", f"{held:.0f}"),
        ]
        facts = {"round": seen.round, "kappa": kappa, "tau": tau, "final": final, "clear": clear, "says": says}
        facts |= {"deviations": s.tolist(), "held": held, "scores": seen.server["S"].tolist(), "pairs": list(pairs)}
        return Findings(says, _drawings(seen.label, s.numpy(), told, says), facts, table=table)

    return Panel(
        "shared",
        "What is shared, what is personal",
        "Deviations of the clients' heads from their mean, direction by direction, the last one taken as noise, and how"
        " wide heads may be along them (κ) and beside them (τ), as held-out losses of all clients chose it.",
        "deviations of the heads",
        look,
    )


def sentence(kappa: float, tau: float, clear: int, rank: int) -> str:
    """How much is shared and how much is personal, in one sentence."""
    if kappa == 0:
        shared = "a body and a mean head, no directions"
    elif clear:
        shared = f"a body, a mean head and {clear} direction{'s' if clear > 1 else ''}"
    else:
        shared = f"a body, a mean head and up to {rank} directions, of which none stands clear"
    residual = next((word for most, word in WIDE if tau <= most), "nearly free")
    return f"Shared: {shared}; personal residual: {residual}."


def _drawings(
    label: str, s: np.ndarray[tuple[int], np.dtype[np.float64]], told: dict[str, dict[int, float]], says: str
) -> list[Drawing]:
    bars = BarChart(values=s, title="deviations of the heads", x="direction", note="the last one is the noise floor")
    lines = [
        LineChart(points=list(told[k].items()), title=t, colour=c) for k, t, c in (("kappa", "κ", 0), ("tau", "τ", 1))
    ]
    return [
        Drawing("deviations", f"Deviations of the heads of {label}. {says}", ((bars,),), (4.6, 2.9)),
        Drawing("widths", f"κ and τ chosen over the rounds of {label}.", [[line] for line in lines], (4.6, 4.0), False),
    ]
