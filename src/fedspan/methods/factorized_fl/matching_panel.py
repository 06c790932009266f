"""Who was matched with whom: similarity of the clients as the server saw it, and how often each received from each.

A method that matches clients keeps two matrices in the server's state (or in its part `seen`), [n, n] over the clients:
`sigma`, the similarity at its last exchange, and `matched`, of which entry (k, i) counts how often client k received
from client i. What its `matrices` gives is kept at every evaluation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from fedspan.errors import FedspanError
from fedspan.method import Findings, Panel, Seen
from fedspan.method.panels import Drawing, Floats, HeatMap, Labels, LineChart
from fedspan.tree import Tree

_SHOWN = 5  # matrices side by side, curves below one another
_FEW = 3

History = dict[str, list[tuple[int, Floats]]]
"""(round, matrix) of every evaluation that kept one, by the matrix's name."""


@dataclass(frozen=True)
class Matches:
    """The two matrices of a run, and what is known of its clients. Similarity is NaN where it is not known."""

    sigma: Floats
    matched: Floats
    names: Sequence[str]
    groups: Labels | None
    round: int

    @property
    def order(self) -> Labels:
        """The clients with those of a group side by side."""
        everybody = np.arange(len(self.names))
        return everybody if self.groups is None else np.argsort(self.groups, kind="stable")


@dataclass(frozen=True)
class MatchStatistics:
    """What the matrices show; pairs are ordered and of two different clients. None where it cannot be said."""

    pairs: int  # matches counted
    inside: float | None  # share of the matches that stay inside a true group
    by_chance: float | None  # what it would be if everybody were matched alike
    similarity_inside: float | None
    similarity_across: float | None
    separation: float | None  # how often a pair inside is more alike than a pair across; 0.5 by chance
    partners: list[list[int]]  # of every client the most frequent ones, the most frequent first


def matching_panel() -> Panel:
    """The panel of a method that matches clients."""
    return Panel(
        "matching",
        "Who learns from whom",
        "How alike the server found the clients, and how often each (row) received from each (column); darker is more,"
        " lines divide the true groups. Where it was kept, similarity over the rounds stands below.",
        "matches",
        findings,
        wide=True,
    )


def findings(seen: Seen) -> Findings:
    """Everything the matrices show."""
    of = matches(seen)
    found, kept = statistics(of), history(seen.lines, len(of.names))
    says = sentence(of, found)
    return Findings(
        says,
        drawings(of, kept, seen.monitored, seen.label, says),
        facts(of, found, kept, seen.monitored),
        ("client", "group", "received from", "most often from (times)"),
        table(of, found),
        (2,),
    )


# ------------------------------------------------------------------------------------------------ matrices


def matches(seen: Seen) -> Matches:
    """The two matrices of the server's state.

    Raises:
        FedspanError: if it has none over the clients.
    """
    held = matrices_of(seen.server, len(seen.names))
    if held is None:
        raise FedspanError(
            "Matching: the server's state must hold sigma and matched over the clients. Got none; look at a run of a"
            " method that matches clients."
        )
    sigma, matched = held
    return Matches(np.where(np.isfinite(sigma), sigma, np.nan), matched, seen.names, seen.groups, seen.round)


def matrices_of(server: Tree, clients: int) -> tuple[Floats, Floats] | None:
    """`sigma` and `matched` of a server's state or of its part `seen`; None if it has none over the clients."""
    for part in (server, server.get("seen")):
        named = [part.get(k) for k in ("sigma", "matched")] if isinstance(part, dict) else []
        held = [m.double().numpy() for m in named if isinstance(m, Tensor) and m.shape == (clients, clients)]
        if len(held) == 2:
            return held[0].astype(np.float64), held[1].astype(np.float64)
    return None


def history(lines: Sequence[Mapping[str, Any]], clients: int) -> History:
    """The matrices of all evaluations; damaged ones are left out."""
    out: History = {}
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


def statistics(of: Matches) -> MatchStatistics:
    """Shares, means and partners."""
    other = ~np.eye(len(of.names), dtype=bool)
    total = float(of.matched[other].sum())
    partners = [_partners(row, k) for k, row in enumerate(of.matched)]
    if of.groups is None:
        return MatchStatistics(round(total), None, None, None, None, None, partners)
    same = (of.groups[:, None] == of.groups[None, :]) & other
    known = other & np.isfinite(of.sigma)
    inside, across = of.sigma[same & known], of.sigma[~same & known]
    return MatchStatistics(
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
    """The area under the curve of telling pairs inside from pairs across by their similarity; ties count half."""
    if not len(inside) or not len(across):
        return None
    values = np.concatenate([inside, across])
    _, where, counts = np.unique(values, return_inverse=True, return_counts=True)
    rank = (np.cumsum(counts) - (counts - 1) / 2)[where]  # the mean rank of equals
    a, b = len(inside), len(across)
    return float((rank[:a].sum() - a * (a + 1) / 2) / (a * b))


# ------------------------------------------------------------------------------------------------ words and numbers


def sentence(of: Matches, found: MatchStatistics) -> str:
    """What the matches say, in words."""
    if not found.pairs:
        return f"After round {of.round} nobody has been matched with anybody else."
    text = f"{found.pairs:,} matches in {of.round} rounds"
    if found.inside is None or found.by_chance is None:
        return f"{text}; the true groups are not known."
    text += f", {found.inside:.0%} of them inside a true group ({found.by_chance:.0%} if all were matched alike)"
    if found.similarity_inside is None or found.similarity_across is None or found.separation is None:
        return f"{text}."
    return (
        f"{text}. Similarity is {found.similarity_inside:.3f} inside groups and {found.similarity_across:.3f} across"
        f" them: a pair inside is more alike than a pair across in {found.separation:.0%} of the cases."
    )


def table(of: Matches, found: MatchStatistics) -> list[list[str]]:
    """A line per client: its group, how many others it received from, and the most frequent of them."""
    rows = []
    for k in of.order:
        often = ", ".join(f"{of.names[i]} ({of.matched[k, i]:.0f})" for i in found.partners[k])
        group = "n/a" if of.groups is None else str(of.groups[k])
        others = int((of.matched[k] > 0).sum()) - int(of.matched[k, k] > 0)
        rows.append([of.names[k], group, str(others), often or "nobody"])
    return rows


def facts(
    of: Matches, found: MatchStatistics, kept: History, over: Mapping[str, Sequence[tuple[int, float]]]
) -> dict[str, Any]:
    """Everything in plain values; null where a similarity is not known."""
    return {
        "round": of.round,
        "matches": found.pairs,
        "share_inside_groups": found.inside,
        "share_if_all_alike": found.by_chance,
        "similarity_inside": found.similarity_inside,
        "similarity_across": found.similarity_across,
        "separation": found.separation,
        "clients": {
            "name": list(of.names),
            "group": None if of.groups is None else of.groups.tolist(),
            "partners": found.partners,
        },
        "sigma": _plain(of.sigma),
        "matched": of.matched.tolist(),
        "monitor": {k: [list(point) for point in v] for k, v in over.items()},
        "matrices": {k: [{"round": r, "values": _plain(m)} for r, m in v] for k, v in kept.items()},
    }


def _plain(matrix: Floats) -> list[list[float | None]]:
    return [[float(v) if np.isfinite(v) else None for v in row] for row in matrix]


# ------------------------------------------------------------------------------------------------ figures


def drawings(
    of: Matches, kept: History, over: Mapping[str, Sequence[tuple[int, float]]], label: str, says: str
) -> list[Drawing]:
    """Similarity beside matches, similarity over the rounds where it was kept, and what the monitor told."""
    label_of = f"Similarity and matches of the clients of {label}. {says}"
    out = [Drawing("matching", label_of, (_last(of),), (8.0, 4.1))]
    if kept:
        label_of = f"Similarity of the clients of {label} over the rounds."
        rows = [_over_rounds(name, matrices, of.groups) for name, matrices in kept.items()]
        size = (1.9 * max(len(row) for row in rows) + 0.9, 2.1 * len(rows))
        out.append(Drawing("similarity_over_rounds", label_of, rows, size))
    if over:
        curves = [[LineChart(points=v, title=k.replace("_", " "))] for k, v in list(over.items())[:_SHOWN]]
        label_of = f"What {label} told of itself over the rounds."
        out.append(Drawing("monitor", label_of, curves, (4.6, 1.0 + 1.3 * len(curves)), on_page=False))
    return out


def _last(of: Matches) -> tuple[HeatMap, HeatMap]:
    """The last similarity beside how often each client (row) received from each (column)."""
    return (
        HeatMap(values=of.sigma, title="similarity", scale="last similarity σ", names=of.names, groups=of.groups),
        HeatMap(
            values=of.matched,
            title="matches",
            scale=f"times received in {of.round} rounds",
            x="from client",
            y="to client",
            names=of.names,
            groups=of.groups,
        ),
    )


def _over_rounds(name: str, matrices: Sequence[tuple[int, Floats]], groups: Labels | None) -> list[HeatMap]:
    """Up to five evaluations side by side on one scale; the diagonal would only take the colours from the rest."""
    at = np.unique(np.linspace(0, len(matrices) - 1, min(_SHOWN, len(matrices))).round().astype(int)).tolist()
    others = [m[~np.eye(len(m), dtype=bool) & np.isfinite(m)] for m in (matrices[c][1] for c in at)]
    every = np.concatenate(others)
    limits = (float(every.min()), float(every.max())) if len(every) else (0.0, 0.0)
    return [
        HeatMap(values=matrices[c][1], title=f"{name}, round {matrices[c][0]}", groups=groups, limits=limits)
        for c in at
    ]
