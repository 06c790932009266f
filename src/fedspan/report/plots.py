"""The page's interactive figures, as plotly takes them. Colours are names (`@ink`, `@3`), which the page puts in.

A trace's `meta` is the number of the method it belongs to, so that the legend can switch it off everywhere at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from fedspan.report.measures import Axis, ClientValue, Curve, Measure, clients, curve_of, monitored, time_on_devices
from fedspan.report.palette import looks
from fedspan.report.runs import Group, Run
from fedspan.report.tables import Row, short, summary_rows
from fedspan.report.text import clean

_X: dict[Axis, str] = {
    "round": "round",
    "bytes": "MB sent, both directions",
    "seconds": "seconds of training",
    "clock": "seconds on the clients' devices",
}
_POINTS = 300  # of a curve; more cannot be seen
_DOTS = 400  # clients of a method; beyond that, evenly spaced ranks stand for all
_CELLS = 160  # clients in the heat map of labels
_CLASSES = 120
_MONITORS = 6
_DIGITS = 5


@dataclass(frozen=True)
class Plot:
    """A figure: where it stands on the page, its words, and what plotly draws."""

    id: str
    title: str
    caption: str
    label: str  # what it shows, for those who cannot see it
    data: list[dict[str, Any]]
    layout: dict[str, Any]
    height: int = 330

    def spec(self) -> dict[str, Any]:
        """What the script needs."""
        return {"id": self.id, "data": self.data, "layout": {**self.layout, "height": self.height}}


def plots(groups: Sequence[Group], rows: Sequence[Row]) -> list[Plot]:
    """The figures every page has, in their order, as far as the runs have something to draw."""
    measure = rows[0].measure
    name = _capital(measure)
    order = "; ".join(f"{r.label} {measure.phrase(r.mean)}" for r in rows)
    band = " The band is one standard deviation over seeds." if any(r.over_seeds is not None for r in rows) else ""
    axes: list[tuple[Axis, str, str]] = [
        ("round", "rounds", f"Mean over clients, each with its own model.{band}"),
        ("bytes", "bytes", "What a megabyte on the wire buys; further left is cheaper."),
        ("seconds", "time", "Seconds of training on the machine of the run; evaluation does not count."),
    ]
    if all(r.lines and time_on_devices(r.lines[-1]) is not None for g in groups for r in g.runs):
        late = any("staleness" in line for g in groups for r in g.runs for line in r.lines[-1:])
        more = " An asynchronous one lasts until enough uploads have arrived." if late else ""
        says = f"A round is as long as its slowest participant computes and sends.{more}"
        axes.append(("clock", "time on devices", says))
    out = [
        curves_plot(
            f"over-{word.replace(' ', '-')}", groups, measure, x, f"{name} over {word}", says, f"At the end: {order}."
        )
        for x, word, says in axes
    ]
    found = [*out, bytes_plot(groups, rows), clients_plot(groups, rows), labels_plot(groups)]
    found.append(capacities_plot(groups, measure))
    for k, further in enumerate(f.measure for f in rows[0].further):
        found += _further_plots(k, groups, further, band)
    return [p for p in found if p is not None]


def _capital(measure: Measure) -> str:
    return measure.words[0].upper() + measure.words[1:]


def _further_plots(k: int, groups: Sequence[Group], measure: Measure, band: str) -> list[Plot | None]:
    """Learning curves and clients by a measure beside the first."""
    rows = summary_rows([run for g in groups for run in g.runs], measure=measure)
    name, order = _capital(measure), "; ".join(f"{r.label} {measure.phrase(r.mean)}" for r in rows)
    says = f"Mean over the clients that define it.{band}"
    curves = curves_plot(f"further-{k}", groups, measure, "round", f"{name} over rounds", says, f"At the end: {order}.")
    return [curves, clients_plot(groups, rows, f"further-clients-{k}", f"Every client, {measure.words}")]


def curves_plot(
    place: str, groups: Sequence[Group], measure: Measure, x: Axis, title: str, caption: str, label: str
) -> Plot:
    """A line per method along rounds, bytes or seconds, with a band over seeds."""
    scale = 100.0 if measure.percent else 1.0
    look = looks(groups)
    found = [(k, c) for k, c in enumerate(_thin(curve_of(g, measure, x)) for g in groups) if c.y]
    still = [(k, c) for k, c in found if x == "bytes" and c.x[-1] == 0.0]
    moving = [pair for pair in found if pair not in still]
    data: list[dict[str, Any]] = []
    for k, c in moving:
        if c.spread is not None:
            low = [scale * (y - s) for y, s in zip(c.y, c.spread)]
            high = [scale * (y + s) for y, s in zip(c.y, c.spread)]
            data.append(
                {
                    "meta": k,
                    "x": _digits(c.x + c.x[::-1]),
                    "y": _digits(high + low[::-1]),
                    "fill": "toself",
                    "fillcolor": f"@{k}~0.15",
                    "line": {"width": 0},
                    "mode": "lines",
                    "hoverinfo": "skip",
                }
            )
    ends = [c.x[-1] for _, c in moving] or [1.0]
    starts = [c.x[0] for _, c in moving] or [0.0]
    for k, c in found:
        alone = (k, c) in still
        dash = look[c.label].pattern or "solid"
        xs = [min(starts), max(ends)] if alone else c.x
        ys = [c.y[-1]] * 2 if alone else c.y
        spread = "" if c.spread is None or alone else " ± %{customdata}"
        says = f"%{{y:.2f}}{spread}" if measure.percent else f"%{{y:.4g}}{spread}"
        trace = {
            "meta": k,
            "name": _fit(c.label) + (" (sends nothing)" if alone else ""),
            "x": _digits(xs),
            "y": _digits([scale * y for y in ys]),
            "mode": "lines" if alone or len(c.x) > 20 else "lines+markers",
            "line": {"color": f"@{k}", "width": 2, "dash": dash},
            "marker": {"size": 5},
            "hovertemplate": says,
        }
        if spread and c.spread is not None:
            trace["customdata"] = [f"{scale * s:.2f}" if measure.percent else f"{s:.3g}" for s in c.spread]
        data.append(trace)
    far = x == "bytes" and len(ends) > 1 and min(starts) > 0.0 and max(ends) > 6 * min(ends)
    across = _axis(_X[x] + (" (logarithmic)" if far else ""), grid=False)
    if far:
        across |= {"type": "log", "dtick": 1, "exponentformat": "none"}
    layout: dict[str, Any] = {
        "xaxis": across,
        "yaxis": _axis(measure.title, grid=True),
        "hovermode": "x unified" if x == "round" else "closest",
        "margin": {"l": 52, "r": 12, "t": 16, "b": 44},
    }
    if not found:
        layout["annotations"] = [_nothing("nothing was evaluated")]
    return Plot(place, title, caption, label, data, layout)


def clients_plot(
    groups: Sequence[Group], rows: Sequence[Row], place: str = "clients", title: str = "Every client"
) -> Plot | None:
    """Every client's final value, one line of dots and a box per method."""
    measure = rows[0].measure
    scale = 100.0 if measure.percent else 1.0
    at = {g.label: k for k, g in enumerate(groups)}
    data: list[dict[str, Any]] = []
    many = False
    for row in rows:
        g = groups[at[row.label]]
        those = sorted((c for run in g.runs for c in clients(run, measure)), key=lambda c: c.value)
        many = many or len(those) > _DOTS
        if those:
            data.append(_box(at[row.label], _fit(row.label), _even(those, _DOTS), scale, len(g.runs) > 1))
    if not data:
        return None
    said = "; ".join(f"{r.label} worst tenth {measure.phrase(r.worst)}" for r in rows)
    return _boxes(
        place,
        title,
        "One dot per client and seed at the end of the run; the box holds the middle half, dashed is the mean."
        + (f" Of more than {_DOTS}, evenly spaced ranks are drawn." if many else ""),
        f"{said}.",
        data,
        measure,
    )


def _boxes(place: str, title: str, caption: str, label: str, data: list[dict[str, Any]], measure: Measure) -> Plot:
    """Lines of dots and boxes below one another."""
    return Plot(
        place,
        title,
        caption,
        label,
        data,
        {
            "xaxis": _axis(f"{measure.title} of each client", grid=True),
            "yaxis": _names([d["name"] for d in data]),
            "margin": {"l": 8, "r": 16, "t": 16, "b": 44},
            "hovermode": "closest",
        },
        height=70 + 44 * max(4, len(data)),
    )


def _box(k: int, name: str, those: Sequence[ClientValue], scale: float, seeds: bool) -> dict[str, Any]:
    return {
        "type": "box",
        "meta": k,
        "name": name,
        "orientation": "h",
        "x": _digits([scale * c.value for c in those]),
        "y": [name] * len(those),
        "text": [f"client {_fit(c.name)}" + (f", seed {c.seed}" if seeds else "") for c in those],
        "hovertemplate": "%{text}: %{x}<extra></extra>",
        "boxpoints": "all",
        "boxmean": True,
        "jitter": 0.55,
        "pointpos": 0,
        "marker": {"color": f"@{k}", "size": 4.5, "opacity": 0.45},
        "line": {"color": f"@{k}", "width": 1.6},
        "fillcolor": f"@{k}~0.18",
        "hoveron": "points",
    }


def bytes_plot(groups: Sequence[Group], rows: Sequence[Row]) -> Plot:
    """What each method sends up and down in total."""
    at = {g.label: k for k, g in enumerate(groups)}
    data: list[dict[str, Any]] = []
    for r in rows:
        k, name = at[r.label], _fit(r.label)
        total = "n/a" if r.total is None else "nothing sent" if r.total == 0.0 else f"{short(r.total)} MB"
        for way, value, alpha, text in (("up", r.up_total, "", ""), ("down", r.down_total, "~0.4", total)):
            data.append(
                {
                    "type": "bar",
                    "meta": k,
                    "name": f"{name}, {way}",
                    "orientation": "h",
                    "x": _digits([value or 0.0]),
                    "y": [name],
                    "text": [text],
                    "textposition": "outside",
                    "cliponaxis": False,
                    "marker": {"color": f"@{k}{alpha}", "line": {"width": 0}},
                    "hovertemplate": f"{short(value)} MB {way}<extra></extra>",
                }
            )
    sent = "; ".join(f"{r.label} {'n/a' if r.total is None else f'{r.total:.3g} MB'}" for r in rows)
    top = max([r.total or 0.0 for r in rows], default=0.0)
    return Plot(
        "bytes",
        "Traffic",
        "All clients and rounds, mean over seeds. Strong: up, faint: down.",
        f"{sent}.",
        data,
        {
            "barmode": "stack",
            "bargap": 0.38,
            "xaxis": _axis("MB in total", grid=True) | {"range": [0, 1.28 * top or 1.0]},
            "yaxis": _names([_fit(r.label) for r in rows]),
            "margin": {"l": 8, "r": 16, "t": 16, "b": 44},
        },
        height=70 + 44 * max(4, len(rows)),
    )


def labels_plot(groups: Sequence[Group]) -> Plot | None:
    """Which client holds how much of which class: of the first run that tells."""
    run = next((r for g in groups for r in g.runs if label_table(r) is not None), None)
    counts = None if run is None else label_table(run)
    if run is None or counts is None:
        return None
    called = run.result.get("names")
    known_names = isinstance(called, list) and len(called) == len(counts)
    names = [clean(str(n)) for n in called] if known_names and called else [str(i) for i in range(len(counts))]
    told = run.result.get("groups")
    known = told if isinstance(told, list) and len(told) == len(counts) else None
    order = np.argsort(np.array(known if known is not None else np.zeros(len(counts))), kind="stable")
    order = order[np.linspace(0, len(order) - 1, min(_CELLS, len(order))).round().astype(int)]
    share = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    of = "" if len(order) == len(counts) else f" {len(order)} of {len(counts)} clients, evenly chosen."
    ordered = " Clients of one group stand together." if known is not None else ""
    titles = [_fit(names[i]) + ("" if known is None else f" (group {known[i]})") for i in order.tolist()]
    unique = [t if titles.count(t) == 1 else f"{t} #{i}" for t, i in zip(titles, order.tolist())]
    data = {
        "type": "heatmap",
        "z": [_digits((100 * share[i]).tolist()) for i in order],
        "y": unique,
        "customdata": counts[order].tolist(),
        "colorscale": [[0, "@low"], [1, "@high"]],
        "zmin": 0,
        "hovertemplate": "client %{y}, class %{x}: %{customdata} examples, %{z} %<extra></extra>",
        "colorbar": {
            "title": {"text": "% of the client's examples", "side": "right"},
            "thickness": 12,
            "outlinewidth": 0,
        },
    }
    held = (counts > 0).sum(1)
    return Plot(
        "labels",
        "Who holds which labels",
        f"Share of each class, as the client names it, among its training examples, seed {run.seed}.{of}{ordered}",
        f"{len(counts)} clients and {counts.shape[1]} classes; a client holds {held.min()} to {held.max()} of them,"
        f" {held.mean():.1f} on average.",
        [data],
        {
            "xaxis": _axis("class", grid=False) | ({"dtick": 1} if counts.shape[1] <= 20 else {}),
            "yaxis": _axis("client", grid=False)
            | {"type": "category", "autorange": "reversed", "showticklabels": False},
            "margin": {"l": 34, "r": 8, "t": 16, "b": 44},
        },
        height=int(min(560, max(260, 90 + 9 * len(order)))),
    )


def label_table(run: Run) -> np.ndarray[Any, np.dtype[np.int64]] | None:
    """Examples per client and class as a run tells them; None if it does not, or they are damaged or too many."""
    told = run.result.get("labels")
    try:
        counts = np.array(told, np.int64)
    except (TypeError, ValueError, OverflowError):
        return None
    fits = counts.ndim == 2 and 0 < counts.shape[1] <= _CLASSES and counts.shape[0] > 0
    return counts if fits and bool((counts >= 0).all()) else None


def capacities_plot(groups: Sequence[Group], measure: Measure) -> Plot | None:
    """How clients of each capacity (the rank they can afford) fare, for the methods that tell them apart."""
    scale = 100.0 if measure.percent else 1.0
    data: list[dict[str, Any]] = []
    said: list[str] = []
    for k, g in enumerate(groups):
        parts: dict[str, list[ClientValue]] = {}
        for run in g.runs:
            told = run.result.get("capacities")
            for c in clients(run, measure):
                if isinstance(told, list) and c.index < len(told):
                    parts.setdefault(str(told[c.index])[:20], []).append(c)
        for capacity, those in sorted(parts.items(), key=lambda pair: _value(pair[0])):
            name = f"{_fit(g.label)}, {capacity}"
            data.append(_box(k, name, _even(those, _DOTS), scale, len(g.runs) > 1))
            said.append(f"{name}: {measure.phrase(float(np.mean([c.value for c in those])))} on average")
    if not data:
        return None
    return _boxes(
        "capacities",
        "By capacity",
        "Clients that can afford less use a smaller rank; one row per method and capacity.",
        f"{'; '.join(said)}.",
        data,
        measure,
    )


def monitor_plots(groups: Sequence[Group]) -> list[Plot]:
    """What methods told about themselves over the rounds (rank, norms, similarity): one figure per number."""
    found: dict[str, list[tuple[int, Group, list[tuple[int, float]]]]] = {}
    for k, g in enumerate(groups):
        for name, points in monitored(g.runs[0].lines).items():
            found.setdefault(name, []).append((k, g, points))
    look = looks(groups)
    out = []
    for n, (name, those) in enumerate(list(found.items())[:_MONITORS]):
        data = []
        for k, g, points in those:
            few = _every(points)
            data.append(
                {
                    "meta": k,
                    "name": _fit(g.label),
                    "x": [r for r, _ in few],
                    "y": _digits([v for _, v in few]),
                    "mode": "lines" if len(few) > 20 else "lines+markers",
                    "line": {"color": f"@{k}", "width": 2, "dash": look[g.label].pattern or "solid"},
                    "marker": {"size": 5},
                    "hovertemplate": "%{y:.4g}",
                }
            )
        values = [v for _, _, points in those for _, v in points]
        wide = min(values) > 0 and max(values) > 50 * min(values)
        title = name.replace("_", " ")
        ends = "; ".join(f"{g.label} {points[-1][1]:.4g}" for _, g, points in those)
        layout = {
            "xaxis": _axis("round", grid=False),
            "yaxis": _axis("logarithmic" if wide else "", grid=True)
            | ({"type": "log"} if wide else {"rangemode": "tozero"}),
            "hovermode": "x unified",
            "margin": {"l": 52, "r": 12, "t": 16, "b": 44},
        }
        words = ", ".join(_fit(g.label) for _, g, _ in those[:4]) + (" and others" if len(those) > 4 else "")
        out.append(
            Plot(f"monitor-{n}", title, f"As told by {words}.", f"At the end: {ends}.", data, layout, height=250)
        )
    return out


# ---------------------------------------------------------------------------------------------------- parts


def _axis(title: str, grid: bool) -> dict[str, Any]:
    return {
        "title": {"text": title, "standoff": 8},
        "showgrid": grid,
        "gridcolor": "@grid",
        "zeroline": False,
        "linecolor": "@grid",
        "automargin": True,
        "showline": not grid,
        "tickfont": {"size": 11},
    }


def _names(names: Sequence[str]) -> dict[str, Any]:
    """An axis of names, the first one on top."""
    return {
        "type": "category",
        "categoryorder": "array",
        "categoryarray": list(dict.fromkeys(names)),
        "autorange": "reversed",
        "automargin": True,
        "showgrid": False,
        "tickfont": {"color": "@ink", "size": 12},
    }


def _nothing(text: str) -> dict[str, Any]:
    return {"text": text, "xref": "paper", "yref": "paper", "x": 0.5, "y": 0.5, "showarrow": False}


def _thin(c: Curve) -> Curve:
    """At most so many points, the last one included."""
    if len(c.x) <= _POINTS:
        return c
    at = np.unique(np.linspace(0, len(c.x) - 1, _POINTS).round().astype(int)).tolist()
    spread = None if c.spread is None else [c.spread[k] for k in at]
    return Curve(c.label, [c.x[k] for k in at], [c.y[k] for k in at], spread)


def _every(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    at = np.unique(np.linspace(0, len(points) - 1, min(_POINTS, len(points))).round().astype(int)).tolist()
    return [points[k] for k in at]


def _even(those: Sequence[ClientValue], most: int) -> list[ClientValue]:
    """All, or evenly spaced ranks, the worst and the best among them."""
    if len(those) <= most:
        return list(those)
    return [those[k] for k in np.linspace(0, len(those) - 1, most).round().astype(int).tolist()]


def _digits(values: Sequence[float]) -> list[float | None]:
    """Numbers short enough for a page; JSON has no infinity."""
    return [float(f"{v:.{_DIGITS}g}") if math.isfinite(v) else None for v in values]


def _value(text: str) -> tuple[float, str]:
    try:
        return float(text), text
    except ValueError:
        return math.inf, text


def _fit(label: str) -> str:
    """A name short enough for an axis; plotly would read angle brackets as markup."""
    return escape(label if len(label) <= 26 else label[:25] + "…", quote=False)
