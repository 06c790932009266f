"""Figures of runs: learning curves over rounds, bytes or seconds; the clients; the traffic. PNG, PDF, SVG by suffix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedspan.errors import FedspanError
from fedspan.report.canvas import bare, canvas, save
from fedspan.report.measures import Axis, Curve, Measure, curve_of, measure_of
from fedspan.report.measures import clients as client_values
from fedspan.report.palette import INK, PAPER, SOFT, Look, looks, stays_behind
from fedspan.report.runs import Run, as_run, group
from fedspan.report.tables import short, summary_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from fedspan.simulation.result import Result

_SIZE = (4.6, 3.2)  # inches: small, so that letters stay readable when a phone scales it down
_MOST = 10  # curves with a colour of their own; a person cannot follow more
_DOTS = 120  # points per method; beyond that, evenly spaced ranks stand for all
_X = {
    "round": "round",
    "bytes": "MB sent, both directions",
    "seconds": "seconds of training",
    "clock": "seconds on the clients' devices",
}

Runs = Sequence[Run | Mapping[str, Any]]


def curves(runs: Runs, path: str | Path, x: Axis = "round") -> Path:
    """Draw the mean over clients and seeds along rounds, bytes or seconds; the band is the deviation over seeds."""
    return save(lambda: curves_figure(runs, x), path)


def plot(result: Result, path: str | Path, x: Axis = "round") -> Path:
    """Draw the learning curve of one result of `fedspan.simulate`."""
    return curves([result.to_json() | {"curve": result.curve}], path, x)


def clients(runs: Runs, path: str | Path) -> Path:
    """Draw every client's final value, one line of dots per method, with quartiles and mean."""
    return save(lambda: clients_figure(runs), path)


def bytes_bars(runs: Runs, path: str | Path) -> Path:
    """Draw what each method sends up and down in total."""
    return save(lambda: bytes_figure(runs), path)


def curves_figure(runs: Runs, x: Axis = "round", measure: Measure | None = None) -> Figure:
    """The figure of `curves`, to be drawn by `save` or `inline_svg`, which set the style.

    Raises:
        FedspanError: for an unknown axis.
    """
    if x not in _X:
        raise FedspanError(f"Report: x must be 'round', 'bytes', 'seconds' or 'clock'. Got {x!r}.")
    from matplotlib.ticker import MaxNLocator

    known = [as_run(r) for r in runs]
    groups, measure = group(known), measure or measure_of(known)
    look = looks(groups)
    found = [c for c in (curve_of(g, measure, x) for g in groups) if c.y]
    found.sort(key=lambda c: c.y[-1], reverse=measure.higher)
    figure, axes = canvas(*_SIZE)
    bare(axes, measure.title, _X[x])
    scale = 100.0 if measure.percent else 1.0
    still = [c for c in found if x == "bytes" and c.x[-1] == 0.0]
    moving = [c for c in found if c not in still]
    lines: list[tuple[Curve, Look, float]] = []
    for k, c in reversed(list(enumerate(moving))):
        own = k < _MOST or stays_behind(c.label)
        style = look[c.label] if own else Look("#c9ced6", "-")
        y = scale * np.array(c.y)
        # Few evaluations are shown as such: a line between two points is not a measurement.
        marker = "o" if len(y) <= 20 else ""
        axes.plot(c.x, y, color=style.colour, linestyle=style.dash, linewidth=1.7, marker=marker, markersize=3.2)
        if c.spread is not None:
            s = scale * np.array(c.spread)
            axes.fill_between(c.x, y - s, y + s, color=style.colour, alpha=0.16, linewidth=0)
        if own:
            lines.insert(0, (c, style, float(y[-1])))
    for c in still:
        axes.axhline(scale * c.y[-1], color=look[c.label].colour, linestyle=look[c.label].dash, linewidth=1.4)
    if x == "bytes" and _far_apart(moving):
        axes.set_xscale("log")
        axes.set_xlabel(f"{_X[x]} (logarithmic)")
    axes.xaxis.set_major_formatter(lambda v, _: short(v).rstrip("0").rstrip(".") if "." in short(v) else short(v))
    if x == "round":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))  # there is no round two and a half
    axes.xaxis.set_minor_formatter(lambda v, _: "")
    rest = len(moving) - len(lines)
    if not found:
        axes.text(0.5, 0.5, "nothing was evaluated", transform=axes.transAxes, ha="center", color=SOFT)
    elif x == "round" and len({c.x[-1] for c in found}) == 1 and not rest:
        _labels_at_ends(axes, lines)
    else:
        entries = lines + [(c, look[c.label], scale * c.y[-1]) for c in still]
        entries.sort(key=lambda e: e[2], reverse=measure.higher)
        _legend(axes, entries, {c.label for c in still}, rest)
    return figure


def clients_figure(runs: Runs, measure: Measure | None = None) -> Figure:
    """The figure of `clients`."""
    known = [as_run(r) for r in runs]
    groups, measure = group(known), measure or measure_of(known)
    look, order = looks(groups), [row.label for row in summary_rows(known, measure=measure)]
    by_label = {g.label: g for g in groups}
    figure, axes = canvas(_SIZE[0], 1.0 + 0.32 * len(order))
    bare(axes, "", f"{measure.title} of each client", across=True)
    scale = 100.0 if measure.percent else 1.0
    for k, label in enumerate(order):
        values = scale * np.sort([c.value for run in by_label[label].runs for c in client_values(run, measure)])
        if not len(values):
            continue
        colour = look[label].colour
        few = values if len(values) <= _DOTS else np.quantile(values, np.linspace(0, 1, _DOTS))
        # The golden ratio spreads dots evenly without chance, so the figure is the same every time.
        offset = 0.30 * ((np.arange(len(few)) * 0.6180339887) % 1.0 - 0.5)
        axes.scatter(few, k + offset, s=11, color=colour, alpha=0.42, linewidths=0, clip_on=False)
        low, middle, high = np.percentile(values, [25, 50, 75])
        axes.plot([low, high], [k, k], color=colour, linewidth=5.5, alpha=0.55, solid_capstyle="butt")
        axes.plot([middle, middle], [k - 0.24, k + 0.24], color=INK, linewidth=1.6, solid_capstyle="butt")
        axes.plot([values.mean()], [k], marker="D", markersize=4.6, color=PAPER, markeredgecolor=INK, markeredgewidth=1)
    _rows(axes, order, look)
    axes.set_title("◇ mean\u2003| median\u2003▬ middle half", fontsize=7.5, color=SOFT, loc="right", pad=5)
    return figure


def bytes_figure(runs: Runs) -> Figure:
    """The figure of `bytes_bars`."""
    known = [as_run(r) for r in runs]
    rows, look = summary_rows(known), looks(group(known))
    figure, axes = canvas(_SIZE[0], 1.0 + 0.32 * len(rows))
    bare(axes, "", "MB in total, all clients and rounds", across=True)
    top = max([r.total or 0.0 for r in rows], default=0.0)
    for k, r in enumerate(rows):
        up, down = r.up_total or 0.0, r.down_total or 0.0
        axes.barh(k, up, height=0.56, color=look[r.label].colour, linewidth=0)
        axes.barh(k, down, left=up, height=0.56, color=look[r.label].colour, alpha=0.42, linewidth=0)
        says = "n/a" if r.total is None else "nothing sent" if r.total == 0.0 else f"{short(r.total)} MB"
        axes.annotate(says, (up + down, k), (4, 0), textcoords="offset points", va="center", fontsize=8, color=INK)
    axes.set_xlim(0, 1.24 * top or 1.0)
    _rows(axes, [r.label for r in rows], look)
    axes.set_title("dark: up\u2003light: down", fontsize=7.5, color=SOFT, loc="right", pad=5)
    return figure


def _far_apart(found: Sequence[Curve]) -> bool:
    ends = [c.x[-1] for c in found]
    return len(ends) > 1 and min(min(c.x) for c in found) > 0.0 and max(ends) > 6 * min(ends)


def _rows(axes: Axes, labels: Sequence[str], look: Mapping[str, Look]) -> None:
    axes.set_yticks(range(len(labels)), [_fit(label) for label in labels])
    for text, label in zip(axes.get_yticklabels(), labels):
        text.set_color(look[label].text)
    axes.set_ylim(len(labels) - 0.4, -0.6)


def _labels_at_ends(axes: Axes, lines: Sequence[tuple[Curve, Look, float]]) -> None:
    """Names at the right ends of the lines, pushed apart where they would overlap."""
    low, high = axes.get_ylim()
    step = (high - low) * min(0.062, 1.0 / max(1, len(lines)))
    wanted = sorted(lines, key=lambda e: e[2])
    places = [y for _, _, y in wanted]
    for _ in range(200):  # neighbours that overlap each give way by half
        for k in range(len(places) - 1):
            overlap = step - (places[k + 1] - places[k])
            if overlap > 0.0:
                places[k], places[k + 1] = places[k] - overlap / 2, places[k + 1] + overlap / 2
    axes.set_ylim(min(low, places[0]), max(high, places[-1]))
    for (c, style, y), place in zip(wanted, places):
        axes.annotate(
            _fit(c.label),
            (c.x[-1], y),
            (1.035, place),
            textcoords=axes.get_yaxis_transform(),
            va="center",
            fontsize=8.5,
            color=style.text,
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": style.colour, "linewidth": 0.7, "shrinkA": 1, "shrinkB": 2},
        )


def _legend(axes: Axes, entries: Sequence[tuple[Curve, Look, float]], still: set[str], rest: int) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=s.colour, linestyle=s.dash, linewidth=1.7) for _, s, _ in entries]
    names = [_fit(c.label) + (" (sends nothing)" if c.label in still else "") for c, _, _ in entries]
    if rest:
        handles.append(Line2D([], [], color="#c9ced6", linewidth=1.7))
        names.append(f"{rest} others")
    longest = max(map(len, names))
    beside = 3 if longest <= 16 else 2 if longest <= 27 else 1
    over = max(0, -(-len(names) // beside) - 3)
    figure: Any = axes.figure
    if over:  # a long legend gets its own room instead of the axes'
        figure.set_size_inches(_SIZE[0], _SIZE[1] + 0.17 * over)
    drop = -0.17 * _SIZE[1] / (_SIZE[1] + 0.05 * over)
    side: dict[str, Any] = {
        "loc": "upper center",
        "bbox_to_anchor": (0.46, drop),
        "ncols": beside,
        "columnspacing": 1.2,
    }
    axes.legend(handles, names, frameon=False, fontsize=8, labelcolor=INK, handlelength=1.9, **side)


def _fit(label: str) -> str:
    return label if len(label) <= 26 else label[:25] + "…"
