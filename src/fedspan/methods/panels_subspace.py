"""Where the clients of a method with a shared subspace lie: their models in an orthonormal basis of it.

With U = Q R_U, client i's model is θ_i = Q (R_U v_i). Distances between the coordinates R_U v_i are distances between
the models, whatever gauge (U R, R⁻¹ v) the run happens to be in; v itself can look like anything.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedspan import tree
from fedspan.errors import FedspanError
from fedspan.learn.task import Task
from fedspan.method import ClientInfo, Findings, Method, Panel, Seen
from fedspan.method.panels import BarChart, Drawing, Floats, Labels, LineChart, Refit, ScatterChart
from fedspan.randomness import key
from fedspan.tree import Tree

Coefficients = Callable[[Tree, Tree, Tree], Tensor]
"""(a client's state, the server's, the common one) → the client's v in the server's present gauge and rank."""


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


def subspace_panel(
    method: Method,
    coefficients: Coefficients,
    factorised: Callable[[Task], Sequence[str]],
    refit: Refit | None = None,
) -> Panel:
    """The panel of a method whose server keeps U and whose clients keep v.

    Args:
        coefficients: a client's v in the server's present gauge and rank.
        factorised: names of the parameters that are U v.
        refit: how a client solves for its v again on the final U.
    """

    def look(seen: Seen) -> Findings:
        of = coordinates(seen, method, coefficients) if seen.models is None else solved_again(seen, factorised)
        return findings(of, seen)

    return Panel(
        "subspace",
        "The clients' coordinates",
        "Every client's model in an orthonormal basis of the shared subspace; near dots are near models. Below, the"
        " singular values of all models side by side.",
        "coordinates",
        look,
        refit=refit,
    )


def findings(of: Coordinates, seen: Seen) -> Findings:
    """Everything the coordinates show."""
    found, over = structure(of, seen.clusters), norms(seen)
    says = sentence(of, found)
    again = "--refresh lets clients that never took part solve for their v first." if of.untrained else ""
    return Findings(
        says, drawings(of, found, over, seen.label, says), facts(of, found, over, seen.names),
        table=table(of, found, over), note=again,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------ coordinates


def coordinates(seen: Seen, method: Method, coefficients: Coefficients) -> Coordinates:
    """The coordinates of the v that clients hold; of those that never took part, of the v they start from."""
    U: Tensor = seen.server["U"]
    bare = Task(torch.nn.Linear(1, 1), dtype=U.dtype)  # the first v depends on a model's type only
    clients = len(seen.names)
    starts = [
        method.init_client(bare, ClientInfo(i, None, key(seen.seed, "client", i), seen.seed)) for i in range(clients)
    ]
    kept = {k: torch.stack([start[k] for start in starts]) for k in starts[0] if k != "stats"}
    trained: set[int] = set()
    for ids, states in seen.rows():
        trained |= set(ids.tolist())
        kept = {k: rows.index_copy(0, ids, states[k]) for k, rows in kept.items()}
    v = torch.func.vmap(lambda client: coefficients(client, seen.server, seen.common))(kept)
    points: Floats = (v.double() @ torch.linalg.qr(U.double()).R.T).numpy()
    return Coordinates(points, seen.groups, seen.round, clients - len(trained))


def solved_again(seen: Seen, factorised: Callable[[Task], Sequence[str]]) -> Coordinates:
    """The coordinates after every client has solved for its v on the final U."""
    assert seen.models is not None
    Q = torch.linalg.qr(seen.server["U"].double()).Q
    names = factorised(seen.models.task)
    rows = [Q.T @ tree.ravel(tree.select(w, names)).double() for w in seen.models.weights]  # Qᵀ θ_i = R_U v_i
    return Coordinates(torch.stack(rows).numpy(), seen.groups, seen.round, refreshed=True)


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


def norms(seen: Seen) -> dict[str, list[float]]:
    """Round, norm and condition of U at every evaluation that told both."""
    told = {name: dict(points) for name, points in seen.monitored.items()}
    norm, condition = told.get("U_norm", {}), told.get("U_condition", {})
    rounds = [r for r in norm if r in condition]
    return {
        "round": [float(r) for r in rounds],
        "U_norm": [norm[r] for r in rounds],
        "U_condition": [condition[r] for r in rounds],
    }


# ------------------------------------------------------------------------------------------------ words and numbers


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


def table(of: Coordinates, found: Structure, over: dict[str, list[float]]) -> list[tuple[str, str]]:
    """The numbers by what they are called."""
    groups = "not known" if of.groups is None else str(len(set(of.groups.tolist())))
    values = ", ".join(f"{v:.3g}" for v in found.singular_values[:8])
    rows = [
        ("after round", str(of.round)),
        ("coefficients", "solved again for every client" if of.refreshed else "as the clients hold them"),
        ("clients, rank, true groups", f"{len(of.points)}, {of.points.shape[1]}, {groups}"),
        ("clusters (k-means)", str(found.k)),
        ("silhouette", "n/a" if found.silhouette is None else f"{found.silhouette:.3f}"),
        ("adjusted Rand index", "n/a" if found.rand_index is None else f"{found.rand_index:.3f}"),
        ("variance in the plane", f"{sum(found.shares):.1%}"),
        ("singular values of [θ_i]", values + (", …" if len(found.singular_values) > 8 else "")),
        ("effective rank", f"{found.effective_rank:.2f}"),
    ]
    for name, what in (("U_norm", "norm of U"), ("U_condition", "condition of U")):
        if over[name]:
            first, last = (f"{v:.3g} (round {r:.0f})" for v, r in ((over[name][k], over["round"][k]) for k in (0, -1)))
            rows.append((what, f"{first} → {last}"))
    return rows


def facts(of: Coordinates, found: Structure, over: dict[str, list[float]], names: Sequence[str]) -> dict[str, Any]:
    """Everything in plain values."""
    return {
        "round": of.round,
        "refreshed": of.refreshed,
        "untrained": of.untrained,
        "k": found.k,
        "silhouette": found.silhouette,
        "adjusted_rand_index": found.rand_index,
        "variance_shares": list(found.shares),
        "singular_values": found.singular_values.tolist(),
        "effective_rank": found.effective_rank,
        "monitor": over,
        "clients": {
            "name": list(names),
            "group": None if of.groups is None else of.groups.tolist(),
            "cluster": found.clusters.tolist(),
            "plane": found.plane.tolist(),
            "coordinates": of.points.tolist(),
        },
    }


# ------------------------------------------------------------------------------------------------ figures


def drawings(of: Coordinates, found: Structure, over: dict[str, list[float]], label: str, says: str) -> list[Drawing]:
    """The clients on the principal plane of their models, the singular values, and U over the rounds."""
    return [
        Drawing(
            "embedding",
            f"Clients of {label} on the principal plane of their models. {says}",
            ((_plane(of, found),),),
            (4.6, 4.0),
        ),
        Drawing(
            "singular_values",
            f"Singular values of the models of {label}; effective rank {found.effective_rank:.2f}.",
            ((_spectrum(found),),),
            (4.6, 2.9),
        ),
        Drawing(
            "norms",
            f"Norm and condition of the subspace of {label} over the rounds; both should settle.",
            [[chart] for chart in _settling(over)],
            (4.6, 4.0),
            on_page=False,
        ),
    ]


def _plane(of: Coordinates, found: Structure) -> ScatterChart:
    return ScatterChart(
        points=found.plane,
        labels=found.clusters if of.groups is None else of.groups,
        x=f"first principal component ({found.shares[0]:.0%} of the variance)",
        y=f"second ({found.shares[1]:.0%})",
        legend="colour and number: " + ("cluster" if of.groups is None else "true group"),
    )


def _spectrum(found: Structure) -> BarChart:
    """How many directions the clients really use."""
    return BarChart(
        values=found.singular_values,
        title="singular values of [θ₁ … θₙ]",
        x="position",
        note=f"effective rank {found.effective_rank:.2f} of {len(found.singular_values)}",
    )


def _settling(over: dict[str, list[float]]) -> tuple[LineChart, LineChart]:
    wide = max(over["U_condition"], default=1.0) > 10 * min(over["U_condition"], default=1.0)
    norm, condition = (list(zip(over["round"], over[k])) for k in ("U_norm", "U_condition"))
    return (
        LineChart(points=norm, title="norm of U", from_zero=True),
        LineChart(
            points=condition,
            title="condition of U" + (" (logarithmic)" if wide else ""),
            from_zero=not wide,
            logarithmic=wide,
            colour=1,
        ),
    )
