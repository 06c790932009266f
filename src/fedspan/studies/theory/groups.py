"""Clients in groups with different linear classifiers, and the methods compared on them (Examples 1 and 2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedspan.data.federated import FederatedData
from fedspan.learn.task import Task
from fedspan.method import Method
from fedspan.models.simple import Linear
from fedspan.randomness import generator
from fedspan.simulation.result import Result
from fedspan.simulation.simulator import simulate


@dataclass(frozen=True)
class Score:
    """What the personal models reach on held-out examples of their own clients, on average."""

    accuracy: float
    loss: float


def grouped(theta: NDArray[np.float64], clients: int, train: int, test: int, seed: int) -> FederatedData:
    """Client i is in group i mod k and labels x ~ N(0, I) by the sign of θ*ᵀx, θ* its group's row of theta [k, d]."""
    rng = generator(seed, "groups")
    k, d = theta.shape
    pairs = []
    for i in range(clients):
        x = rng.normal(size=(train + test, d))
        y = (x @ theta[i % k] > 0).astype(np.int64)
        pairs.append((torch.from_numpy(x), torch.from_numpy(y)))
    own, held = [(x[:train], y[:train]) for x, y in pairs], [(x[train:], y[train:]) for x, y in pairs]
    return FederatedData.from_arrays(own, test=held, groups=[i % k for i in range(clients)], classes=2)


def fit(method: Method, data: FederatedData, rounds: int, seed: int = 0) -> tuple[Score, Result]:
    """Run a method with a linear classifier without bias, full batches, five local steps a round, all clients."""
    task = Task(Linear((data.x.shape[1],), 2, bias=False), dtype=torch.float64, seed=seed)
    settings: dict[str, Any] = {
        "batch_size": "full",
        "epochs": 5,
        "evaluate_every": rounds,
        "workers": 1,
        "precision": "float64",
        "device": "cpu",
    }
    result = simulate(method, task, data, rounds=rounds, seed=seed, **settings)
    return Score(result.accuracy["mean"], result.measures["loss"]["mean"]), result


def coordinates(result: Result) -> Tensor:
    """R v_i of all clients [n, r], where U = Q R: their distances are those of the models θ_i = U v_i."""
    assert result.simulation is not None
    record = result.simulation.record
    V = torch.stack([record.row(i)["v"] for i in range(len(result.names))])
    R: Tensor = torch.linalg.qr(record.server["U"])[1]
    return V @ R.T
