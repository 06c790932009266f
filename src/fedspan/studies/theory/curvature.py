"""The smoothness constant L of Assumption 1, from the curvature of ψ at the points a run visits."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.func import grad, vmap

from fedspan.methods.pfl_mf import PflMfAlgorithm1
from fedspan.randomness import generator
from fedspan.studies.theory.plain_rounds import start_of
from fedspan.studies.theory.problem import Problem

MARGIN = 1.5
"""The largest curvature at visited points is taken this much larger: between them it is not known."""


def curvature(problem: Problem, U: Tensor, V: Tensor, steps: int = 60) -> float:
    """The largest ‖∇²ψ‖₂ over the points (U[k], V[k]), by power iteration with Hessian-vector products.

    Assumption 1 asks for L with ‖∇ψ(a) − ∇ψ(b)‖ <= L (‖ΔU‖ + ‖ΔV‖), which the norm of the whole Hessian gives.
    """
    d, r = U.shape[1:]

    def psi(w: Tensor) -> Tensor:
        return problem.psi(w[: d * r].reshape(d, r), w[d * r :].reshape(-1, r))

    def product(w: Tensor, v: Tensor) -> Tensor:
        result: Tensor = grad(lambda u: grad(psi)(u) @ v)(w)
        return result

    w = torch.cat([U.flatten(1), V.flatten(1)], 1)
    v = torch.from_numpy(generator(0, "power").normal(size=tuple(w.shape))).to(w.dtype)
    size = v.norm(dim=1)
    for _ in range(steps):
        v = vmap(product)(w, v / v.norm(dim=1, keepdim=True))
        size = v.norm(dim=1)
    return float(size.max())


def visited(problem: Problem, U: Tensor, V: Tensor, points: int = 40) -> float:
    """`curvature` over points of a path, dense at its start where it moves most."""
    at = np.unique(np.geomspace(1, len(U), points).astype(int)) - 1
    return curvature(problem, U[at], V[at])


def descent(problem: Problem, U: Tensor, V: Tensor, eta: float, rounds: int) -> tuple[Tensor, Tensor]:
    """The path of eqs. (8) and (9) written out, without noise and with K = 1: U [T+1, d, r] and V [T+1, n, r]."""
    path_U, path_V = [U], [V]
    for _ in range(rounds):
        g_U, g_V = problem.gradients(U[None], V[None])
        U, V = U - eta * g_U[0], V - eta * g_V[0]
        path_U.append(U)
        path_V.append(V)
    return torch.stack(path_U), torch.stack(path_V)


def lipschitz(problem: Problem, rank: int, rounds: int) -> float:
    """L for Theorem 1: `MARGIN` times the curvature on a pilot run's path, raised until a run's path stays under it.

    A pilot with a longer step may go further than the final run, so L can be more than `MARGIN` times what that sees.

    The path is eqs. (8) and (9) written out with K = 1, which is much quicker than the method and the same to rounding.
    """
    start = start_of(PflMfAlgorithm1(rank=rank), problem)
    L = MARGIN * curvature(problem, start[0][None], start[1][None])
    for _ in range(5):
        U, V = descent(problem, *start, 1 / (4 * L), rounds)
        seen = MARGIN * visited(problem, U, V)
        if seen <= L:
            break
        L = seen
    return L
