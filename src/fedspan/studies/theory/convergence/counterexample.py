"""One client, one number: where Theorem 1 as printed is false, with the expectation over the sampling taken exactly.

f(θ) = ½ (θ − a)², θ = u v, u⁰ = 1, v⁰ = 0, full gradients (σ = 0), η = 1/(4L), η_v = p η, K = 1. On the way from the
start the Hessian of ψ has norm below 1.08, so L = 1.5 satisfies Assumption 1 there; F* = 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedspan.studies.theory.convergence.bounds import as_printed, sharpened

A, L = 0.05, 1.5
ETA = 1 / (4 * L)
GAP = A**2 / 2
"""F⁰ − F*."""
ENUMERATED = 20
"""Rounds of the proof's compact form whose 2ᵀ ways to take part are all followed."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Ratios:
    """Bound over expected average at one p: the least over all T, which is the limit for T → ∞."""

    p: float
    printed: float
    corrected: float
    sharpened: float
    first: int | None  # the first T at which the printed bound is broken
    compact: float  # the printed one at T = `ENUMERATED` in the proof's compact form
    curvature: float  # the largest norm of the Hessian of ψ on the path


def gradients(u: Floats, v: Floats) -> tuple[Floats, Floats]:
    """Return ∂ψ/∂u and ∂ψ/∂v of ψ = ½ (u v − a)²."""
    return (u * v - A) * v, (u * v - A) * u


def steps_taken(p: float) -> tuple[Floats, Floats]:
    """Return u and v after 0, 1, 2, … rounds with the client, until the gradient has fallen by 1e-14.

    The client alone is the federation: a round without it changes nothing.
    """
    u, v = np.array([1.0]), np.array([0.0])
    path = [(u, v)]
    while True:
        g_u, g_v = gradients(u, v)
        if abs(g_v[0]) <= 1e-14 * A:
            return np.concatenate([u for u, _ in path]), np.concatenate([v for _, v in path])
        u, v = u - ETA * g_u, v - p * ETA * g_v  # eqs. (9) and (8), η_v = p η
        path.append((u, v))


def expected_sums(p: float, weight_u: float, weight_v: float, T: int | None = None) -> float:
    """Return E Σ_{t<T} (weight_u ‖∂_u‖² + weight_v ‖∂_v‖²), exactly; T = None is the limit.

    After m rounds with the client the state is z_m, whatever the rounds between. Before T the expected number of rounds
    at z_m is P(Bin(T, p) > m)/p, in the limit 1/p.
    """
    g_u, g_v = gradients(*steps_taken(p))
    square = weight_u * g_u**2 + weight_v * g_v**2
    if T is None:
        return float(square.sum() / p)
    from scipy.stats import binom

    return float(square @ binom.sf(np.arange(len(square)), T, p) / p)


def compact(p: float, T: int = ENUMERATED) -> float:
    """Return E Σ_{t<T} ‖∇ψ‖² in the proof's compact form, where u moves every round: over all 2ᵀ ways to take part."""
    u, v, chance, total = np.array([1.0]), np.array([0.0]), np.array([1.0]), 0.0
    for _ in range(T):
        g_u, g_v = gradients(u, v)
        total += float(chance @ (g_u**2 + g_v**2))
        new = u - ETA * g_u
        u, v = np.concatenate([new, new]), np.concatenate([v - p * ETA * g_v, v])
        chance = np.concatenate([p * chance, (1 - p) * chance])
    return total


def first_broken(p: float) -> int | None:
    """Return the first T at which the expected average is above the printed bound, by halving; None if it never is.

    T times the bound is one number for all T, and the sum only grows.
    """
    bound = as_printed(GAP, ETA, L, 1)
    if expected_sums(p, 1, 1) <= bound:
        return None
    low, high = 0, 1
    while expected_sums(p, 1, 1, high) <= bound:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if expected_sums(p, 1, 1, middle) <= bound else (low, middle)
    return high


def curvature(p: float) -> float:
    """Return the largest spectral norm of the Hessian of ψ over the box that holds the path.

    All entries v², u² and |2uv − a| are at most their values at the box's corners, and the largest row sum bounds it.
    """
    u, v = steps_taken(p)
    u_max, v_max = float(u.max()), float(v.max())
    beside = max(A, abs(2 * u_max * v_max - A))
    return max(v_max**2, u_max**2) + beside


def ratios(p: float) -> Ratios:
    """Return all readings at one p. With one client q = p."""
    bound, found = float(as_printed(GAP, ETA, L, 1)), expected_sums(p, p, p * p)
    return Ratios(
        p=p,
        printed=bound / expected_sums(p, 1, 1),
        corrected=bound / found,
        sharpened=float(sharpened(GAP, ETA, L, 1)) / found,
        first=first_broken(p),
        compact=bound / compact(p),
        curvature=curvature(p),
    )
