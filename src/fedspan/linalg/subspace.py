"""Linear algebra of a shared subspace: θ_i = U v_i. Solving for v, stepping U, choosing a gauge, choosing a rank."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def gauge(U: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """U = Q Lᵀ with orthonormal Q [d, r], and L, L⁺ᵀ [r, r]: θ = U v is Q w with w = Lᵀ v.

    In the coordinates w distances between models are plain distances, whatever (U R, R⁻¹ v) was sent: what is computed
    there does not depend on the gauge, and does not suffer when it is a bad one. Directions that U has lost stay lost.
    """
    Q, s, Wh = torch.linalg.svd(U, full_matrices=False)
    alive = s > torch.finfo(s.dtype).eps * s.amax() * max(U.shape)
    inverted = torch.where(alive, 1 / torch.where(alive, s, torch.ones_like(s)), torch.zeros_like(s))
    return Q, Wh.T * s, Wh.T * inverted


def inverse(A: Tensor, eps: float) -> Tensor:
    """(A + ε·tr(A)/r·I)⁻¹ of a positive semi-definite matrix; finite also where A is zero."""
    r = len(A)
    ridge = eps * A.diagonal().sum() / r + torch.finfo(A.dtype).tiny ** 0.5
    result: Tensor = torch.linalg.inv(A + ridge * torch.eye(r, dtype=A.dtype, device=A.device))
    return result


def scaled_step(U: Tensor, M: Tensor, C: Tensor, ridge: float, most: float | None = None) -> Tensor:
    """U + M (C + λ·(tr(UᵀU C)/r)·(UᵀU)⁻¹)⁻¹: least squares for the dictionary that explains all Δθ_i by the v_i.

    The ridge transforms like C, so the step does not depend on the gauge (U R, R⁻¹ v). λ = 0 means M·pinv(C). With
    `most` the step is shortened until the models that are distributed as C move at most that part of their own root
    mean square, which no gauge changes either.
    """
    A = C.double()
    if ridge:
        # With UᵀU = L Lᵀ this is M L (Lᵀ C L + ρ I)⁻¹ Lᵀ: no inverse of UᵀU, which single precision could not give.
        _, L, _ = gauge(U.double())
        inner = L.T @ A @ L
        inner = inner + ridge * inner.diagonal().mean() * torch.eye(len(A), dtype=A.dtype, device=A.device)
        inverted = L @ torch.linalg.pinv(inner, hermitian=True) @ L.T
    else:
        inverted = torch.linalg.pinv(C, hermitian=True)
    step: Tensor = M @ inverted.to(U.dtype)
    if most is None:
        return U + step
    moved, held = (torch.trace(X.T @ X @ A).clamp_min(0).sqrt() for X in (step.double(), U.double()))
    return U + step * allowed(moved, held, most)


def allowed(moved: Tensor, held: Tensor, most: float) -> float:
    """The part of a step of size `moved` that changes what has size `held` by at most `most` of it."""
    return float(torch.clamp(most * held / moved.clamp_min(torch.finfo(moved.dtype).tiny), max=1.0))


def orthonormal_gauge(U: Tensor, C: Tensor) -> tuple[Tensor, Tensor]:
    """U = Q R: the same subspace with orthogonal columns of one length s, and the map v ← R v/s that keeps all θ_i.

    s is chosen so that the v_i, distributed as C, have mean square length 1: otherwise U could grow as v shrinks.
    """
    Q, R = torch.linalg.qr(U)
    s = torch.trace(R @ C @ R.T).clamp_min(torch.finfo(U.dtype).tiny).sqrt()
    return Q * s, R / s


def symmetric_root(C: Tensor) -> tuple[Tensor, Tensor]:
    """C^{1/2} and its pseudo-inverse, for a positive semi-definite C."""
    values, vectors = torch.linalg.eigh(C)
    root = values.clamp_min(0).sqrt()
    floor = root.max() * 1e-7
    inverted = torch.where(root > floor, 1 / root.clamp_min(torch.finfo(C.dtype).tiny), torch.zeros_like(root))
    return (vectors * root) @ vectors.T, (vectors * inverted) @ vectors.T


def spectrum(U: Tensor, C: Tensor) -> Tensor:
    """Singular values of U C^{1/2}: how much of the models' spread each direction carries."""
    values: Tensor = torch.linalg.svdvals(U @ symmetric_root(C)[0])
    return values


def gaps(values: Tensor) -> Tensor:
    """log(σ_k/σ_{k+1}) of a falling sequence, k = 1, 2, …; gaps below the noise of the arithmetic count as none."""
    floor = values.amax() * torch.finfo(values.dtype).eps * len(values) + torch.finfo(values.dtype).tiny
    kept = values.clamp_min(floor).log()
    return kept[:-1] - kept[1:]


def clear_gap(gaps: Tensor, least: float) -> int | None:
    """The k after which the largest gap sits, if it is at least log(`least`) and half that ahead of any other, or None.

    The first gap is left out: what all models have in common is nearly always far ahead of the rest, and one direction
    would be one model for all. So are those in the last quarter: the smallest values of any sample spread far apart.
    """
    inner = gaps[1 : len(gaps) - len(gaps) // 4]
    if not len(inner):
        return None
    top = inner.topk(min(2, len(inner))).values
    ahead = float(top[0] - top[1]) if len(top) > 1 else math.inf
    if float(top[0]) < math.log(least) or ahead < math.log(least) / 2:
        return None
    return int(inner.argmax()) + 2


def cut(U: Tensor, C: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The best rank-r' dictionary for models distributed as C, and the r'×r map for every v."""
    root, inverted = symmetric_root(C)
    _, _, Vh = torch.linalg.svd(U @ root, full_matrices=False)
    B = Vh[:rank].T
    return U @ root @ B, B.T @ inverted


def triangle(C: Tensor) -> Tensor:
    """The upper triangle of a symmetric matrix as a vector: r(r+1)/2 numbers."""
    i, j = torch.triu_indices(len(C), len(C), device=C.device)
    return C[i, j]


def from_triangle(t: Tensor, r: int) -> Tensor:
    """The inverse of `triangle`."""
    i, j = torch.triu_indices(r, r, device=t.device)
    upper = torch.zeros(r, r, dtype=t.dtype, device=t.device).index_put((i, j), t)
    return upper + upper.triu(1).T
