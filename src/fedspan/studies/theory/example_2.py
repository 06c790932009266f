"""Example 2: clients in k clusters with different linear models; rank k recovers them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from fedspan.methods.fedavg import FedAvg
from fedspan.methods.local import Local
from fedspan.methods.oracle import Oracle
from fedspan.methods.pfl_mf import CoefficientSolver, PflMf
from fedspan.randomness import generator
from fedspan.report.canvas import panels
from fedspan.studies.theory.groups import Score, coordinates, fit, grouped
from fedspan.studies.theory.outcome import BLUE, GREEN, GREY, RED, Outcome

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def run(
    k: int = 4,
    clients: int = 40,
    dimension: int = 20,
    train: int = 60,
    test: int = 200,
    rounds: int = 60,
    seed: int = 200,
) -> Outcome:
    """pFL-MF of ranks 1 to k + 2 beside local training, FedAvg and the oracle, with the clusters found in the v_i."""
    theta = generator(seed, "example-2").normal(size=(k, dimension))
    data = grouped(theta, clients, train, test, seed=seed)
    assert data.groups is not None
    truth = data.groups
    baselines = {"local": Local(lr=0.5), "fedavg": FedAvg(lr=0.5), "oracle": Oracle(lr=0.5)}
    scores = {name: fit(method, data, rounds, seed)[0] for name, method in baselines.items()}
    ranks = list(range(1, k + 3))
    found: dict[int, float] = {}
    for r in ranks:
        scores[f"pfl-mf, r = {r}"], result = fit(
            PflMf(rank=r, lr=0.5, solver=CoefficientSolver(steps=20)), data, rounds, seed
        )
        found[r] = rand_index(coordinates(result), truth, k)
    rows = [[name, f"{100 * s.accuracy:.1f} %", f"{s.loss:.3f}", ""] for name, s in scores.items()]
    for row, r in zip(rows[len(baselines) :], ranks):
        row[3] = f"{found[r]:.2f}"
    percent = {name: f"{100 * s.accuracy:.1f} %" for name, s in scores.items()}
    says = (
        f"With {k} clusters, rank {k} reaches {percent[f'pfl-mf, r = {k}']} (oracle {percent['oracle']}, local"
        f" {percent['local']}, FedAvg {percent['fedavg']}), and k-means on the clients' coordinates finds the clusters"
        f" with an adjusted Rand index of {found[k]:.2f}."
    )
    numbers = {
        "clusters": k, "clients": clients, "dimension": dimension, "train": train, "test": test, "rounds": rounds,
        "accuracy": {name: s.accuracy for name, s in scores.items()},
        "loss": {name: s.loss for name, s in scores.items()},
        "adjusted_rand_index": {str(r): a for r, a in found.items()},
    }  # fmt: skip
    return Outcome(
        ["method", "accuracy", "loss", "Rand index"], rows, says, numbers, partial(draw, scores, ranks, found, k)
    )


def rand_index(points: Tensor, truth: Tensor, k: int) -> float:
    """Adjusted Rand index of k-means on the clients' coordinates [n, r] against the true groups: 1 = the same."""
    from sklearn.cluster import KMeans
    from sklearn.metrics import adjusted_rand_score

    labels = KMeans(k, n_init=20, random_state=0).fit_predict(points.numpy())
    return float(adjusted_rand_score(truth.numpy(), labels))


def draw(scores: dict[str, Score], ranks: list[int], found: dict[int, float], k: int) -> Figure:
    """Accuracy and the Rand index against the rank."""
    figure, (left, right) = panels(
        8.4, 3.2, [("accuracy in %", "rank r"), ("adjusted Rand index of the clusters", "rank r")]
    )
    left.plot(
        ranks,
        [100 * scores[f"pfl-mf, r = {r}"].accuracy for r in ranks],
        color=BLUE,
        marker="o",
        markersize=4,
        label="pfl-mf",
    )
    for name, colour in (("oracle", GREEN), ("local", GREY), ("fedavg", RED)):
        left.axhline(100 * scores[name].accuracy, color=colour, linewidth=1.2, linestyle=(0, (4, 2)), label=name)
    right.plot(ranks, [found[r] for r in ranks], color=BLUE, marker="o", markersize=4)
    right.set_ylim(-0.05, 1.05)
    for axes in (left, right):
        axes.axvline(k, color=GREY, linewidth=0.8, linestyle=(0, (1, 2)))
        axes.set_xticks(ranks)
    left.legend(frameon=False, fontsize=8)
    return figure
