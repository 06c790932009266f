"""Example 1: two groups that name the classes in opposite ways, so that θ*_1 = −θ*_2."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from fedspan.methods.fedavg import FedAvg
from fedspan.methods.local import Local
from fedspan.methods.oracle import Oracle
from fedspan.methods.pfl_mf import CoefficientSolver, PflMf, PflMfPaper
from fedspan.randomness import generator
from fedspan.report.canvas import panels
from fedspan.studies.theory.groups import Score, coordinates, fit, grouped
from fedspan.studies.theory.outcome import BLUE, GREY, RED, Outcome

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def run(clients: int = 20, dimension: int = 20, train: int = 30, test: int = 200, rounds: int = 60) -> Outcome:
    """Local, FedAvg, two separate models (the oracle) and pFL-MF of rank 1 on sign-flipped labels."""
    theta = generator(0, "example-1").normal(size=dimension)
    data = grouped(np.stack([theta, -theta]), clients, train, test, seed=0)
    methods = {
        "local": Local(lr=0.5),
        "fedavg": FedAvg(lr=0.5),
        "oracle": Oracle(lr=0.5),
        "pfl-mf, r = 1": PflMf(rank=1, lr=0.5, solver=CoefficientSolver(steps=20)),
        "pfl-mf-paper, r = 1": PflMfPaper(rank=1, lr=0.5, lr_v=0.5, v_scale="1", v_steps=5),
    }
    fits = {name: fit(method, data, rounds) for name, method in methods.items()}
    scores = {name: score for name, (score, _) in fits.items()}
    v = coordinates(fits["pfl-mf, r = 1"][1])[:, 0].tolist()
    names = {
        "local": "one model per client",
        "fedavg": "one model for all",
        "oracle": "two separate models, groups known",
        "pfl-mf, r = 1": "one model and a number per client",
        "pfl-mf-paper, r = 1": "the same by Algorithm 1, v-step without 1/n",
    }
    rows = [[k, names[k], f"{100 * s.accuracy:.1f} %", f"{s.loss:.3f}"] for k, s in scores.items()]
    right = sum((a > 0) == (v[0] > 0) for a in v[::2]) + sum((a > 0) != (v[0] > 0) for a in v[1::2])
    percent = {name: f"{100 * s.accuracy:.1f} %" for name, s in scores.items()}
    says = (
        f"Groups that disagree on the sign leave FedAvg at {percent['fedavg']} (chance: 50 %); pFL-MF of rank 1 reaches"
        f" {percent['pfl-mf, r = 1']} where two separate models reach {percent['oracle']}, without being told the"
        f" groups: the sign of v is that of the group for {right} of {clients} clients."
    )
    numbers = {
        "clients": clients, "dimension": dimension, "train": train, "test": test, "rounds": rounds,
        "accuracy": {k: s.accuracy for k, s in scores.items()},
        "loss": {k: s.loss for k, s in scores.items()},
        "v": v,
        "right_sign": right,
    }  # fmt: skip
    return Outcome(["method", "what it is", "accuracy", "loss"], rows, says, numbers, partial(draw, scores, v))


def draw(scores: dict[str, Score], v: list[float]) -> Figure:
    """Accuracies as bars, and the one number each client keeps."""
    figure, (left, right) = panels(
        8.4, 3.0, [("accuracy in %", ""), ("R v of each client, pfl-mf of rank 1", "client")]
    )
    colours = [BLUE if name.startswith("pfl-mf") else GREY for name in scores]
    left.bar(range(len(scores)), [100 * s.accuracy for s in scores.values()], color=colours, width=0.6)
    left.set_xticks(range(len(scores)), [name.replace(", ", "\n") for name in scores])
    left.axhline(50, color=RED, linewidth=1.0, linestyle=(0, (2, 2)))
    for group, colour in ((0, BLUE), (1, RED)):
        right.scatter(range(group, len(v), 2), v[group::2], color=colour, s=22, label=f"group {group + 1}")
    right.set_xticks(range(0, len(v), 5))
    right.axhline(0, color=GREY, linewidth=0.8)
    right.legend(frameon=False, fontsize=8)
    return figure
