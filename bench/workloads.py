"""The workloads: data of the right shape over clients of Dirichlet sizes, models, batch sizes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from fedspan.data.federated import FederatedData
from fedspan.models import build
from fedspan.randomness import generator


@dataclass(frozen=True)
class Workload:
    """One cell of the table: 10 % of the clients take part in each round and do one local epoch."""

    name: str
    model: str
    clients: int
    batch: int
    rounds: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one example."""
        return (1, 28, 28) if self.model == "mlp" else (3, 32, 32)

    @property
    def examples(self) -> int:
        """Training examples over all clients: three quarters of the data set's size."""
        return 52_500 if self.model == "mlp" else 45_000

    def module(self) -> nn.Module:
        """The model."""
        return build(self.model, self.shape, 10)

    def data(self) -> FederatedData:
        """Random pictures: training time does not depend on what they show, and no file is needed."""
        rng = generator(0, "bench", self.name)
        g = torch.Generator().manual_seed(0)
        n = self.examples
        y = torch.arange(n) % 10
        x = torch.randn(n, *self.shape, generator=g)
        rows: list[list[int]] = [[] for _ in range(self.clients)]
        for label in range(10):
            share = rng.dirichlet(np.full(self.clients, 0.5))
            mine = rng.permutation(np.flatnonzero(y.numpy() == label))
            for i, part in enumerate(np.split(mine, (np.cumsum(share)[:-1] * len(mine)).astype(int))):
                rows[i] += part.tolist()
        spare = max(range(self.clients), key=lambda i: len(rows[i]))
        for i in range(self.clients):
            while len(rows[i]) < 8:
                rows[i].append(rows[spare].pop())
        train = [np.array(r, np.int64) for r in rows]
        return FederatedData(x=x, y=y, train=train, test=[r[:1] for r in train], classes=10)


WORKLOADS = {
    w.name: w
    for w in (
        Workload("mlp-100-b256", "mlp", 100, 256, 60),
        Workload("mlp-100-b32", "mlp", 100, 32, 30),
        Workload("mlp-1000-b256", "mlp", 1000, 256, 40),
        Workload("mlp-1000-b32", "mlp", 1000, 32, 30),
        Workload("cnn-100-b256", "cnn", 100, 256, 3),
        Workload("cnn-100-b32", "cnn", 100, 32, 3),
    )
}
