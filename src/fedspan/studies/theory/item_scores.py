"""Example 3 by the registered method: users are clients of the simulator, their model the scores of all items."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedspan.data.federated import FederatedData
from fedspan.learn.task import Task
from fedspan.method import Method
from fedspan.methods.pfl_mf import CoefficientSolver, PflMf
from fedspan.simulation.simulator import simulate
from fedspan.studies.theory.ratings import Bias, Ratings


class ItemScores(nn.Module):
    """θ ∈ R^p, one score per item; an example is the number of an item."""

    def __init__(self, items: int) -> None:
        super().__init__()
        self.head = nn.Embedding(items, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[B] item numbers -> [B] scores."""
        scores: Tensor = self.head(x).squeeze(-1)
        return scores


def chosen_method(rank: int) -> PflMf:
    """Return pFL-MF's default form for ratings: of priors 1, 3 and 6 the best on a tenth of the training ratings.

    1 is the smallest tried. Users weigh by their numbers of ratings, since the error is over ratings.
    """
    return PflMf(rank=rank, lr=5.0, solver=CoefficientSolver(rule="solve", steps=5, prior=1.0), weighting="samples")


def rmse_by_method(
    method: Method, train: Ratings, test: Ratings, base: Bias, *, rounds: int, participation: float, seed: int
) -> float:
    """Run a method on what the base model leaves of the ratings; held-out RMSE over all ratings of users it trained."""
    own, held = (_by_user(part, base) for part in (train, test))
    users = [u for u, (items, _) in enumerate(own) if len(items)]
    data = FederatedData.from_arrays([own[u] for u in users], test=[held[u] for u in users])
    task = Task(lambda: ItemScores(train.items), "regression", head="head", dtype=torch.float64, seed=seed)
    settings: dict[str, Any] = {"batch_size": "full", "epochs": 1, "evaluate_every": rounds, "workers": 1}
    result = simulate(
        method, task, data, rounds=rounds, seed=seed, participation=participation, precision="float64", **settings
    )
    rated = np.array([len(held[u][0]) for u in users])
    without = test.rows(np.flatnonzero(~np.isin(test.user, users)))  # users with nothing to train on keep the base
    total = result.measures["squared_error"]["weighted"] * rated.sum()
    total += np.square(base.predict(without) - without.rating).sum()
    return float(np.sqrt(total / len(test.rating)))


def _by_user(ratings: Ratings, base: Bias) -> list[tuple[Tensor, Tensor]]:
    left = torch.from_numpy(ratings.rating - base.predict(ratings))
    items = torch.from_numpy(ratings.item)
    return [(items[rows], left[rows]) for rows in ratings.by_user()]
