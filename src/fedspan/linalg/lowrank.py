"""Pure functions on factors: how they compose a weight, how they start, and the best factors of a given weight.

Factors of an adapter are told apart by name, W being read as m × n, outputs by all the rest (a kernel [o, i, k, k] is
o × i·k²): A B (LoRA), (A1 B1) ∘ (A2 B2) (LoHa), C ⊗ (A B) (LoKr), L U (a client's own). Factors U [o, k, r] and
V [i, k, r] stand for a kernel W[o, i, h, w] = Σ_r U[o, h, r] V[i, w, r], which is U Vᵀ as a matrix of o·k × i·k.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from fedspan.randomness import normal
from fedspan.tree import Params

FACTORS: dict[str, tuple[str, ...]] = {"lora": ("A", "B"), "loha": ("A1", "B1", "A2", "B2"), "lokr": ("C", "A", "B")}
"""The factors of each kind of adapter; the last is zero at the start."""

_DEVIATION: dict[str, Callable[[Sequence[int]], float]] = {
    # Columns of A have unit length on average, so that a step of B moves A B as a step of W would.
    **dict.fromkeys(("A", "A2", "L", "B_d"), lambda shape: shape[1] ** -0.5),
    "A_u": lambda shape: shape[0] ** -0.5,
    # The entries of A1 B1 have variance one: the second product moves W as A B would.
    "A1": lambda shape: shape[1] ** -0.25,
    "B1": lambda shape: shape[0] ** -0.25,
    "C": lambda shape: shape[1] ** -0.5,
    **dict.fromkeys(("B", "B2", "U", "A_d", "B_u"), lambda _: 0.0),
}

T = TypeVar("T")


def shapes(kind: str, weight: Sequence[int], rank: int) -> dict[str, tuple[int, ...]]:
    """The shapes of an adapter's factors for a weight of a linear layer or a convolution."""
    m, n = weight[0], math.prod(weight[1:])
    if kind == "lora":
        return {"A": (m, rank), "B": (rank, n)}
    if kind == "loha":
        return {"A1": (m, rank), "B1": (rank, n), "A2": (m, rank), "B2": (rank, n)}
    m1, n1 = _middle(m), _middle(weight[1])
    return {"C": (m1, n1), "A": (m // m1, rank), "B": (rank, n // n1)}


def size(kind: str, layer: nn.Linear | nn.Conv2d, rank: int) -> int:
    """Numbers in an adapter's factors."""
    return sum(math.prod(shape) for shape in shapes(kind, layer.weight.shape, rank).values())


def _middle(n: int) -> int:
    """The largest divisor of n that is at most √n."""
    return next(d for d in range(math.isqrt(n), 0, -1) if n % d == 0)


def compose(factors: Mapping[str, Tensor], shape: Sequence[int]) -> Tensor:
    """What an adapter's factors make, in the shape of the weight they are added to."""
    if "A1" in factors:
        made = (factors["A1"] @ factors["B1"]) * (factors["A2"] @ factors["B2"])
    else:
        made = factors["A"] @ factors["B"]
        if "C" in factors:
            made = torch.kron(factors["C"], made)
    return made.reshape(tuple(shape))


def accumulate(W: Params, factors: Mapping[str, Params], scale: float) -> Params:
    """W + scale · what the factors make, for every weight that has factors; `factors` maps a factor to its layers."""
    new = dict(W)
    for name, weight in W.items():
        layer = name.removesuffix("weight")
        own = {f: some[layer + f] for f, some in factors.items() if layer + f in some}
        if len(own) == len(factors):  # a private layer's factors are not there
            new[name] = weight + scale * compose(own, weight.shape)
    return new


def deviation(name: str, shape: Sequence[int]) -> float:
    """The standard deviation a factor is drawn with; 0 for the one that makes the product vanish."""
    return _DEVIATION[name](shape)


def draw(name: str, like: Tensor, k: Tensor, start: str) -> Tensor:
    """A factor as it starts: zero, Gaussian from a key, or the identity."""
    size = deviation(name, like.shape)
    if not size:
        return torch.zeros_like(like)
    if start == "identity":
        return torch.eye(*like.shape, dtype=like.dtype, device=like.device)
    return size * normal(k, like.shape, like.dtype)


# ------------------------------------------------------------------------------------------------ U Vᵀ


def fold(U: Tensor, V: Tensor) -> Tensor:
    """The weight U Vᵀ stands for: of a convolution for three axes, of a linear layer for two."""
    return torch.einsum("ohr,iwr->oihw", U, V) if U.ndim == 3 else U @ V.T


def unfold(weight: Tensor) -> Tensor:
    """A kernel [o, i, h, w] as the matrix o·h × i·w; a matrix as it is."""
    if weight.ndim == 2:
        return weight
    o, i, h, w = weight.shape
    return weight.permute(0, 2, 1, 3).reshape(o * h, i * w)


def full_rank(shape: Sequence[int]) -> int:
    """The largest rank that the matrix of a weight can have."""
    o, i, h, w = *shape, *(1, 1)[len(shape) - 2 :]
    return min(o * h, i * w)


def leading(weight: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Balanced factors U = P √Σ, V = Q √Σ of the nearest weight of that rank, by the singular value decomposition.

    Where the weight has a lower rank, V is zero and U is not: the product is exact, and yet both can be trained, while
    two zero factors would have no gradient for ever. Signs are fixed, so that equal weights have equal factors.
    """
    P, s, Q = torch.linalg.svd(unfold(weight), full_matrices=False)
    P, s, Q = P[:, :rank], s[:rank], Q[:rank].T
    peak = P.gather(0, P.abs().argmax(0, keepdim=True))
    turn = torch.where(peak < 0, -torch.ones_like(peak), torch.ones_like(peak))
    live = s > 1e-8 * s[0]
    spare = s[live].min() if bool(live.any()) else torch.ones_like(s[0])
    U, V = P * turn * torch.where(live, s, spare).sqrt(), Q * turn * torch.where(live, s, 0 * s).sqrt()
    if weight.ndim == 4:
        o, i, h, w = weight.shape
        U, V = U.reshape(o, h, -1), V.reshape(i, w, -1)
    return U.contiguous(), V.contiguous()


def changed(new: Tensor, old: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """P, s, Q with new − old = P diag(s) Qᵀ as matrices of outputs by all the rest, of the rank it has beyond rounding.

    Every number of a weight is rounded when something is added to it: noise of a small norm in all directions.
    """
    gap = (new.double() - old.double()).flatten(1)
    P, s, Q = torch.linalg.svd(gap, full_matrices=False)
    largest = float(torch.maximum(new.abs().max(), old.abs().max()))
    noise = torch.finfo(new.dtype).eps * largest * (gap.shape[0] ** 0.5 + gap.shape[1] ** 0.5)
    r = int((s > noise).sum())
    return P[:, :r], s[:r], Q[:r].T


def condensed(A: Tensor, B: Tensor) -> Tensor:
    """A small matrix with the singular values of A Bᵀ, from the triangles of two QR decompositions."""
    (_, R), (_, L) = torch.linalg.qr(A, mode="r"), torch.linalg.qr(B, mode="r")
    small: Tensor = R @ L.T
    return small


def energies(matrix: Tensor) -> Tensor:
    """σ², the largest first: of the smaller Gram matrix, in half the time that σ take."""
    gram = matrix @ matrix.T if matrix.shape[0] <= matrix.shape[1] else matrix.T @ matrix
    found: Tensor = torch.linalg.eigvalsh(gram).flip(0).clamp_min(0)
    return found


def changed_energies(old: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor]) -> Tensor:
    """σ² of what training did to U Vᵀ, the largest first: at most 2r, as both factors move.

    U′V′ᵀ − U Vᵀ = (U′ − U) V′ᵀ + U (V′ − V)ᵀ, in which nothing large cancels.
    """
    (U, V), (U_new, V_new) = ([f.flatten(0, -2) for f in pair] for pair in (old, new))
    return energies(condensed(torch.cat([U_new - U, U], 1), torch.cat([V_new, V_new - V], 1)))


def stable_rank(A: Tensor, B: Tensor) -> float | None:
    """‖AB‖_F² / ‖AB‖₂²; None for the product zero."""
    s = torch.linalg.svdvals(condensed(A, B.T))
    return float(s.square().sum() / s[0].square()) if s[0] > 0 else None


def squared_product(U: Tensor, V: Tensor) -> Tensor:
    """‖U Vᵀ‖², without the product; it can be differentiated once.

    Its gradient, 2 U (VᵀV) and 2 V (UᵀU), is written down: that takes two products where automatic differentiation of
    the trace takes four, and with small minibatches they are the dearest part of a step.
    """
    U, V = U.flatten(0, -2), V.flatten(0, -2)
    u, v = U.detach(), V.detach()
    A, B = u.T @ u, v.T @ v
    return 2 * ((U * (u @ B)).sum() + (V * (v @ A)).sum()) - 3 * (A * B).sum()


def turn(values: Sequence[T], client: int) -> T:
    """Clients take turns: client i gets entry i modulo their number, so that every entry serves as many clients."""
    return values[client % len(values)]
