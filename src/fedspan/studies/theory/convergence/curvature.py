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


def descent(
    problem: Problem, U: Tensor, V: Tensor, eta: float, rounds: int, *, K: int = 1, p: float = 1.0,
    took: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Paths of eqs. (8) and (9) written out, without noise: U [T+1, P, d, r] and V [T+1, P, n, r].

    η_v = p η/K as in Theorem 1. `took` [T, P, n] says who takes part in each round of each path; if None there is one
    path with everybody. A round with nobody changes nothing.
    """
    n = len(V)
    took = torch.ones(rounds, 1, n, dtype=torch.bool) if took is None else took
    U, V = (w.expand(took.shape[1], *w.shape) for w in (U, V))
    path_U, path_V = [U], [V]
    for who in took:
        g = problem.client_gradients(U, V)  # ∇f_i(U v_i)
        trained, g_k = V, g
        for k in range(K):
            g_k = problem.client_gradients(U, trained) if k else g
            trained = trained - p * eta / K * g_k @ U / n  # eq. (8)
        count = who.sum(1).clamp_min(1)[:, None, None]
        U = U - eta * (g * who[..., None]).transpose(1, 2) @ V / count  # eq. (9)
        V = torch.where(who[..., None], trained, V)
        path_U.append(U)
        path_V.append(V)
    return torch.stack(path_U), torch.stack(path_V)


def lipschitz(problem: Problem, rank: int, rounds: int, seed: int = 0) -> float:
    """L for Theorem 1: `MARGIN` times the curvature on a pilot run's path, raised until a run's path stays under it.

    A pilot with a longer step may go further than the final run, so L can be more than `MARGIN` times what that sees.

    The path is eqs. (8) and (9) written out with K = 1, which is much quicker than the method and the same to rounding.
    """
    start = start_of(PflMfAlgorithm1(rank=rank), problem, seed)
    L = MARGIN * curvature(problem, start[0][None], start[1][None])
    for _ in range(5):
        U, V = descent(problem, *start, 1 / (4 * L), rounds)
        seen = MARGIN * visited(problem, U[:, 0], V[:, 0])
        if seen <= L:
            break
        L = seen
    return L
