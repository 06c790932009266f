"""FedLoRU's Proposition 3.1 and Theorem 3.2 on their own model: a few large eigenvalues, and noise by sample size.

H = diag(θ_1, …, θ_k, 0, …) + s X with X symmetric, its entries Gaussian and its spectrum the semicircle on [−2, 2], so
that R_μ(t) = t and eq. (4) puts the outlier of θ at θ + s²/θ. s falls with the number of samples: the server's is the
smaller. The theorem says that the client's stable rank is larger by an amount that converges as R grows. The order is
right, though the printed proof ends with the opposite sign ("each term is negative"); the amount grows like R, since
the R − k eigenvalues of the bulk have squares of mean s²: ‖H‖_F² = Σ θ² + s² R up to lower order.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedspan.randomness import generator
from fedspan.report.canvas import panels
from fedspan.studies.theory.outcome import BLUE, GREY, RED, Outcome

if TYPE_CHECKING:
    from matplotlib.figure import Figure

THETA = (4.0, 3.0, 2.0, -3.0)
"""Eigenvalues of the true Hessian that are not zero."""
SCALES = {"many samples": 0.2, "few samples": 0.8}
"""s(N) and s(M)."""
SIZES = (200, 400, 800)
"""R, the number of parameters."""


def outlier(theta: float, s: float) -> float:
    """Return g⁻¹(θ) = θ + s R_μ(s/θ) = θ + s²/θ, eq. (4), or the edge ±2s of the bulk where |θ| <= s."""
    return theta + s * s / theta if abs(theta) > s else float(np.sign(theta)) * 2 * s


def growth(s: float) -> float:
    """Return the stable rank per parameter for R → ∞: s² over the square of the largest outlier."""
    return s * s / max(abs(outlier(theta, s)) for theta in THETA) ** 2


def noise(R: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Draw X of the Gaussian orthogonal ensemble, scaled so that its spectrum tends to the semicircle on [−2, 2]."""
    G = rng.normal(size=(R, R))
    made: NDArray[np.float64] = (G + G.T) / np.sqrt(2 * R)
    return made


@dataclass(frozen=True)
class Spiked:
    """One draw: the outliers in the order of `THETA`, and the stable rank."""

    R: int
    s: float
    seed: int
    outliers: list[float]
    stable_rank: float


def look(R: int, s: float, seed: int, part: str) -> Spiked:
    """Draw one H and take its spectrum; server and client have noise of their own, as in eq. (1)."""
    H = s * noise(R, generator(seed, "spiked-hessian", part, R))
    k = len(THETA)
    H[range(k), range(k)] += THETA
    values = np.linalg.eigvalsh(H)
    above, below = sorted((t for t in THETA if t > 0), reverse=True), sorted(t for t in THETA if t < 0)
    at = {t: float(values[-1 - j]) for j, t in enumerate(above)} | {t: float(values[j]) for j, t in enumerate(below)}
    return Spiked(R, s, seed, [at[t] for t in THETA], float(np.square(values).sum() / np.abs(values).max() ** 2))


def run(sizes: Sequence[int] = SIZES, seeds: Sequence[int] = tuple(range(200, 210))) -> Outcome:
    """Outliers against eq. (4), and the difference of stable ranks, at several R."""
    began = time.perf_counter()
    found = {(R, part): [look(R, s, seed, part) for seed in seeds] for R in sizes for part, s in SCALES.items()}
    rows = []
    for (R, part), draws in found.items():
        s = SCALES[part]
        seen = np.mean([d.outliers for d in draws], 0)
        cells = [f"{a:.3f} ({outlier(t, s):.3f})" for t, a in zip(THETA, seen)]
        ranks = [d.stable_rank for d in draws]
        rows.append([str(R), f"{part}, s = {s:g}", *cells, f"{np.mean(ranks):.2f}", ""])
        if part == list(SCALES)[-1]:
            gap = differences(found, R)
            rows[-1][-1] = f"{gap.mean():.2f} ± {gap.std(ddof=1) if len(gap) > 1 else 0:.2f}"
    titles = ["R", "Hessian", *(f"outlier of {t:g} (eq. (4))" for t in THETA), "stable rank", "difference"]
    gaps = {R: differences(found, R) for R in sizes}
    error = max(
        abs(float(np.mean([d.outliers[j] for d in found[sizes[-1], part]])) - outlier(t, s))
        for part, s in SCALES.items()
        for j, t in enumerate(THETA)
    )
    wanted = growth(SCALES["few samples"]) - growth(SCALES["many samples"])
    line = float(np.polyfit(list(sizes), [g.mean() for g in gaps.values()], 1)[0]) if len(sizes) > 1 else float("nan")
    seconds = time.perf_counter() - began
    says = (
        f"At R = {sizes[-1]} the outliers lie within {error:.3f} of eq. (4) (means of {len(seeds)} seeds). The Hessian"
        f" of few samples has the larger stable rank in {sum(int((g > 0).sum()) for g in gaps.values())} of"
        f" {len(sizes) * len(seeds)} draws, as Theorem 3.2 says and its printed proof does not; the difference is"
        f" {', '.join(f'{g.mean():.1f}' for g in gaps.values())} at R = {', '.join(map(str, sizes))}. It does not"
        f" converge: it grows by {line:.4f} per parameter, where the bulk's s² R / outlier² gives {wanted:.4f}."
    )
    numbers: dict[str, Any] = {
        "theta": list(THETA), "scales": SCALES, "sizes": list(sizes), "seeds": list(seeds),
        "predicted_outliers": {part: [outlier(t, s) for t in THETA] for part, s in SCALES.items()},
        "outliers": {f"{R}, {part}": [d.outliers for d in draws] for (R, part), draws in found.items()},
        "stable_rank": {f"{R}, {part}": [d.stable_rank for d in draws] for (R, part), draws in found.items()},
        "difference": {str(R): g.tolist() for R, g in gaps.items()},
        "growth": line, "predicted_growth": wanted, "seconds": round(seconds, 1),
    }  # fmt: skip
    return Outcome(titles, rows, says, numbers, partial(draw, sizes, gaps, wanted))


def differences(found: dict[tuple[int, str], list[Spiked]], R: int) -> NDArray[np.float64]:
    """Return srank(H_M) − srank(H_N) for every seed."""
    few, many = (np.array([d.stable_rank for d in found[R, part]]) for part in ("few samples", "many samples"))
    gap: NDArray[np.float64] = few - many
    return gap


def draw(sizes: Sequence[int], gaps: dict[int, NDArray[np.float64]], wanted: float) -> Figure:
    """The spectrum of one draw with the outliers of eq. (4), and the difference of stable ranks against R."""
    titles = [(f"eigenvalues at R = {sizes[-1]}, few samples", "value"), ("difference of stable ranks", "R")]
    figure, (left, right) = panels(8.4, 3.1, titles)
    s = SCALES["few samples"]
    H = s * noise(sizes[-1], generator(200, "spiked-hessian", "few samples", sizes[-1]))
    H[range(len(THETA)), range(len(THETA))] += THETA
    left.hist(np.linalg.eigvalsh(H), bins=80, color=GREY)
    for t in THETA:
        left.axvline(outlier(t, s), color=RED, linewidth=1.2, linestyle=(0, (2, 2)))
    right.plot(sizes, [gaps[R].mean() for R in sizes], color=BLUE, marker="o", markersize=4, label="seen")
    first = gaps[sizes[0]].mean() - wanted * sizes[0]
    right.plot(sizes, [first + wanted * R for R in sizes], color=GREY, linestyle="--", label="slope of the bulk")
    right.legend(frameon=False, fontsize=8)
    right.set_ylim(bottom=0)
    return figure
