"""Where the clients of a pFL-MF run lie: their models in an orthonormal basis of the shared subspace.

With U = Q R_U, client i's model is θ_i = Q (R_U v_i). Distances between the coordinates R_U v_i are distances between
the models, whatever gauge (U R, R⁻¹ v) the run happens to be in; v itself can look like anything.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedspan.errors import FedspanError
from fedspan.learn.task import Task
from fedspan.method import ClientInfo
from fedspan.methods import METHODS, make
from fedspan.methods.pfl_mf import InSubspace
from fedspan.randomness import key
from fedspan.report.canvas import bare, canvas
from fedspan.report.palette import PAPER, SOFT, looks
from fedspan.report.runs import Group, Run
from fedspan.report.text import number
from fedspan.storage.checkpoint import RunDirectory
from fedspan.storage.client_store import ClientStore
from fedspan.tree import Tree

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Floats = NDArray[np.float64]
Labels = NDArray[np.int64]

_MARKERS = ("o", "s", "^", "D", "v")  # a new shape whenever the colours begin again
_SHAPED = 8
_DOTS = 600  # points in a figure; beyond that, a fixed random choice stands for all
_TYPES = {"float32": torch.float32, "float64": torch.float64, "int64": torch.int64, "bool": torch.bool}


@dataclass(frozen=True)
class Coordinates:
    """R_U v_i of every client, [clients, rank], and what is known of the clients."""

    points: Floats
    groups: Labels | None
    round: int
    untrained: int = 0  # clients that never took part, and still have the v everybody starts from
    refreshed: bool = False


@dataclass(frozen=True)
class Structure:
    """What the coordinates show: a plane to draw, clusters, and the spectrum of Θ = [θ_1 … θ_n]."""

    plane: Floats  # [clients, 2], principal components
    shares: tuple[float, float]  # of the variance
    clusters: Labels
    k: int
    silhouette: float | None
    rand_index: float | None
    singular_values: Floats
    effective_rank: float


def is_subspace(run: Run) -> bool:
    """Whether a run is of the pFL-MF family."""
    kind = METHODS.get(str(run.result["method"]))
    return kind is not None and issubclass(kind, InSubspace)


def coordinates(run: Run) -> Coordinates:
    """Read the clients' coordinates from a finished run's newest checkpoint; data and model are not needed.

    Raises:
        FedspanError: if there is no checkpoint, or the run is of another method.
    """
    if run.path is None or not is_subspace(run):
        raise FedspanError(f"Subspace: it needs the directory of a pfl-mf run. Got a run of {run.method}.")
    fields = {k: v for k, v in run.config["method"].items() if k != "name"}
    method = make(str(run.result["method"]), **fields)
    assert isinstance(method, InSubspace)
    loaded = RunDirectory(run.path / "checkpoints", None, read_only=True).load()
    if loaded is None:
        raise FedspanError(f"Subspace: {run.path} must have a checkpoint. Got none; run the experiment again.")
    server, common = loaded.server["server"], loaded.server["common"]
    U = server["U"]
    clients = len(run.result["names"])
    like: Tree = _empty(json.loads(loaded.rows[0][-1].structure)) if loaded.rows[0] else {}
    bare_task = Task(torch.nn.Linear(1, 1), dtype=U.dtype)  # the first v depends on a model's type only

    def begin(i: int) -> Tree:
        own = method.init_client(bare_task, ClientInfo(i, None, key(run.seed, "client", i), run.seed))
        return {**like, **{k: own[k] for k in own if k != "stats"}}

    store = ClientStore(begin, range(clients))
    store.restore(loaded.rows[0])
    rows = store.take(list(range(clients)))
    kept = {k: rows[k] for k in rows if k != "stats"}
    v = torch.func.vmap(lambda client: method.coefficients(client, server, common))(kept)
    seen = {int(i) for segment in loaded.rows[0] for i in segment.ids}
    groups = run.result.get("groups")
    return Coordinates(
        (v.double() @ torch.linalg.qr(U.double()).R.T).numpy(),
        np.array(groups, np.int64) if isinstance(groups, list) and len(groups) == clients else None,
        loaded.round,
        clients - len(seen),
    )


def _empty(described: Any) -> Any:
    """A tree of the described types and shapes, all zero."""
    if isinstance(described, dict):
        return {k: _empty(part) for k, part in described.items()}
    name, shape = described[:-1].split("[")
    return torch.zeros(json.loads(f"[{shape}]"), dtype=_TYPES[name])


def structure(of: Coordinates, clusters: int | None = None) -> Structure:
    """Principal plane, k-means clusters, and singular values.

    k is `clusters`, or the number of true groups, or where neither is known the k of 2..10 with the best silhouette.
    """
    from sklearn.metrics import adjusted_rand_score

    points = of.points
    centred = points - points.mean(0)
    _, s, axes = np.linalg.svd(centred, full_matrices=False)
    plane = np.zeros((len(points), 2))
    plane[:, : min(2, len(axes))] = centred @ axes[:2].T
    spread = np.append(s**2, (0.0, 0.0))[:2] / max(float((s**2).sum()), np.finfo(float).tiny)
    k = clusters or (None if of.groups is None else len(np.unique(of.groups)))
    tried = [k] if k is not None else list(range(2, min(10, len(points) - 1) + 1)) or [1]
    fits = [(c, *_k_means(points, c)) for c in tried]
    k, labels, silhouette = max(fits, key=lambda fit: -2.0 if fit[2] is None else fit[2])
    values: Floats = np.linalg.svd(points, compute_uv=False).astype(np.float64)
    share = values**2 / max(float((values**2).sum()), np.finfo(float).tiny)
    rank = float(np.exp(-(share * np.log(np.maximum(share, 1e-30))).sum()))
    index = None if of.groups is None else float(adjusted_rand_score(of.groups, labels))
    return Structure(plane, (float(spread[0]), float(spread[1])), labels, k, silhouette, index, values, rank)


def _k_means(points: Floats, k: int) -> tuple[Labels, float | None]:
    from sklearn.cluster import KMeans
    from sklearn.metrics import silhouette_score

    if k > len(points):
        raise FedspanError(f"Subspace: clusters must be at most the number of clients, {len(points)}. Got {k}.")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fewer different points than clusters: the silhouette says it better
        labels: Labels = KMeans(k, n_init=10, random_state=0).fit_predict(points).astype(np.int64)
    different = len(np.unique(labels))
    return labels, float(silhouette_score(points, labels)) if 1 < different < len(points) else None


def sentence(of: Coordinates, found: Structure) -> str:
    """What the clusters say, in words."""
    text = f"k-means with k = {found.k} on the coordinates"
    text += " has no silhouette" if found.silhouette is None else f" has a silhouette of {found.silhouette:.2f}"
    if found.rand_index is None:
        text += "; the true groups are not known"
    else:
        verdict = "found" if found.rand_index >= 0.9 else "found in part" if found.rand_index >= 0.3 else "not found"
        text += f" and an adjusted Rand index of {found.rand_index:.2f}: the true groups are {verdict}"
    if of.untrained:
        text += f". {of.untrained} of {len(of.points)} clients never took part and lie where everybody starts"
    return text + "."


def norms(lines: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    """Round, norm and condition of U at every evaluation."""
    out: dict[str, list[float]] = {"round": [], "U_norm": [], "U_condition": []}
    for line in lines:
        seen = line.get("monitor")
        values = [number(seen.get(k)) for k in ("U_norm", "U_condition")] if isinstance(seen, dict) else [None]
        if None not in values:
            for name, value in zip(out, [float(line["round"]), *values]):
                out[name].append(float(value or 0.0))
    return out


def embedding_figure(of: Coordinates, found: Structure) -> Figure:
    """The clients on the principal plane of their models, coloured by true group, else by cluster."""
    known = of.groups is not None
    labels = of.groups if of.groups is not None else found.clusters
    figure, axes = canvas(4.6, 4.0)
    bare(axes, "", f"first principal component ({found.shares[0]:.0%} of the variance)")
    axes.grid(axis="both", color="#eceef1", linewidth=0.8)
    axes.set_ylabel(f"second ({found.shares[1]:.0%})", color=SOFT, fontsize=8.5)
    shown = np.random.default_rng(0).permutation(len(labels))[:_DOTS]
    names = [int(g) for g in np.unique(labels)]
    look = looks([Group(str(g), ()) for g in names])
    for n, g in enumerate(names):
        at = shown[labels[shown] == g]
        x, y = found.plane[at].T
        marker = _MARKERS[n // _SHAPED % len(_MARKERS)]
        axes.scatter(x, y, s=34, marker=marker, color=look[str(g)].colour, alpha=0.6, linewidths=0.6, edgecolors=PAPER)
    for g in names if len(names) <= 24 else []:
        x, y = np.median(found.plane[labels == g, 0]), found.plane[labels == g, 1].max()
        bold: dict[str, Any] = {"fontsize": 9, "fontweight": "bold", "color": look[str(g)].text}
        axes.annotate(str(g), (x, y), (0, 8), textcoords="offset points", ha="center", **bold)
    axes.margins(0.12, 0.18)
    axes.set_aspect("equal", adjustable="datalim")  # distances on paper are distances between models
    axes.set_title(
        "colour and number: " + ("true group" if known else "cluster"), loc="left", fontsize=8.5, color=SOFT, pad=10
    )
    return figure


def spectrum_figure(found: Structure) -> Figure:
    """Singular values of all models side by side: how many directions the clients really use."""
    figure, axes = canvas(4.6, 2.9)
    bare(axes, "singular values of [θ₁ … θₙ]", "position")
    values = found.singular_values
    at = np.arange(1, len(values) + 1)
    axes.bar(at, values, width=0.62, color="#0072b2", linewidth=0)
    axes.set_xticks(at if len(at) <= 15 else at[:: -(-len(at) // 10)])
    text = f"effective rank {found.effective_rank:.2f} of {len(values)}"
    axes.set_title(text, loc="right", fontsize=8.5, color=SOFT, pad=8)
    return figure


def norms_figure(over: dict[str, list[float]]) -> Figure:
    """Norm and condition of U over the rounds: both should settle."""
    from matplotlib.ticker import MaxNLocator

    figure, _ = canvas(4.6, 4.0)
    figure.clear()
    top, bottom = figure.subplots(2, 1, sharex=True)
    bare(top, "norm of U", "")
    wide = max(over["U_condition"], default=1.0) > 10 * min(over["U_condition"], default=1.0)
    bare(bottom, "condition of U" + (" (logarithmic)" if wide else ""), "round")
    for axes, name, colour in ((top, "U_norm", "#0072b2"), (bottom, "U_condition", "#d55e00")):
        marker = "o" if len(over["round"]) <= 20 else ""
        axes.plot(over["round"], over[name], color=colour, linewidth=1.7, marker=marker, markersize=3.4)
        if not over["round"]:
            axes.text(0.5, 0.5, "nothing was recorded", transform=axes.transAxes, ha="center", color=SOFT)
    top.set_ylim(0.0, 1.15 * max([*over["U_norm"], 1e-9]))
    if wide:
        bottom.set_yscale("log")
        bottom.yaxis.set_major_formatter(lambda v, _: f"{v:,.0f}")
        bottom.yaxis.set_minor_formatter(lambda v, _: "")
    else:
        bottom.set_ylim(0.0, 1.15 * max([*over["U_condition"], 1.0]))
    bottom.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure
