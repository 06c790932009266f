"""Rows that differ in one number (`pFL-MF r=1`, `r=2`, ...) as a picture: accuracy and seconds over that number."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fedspan.studies.papers.step_sizes import RowOutcome

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NUMBER = re.compile(r"\b(\w+) ?= ?(\d+(?:\.\d+)?(?:e-?\d+)?)(?![\w.])")
_LEAST = 3  # points; two are better read in the table
_WORDS = {"r": "rank r", "K": "number of clients K", "K_U": "steps K_U on U in a round"}


@dataclass(frozen=True)
class LabelledPoint:
    """A row as its label and what is drawn of it: accuracy and what it may be off by as parts of one, seconds."""

    label: str
    accuracy: float
    spread: float
    seconds: float | None = None


@dataclass(frozen=True)
class Series:
    """Rows alike but for one number, in its order; percent, points over seeds, seconds where they were taken."""

    label: str
    name: str
    x: tuple[float, ...]
    accuracy: tuple[float, ...]
    spread: tuple[float, ...]
    seconds: tuple[float, ...]


def series(outcomes: Sequence[RowOutcome]) -> list[Series]:
    """What can be drawn of a paper's rows; diverged ones are left out."""
    return lines(
        [LabelledPoint(o.row.label, o.mean, o.std or 0.0, o.seconds or 0.0) for o in outcomes if o.mean is not None]
    )


def lines(points: Sequence[LabelledPoint]) -> list[Series]:
    """What can be drawn over a number that stands in labels as `name=number` or `name = number`."""
    found: dict[tuple[str, str], list[tuple[float, LabelledPoint]]] = {}
    for point in points:
        for match in _NUMBER.finditer(point.label):
            left = (point.label[: match.start()] + point.label[match.end() :]).split(",")
            rest = ", ".join(" ".join(part.split()) for part in left if part.strip())
            found.setdefault((match.group(1), rest), []).append((float(match.group(2)), point))
    made = []
    for (name, rest), those in found.items():
        those.sort(key=lambda p: p[0])
        if len({x for x, _ in those}) < _LEAST:
            continue
        x, rows = zip(*those)
        seconds = tuple(p.seconds for p in rows if p.seconds is not None)
        made.append(
            Series(
                rest,
                name,
                x,
                tuple(100 * p.accuracy for p in rows),
                tuple(100 * p.spread for p in rows),
                seconds if len(seconds) == len(rows) else (),
            )
        )
    return made


def draw(name: str, those: Sequence[Series], path: Path, time: str = "seconds per run") -> Path:
    """Panels over the number `name`: accuracy with its spread, and seconds where all of them have any.

    Raises:
        FedspanError: if matplotlib is missing.
    """
    from fedspan.report.canvas import save

    return save(lambda: _figure(name, those, time), path)


def _figure(name: str, those: Sequence[Series], time: str) -> Figure:
    from matplotlib.ticker import MaxNLocator

    from fedspan.report.canvas import panels
    from fedspan.report.palette import PLAIN

    x = _WORDS.get(name, name)
    timed = all(s.seconds for s in those)
    titles = [("accuracy, %", x), *([(time, x)] if timed else [])]
    figure, axes = panels(7.6 if timed else 5.2, 3.2, titles)
    left = axes[0]
    for k, s in enumerate(those):
        colour = PLAIN[k % len(PLAIN)]
        left.errorbar(s.x, s.accuracy, s.spread, color=colour, marker="o", markersize=3.2, linewidth=1.5, label=s.label)
        for right in axes[1:]:
            right.plot(s.x, s.seconds, color=colour, marker="o", markersize=3.2, linewidth=1.5)
    low, high = left.get_ylim()
    left.set_ylim(max(low, 0), min(high, 100))  # an interval may reach beyond what there is
    for right in axes[1:]:
        right.set_ylim(bottom=0)  # after all lines, as a limit that is set is not widened by those that follow
    numbers = [v for s in those for v in s.x]
    for panel in axes:
        if max(numbers) >= 20 * max(min(numbers), 1e-12) and min(numbers) > 1:
            panel.set_xscale("log")
            panel.set_xticks(sorted(set(numbers)), [f"{v:g}" for v in sorted(set(numbers))])
            panel.xaxis.set_minor_formatter(lambda v, _: "")  # powers of ten cannot be typeset, as dollar signs stay
        elif all(v == int(v) for v in numbers):
            panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    return figure
