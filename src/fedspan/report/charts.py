"""Draws what methods show of their runs: scatter, bars, lines and heat maps in rows, with matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fedspan.method.panels import BarChart, Chart, Drawing, Floats, HeatMap, LineChart, ScatterChart
from fedspan.report.canvas import bare, canvas
from fedspan.report.palette import PAPER, PLAIN, SOFT, looks
from fedspan.report.runs import Group

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.collections import QuadMesh
    from matplotlib.figure import Figure

_MARKERS = ("o", "s", "^", "D", "v")  # a new shape whenever the colours begin again
_SHAPED = 8
_DOTS = 600  # points in a figure; beyond that, a fixed random choice stands for all
_NUMBERED = 24  # more labels than this are not written beside their points
_NAMED = 40  # more clients than this get no names on the axes
_MOST = 60  # clients in a matrix; of more, an even choice stands for all
_MARKED = 20  # more points on a line than this get no marks


def figure_of(drawing: Drawing) -> Figure:
    """A drawing as a figure, to be drawn by `save` or `inline_svg`, which set the style."""
    rows = drawing.rows
    if len(rows) == 1 and len(rows[0]) == 1:
        figure, axes = canvas(*drawing.size)
        _draw(axes, rows[0][0])
        return figure
    figure, _ = canvas(*drawing.size)
    figure.clear()
    lines = all(isinstance(chart, LineChart) for row in rows for chart in row)
    wide = max(map(len, rows))
    grid = figure.subplots(len(rows), wide, sharex=lines, squeeze=False)
    for k, (places, row) in enumerate(zip(grid, rows)):
        for axes, chart in zip(places, row):
            _draw(axes, chart, below=lines and k < len(rows) - 1)
        for axes in places[len(row) :]:
            axes.set_axis_off()
        if row and all(isinstance(chart, HeatMap) and chart.limits is not None for chart in row):
            _scale(figure, places[len(row) - 1].collections[0], list(places), "", fraction=0.03, pad=0.01)
    return figure


def _draw(axes: Axes, chart: Chart, below: bool = False) -> None:
    """One chart; `below`: another one of the same rounds stands below it."""
    if isinstance(chart, ScatterChart):
        _scatter(axes, chart)
    elif isinstance(chart, BarChart):
        _bars(axes, chart)
    elif isinstance(chart, LineChart):
        _line(axes, chart, below)
    else:
        _heat(axes, chart)


def _scatter(axes: Axes, chart: ScatterChart) -> None:
    bare(axes, "", chart.x)
    axes.grid(axis="both", color="#eceef1", linewidth=0.8)
    axes.set_ylabel(chart.y, color=SOFT, fontsize=8.5)
    labels = chart.labels
    shown = np.random.default_rng(0).permutation(len(labels))[:_DOTS]
    names = [int(g) for g in np.unique(labels)]
    look = looks([Group(str(g), ()) for g in names])
    for n, g in enumerate(names):
        at = shown[labels[shown] == g]
        x, y = chart.points[at].T
        marker = _MARKERS[n // _SHAPED % len(_MARKERS)]
        axes.scatter(x, y, s=34, marker=marker, color=look[str(g)].colour, alpha=0.6, linewidths=0.6, edgecolors=PAPER)
    for g in names if len(names) <= _NUMBERED else []:
        x, y = np.median(chart.points[labels == g, 0]), chart.points[labels == g, 1].max()
        bold: dict[str, Any] = {"fontsize": 9, "fontweight": "bold", "color": look[str(g)].text}
        axes.annotate(str(g), (x, y), (0, 8), textcoords="offset points", ha="center", **bold)
    axes.margins(0.12, 0.18)
    axes.set_aspect("equal", adjustable="datalim")  # distances on paper are distances between points
    axes.set_title(chart.legend, loc="left", fontsize=8.5, color=SOFT, pad=10)


def _bars(axes: Axes, chart: BarChart) -> None:
    bare(axes, chart.title, chart.x)
    at = np.arange(1, len(chart.values) + 1)
    axes.bar(at, chart.values, width=0.62, color=PLAIN[0], linewidth=0)
    axes.set_xticks(at if len(at) <= 15 else at[:: -(-len(at) // 10)])
    axes.set_title(chart.note, loc="right", fontsize=8.5, color=SOFT, pad=8)


def _line(axes: Axes, chart: LineChart, below: bool) -> None:
    from matplotlib.ticker import MaxNLocator

    bare(axes, chart.title, "" if below else chart.x)
    x, y = zip(*chart.points) if chart.points else ((), ())
    marker = "o" if len(x) <= _MARKED else ""
    axes.plot(x, y, color=PLAIN[chart.colour % len(PLAIN)], linewidth=1.7, marker=marker, markersize=3.4)
    if not chart.points:
        axes.text(0.5, 0.5, "nothing was recorded", transform=axes.transAxes, ha="center", color=SOFT)
    if chart.logarithmic:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda v, _: f"{v:,.0f}")
        axes.yaxis.set_minor_formatter(lambda v, _: "")
    elif chart.from_zero:
        axes.set_ylim(0.0, 1.15 * (max(y, default=0.0) or 1.0))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))  # there is no round two and a half


def _heat(axes: Axes, chart: HeatMap) -> None:
    n = len(chart.values)
    order = np.arange(n) if chart.groups is None else np.argsort(chart.groups, kind="stable")
    title = chart.title
    if n > _MOST:
        title = f"{title} ({_MOST} of {n} clients)"
        order = order[np.linspace(0, n - 1, _MOST).round().astype(np.int64)]
    shown = np.ma.masked_invalid(_others(chart.values)[np.ix_(order, order)])
    low, high = chart.limits or ((float(shown.min()), float(shown.max())) if shown.count() else (0.0, 1.0))
    if high <= low:  # all alike: a scale from zero, not one of rounding errors
        low, high = min(low, 0.0), max(high, 0.0) or 1.0
    # Cells as vectors, not as a picture inside the figure: a page that loads nothing would not show that.
    image = axes.pcolormesh(shown, cmap="Blues", vmin=low, vmax=high)
    axes.invert_yaxis()
    axes.set_aspect("equal")
    axes.set_facecolor("#eceef1")
    axes.set_title(title, loc="left", fontsize=9, pad=6)
    axes.tick_params(length=0, colors=SOFT, labelsize=6.5)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.set_xticks([])
    axes.set_yticks([])
    if len(chart.names) == n and len(order) <= _NAMED:
        axes.set_yticks(np.arange(len(order)) + 0.5, [chart.names[i][:16] for i in order])
    for edge in [] if chart.groups is None else (np.flatnonzero(np.diff(chart.groups[order])) + 1).tolist():
        axes.axhline(edge, color=PLAIN[1], linewidth=0.7)
        axes.axvline(edge, color=PLAIN[1], linewidth=0.7)
    axes.set_xlabel(chart.x, color=SOFT, fontsize=8.5)
    axes.set_ylabel(chart.y, color=SOFT, fontsize=8.5)
    if chart.limits is None:
        figure: Any = axes.figure
        _scale(figure, image, axes, chart.scale, fraction=0.046, pad=0.02)


def _scale(
    figure: Figure, image: QuadMesh, axes: Axes | Sequence[Axes], label: str, fraction: float, pad: float
) -> None:
    """The scale of the colours."""
    where: Any = axes
    bar: Any = figure.colorbar(image, ax=where, fraction=fraction, pad=pad)
    bar.solids.set_rasterized(False)
    bar.solids.set_edgecolor("face")  # no white seams between its steps
    bar.outline.set_visible(False)
    bar.set_label(label, color=SOFT, fontsize=8.5)
    bar.ax.tick_params(colors=SOFT, labelsize=7.5, length=0)


def _others(values: Floats) -> Floats:
    """Without the diagonal: everybody is like itself, which would only take the colours from the rest."""
    return np.where(np.eye(len(values), dtype=bool), np.nan, values)
