"""Example 1: two groups that name the classes in opposite ways, so that θ*_1 = −θ*_2."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from fedspan.method import Method
from fedspan.methods.fedavg import FedAvg
from fedspan.methods.local import Local
from fedspan.methods.oracle import Oracle
from fedspan.methods.pfl_mf import CoefficientSolver, PflMf, PflMfAlgorithm1, algorithm_1
from fedspan.randomness import generator
from fedspan.report.canvas import panels
from fedspan.studies.theory.groups import Score, coordinates, fit, grouped
from fedspan.studies.theory.outcome import BLUE, GREY, RED, Outcome

if TYPE_CHECKING:
    from matplotlib.figure import Figure


SEEDS = (200, 201, 202)


def run(
    clients: int = 20, dimension: int = 20, train: int = 30, test: int = 200, rounds: int = 60,
    seeds: Sequence[int] = SEEDS,
) -> Outcome:  # fmt: skip
    """Local, FedAvg, two separate models (the oracle) and pFL-MF of rank 1 on sign-flipped labels; means over seeds."""
    methods: dict[str, Method] = {
        "local": Local(lr=0.5),
        "fedavg": FedAvg(lr=0.5),
        "oracle": Oracle(lr=0.5),
        "pfl-mf, r = 1": PflMf(rank=1, lr=0.5, solver=CoefficientSolver(steps=20)),
        "Algorithm 1, K = 1": PflMfAlgorithm1(rank=1, lr=0.5, v_steps=1),
        "Algorithm 1, K = 5": PflMfAlgorithm1(rank=1, lr=0.5, v_steps=5),
        "pfl-mf-paper, K = 5": algorithm_1(rank=1, lr=0.5, lr_v=0.5, v_scale="1", v_steps=5),
    }
    each: dict[str, list[Score]] = {name: [] for name in methods}
    right, v = 0, list[float]()
    for seed in seeds:
        theta = generator(seed, "example-1").normal(size=dimension)
        data = grouped(np.stack([theta, -theta]), clients, train, test, seed=seed)
        for name, method in methods.items():
            score, result = fit(method, data, rounds, seed)
            each[name].append(score)
            if name == "pfl-mf, r = 1":
                v = coordinates(result)[:, 0].tolist()
                right += sum((a > 0) == (v[0] > 0) for a in v[::2]) + sum((a > 0) != (v[0] > 0) for a in v[1::2])
    scores = {
        name: Score(*(float(np.mean([getattr(s, k) for s in found])) for k in ("accuracy", "loss")))
        for name, found in each.items()
    }
    names = {
        "local": "one model per client",
        "fedavg": "one model for all",
        "oracle": "two separate models, groups known",
        "pfl-mf, r = 1": "one model and a number per client",
        "Algorithm 1, K = 1": "to the letter: one step on v, of η/n",
        "Algorithm 1, K = 5": "to the letter: five steps on v, of η/n",
        "pfl-mf-paper, K = 5": "Algorithm 1 with v-steps of η",
    }
    rows = [[k, names[k], f"{100 * s.accuracy:.1f} %", f"{s.loss:.3f}"] for k, s in scores.items()]
    spread = {k: [s.accuracy for s in found] for k, found in each.items()}
    percent = {name: f"{100 * s.accuracy:.1f} %" for name, s in scores.items()}
    says = (
        f"Groups that disagree on the sign leave FedAvg at {percent['fedavg']} (chance: 50 %); pFL-MF of rank 1 reaches"
        f" {percent['pfl-mf, r = 1']} where two separate models reach {percent['oracle']}, without being told the"
        f" groups: the sign of v is that of the group for {right} of {clients * len(seeds)} clients. Algorithm 1 to the"
        f" letter reaches {percent['Algorithm 1, K = 1']} with K = 1, {percent['Algorithm 1, K = 5']} with K = 5 (means"
        f" of {len(seeds)} seeds)."
    )
    numbers = {
        "clients": clients, "dimension": dimension, "train": train, "test": test, "rounds": rounds,
        "seeds": list(seeds), "accuracy_by_seed": spread,
        "accuracy": {k: s.accuracy for k, s in scores.items()},
        "loss": {k: s.loss for k, s in scores.items()},
        "v": v,
        "right_sign": right,
    }  # fmt: skip
    return Outcome(["method", "what it is", "accuracy", "loss"], rows, says, numbers, partial(draw, scores, v))


def draw(scores: dict[str, Score], v: list[float]) -> Figure:
    """Accuracies as bars, and the one number each client keeps."""
    figure, (left, right) = panels(
        10.4, 3.0, [("accuracy in %", ""), ("R v of each client, pfl-mf of rank 1", "client")]
    )
    colours = [BLUE if name.startswith(("pfl-mf", "Algorithm")) else GREY for name in scores]
    left.bar(range(len(scores)), [100 * s.accuracy for s in scores.values()], color=colours, width=0.6)
    left.set_xticks(range(len(scores)), [name.replace(", ", "\n") for name in scores])
    left.axhline(50, color=RED, linewidth=1.0, linestyle=(0, (2, 2)))
    for group, colour in ((0, BLUE), (1, RED)):
        right.scatter(range(group, len(v), 2), v[group::2], color=colour, s=22, label=f"group {group + 1}")
    right.set_xticks(range(0, len(v), 5))
    right.axhline(0, color=GREY, linewidth=0.8)
    right.legend(frameon=False, fontsize=8)
    return figure
