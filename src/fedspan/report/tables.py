"""One row per method or setting, as Markdown, CSV, LaTeX, or a table for the terminal."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedspan.report.grid import Cell, Grid, comma_separated, latex, markdown
from fedspan.report.measures import Measure, deviation, mean, measure_of, measures_of, points, value
from fedspan.report.runs import Run, group
from fedspan.report.text import number

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Target:
    """What it took to reach a value for the first time, on average over the seeds that did."""

    value: float
    reached: int  # seeds that did
    rounds: float | None = None
    megabytes: float | None = None  # both directions
    seconds: float | None = None


@dataclass(frozen=True)
class FurtherValue:
    """What a row has of a measure beside its first."""

    measure: Measure
    mean: float | None
    over_seeds: float | None
    over_clients: float | None
    pooled: float | None  # over the examples of all clients together


@dataclass(frozen=True)
class Row:
    """A method or setting, averaged over its seeds. Accuracies are fractions, bytes are MB (1e6 bytes).

    Downloads include announcements; evaluation and the weights of uploads are not counted.
    """

    label: str
    method: str
    measure: Measure
    seeds: tuple[int, ...]
    rounds: int
    mean: float | None
    over_seeds: float | None  # sample standard deviation over seeds; None for one seed
    over_clients: float | None  # standard deviation over clients, averaged over seeds
    worst: float | None  # the tenth percentile over clients, from the bad side
    up: float | None  # MB per client and round
    down: float | None
    up_total: float | None
    down_total: float | None
    seconds: float | None
    target: Target | None = None
    further: tuple[FurtherValue, ...] = ()

    @property
    def total(self) -> float | None:
        """MB in both directions over the whole run."""
        return None if self.up_total is None or self.down_total is None else self.up_total + self.down_total


def summary_rows(runs: Sequence[Run], target: float | None = None, measure: Measure | None = None) -> list[Row]:
    """One row per group of equal settings, the best mean first; with what it took to reach a `target` if given.

    Without a `measure` it is the first that the runs were asked for; the others stand beside it.
    """
    measure = measure or measure_of(runs)
    others = [m for m in measures_of(runs) if m != measure]
    rows = []
    for g in group(runs):
        means = [value(r, measure) for r in g.runs]
        sent = [_megabytes(r) for r in g.runs]
        rows.append(
            Row(
                label=g.label,
                method=g.runs[0].method,
                measure=measure,
                seeds=g.seeds,
                rounds=g.runs[0].rounds,
                mean=mean(means),
                over_seeds=deviation(means),
                over_clients=mean([value(r, measure, "std") for r in g.runs]),
                worst=mean([value(r, measure, "worst") for r in g.runs]),
                up=mean([s[0] for s in sent]),
                down=mean([s[1] for s in sent]),
                up_total=mean([s[2] for s in sent]),
                down_total=mean([s[3] for s in sent]),
                seconds=mean([number(r.result["seconds"].get("train")) for r in g.runs]),
                target=None if target is None else reach(g.runs, measure, target),
                further=tuple(_further(g.runs, m) for m in others),
            )
        )
    sign = -1.0 if measure.higher else 1.0
    return sorted(rows, key=lambda r: (r.mean is None, sign * (r.mean or 0.0)))


def _further(runs: Sequence[Run], measure: Measure) -> FurtherValue:
    means = [value(r, measure) for r in runs]
    rest = [mean([value(r, measure, of) for r in runs]) for of in ("std", "pooled")]
    return FurtherValue(measure, mean(means), deviation(means), *rest)


def reach(runs: Sequence[Run], measure: Measure, target: float) -> Target:
    """When runs of different seeds first reach a mean over clients, at the rounds they were evaluated."""
    found: list[tuple[float, float, float]] = []
    for run in runs:
        ways = [points(run, measure, x) for x in ("round", "bytes", "seconds")]
        at = next((k for k, p in enumerate(ways[0]) if measure.gain(p[2], target) >= 0.0), None)
        if at is not None:
            found.append((ways[0][at][1], ways[1][at][1], ways[2][at][1]))
    if not found:
        return Target(target, 0)
    rounds, megabytes, seconds = (math.fsum(column) / len(found) for column in zip(*found))
    return Target(target, len(found), rounds, megabytes, seconds)


def usual_target(rows: Sequence[Row]) -> float | None:
    """A value worth asking for: 95 % of the best mean (105 % of an error), to a whole percent for accuracies."""
    known = [r.mean for r in rows if r.mean is not None]
    if not known:
        return None
    measure = rows[0].measure
    if not measure.higher:
        return 1.05 * min(known)
    return math.floor(95 * max(known)) / 100 if measure.percent else 0.95 * max(known)


def _megabytes(run: Run) -> tuple[float | None, float | None, float | None, float | None]:
    """MB up and down per client and round, and in total."""
    up, down = number(run.result["bytes"].get("up")), number(run.result["bytes"].get("down"))
    if up is None or down is None:
        return None, None, None, None
    down += number(run.result["bytes"].get("announce")) or 0.0
    answered = sum(number(line.get("answered")) or 0.0 for line in run.lines)
    train = run.config.get("train")
    before = isinstance(train, dict) and train.get("drop") == "before"  # such clients drop out before their download
    asked = answered if before else sum(number(line.get("sampled")) or 0.0 for line in run.lines)
    per_up = up / 1e6 / answered if answered else None
    per_down = down / 1e6 / asked if asked else None
    return per_up, per_down, up / 1e6, down / 1e6


@dataclass(frozen=True)
class Column:
    """A column of the table: its heading, a cell's text, the number to sort by, and which end is best."""

    title: str
    text: Callable[[Row], str]
    sort: Callable[[Row], float | None] | None = None
    best: Callable[[Sequence[float]], float] | None = None

    def winners(self, rows: Sequence[Row]) -> set[str]:
        """The labels whose cell is best, if there is something to compare."""
        if self.best is None or self.sort is None or len(rows) < 2:
            return set()
        # Equal as shown is equal: nobody wins by a digit that is not printed.
        numbers = {r.label: (v, self.text(r).split(" ")[0]) for r in rows if (v := self.sort(r)) is not None}
        if not numbers:
            return set()
        top = self.best([v for v, _ in numbers.values()])
        shown = {text for v, text in numbers.values() if v == top}
        return {label for label, (_, text) in numbers.items() if text in shown}


def columns(rows: Sequence[Row]) -> list[Column]:
    """The columns of the table; the spread is over seeds as soon as some row has several, else over clients."""
    measure = rows[0].measure if rows else measure_of([])
    seeds = any(r.over_seeds is not None for r in rows)
    best = max if measure.higher else min

    def plus_minus(row: Row | FurtherValue) -> str:
        spread, text = row.over_seeds if seeds else row.over_clients, row.measure.text
        return text(row.mean) if row.mean is None else f"{text(row.mean)} ± {text(spread)}"

    def beside(k: int, other: Measure) -> Column:
        title = f"{other.title} (± over {'seeds' if seeds else 'clients'})"
        which = max if other.higher else min
        return Column(title, lambda r: plus_minus(r.further[k]), lambda r: r.further[k].mean, which)

    found = [
        Column("method", lambda r: r.label),
        Column(f"{measure.title} (± over {'seeds' if seeds else 'clients'})", plus_minus, lambda r: r.mean, best),
        Column(
            "worst tenth %" if measure.percent else "worst tenth",
            lambda r: measure.text(r.worst),
            lambda r: r.worst,
            best,
        ),
        *(beside(k, f.measure) for k, f in enumerate(rows[0].further if rows else ())),
        Column("MB up per client-round", lambda r: short(r.up), lambda r: r.up),
        Column("MB down per client-round", lambda r: short(r.down), lambda r: r.down),
        Column("MB in total", lambda r: short(r.total), lambda r: r.total),
        Column("train\u00a0s", lambda r: "n/a" if r.seconds is None else f"{r.seconds:,.1f}", lambda r: r.seconds),
        Column("rounds", lambda r: str(r.rounds), lambda r: float(r.rounds)),
        Column("seeds", lambda r: str(len(r.seeds)), lambda r: float(len(r.seeds))),
    ]
    aim = next((r.target for r in rows if r.target is not None), None)
    start = 3 + len(rows[0].further if rows else ())
    return found if aim is None else found[:start] + _to_target(aim, measure) + found[start:]


def _to_target(aim: Target, measure: Measure) -> list[Column]:
    """What it took to get there; a row of which not all seeds did says how many."""
    to = f"to {measure.phrase(aim.value)}"

    def column(title: str, pick: Callable[[Target], float | None], shown: Callable[[float], str]) -> Column:
        def sort(r: Row) -> float | None:
            return None if r.target is None else pick(r.target)

        def text(r: Row) -> str:
            value = sort(r)
            if value is None or r.target is None:
                return "never"
            few = r.target.reached < len(r.seeds)
            return shown(value) + (f" ({r.target.reached} of {len(r.seeds)} seeds)" if few else "")

        return Column(f"{title} {to}", text, sort, min)

    return [
        column("rounds", lambda t: t.rounds, lambda v: f"{v:.0f}" if v >= 10 else f"{v:.3g}"),
        column("MB", lambda t: t.megabytes, short),
        column("s", lambda t: t.seconds, lambda v: f"{v:,.1f}"),
    ]


def short(value: float | None) -> str:
    """A number with three digits that matter, never in powers of ten."""
    if value is None:
        return "n/a"
    if value == 0.0:
        return "0"
    digits = min(6, max(0, 2 - math.floor(math.log10(abs(value)))))
    return f"{value:,.{digits}f}" if abs(value) >= 1e-6 else "< 0.000001"


def grid(rows: Sequence[Row]) -> Grid:
    """The table as text, the best values marked."""
    cols = columns(rows)
    best = [c.winners(rows) for c in cols]
    cells = [[Cell(c.text(r), r.label in b) for c, b in zip(cols, best)] for r in rows]
    return Grid([c.title for c in cols], cells)


def to_markdown(rows: Sequence[Row]) -> str:
    """A Markdown table; the best values are bold."""
    return markdown(grid(rows))


def to_latex(rows: Sequence[Row]) -> str:
    """A LaTeX table for the booktabs package; the best values are bold."""
    return latex(grid(rows))


def to_csv(rows: Sequence[Row]) -> str:
    """CSV with full precision: fractions, not percent; `n/a` where a value is missing."""
    name = rows[0].measure.name if rows else "accuracy"
    titles = ["label", "method", "seeds", "rounds", name, f"{name}_std_over_seeds", f"{name}_std_over_clients"]
    titles += [f"{name}_worst_tenth", "mb_up_per_client_round", "mb_down_per_client_round"]
    titles += ["mb_up", "mb_down", "mb_total", "train_seconds"]
    for f in rows[0].further if rows else ():
        n = f.measure.name
        titles += [n, f"{n}_std_over_seeds", f"{n}_std_over_clients", f"{n}_pooled"]
    aimed = any(r.target is not None for r in rows)
    titles += ["target", "seeds_that_reach_it", "rounds_to_it", "mb_to_it", "seconds_to_it"] if aimed else []
    lines: list[list[str | int | float | None]] = []
    for r in rows:
        line: list[str | int | float | None] = [r.label, r.method, " ".join(map(str, r.seeds)), r.rounds]
        line += [r.mean, r.over_seeds, r.over_clients, r.worst, r.up, r.down]
        line += [r.up_total, r.down_total, r.total, r.seconds]
        for f in r.further:
            line += [f.mean, f.over_seeds, f.over_clients, f.pooled]
        if aimed and r.target is not None:
            t = r.target
            line += [t.value, t.reached, t.rounds, t.megabytes, t.seconds]
        lines.append(line)
    return comma_separated(titles, lines)


def to_rich(rows: Sequence[Row]) -> Table:
    """A table for the terminal; the best values are bold and green."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    cols = columns(rows)
    shared = [c for c in cols[-2:] if len({c.text(r) for r in rows}) == 1]  # said once below, to fit 80 columns
    cols = [c for c in cols if c not in shared]
    best = [c.winners(rows) for c in cols]
    below = ", ".join(f"{c.title}: {c.text(rows[0])}" for c in shared)
    table = Table(
        box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, caption=below or None, caption_justify="left"
    )
    for c in cols:
        title = c.title.replace(" (± over ", "\n± over ").replace(")", "").replace(" per client-", "\nper client\nand ")
        title = title.replace("tenth", "\ntenth").replace(" \n", "\n").replace("MB in ", "MB in\n")
        table.add_column(Text(title), justify="left" if c.sort is None else "right", no_wrap=c.sort is not None)
    for r in rows:
        # Text, not markup: a label may hold square brackets.
        table.add_row(*(Text(c.text(r), "bold green" if r.label in b else "") for c, b in zip(cols, best)))
    return table
