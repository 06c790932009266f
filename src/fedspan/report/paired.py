"""Methods compared client by client: each client is its own control, so that the spread over clients cancels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fedspan.errors import FedspanError
from fedspan.report.canvas import bare, canvas
from fedspan.report.grid import Cell, Grid, comma_separated, latex, markdown
from fedspan.report.measures import Measure, alone, clients, measure_of
from fedspan.report.palette import INK, PAPER, looks
from fedspan.report.registered import role
from fedspan.report.runs import Group, Run, group
from fedspan.report.tables import summary_rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fedspan.report.tables import Row

Floats = NDArray[np.float64]
_DOTS = 400
NOTE = (
    "p of the sign test and of Wilcoxon's signed-rank test, two-sided, corrected by Holm for the number of comparisons."
    " The tests take clients as independent; those of one run share what they learnt, so read p as a guide."
)


@dataclass(frozen=True)
class Pair:
    """A method against a reference on the same clients; gains are positive where the method is better."""

    label: str
    against: str
    measure: Measure
    gains: Floats  # one per client and seed both have
    seeds: int
    sign: float | None  # p; None if no client differs
    wilcoxon: float | None

    @property
    def better(self) -> int:
        """How many clients gain."""
        return int((self.gains > 0).sum())

    @property
    def worse(self) -> int:
        """How many clients lose."""
        return int((self.gains < 0).sum())


def pairs(runs: Sequence[Run], against: str | None = None, measure: Measure | None = None) -> list[Pair]:
    """Every method against one of them (by default the best), in the order of the table, by the first measure or this.

    Methods that share no client and seed with the reference are left out.

    Raises:
        FedspanError: if `against` is no method of these runs.
    """
    groups, measure = group(runs), measure or measure_of(runs)
    by_label = {g.label: g for g in groups}
    rows = [r for r in summary_rows(runs, measure=measure) if r.mean is not None]
    if against is not None and against not in by_label:
        raise FedspanError(f"Compare: the reference must be one of {', '.join(by_label)}. Got {against!r}.")
    if len(rows) < 2:
        return []
    reference = against or first_contender(rows)
    found = [_pair(by_label[r.label], by_label[reference], measure) for r in rows if r.label != reference]
    return _corrected([p for p in found if len(p.gains)])


def first_contender(rows: Sequence[Row]) -> str:
    """The best row that was not told what a method must find out."""
    return next((r.label for r in rows if role(r.method) != "told"), rows[0].label)


def _pair(one: Group, other: Group, measure: Measure) -> Pair:
    gains: list[float] = []
    seeds = 0
    for mine in one.runs:
        for theirs in other.runs:
            values = alone(mine, theirs, measure)
            if values:
                seeds += 1
                gains += [measure.gain(c.value, values[c.index]) for c in clients(mine, measure)]
    array = np.array(gains, np.float64)
    return Pair(one.label, other.label, measure, array, seeds, *p_values(array))


def p_values(gains: Floats) -> tuple[float | None, float | None]:
    """p of the sign test and of Wilcoxon's signed-rank test, two-sided, without the clients that do not differ."""
    from scipy.stats import binomtest, wilcoxon

    moved = gains[gains != 0]
    if not len(moved):
        return None, None
    sign = binomtest(int((moved > 0).sum()), len(moved)).pvalue
    # Equal sizes of gains are the rule among accuracies of small test parts, which the exact law does not allow.
    tied = len(np.unique(np.abs(moved).round(12))) < len(moved)
    rank = wilcoxon(moved.round(12), method="approx" if tied or len(moved) > 50 else "exact").pvalue
    return float(sign), float(rank)


def _corrected(found: list[Pair]) -> list[Pair]:
    signs, ranks = holm([p.sign for p in found]), holm([p.wilcoxon for p in found])
    return [replace(p, sign=s, wilcoxon=w) for p, s, w in zip(found, signs, ranks)]


def holm(values: Sequence[float | None]) -> list[float | None]:
    """Holm's correction: the k-th smallest of m is multiplied by m - k + 1, and none falls below a smaller one."""
    out: list[float | None] = [None] * len(values)
    known = sorted((v, k) for k, v in enumerate(values) if v is not None)
    least = 0.0
    for rank, (v, k) in enumerate(known):
        least = max(least, min(1.0, v * (len(known) - rank)))
        out[k] = least
    return out


# ------------------------------------------------------------------------------------------------ tables


def grid(found: Sequence[Pair]) -> Grid:
    """The comparison as a table; a gain is bold where Wilcoxon's p is below 0.05."""
    measure = found[0].measure
    unit = "points" if measure.percent else measure.title
    titles = [f"against {found[0].against}", f"mean gain ({unit})", f"median gain ({unit})"]
    titles += ["better", "equal", "worse", "p (sign)", "p (Wilcoxon)"]
    rows = []
    for p in found:
        clear = p.wilcoxon is not None and p.wilcoxon < 0.05
        equal = len(p.gains) - p.better - p.worse
        counts = [Cell(str(n)) for n in (p.better, equal, p.worse)]
        mean, median = (Cell(_signed(float(f(p.gains)), measure), clear) for f in (np.mean, np.median))
        rows.append([Cell(p.label), mean, median, *counts, Cell(_p(p.sign)), Cell(_p(p.wilcoxon))])
    return Grid(titles, rows)


def to_markdown(found: Sequence[Pair]) -> str:
    """As Markdown, with a line on how to read it."""
    return f"{markdown(grid(found))}\n{NOTE}\n"


def to_latex(found: Sequence[Pair]) -> str:
    """As a LaTeX table for the booktabs package."""
    return latex(grid(found))


def to_csv(found: Sequence[Pair]) -> str:
    """With full precision; gains are fractions for accuracies."""
    titles = ["label", "against", "clients_and_seeds", "seeds", "mean_gain", "median_gain", "better", "equal", "worse"]
    lines: list[list[str | int | float | None]] = []
    for p in found:
        n = len(p.gains)
        line: list[str | int | float | None] = [p.label, p.against, n, p.seeds]
        line += [float(p.gains.mean()), float(np.median(p.gains)), p.better, n - p.better - p.worse, p.worse]
        lines.append([*line, p.sign, p.wilcoxon])
    return comma_separated([*titles, "p_sign_holm", "p_wilcoxon_holm"], lines)


def to_html(found: Sequence[Pair]) -> str:
    """As a table of the page."""
    made = grid(found)
    head = "".join(f'<th scope="col">{escape(t)}</th>' for t in made.titles)
    body = ""
    for row in made.rows:
        cells = "".join(f"<td{' class=clear' if c.bold else ''}>{escape(c.text)}</td>" for c in row[1:])
        body += f'<tr><th scope="row">{escape(row[0].text)}</th>{cells}</tr>\n'
    return (
        '<div class="box" role="region" aria-label="Differences client by client" tabindex="0"><table>'
        f"<caption><span>Gains over {escape(found[0].against)} on the same clients. {escape(NOTE)}</span></caption>"
        f"<thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table></div>\n"
    )


def _signed(value: float, measure: Measure) -> str:
    value = 100 * value if measure.percent else value
    text = f"{abs(value):.2f}" if measure.percent else f"{abs(value):.4g}"
    return text if float(text) == 0 else f"{'+' if value > 0 else '−'}{text}"


def _p(value: float | None) -> str:
    return "n/a" if value is None else "< 0.001" if value < 0.001 else f"{value:.3f}"


# ------------------------------------------------------------------------------------------------ figure


def differences_figure(runs: Sequence[Run], against: str | None = None, measure: Measure | None = None) -> Figure:
    """Every client's gain, a row per method: how many gain, how many lose, and by how much."""
    found, look = pairs(runs, against, measure), looks(group(runs))
    if not found:
        raise FedspanError("Compare: there must be two methods with the same clients and seeds. Got none.")
    measure = found[0].measure
    figure, axes = canvas(4.6, 1.0 + 0.34 * len(found))
    unit = "points" if measure.percent else measure.title
    bare(axes, "", f"gain over {found[0].against} of each client ({unit})", across=True)
    axes.axvline(0.0, color=INK, linewidth=1.0)
    scale = 100.0 if measure.percent else 1.0
    for k, p in enumerate(found):
        values = scale * np.sort(p.gains)
        few = values if len(values) <= _DOTS else np.quantile(values, np.linspace(0, 1, _DOTS))
        offset = 0.44 * ((np.arange(len(few)) * 0.6180339887) % 1.0 - 0.5)
        axes.scatter(few, k + offset, s=9, color=look[p.label].colour, alpha=0.4, linewidths=0)
        axes.plot([values.mean()], [k], marker="D", markersize=5, color=PAPER, markeredgecolor=INK, markeredgewidth=1.1)
    axes.set_yticks(range(len(found)), [p.label[:26] for p in found])
    for text, p in zip(axes.get_yticklabels(), found):
        text.set_color(look[p.label].text)
    axes.set_ylim(len(found) - 0.4, -0.6)
    axes.set_title("◇ mean", fontsize=7.5, color=INK, loc="right", pad=5)
    return figure
