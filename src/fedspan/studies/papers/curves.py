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

_NUMBER = re.compile(r"\b(\w+)=(\d+(?:\.\d+)?(?:e-?\d+)?)(?![\w.])")
_LEAST = 3  # points; two are better read in the table
_WORDS = {"r": "rank r", "K": "number of clients K"}


@dataclass(frozen=True)
class Series:
    """Rows alike but for one number, in its order; percent, points over seeds, seconds."""

    label: str
    name: str
    x: tuple[float, ...]
    accuracy: tuple[float, ...]
    spread: tuple[float, ...]
    seconds: tuple[float, ...]


def series(outcomes: Sequence[RowOutcome]) -> list[Series]:
    """What can be drawn over a number that stands in the labels as `name=number`; diverged rows are left out."""
    found: dict[tuple[str, str], list[tuple[float, RowOutcome]]] = {}
    for o in outcomes:
        if o.mean is None:
            continue
        for match in _NUMBER.finditer(o.row.label):
            rest = " ".join((o.row.label[: match.start()] + o.row.label[match.end() :]).split())
            found.setdefault((match.group(1), rest), []).append((float(match.group(2)), o))
    made = []
    for (name, rest), points in found.items():
        points.sort(key=lambda p: p[0])
        if len({x for x, _ in points}) < _LEAST:
            continue
        x, rows = zip(*points)
        made.append(
            Series(
                rest,
                name,
                x,
                tuple(100 * (o.mean or 0.0) for o in rows),
                tuple(100 * (o.std or 0.0) for o in rows),
                tuple(o.seconds or 0.0 for o in rows),
            )
        )
    return made


def draw(name: str, those: Sequence[Series], path: Path) -> Path:
    """Two panels over the number `name`: accuracy with its spread over seeds, and seconds per run.

    Raises:
        FedspanError: if matplotlib is missing.
    """
    from fedspan.report.canvas import save

    return save(lambda: _figure(name, those), path)


def _figure(name: str, those: Sequence[Series]) -> Figure:
    from matplotlib.ticker import MaxNLocator

    from fedspan.report.canvas import panels
    from fedspan.report.palette import PLAIN

    x = _WORDS.get(name, name)
    figure, (left, right) = panels(7.6, 3.2, [("accuracy, %", x), ("seconds per run", x)])
    for k, s in enumerate(those):
        colour = PLAIN[k % len(PLAIN)]
        left.errorbar(s.x, s.accuracy, s.spread, color=colour, marker="o", markersize=3.2, linewidth=1.5, label=s.label)
        right.plot(s.x, s.seconds, color=colour, marker="o", markersize=3.2, linewidth=1.5)
    right.set_ylim(bottom=0)
    numbers = [v for s in those for v in s.x]
    for axes in (left, right):
        if max(numbers) >= 20 * max(min(numbers), 1e-12) and min(numbers) > 1:
            axes.set_xscale("log")
            axes.set_xticks(sorted(set(numbers)), [f"{v:g}" for v in sorted(set(numbers))])
            axes.xaxis.set_minor_formatter(lambda v, _: "")  # powers of ten cannot be typeset, as dollar signs stay
        elif all(v == int(v) for v in numbers):
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    return figure
