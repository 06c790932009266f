"""Figure 1: points in the plane, and the ways to make their models agree; with the landscape behind pFL-MF's answer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fedspan.methods.pfl_mf import PflMfAlgorithm1
from fedspan.randomness import generator
from fedspan.report.canvas import panels
from fedspan.report.palette import PAPER
from fedspan.studies.theory.outcome import BLUE, GOLD, GREEN, GREY, RED, Outcome
from fedspan.studies.theory.plain_rounds import trajectory
from fedspan.studies.theory.problem import quadratic

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def points() -> Tensor:
    """The a_i as columns [2, 8]: two bunches on opposite sides of the origin, so that their mean says little."""
    rng = generator(0, "figure-1")
    sign = np.array([1, 1, 1, 1, -1, -1, -1, -1])
    A = np.stack([1.5 * sign + 0.5 * rng.normal(size=8), 0.8 * sign + 0.5 * rng.normal(size=8)])
    return torch.from_numpy(A)


def eckart_young(A: Tensor, r: int) -> float:
    """Σ_{j>r} σ_j(A)²/(2n): the least of (1/n) Σ ½‖θ_i − a_i‖² over models of rank r."""
    return float(torch.linalg.svdvals(A)[r:].square().sum() / (2 * A.shape[1]))


def within(A: Tensor, delta: float, sweeps: int = 500) -> Tensor:
    """The closest points to the columns of A with ‖θ_i − θ_j‖ <= δ for all pairs: green in Figure 1.

    Dykstra's alternating projections, which find the projection onto an intersection of convex sets.
    """
    theta, n = A.clone(), A.shape[1]
    pairs = [(i, j) for i in range(n) for j in range(i)]
    kept = {pair: torch.zeros(2, A.shape[0], dtype=A.dtype) for pair in pairs}
    for _ in range(sweeps):
        for i, j in pairs:
            a, b = theta[:, i] + kept[i, j][0], theta[:, j] + kept[i, j][1]
            shift = (a - b) * max(0.0, 1 - delta / max(float((a - b).norm()), 1e-300)) / 2
            theta[:, i], theta[:, j] = a - shift, b + shift
            kept[i, j] = torch.stack([shift, -shift])
    return theta


@dataclass(frozen=True)
class Path:
    """One run of Algorithm 1 from one start: the angle of span U in degrees, and the loss, per round."""

    angle: list[float]
    loss: list[float]
    theta: Tensor  # [d, n] at the end


def descend(A: Tensor, U: Tensor, V: Tensor, rounds: int, lr: float = 0.3) -> Path:
    """Algorithm 1 to the letter (K = 1, one η, 1/n in the v-step) on f_i(θ) = ½‖θ − a_i‖², all clients."""
    problem = quadratic(A)
    method = PflMfAlgorithm1(rank=U.shape[1], lr=lr)
    path_U, path_V = trajectory(method, problem, rounds, start=(U, V))
    angle = torch.rad2deg(torch.atan2(path_U[:, 1, 0], path_U[:, 0, 0])) % 180
    return Path(angle.tolist(), problem.losses(path_U, path_V).tolist(), path_U[-1] @ path_V[-1].T)


def start_at(A: Tensor, degrees: float, scale: float = 0.4) -> tuple[Tensor, Tensor]:
    """U along an angle, and the v of each client a fraction `scale` of its best one for that U."""
    U = torch.tensor([[math.cos(math.radians(degrees))], [math.sin(math.radians(degrees))]], dtype=A.dtype)
    return U, scale * (A.T @ U)


def run(rounds: int = 300, sweeps: int = 500) -> Outcome:
    """The solutions of Figure 1, and where Algorithm 1 of rank 1 ends from several starts."""
    A = points()
    n, delta = A.shape[1], 1.5
    left, sigma, _ = torch.linalg.svd(A)
    kinds = {"global minimum": eckart_young(A, 1), "saddle": float(sigma[0] ** 2 / (2 * n)), "zero": _loss(A, 0 * A)}
    bad = math.degrees(math.atan2(float(left[1, 1]), float(left[0, 1])))
    starts = {f"{a:g}° from the saddle": start_at(A, bad + a) for a in (2, -2, 25, -25, 60)}
    starts["at the saddle"] = (left[:, 1:].clone(), A.T @ left[:, 1:])
    starts["at zero"] = (torch.zeros(2, 1, dtype=A.dtype), torch.zeros(n, 1, dtype=A.dtype))
    paths = {name: descend(A, U, V, rounds) for name, (U, V) in starts.items()}
    mean, green = A.mean(1, keepdim=True), within(A, delta, sweeps)
    ends = {name: _kind(p.loss[-1], kinds) for name, p in paths.items()}
    stayed = sum(abs(x - kinds["saddle"]) <= 1e-6 for x in paths["at the saddle"].loss) - 1
    rows = [
        ["one model each, θ_i = a_i", "", f"{_loss(A, A):.6f}", ""],
        ["FedAvg, the mean", "", f"{_loss(A, mean):.6f}", ""],
    ]
    rows.append([f"‖θ_i − θ_j‖ <= {delta:g}", "", f"{_loss(A, green):.6f}", ""])
    formula = {"global minimum": "σ₂²/2n", "saddle": "σ₁²/2n", "zero": "(σ₁² + σ₂²)/2n"}
    rows += [[f"stationary point: {name}", "", f"{value:.6f}", formula[name]] for name, value in kinds.items()]
    rows += [["Algorithm 1, r = 1", name, f"{p.loss[-1]:.6f}", ends[name]] for name, p in paths.items()]
    reached = sum(k == "global minimum" for k in ends.values())
    says = (
        f"Models on one line through the origin (r = 1) lose {kinds['global minimum']:.4f} = σ₂²/2n, where one model"
        f" for all loses {_loss(A, mean):.4f} and models within {delta:g} of each other {_loss(A, green):.4f}."
        f" Algorithm 1 ends at the global minimum from {reached} of {len(paths)} starts; put exactly on the saddle it"
        f" stays for {stayed} of {rounds} rounds and ends at: {ends['at the saddle']}; at zero it ends at:"
        f" {ends['at zero']}."
    )
    first = next(iter(paths.values()))
    numbers: dict[str, Any] = {
        "a": A.T.tolist(), "singular_values": sigma.tolist(), "stationary": kinds, "fedavg": _loss(A, mean),
        "delta": delta, "within_delta": _loss(A, green), "rounds": rounds, "ends": ends, "rounds_on_saddle": stayed,
        "algorithm_1": {name: p.loss[-1] for name, p in paths.items()},
        "gap_to_eckart_young": abs(first.loss[-1] - kinds["global minimum"]),
    }  # fmt: skip
    made = partial(draw, A, mean, green, first.theta, paths, kinds, bad + 90)
    return Outcome(["models", "start", "loss", "which is"], rows, says, numbers, made)


def _kind(loss: float, kinds: dict[str, float]) -> str:
    """Which stationary value a loss has reached to 1e-6, if any."""
    return next((name for name, value in kinds.items() if abs(value - loss) <= 1e-6), "not there yet")


def _loss(A: Tensor, theta: Tensor) -> float:
    return float((A - theta).square().sum() / (2 * A.shape[1]))


def draw(
    A: Tensor, mean: Tensor, green: Tensor, blue: Tensor, paths: dict[str, Path], kinds: dict[str, float], best: float
) -> Figure:
    """Left the solutions in the plane as in the paper; right the loss along the angle of the line, with the paths."""
    titles = [
        ("θ₂ over θ₁: four ways to agree", ""),
        ("loss; grey: v solved for each line", "degrees from the best line"),
    ]
    figure, (plane, land) = panels(9.0, 4.0, titles)
    for i in range(A.shape[1]):
        plane.plot([A[0, i], blue[0, i]], [A[1, i], blue[1, i]], color="#c9ced6", linewidth=0.8, zorder=1)
    plane.axline((0.0, 0.0), (float(blue[0, 0]), float(blue[1, 0])), color=BLUE, linewidth=0.8, alpha=0.5)
    kinds_of_points = [(A, RED, "a_i, one model each", 26), (green, GREEN, "within δ of each other", 20)]
    kinds_of_points += [(blue, BLUE, "rank 1", 26), (mean, GOLD, "FedAvg", 70)]
    for where, colour, label, size in kinds_of_points:
        plane.scatter(where[0], where[1], color=colour, s=size, label=label, zorder=2)
    plane.set_aspect("equal", adjustable="datalim")
    angle, a = np.linspace(-90, 90, 361), A.numpy()
    u = np.stack([np.cos(np.radians(angle + best)), np.sin(np.radians(angle + best))])
    land.plot(angle, (np.square(a).sum() - np.square(u.T @ a).sum(1)) / (2 * a.shape[1]), color=GREY, linewidth=1.6)
    for name, path in paths.items():
        if name == "at zero":  # there the line has no angle
            continue
        turned = (np.array(path.angle) - best + 90) % 180 - 90
        shown = np.where(np.abs(np.diff(turned, prepend=turned[0])) > 90, np.nan, turned)  # not across the seam
        land.plot(shown, path.loss, color=BLUE, linewidth=1.0, alpha=0.8)
        land.scatter(turned[:1], path.loss[:1], color=PAPER, edgecolor=BLUE, s=18, zorder=3)
    land.scatter([0], [kinds["global minimum"]], color=GREEN, s=50, zorder=4, label="global minimum")
    land.scatter([-90, 90], [kinds["saddle"]] * 2, color=RED, s=50, marker="X", zorder=4, label="saddle")
    land.axhline(kinds["zero"], color=GREY, linewidth=0.8, linestyle=(0, (2, 2)), label="U = 0, V = 0: a saddle too")
    for axes in (plane, land):
        axes.legend(frameon=False, fontsize=7.5, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)
    return figure
