"""The stable rank of a loss's Hessian, ‖H‖_F² / ‖H‖₂²: exact, unbiased in its numerator, and as FedLoRU estimates it.

H is met only through its products with vectors. Below `EXACT` parameters it is computed whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from fedspan import tree
from fedspan.learn.batches import Batch
from fedspan.learn.sgd import hessian_product
from fedspan.learn.task import Task
from fedspan.randomness import generator, key
from fedspan.tree import Params

EXACT = 2_000
"""Below this many parameters the Hessian is computed whole: it is quicker than estimating it well."""

Floats: TypeAlias = NDArray[np.float64]
Product: TypeAlias = Callable[[Floats], Floats]
"""v ↦ H v."""


@dataclass(frozen=True)
class StableRank:
    """Both readings of a Hessian: ‖H‖_F²/‖H‖₂², with the spread of its numerator if drawn, and the paper's estimate."""

    value: float
    error: float  # standard error of the value; 0 where it is exact
    paper: float
    norm: float
    exact: bool


def hessian_products(task: Task, params: Params, x: torch.Tensor, y: torch.Tensor) -> tuple[Product, int]:
    """v ↦ ∇²loss · v of the mean loss over examples, and the number of parameters.

    Running statistics are constants: with batch normalisation the batch is normalised by its own.
    """
    at = {k: params[k] for k in task.names}
    rest = {k: v for k, v in params.items() if k not in at}
    batch = Batch(x, y, None, key(0, "hessian"), 0)
    loss = lambda p, b: task.loss(rest | p, b)
    first = next(iter(at.values()))

    def product(v: Floats) -> Floats:
        direction = tree.unravel(torch.from_numpy(np.ascontiguousarray(v).reshape(-1)).to(first.dtype), at)
        made: Floats = tree.ravel(hessian_product(loss, at, direction, batch)).double().numpy()
        return made

    return product, sum(p.numel() for p in at.values())


def whole(product: Product, size: int) -> Floats:
    """The matrix itself, column by column, made symmetric."""
    H = np.stack([product(e) for e in np.eye(size)], 1)
    return (H + H.T) / 2


def squared_norm(product: Product, size: int, samples: int, seed: int) -> tuple[float, float]:
    """‖H‖_F² = E‖H z‖² for random signs z: an unbiased estimate, and its standard error."""
    rng = generator(seed, "hutchinson")
    found = [float(np.square(product(z)).sum()) for z in rng.choice([-1.0, 1.0], (samples, size))]
    return float(np.mean(found)), float(np.std(found, ddof=1) / np.sqrt(samples))


def spectral_norm(product: Product, size: int, seed: int) -> float:
    """‖H‖₂, the largest |eigenvalue|, by Lanczos' method (ARPACK)."""
    from scipy.sparse.linalg import LinearOperator, eigsh

    start = generator(seed, "lanczos").normal(size=size)
    H: Any = LinearOperator((size, size), matvec=product, dtype=np.float64)
    return float(np.abs(eigsh(H, k=1, which="LM", v0=start, return_eigenvectors=False, tol=1e-6)).max())


def quadrature(product: Product, size: int, steps: int, seed: int) -> tuple[Floats, Floats]:
    """Values and densities of H's spectrum by stochastic Lanczos quadrature from one random vector of signs.

    All directions so far are taken out of a new one: without that, values would come twice.
    """
    rng = generator(seed, "quadrature")
    v = rng.choice([-1.0, 1.0], size) / np.sqrt(size)
    basis, diagonal, beside = [v], list[float](), list[float]()
    for _ in range(min(steps, size)):
        w = product(basis[-1])
        diagonal.append(float(w @ basis[-1]))
        for _twice in range(2):
            Q = np.stack(basis)
            w = w - Q.T @ (Q @ w)
        length = float(np.linalg.norm(w))
        if len(diagonal) == min(steps, size) or length <= 1e-10 * max(1e-300, max(map(abs, diagonal))):
            break
        beside.append(length)
        basis.append(w / length)
    T = np.diag(diagonal) + np.diag(beside, 1) + np.diag(beside, -1)
    values, vectors = np.linalg.eigh(T)
    return values, np.square(vectors[0])


def paper_estimate(values: Floats, densities: Floats) -> float:
    """Σ p_i σ_i² / (p_1 σ_1²), σ_1 the largest: eq. (37) of FedLoRU.

    The density of the top value in the denominator makes it depend on how the spectrum was cut into values: it is not
    a stable rank, and is reported only as what the paper shows.
    """
    sizes = np.abs(values)
    top = int(sizes.argmax())
    return float((densities * sizes**2).sum() / (densities[top] * sizes[top] ** 2))


def stable_rank(
    product: Product, size: int, *, samples: int = 30, steps: int = 40, seed: int = 0, exact: bool | None = None
) -> StableRank:
    """Both readings of a Hessian.

    Args:
        samples: random vectors for the Frobenius norm.
        steps: of the quadrature, which are the values the paper's estimate has.
        exact: compute the Hessian whole; by default below `EXACT` parameters.
    """
    if size < EXACT if exact is None else exact:
        H = whole(product, size)
        norm, error = float(np.abs(np.linalg.eigvalsh(H)).max()), 0.0
        total = float(np.square(H).sum())
        product = lambda v: H @ v
        exact = True
    else:
        total, error = squared_norm(product, size, samples, seed)
        norm, exact = spectral_norm(product, size, seed), False
    paper = paper_estimate(*quadrature(product, size, steps, seed))
    return StableRank(total / norm**2, error / norm**2, paper, norm, exact)
