"""Algorithm 1 with noisy gradients, many seeds at once: Corollary 2 in the stochastic setting."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedspan.methods.pfl_mf import PflMfAlgorithm1
from fedspan.randomness import generator
from fedspan.studies.theory.convergence.curvature import descent
from fedspan.studies.theory.outcome import slope
from fedspan.studies.theory.plain_rounds import start_of
from fedspan.studies.theory.problem import Problem


@dataclass(frozen=True)
class Noisy:
    """For several T, each with its own step η = 1/(2L√T): the mean over seeds of the average, and the bound."""

    T: list[int]
    average: list[float]
    bound: list[float]
    L: float
    sigma: float
    seeds: int
    solved: bool

    @property
    def slack(self) -> float:
        """How many times the average fits into the bound, at the worst T."""
        return min(b / a for a, b in zip(self.average, self.bound))

    @property
    def slope(self) -> float:
        """The log-log slope over the larger half of the T."""
        half = len(self.T) // 2
        return slope(self.T[half:], self.average[half:])


def noisy(
    problem: Problem, L: float, rank: int, longest: int, seeds: int, *, sigma: float = 3.0, solved: bool = False
) -> Noisy:
    """Gaussian noise of total variance σ² on ∇_U ψ and on ∇_V ψ (Assumption 2), K = 1, all clients.

    These are eqs. (8) and (9) written out, since the method's own gradients have no noise to switch on; the noise-free
    recursion is the method's to rounding (`squared_gradients` measures that). From the usual start the average is
    mostly the way to a solution; with `solved` a run starts at one, so that noise is all there is.
    """
    U, V = start_of(PflMfAlgorithm1(rank=rank), problem)
    if solved:
        path = descent(problem, U, V, 1 / (2 * L), 4000)
        U, V = path[0][-1, 0], path[1][-1, 0]
    Ts = [4**k for k in range(2, 20) if 4**k <= longest] or [longest]
    Ts = sorted({*Ts, *(2 * t for t in Ts if 2 * t <= longest)})
    pairs = [_average(problem, U, V, T, L, seeds, sigma) for T in Ts]
    average, bound = [a for a, _ in pairs], [b for _, b in pairs]
    return Noisy(Ts, average, bound, L, sigma, seeds, solved)


def _average(problem: Problem, U: Tensor, V: Tensor, T: int, L: float, seeds: int, sigma: float) -> tuple[float, float]:
    """The mean over seeds of (1/T) Σ_t ‖∇_U ψ‖² + ‖∇_V ψ‖², and the right side of Theorem 1 for η = 1/(2L√T)."""
    eta, first = 1 / (2 * L * T**0.5), float(problem.psi(U, V))
    U, V = U.expand(seeds, *U.shape), V.expand(seeds, *V.shape)
    rng = generator(0, "noise", T)
    scale_U, scale_V = sigma / U[0].numel() ** 0.5, sigma / V[0].numel() ** 0.5
    total, lowest = torch.zeros(seeds, dtype=U.dtype), first
    for _ in range(T):
        g_U, g_V = problem.gradients(U, V)
        total += g_U.square().sum((1, 2)) + g_V.square().sum((1, 2))
        noise_U, noise_V = (torch.from_numpy(rng.normal(size=tuple(g.shape))) for g in (g_U, g_V))
        U, V = U - eta * (g_U + scale_U * noise_U), V - eta * (g_V + scale_V * noise_V)  # eqs. (9) and (8)
    lowest = min(lowest, float(problem.losses(U, V).min()))
    bound = 2 * (first - lowest) / (eta * T * (1 - 2 * eta * L)) + 2 * eta * L * sigma**2 / (1 - 2 * eta * L)
    return float(total.mean() / T), bound
