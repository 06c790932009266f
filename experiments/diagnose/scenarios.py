"""Federations of bundled digits whose kind of heterogeneity is known, one per seed.

`fedspan diagnose` was written looking at seeds 0 to 20 only; 100 to 109 are the test. Nothing in `src/` imports this.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from fedspan.data.federated import FederatedData

KINDS = ("none", "label skew", "permuted labels", "clusters", "domain shift")
Floats = NDArray[np.float32]

_DOMAINS: tuple[Callable[[Floats], Floats], ...] = (
    lambda x: x,
    lambda x: 1.0 - x,
    lambda x: x.transpose(0, 2, 1),
    lambda x: np.rot90(x, 1, axes=(1, 2)),
    lambda x: np.rot90(x, 2, axes=(1, 2)),
    lambda x: np.roll(x, 3, axis=2),
    lambda x: 0.5 * x + 0.3,
)


@dataclass(frozen=True)
class Scenario:
    """Data and what is true of them."""

    kind: str
    groups: int | None  # of clients, where there are such
    data: FederatedData


def scenario(seed: int) -> Scenario:
    """The federation of a seed: kinds take turns, sizes and strengths are drawn."""
    from sklearn.datasets import load_digits

    rng = np.random.default_rng([seed, 20_240_901])
    kind = KINDS[seed % len(KINDS)]
    bunch = load_digits()
    x: Floats = (bunch.images / 16.0).astype(np.float32)
    y = bunch.target.astype(np.int64)
    clients = int(rng.choice([12, 16, 20, 24, 30]))
    kept = rng.permutation(len(y))[: int(rng.integers(1200, len(y) + 1))]
    x, y = x[kept], y[kept]
    groups = int(rng.integers(2, 5))
    held = _skewed(y, clients, rng) if kind == "label skew" else np.array_split(np.arange(len(y)), clients)
    namings = np.stack([rng.permutation(10) for _ in range(clients)])
    domains = rng.permutation(len(_DOMAINS))[:groups]
    of = np.arange(clients) % groups
    pairs = []
    for i, rows in enumerate(held):
        own_x, own_y = x[rows], y[rows]
        if kind == "permuted labels":
            own_y = namings[i][own_y]
        elif kind == "clusters":
            own_y = namings[of[i]][own_y]
        elif kind == "domain shift":
            own_x = _DOMAINS[domains[of[i]]](own_x)
        pairs.append((torch.from_numpy(np.ascontiguousarray(own_x.reshape(len(rows), -1))), torch.from_numpy(own_y)))
    grouped = kind in ("clusters", "domain shift")
    data = FederatedData.from_arrays(pairs, classes=10, seed=seed)  # who is in which group is not told
    return Scenario(kind, groups if grouped else None, data)


def _skewed(y: NDArray[np.int64], clients: int, rng: np.random.Generator) -> list[NDArray[np.int64]]:
    """Dirichlet proportions per class, or two or three classes per client; everybody gets at least 20 examples."""
    alpha, few = float(rng.uniform(0.1, 0.5)), bool(rng.random() < 0.5)
    while True:
        share = rng.dirichlet([alpha] * clients, 10)
        if few:
            share = np.zeros((10, clients))
            for i in range(clients):
                share[rng.permutation(10)[: rng.integers(2, 4)], i] = rng.uniform(0.5, 1.0)
            share /= np.maximum(share.sum(1, keepdims=True), 1e-9)
        held: list[list[int]] = [[] for _ in range(clients)]
        for c in range(10):
            rows = np.flatnonzero(y == c)
            cuts = (np.cumsum(share[c])[:-1] * len(rows)).astype(int)
            for i, part in enumerate(np.split(rows, cuts)):
                held[i] += part.tolist() if share[c, i] > 0 else []
        if min(map(len, held)) >= 20:
            return [np.array(h) for h in held]
