"""Who was matched with whom: likeness of the clients as the server saw it, and how often each received from each.

A method that matches clients keeps two matrices in the server's state (or in its part `seen`), [n, n] over the clients:
`sigma`, the likeness at its last exchange, and `matched`, of which entry (k, i) counts how often client k received from
client i. What its `matrices` gives is kept at every evaluation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedspan.errors import FedspanError
from fedspan.report.canvas import bare, canvas
from fedspan.report.measures import monitored
from fedspan.report.palette import SOFT
from fedspan.report.runs import Run
from fedspan.storage.checkpoint import RunDirectory
from fedspan.tree import Tree

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.collections import QuadMesh
    from matplotlib.figure import Figure

Floats = NDArray[np.float64]
Labels = NDArray[np.int64]

_NAMED = 40  # more clients than this get no names on the axes
_MOST = 60  # clients in a matrix; of more, an even choice stands for all
_SHOWN = 5  # matrices and curves side by side
_FEW = 3


@dataclass(frozen=True)
class Matching:
    """The two matrices of a run, and what is known of its clients. Likeness is NaN where it is not known."""

    sigma: Floats
    matched: Floats
    names: list[str]
    groups: Labels | None
    round: int

    @property
    def order(self) -> Labels:
        """The clients with those of a group side by side."""
        everybody = np.arange(len(self.names))
        return everybody if self.groups is None else np.argsort(self.groups, kind="stable")


@dataclass(frozen=True)
class Found:
    """What the matrices show; pairs are ordered and of two different clients. None where it cannot be said."""

    pairs: int  # matches counted
    inside: float | None  # share of the matches that stay inside a true group
    by_chance: float | None  # what it would be if everybody were matched alike
    likeness_inside: float | None
    likeness_across: float | None
    separation: float | None  # how often a pair inside is more alike than a pair across; 0.5 by chance
    partners: list[list[int]]  # of every client the most frequent ones, the most frequent first


def method_of(run: Run) -> str:
    """The method's registered name; a page may show the run under another."""
    method = run.config.get("method")
    return str(method.get("name", run.result["method"])) if isinstance(method, dict) else run.method


def matching(run: Run) -> Matching:
    """Read the matrices from a finished run's newest checkpoint; data and model are not needed.

    Raises:
        FedspanError: if there is no checkpoint, or the run's method does not match clients.
    """
    if run.path is None:
        raise FedspanError("Matching: it needs the directory of a run. Got a run from memory.")
    loaded = RunDirectory(run.path / "checkpoints", None, read_only=True).load()
    if loaded is None:
        raise FedspanError(f"Matching: {run.path} must have a checkpoint. Got none; run the experiment again.")
    names = [str(n) for n in run.result["names"]]
    n = len(names)
    held = matrices_of(loaded.server["server"], n)
    if held is None:
        raise FedspanError(
            "Matching: the run must be of a method that matches clients, such as factorized-fl-alpha."
            f" Got one of {method_of(run)}."
        )
    sigma, matched = held
    groups = run.result.get("groups")
    known = np.array(groups, np.int64) if isinstance(groups, list) and len(groups) == n else None
    return Matching(np.where(np.isfinite(sigma), sigma, np.nan), matched, names, known, loaded.round)


def matrices_of(server: Tree, clients: int) -> tuple[Floats, Floats] | None:
    """`sigma` and `matched` of a server's state or of its part `seen`; None if it has none over the clients."""
    for part in (server, server.get("seen")):
        named = [part.get(k) for k in ("sigma", "matched")] if isinstance(part, dict) else []
        held = [m.double().numpy() for m in named if isinstance(m, Tensor) and m.shape == (clients, clients)]
        if len(held) == 2:
            return held[0].astype(np.float64), held[1].astype(np.float64)
    return None


def found_in(of: Matching) -> Found:
    """Shares, means and partners."""
    other = ~np.eye(len(of.names), dtype=bool)
    total = float(of.matched[other].sum())
    partners = [_partners(row, k) for k, row in enumerate(of.matched)]
    if of.groups is None:
        return Found(round(total), None, None, None, None, None, partners)
    same = (of.groups[:, None] == of.groups[None, :]) & other
    known = other & np.isfinite(of.sigma)
    inside, across = of.sigma[same & known], of.sigma[~same & known]
    return Found(
        round(total),
        float(of.matched[same].sum()) / total if total else None,
        float(same.sum()) / float(other.sum()) if other.any() else None,
        float(inside.mean()) if len(inside) else None,
        float(across.mean()) if len(across) else None,
        _separation(inside, across),
        partners,
    )


def _partners(row: Floats, k: int) -> list[int]:
    times = np.where(np.arange(len(row)) == k, 0.0, row)
    order = np.argsort(-times, kind="stable")
    return [int(i) for i in order[:_FEW] if times[i] > 0]


def _separation(inside: Floats, across: Floats) -> float | None:
    """The area under the curve of telling pairs inside from pairs across by their likeness; ties count half."""
    if not len(inside) or not len(across):
        return None
    values = np.concatenate([inside, across])
    _, where, counts = np.unique(values, return_inverse=True, return_counts=True)
    rank = (np.cumsum(counts) - (counts - 1) / 2)[where]  # the mean rank of equals
    a, b = len(inside), len(across)
    return float((rank[:a].sum() - a * (a + 1) / 2) / (a * b))


def sentence(of: Matching, found: Found) -> str:
    """What the matches say, in words."""
    if not found.pairs:
        return f"After round {of.round} nobody has been matched with anybody else."
    text = f"{found.pairs:,} matches in {of.round} rounds"
    if found.inside is None or found.by_chance is None:
        return f"{text}; the true groups are not known."
    text += f", {found.inside:.0%} of them inside a true group ({found.by_chance:.0%} if all were matched alike)"
    if found.likeness_inside is None or found.likeness_across is None or found.separation is None:
        return f"{text}."
    return (
        f"{text}. Likeness is {found.likeness_inside:.3f} inside groups and {found.likeness_across:.3f} across them: a"
        f" pair inside is more alike than a pair across in {found.separation:.0%} of the cases."
    )


def history(lines: Sequence[dict[str, Any]], clients: int) -> dict[str, list[tuple[int, Floats]]]:
    """(round, matrix) of every evaluation that kept one, by the matrix's name; damaged ones are left out."""
    out: dict[str, list[tuple[int, Floats]]] = {}
    for line in lines:
        kept = line.get("matrices")
        for name, values in kept.items() if isinstance(kept, dict) else ():
            try:
                matrix = np.array(values, np.float64)
            except (TypeError, ValueError):
                continue
            if matrix.shape == (clients, clients):
                out.setdefault(str(name), []).append((int(line["round"]), matrix))
    return out


def facts(of: Matching, found: Found, lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Everything in plain values, as `matching.json` holds it; null where a likeness is not known."""
    kept = history(lines, len(of.names))
    return {
        "round": of.round,
        "matches": found.pairs,
        "share_inside_groups": found.inside,
        "share_if_all_alike": found.by_chance,
        "likeness_inside": found.likeness_inside,
        "likeness_across": found.likeness_across,
        "separation": found.separation,
        "clients": {
            "name": of.names,
            "group": None if of.groups is None else of.groups.tolist(),
            "partners": found.partners,
        },
        "sigma": _plain(of.sigma),
        "matched": of.matched.tolist(),
        "monitor": {k: [list(point) for point in v] for k, v in monitored(lines).items()},
        "matrices": {k: [{"round": r, "values": _plain(m)} for r, m in v] for k, v in kept.items()},
    }


def _plain(matrix: Floats) -> list[list[float | None]]:
    return [[float(v) if np.isfinite(v) else None for v in row] for row in matrix]


# ------------------------------------------------------------------------------------------------ figures


def matching_figure(of: Matching) -> Figure:
    """The last likeness beside how often each client (row) received from each (column); clients ordered by group."""
    figure, _ = canvas(8.0, 4.1)
    figure.clear()
    left, right = figure.subplots(1, 2)
    for axes, values, title, label in (
        (left, of.sigma, "likeness", "last likeness σ"),
        (right, of.matched, "matches", f"times received in {of.round} rounds"),
    ):
        image = _heat(axes, values, of, title)
        _bar(figure, image, axes, label, fraction=0.046, pad=0.02)
    right.set_xlabel("from client", color=SOFT, fontsize=8.5)
    right.set_ylabel("to client", color=SOFT, fontsize=8.5)
    return figure


def history_figure(of: Matching, kept: dict[str, list[tuple[int, Floats]]]) -> Figure:
    """Likeness over the rounds: a row per matrix, up to five evaluations side by side on one scale."""
    count = max(1, max((len(v) for v in kept.values()), default=1))
    wide = min(_SHOWN, count)
    figure, first = canvas(1.9 * wide + 0.9, 2.1 * max(1, len(kept)))
    if not kept:
        bare(first, "", "")
        first.text(0.5, 0.5, "nothing was recorded", transform=first.transAxes, ha="center", color=SOFT)
        return figure
    figure.clear()
    grid = figure.subplots(len(kept), wide, squeeze=False)
    for line, (name, matrices) in zip(grid, kept.items()):
        chosen = np.unique(np.linspace(0, len(matrices) - 1, min(wide, len(matrices))).round().astype(int))
        finite = [m[np.isfinite(m)] for m in (_others(matrices[c][1]) for c in chosen)]
        low, high = (
            f(np.concatenate([*finite, np.zeros(0 if any(map(len, finite)) else 1)])) for f in (np.min, np.max)
        )
        for axes, c in zip(line, chosen):
            image = _heat(axes, matrices[c][1], of, f"{name}, round {matrices[c][0]}", (float(low), float(high)), False)
        for axes in line[len(chosen) :]:
            axes.set_axis_off()
        _bar(figure, image, list(line), "", fraction=0.03, pad=0.01)
    return figure


def curves_figure(over: dict[str, list[tuple[int, float]]]) -> Figure:
    """What the method's monitor told over the rounds, one below the other."""
    from matplotlib.ticker import MaxNLocator

    those = list(over.items())[:_SHOWN]
    figure, first = canvas(4.6, 1.0 + 1.3 * max(1, len(those)))
    if not those:
        bare(first, "", "round")
        first.text(0.5, 0.5, "nothing was recorded", transform=first.transAxes, ha="center", color=SOFT)
        return figure
    figure.clear()
    for axes, (name, points) in zip(figure.subplots(len(those), 1, sharex=True, squeeze=False)[:, 0], those):
        bare(axes, name.replace("_", " "), "round" if name == those[-1][0] else "")
        x, y = zip(*points)
        axes.plot(x, y, color="#0072b2", linewidth=1.7, marker="o" if len(x) <= 20 else "", markersize=3.4)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def _bar(figure: Figure, image: QuadMesh, axes: Axes | list[Axes], label: str, fraction: float, pad: float) -> None:
    """The scale of the colours."""
    bar: Any = figure.colorbar(image, ax=axes, fraction=fraction, pad=pad)
    bar.solids.set_rasterized(False)
    bar.solids.set_edgecolor("face")  # no white seams between its steps
    bar.outline.set_visible(False)
    bar.set_label(label, color=SOFT, fontsize=8.5)
    bar.ax.tick_params(colors=SOFT, labelsize=7.5, length=0)


def _others(values: Floats) -> Floats:
    """Without the diagonal: everybody is like itself, which would only take the colours from the rest."""
    return np.where(np.eye(len(values), dtype=bool), np.nan, values)


def _heat(
    axes: Axes,
    values: Floats,
    of: Matching,
    title: str,
    limits: tuple[float, float] | None = None,
    named: bool = True,
) -> QuadMesh:
    """A matrix over the clients, darker is more, with lines between the true groups."""
    order = of.order
    if len(order) > _MOST:
        title = f"{title} ({_MOST} of {len(order)} clients)"
        order = order[np.linspace(0, len(order) - 1, _MOST).round().astype(np.int64)]
    n = len(order)
    shown = np.ma.masked_invalid(_others(values)[np.ix_(order, order)])
    low, high = limits or ((float(shown.min()), float(shown.max())) if shown.count() else (0.0, 1.0))
    # Cells as vectors, not as a picture inside the figure: a page that loads nothing would not show that.
    image = axes.pcolormesh(shown, cmap="Blues", vmin=low, vmax=max(high, low + 1e-9))
    axes.invert_yaxis()
    axes.set_aspect("equal")
    axes.set_facecolor("#eceef1")
    axes.set_title(title, loc="left", fontsize=9, pad=6)
    axes.tick_params(length=0, colors=SOFT, labelsize=6.5)
    for side in axes.spines.values():
        side.set_visible(False)
    if named and n <= _NAMED:
        axes.set_yticks(np.arange(n) + 0.5, [of.names[i][:16] for i in order])
        axes.set_xticks([])
    else:
        axes.set_xticks([])
        axes.set_yticks([])
    if of.groups is not None:
        for edge in (np.flatnonzero(np.diff(of.groups[order])) + 1).tolist():
            axes.axhline(edge, color="#d55e00", linewidth=0.7)
            axes.axvline(edge, color="#d55e00", linewidth=0.7)
    return image
