"""When runs reach a target: rounds, bytes and seconds per method, and the way there over the bytes sent."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedspan.errors import ConfigError
from fedspan.report.figures import curves_figure
from fedspan.report.measures import Measure, deviation, mean, measure_of
from fedspan.report.palette import SOFT
from fedspan.report.runs import Group, Run, group
from fedspan.simulation.evaluation import to_target

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Reached:
    """A method or setting and a target: means over the seeds that reached it, None if none did.

    Bytes are those of all clients, both ways, announcements included; evaluation is not counted.
    """

    label: str
    target: float
    seeds: int
    reached: int
    round: float | None
    round_spread: float | None  # sample standard deviation over seeds
    up: float | None
    down: float | None
    seconds: float | None
    clock: float | None = None  # seconds on the clients' devices, where all runs were given them
    flops: float | None = None  # operations of all clients there

    @property
    def bytes(self) -> float | None:
        """Both ways."""
        return None if self.up is None or self.down is None else self.up + self.down


def reached(runs: Sequence[Run], targets: Sequence[float], named: str | None = None) -> tuple[Measure, list[Reached]]:
    """For every target and group of equal settings, what it took; quickest in bytes first, those that never did last.

    A target is met when the mean over clients first is as good, at the rounds that were evaluated.

    Args:
        named: the measure; by default the first that the runs were asked for.

    Raises:
        ConfigError: for an accuracy outside (0, 1], or a target that is no number, or no error.
    """
    measure = measure_of(runs, named)
    for target in targets:
        low = 0.0 if measure.percent or not measure.higher else -math.inf
        if not low < target < math.inf or (measure.percent and target > 1):
            allowed = "a fraction in (0, 1]" if measure.percent else "a number" + (" > 0" if low == 0.0 else "")
            raise ConfigError(f"targets: a target of {measure.name} must be {allowed}. Got {target}.")
    rows = []
    for target in targets:
        some = [_one(g, measure, target) for g in group(runs)]
        rows += sorted(some, key=lambda r: (r.bytes is None, -r.reached, r.bytes or 0.0, r.label))
    return measure, rows


def _one(group: Group, measure: Measure, target: float) -> Reached:
    each = [to_target(r.lines, target, measure.name, higher=measure.higher) for r in group.runs]
    found = [f for f in each if f is not None]
    rounds = [float(f["round"]) for f in found]
    kept = [k for k in ("up", "down", "seconds", "clock", "flops") if all(k in f for f in found)]
    means = {k: mean([float(f[k]) for f in found]) for k in kept}
    return Reached(group.label, target, len(each), len(found), mean(rounds), deviation(rounds), **means)


def to_csv(measure: Measure, rows: Sequence[Reached]) -> str:
    """The table as CSV, bytes as whole numbers."""
    out = io.StringIO()
    write = csv.writer(out, lineterminator="\n")
    names = ["rounds", "rounds std", "up", "down", "bytes", "seconds", "device seconds", "operations"]
    write.writerow([measure.name, "method", "seeds", "reached", *names])
    for r in rows:
        numbers = [r.round, r.round_spread, r.up, r.down, r.bytes, r.seconds, r.clock, r.flops]
        write.writerow([r.target, r.label, r.seeds, r.reached, *("" if v is None else f"{v:.10g}" for v in numbers)])
    return out.getvalue()


def figure(runs: Sequence[Run], targets: Sequence[float], named: str | None = None) -> Figure:
    """The measure over the bytes sent, with a line at every target."""
    measure = measure_of(runs, named)
    drawn = curves_figure(runs, "bytes", measure)
    axes = drawn.axes[0]
    for target in targets:
        y = 100 * target if measure.percent else target
        axes.axhline(y, color=SOFT, linestyle=(0, (1.2, 2.2)), linewidth=0.9, zorder=0)
        axes.annotate(
            f"{y:g}{' %' if measure.percent else ''}",
            (1.0, y),
            xycoords=axes.get_yaxis_transform(),
            ha="right",
            va="bottom",
            fontsize=7.5,
            color=SOFT,
        )
    return drawn
