"""The workloads: data of the right shape over clients of Dirichlet sizes; numpy alone, so that peers can import it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Index = NDArray[np.int64]

CLASSES = 10
LEAST = 12
"""The least number of examples of a client, a quarter of them held out."""
LR = 0.1
PARTICIPATION = 0.1


@dataclass(frozen=True)
class Data:
    """Pictures, labels, and the rows of each client."""

    x: NDArray[np.float32]
    y: Index
    train: list[Index]
    test: list[Index]


@dataclass(frozen=True)
class Workload:
    """One column of the table: 10 % of the clients take part in each round and do one local epoch."""

    name: str
    title: str
    model: str
    clients: int
    batch: int
    examples: int
    """Examples over all clients, three quarters of them for training."""
    rounds: int
    """Rounds of FedAvg that are timed, after a first one that is not."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of one example."""
        return (1, 28, 28) if self.model == "mlp" else (3, 32, 32)

    @property
    def convolutional(self) -> bool:
        """Whether the model has convolutions."""
        return self.model != "mlp"

    @property
    def participants(self) -> int:
        """Clients of a round."""
        return max(1, round(PARTICIPATION * self.clients))

    def data(self, shape: tuple[int, ...] | None = None) -> Data:
        """Pictures of a pattern per class under noise: what they show does not change the time of a step.

        Labels follow Dirichlet(0.5) over the clients. At most 20,000 pictures differ; several rows then share one.

        Args:
            shape: of a picture, if another one is wanted; who holds which rows does not depend on it.
        """
        rng = np.random.default_rng(7)
        labels = rng.permutation(np.arange(self.examples) % CLASSES)
        train, test = self._partition(labels, rng)
        kept = min(self.examples, 70_000 if self.model == "mlp" else 20_000)
        shape = shape or self.shape
        patterns = rng.standard_normal((CLASSES, *shape), dtype=np.float32)
        if kept < self.examples:  # the n-th example of a class shows its (n modulo how many are kept)-th picture
            pools = [np.flatnonzero(labels[:kept] == c) for c in range(CLASSES)]
            place = np.empty(self.examples, np.int64)
            for c, pool in enumerate(pools):
                mine = np.flatnonzero(labels == c)
                place[mine] = pool[np.arange(len(mine)) % len(pool)]
            train, test = [place[r] for r in train], [place[r] for r in test]
        y = labels[:kept]
        x = rng.standard_normal((kept, *shape), dtype=np.float32)
        for c in range(CLASSES):
            x[y == c] += 0.5 * patterns[c]
        return Data(x, y, train, test)

    def _partition(self, labels: Index, rng: np.random.Generator) -> tuple[list[Index], list[Index]]:
        rows: list[list[int]] = [[] for _ in range(self.clients)]
        for label in range(CLASSES):
            mine = np.flatnonzero(labels == label)
            share = rng.dirichlet(np.full(self.clients, 0.5))
            for i, part in enumerate(np.split(mine, (np.cumsum(share)[:-1] * len(mine)).astype(int))):
                rows[i] += part.tolist()
        for i in range(self.clients):
            while len(rows[i]) < LEAST:
                rows[i].append(max(rows, key=len).pop())
        mixed = [rng.permutation(np.array(r, np.int64)) for r in rows]
        return [r[len(r) // 4 :] for r in mixed], [r[: len(r) // 4] for r in mixed]

    def sampled(self, seed: int = 0) -> Iterator[list[int]]:
        """The participants of round after round, for those who do not draw their own."""
        rng = np.random.default_rng(seed)
        while True:
            yield rng.choice(self.clients, self.participants, replace=False).tolist()


WORKLOADS = {
    w.name: w
    for w in (
        Workload("mlp-100-b256", "MLP 100 b256", "mlp", 100, 256, 70_000, 30),
        Workload("mlp-100-b32", "MLP 100 b32", "mlp", 100, 32, 70_000, 16),
        Workload("mlp-1000-b256", "MLP 1000 b256", "mlp", 1000, 256, 70_000, 20),
        Workload("mlp-1000-b32", "MLP 1000 b32", "mlp", 1000, 32, 70_000, 14),
        Workload("cnn-100-b256", "CNN b256", "cnn", 100, 256, 60_000, 2),
        Workload("cnn-100-b32", "CNN b32", "cnn", 100, 32, 60_000, 2),
        Workload("resnet9-100-b32", "ResNet-9 b32", "resnet9", 100, 32, 2_400, 2),
    )
}
