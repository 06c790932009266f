"""One step of every client from the common start: how alike the steps are, and how many directions they span."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedspan import tree
from fedspan.data.federated import FederatedData
from fedspan.learn.batches import Batch
from fedspan.learn.sgd import gradient
from fedspan.learn.task import Task
from fedspan.linalg.similarity import cosine
from fedspan.randomness import generator, key
from fedspan.studies.diagnosis.statistics import EXAMPLES

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class FirstSteps:
    """What one step of every client shows."""

    similarity: Floats  # cosines of the steps, [clients, clients]
    repeated: float  # mean cosine of a client's steps on its two halves: what similarity could be at most
    apart: float  # mean cosine of different clients' halves
    spectrum: Floats  # eigenvalues of A Bᵀ, steps on one half against steps on the other; noise is about 0
    rank: int  # directions above the noise


def steps(task: Task, data: FederatedData, ids: Sequence[int]) -> FirstSteps:
    """Gradients at the common start on two halves of every client's examples.

    What two halves of different examples agree on is signal, so the eigenvalues of A Bᵀ (made symmetric) are those of
    the signal plus noise around 0, and the most negative one shows how large noise gets.
    """
    rng = generator(0, "diagnose", "steps")
    halves: list[list[Tensor]] = [[], []]
    for i in ids:
        rows = rng.permutation(data.train[i])[:EXAMPLES]
        cut = max(1, len(rows) // 2)
        for half, own in zip(halves, (rows[:cut], rows[cut:] if len(rows) > 1 else rows)):
            half.append(_step(task, data, i, torch.from_numpy(own)))
    a, b = (torch.stack(half).double() for half in halves)
    scale = torch.linalg.vector_norm(torch.cat([a, b]), dim=1).mean().clamp_min(1e-30)
    a, b = a / scale, b / scale
    crossed = cosine_between(a, b)
    n = len(ids)
    other = ~np.eye(n, dtype=bool)
    product = (a @ b.T).numpy()
    values: Floats = np.sort(np.linalg.eigvalsh((product + product.T) / 2))[::-1].astype(np.float64)
    floor = max(2.0 * float(-values[-1]), 0.02 * float(values[0]), 1e-12)
    return FirstSteps(
        cosine(a + b).numpy(),
        float(np.diag(crossed).mean()),
        float(crossed[other].mean()) if n > 1 else 1.0,
        values,
        max(1, int((values > floor).sum())),
    )


def _step(task: Task, data: FederatedData, client: int, rows: Tensor) -> Tensor:
    """The gradient. Every class a client holds counts alike: chance in its counts would drown what it means by them."""
    y = data.y[rows]
    y = y if data.relabel is None else data.relabel[client][y]
    parts = [torch.arange(len(rows))]
    if data.classes is not None and y.ndim == 1:
        parts = [torch.nonzero(y == c)[:, 0] for c in sorted(set(y.tolist()))]
    total: Tensor | None = None
    for part in parts:
        batch = Batch(data.x[rows[part]], y[part], None, key(0, "diagnose"), 0)
        found = gradient(task.loss, task.init(), batch)
        flat = torch.cat([g.reshape(-1) for g in tree.leaves(found)])
        total = flat if total is None else total + flat
    assert total is not None
    return total / len(parts)


def cosine_between(a: Tensor, b: Tensor) -> Floats:
    """Cosines of the rows of `a` with those of `b`."""
    unit = [x / torch.linalg.vector_norm(x, dim=1, keepdim=True).clamp_min(1e-30) for x in (a, b)]
    out: Floats = (unit[0] @ unit[1].T).numpy()
    return out
