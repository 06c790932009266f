"""Linear fits in closed form: how well one model for all predicts, one for each client, and one near the common one.

Every example is predicted by fits that leave it out (the hat matrix gives those without fitting again), so what is said
is what personal models could gain, and not how well they can learn by heart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedspan.studies.diagnosis.statistics import Floats, Sample

_RIDGES = (0.1, 1.0, 10.0, 100.0, 1000.0)  # in examples: how many of its own outweigh what a client is held to


@dataclass(frozen=True)
class LinearFits:
    """Mean over clients: the share of right answers, or of the targets' squares that is explained."""

    common: float  # one model for all
    own: float  # one for each, drawn towards no difference at all
    near: float  # the common one and a correction of the client's own

    @property
    def gain(self) -> float:
        """What the better kind of personal model gains over the common one, or over saying nothing."""
        return max(self.own, self.near) - max(self.common, 0.0)


def linear_fits(of: Sample) -> LinearFits | None:
    """Fit labels, or targets, to the principal components of the inputs; None where there is nothing to fit."""
    target = _targets(of)
    if target is None:
        return None
    z = np.hstack([np.ones((len(of.z), 1)), of.z])
    rows = [np.flatnonzero(of.client == i) for i in range(of.clients)]
    common = left_out(z, target, 1.0)
    judge = _Judge(of, target, rows)
    return LinearFits(
        judge.mean(common),
        max(judge.mean(_per_client(z, target, rows, ridge)) for ridge in _RIDGES),
        max(judge.mean(common + _per_client(z, target - common, rows, ridge)) for ridge in _RIDGES),
    )


def left_out(z: Floats, target: Floats, ridge: float) -> Floats:
    """Predictions of every row by a ridge regression on all the others."""
    inner = np.linalg.solve(z.T @ z + ridge * np.eye(z.shape[1]), z.T)
    lever = np.minimum(np.einsum("nd,dn->n", z, inner), 1 - 1e-9)[:, None]
    out: Floats = (z @ (inner @ target) - lever * target) / (1 - lever)
    return out


def _per_client(z: Floats, target: Floats, rows: Sequence[NDArray[np.intp]], ridge: float) -> Floats:
    out = np.zeros_like(target)
    for mine in rows:
        out[mine] = left_out(z[mine], target[mine], ridge)
    return out


def _targets(of: Sample) -> Floats | None:
    """One column per label, or the standardised targets; centred, so that zero is what is said without a model."""
    if of.y is not None:
        made: Floats = (of.y[:, None] == np.unique(of.y)[None]).astype(np.float64)
        made -= made.mean(0)
        return made
    if of.target is None:
        return None
    spread = float(of.target.std())
    scaled: Floats = (of.target - of.target.mean())[:, None] / (spread or 1.0)
    return scaled if spread > 0 else None


@dataclass(frozen=True)
class _Judge:
    of: Sample
    target: Floats
    rows: Sequence[NDArray[np.intp]]

    def mean(self, predicted: Floats) -> float:
        """How good predictions are, mean over clients."""
        if self.of.y is not None:
            uncentred = predicted + (1.0 - self.target.max(0))
            said = np.unique(self.of.y)[uncentred.argmax(1)]
            return float(np.mean([np.mean(said[mine] == self.of.y[mine]) for mine in self.rows]))
        square = float((self.target**2).mean())
        left = [float(((predicted - self.target)[mine] ** 2).mean()) for mine in self.rows]
        return 1.0 - float(np.mean(left)) / square
