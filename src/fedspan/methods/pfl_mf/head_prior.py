"""Heads under a Gaussian prior, θ = μ + √κ Bᵀz + √τ u δ: the most probable one, and B found from sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedspan import tree
from fedspan.errors import ConfigError
from fedspan.learn.batches import Batches
from fedspan.learn.task import Task
from fedspan.randomness import key, normal
from fedspan.tree import Params

SQUARINGS = 4
"""How often hᵀh is squared to bound its largest eigenvalue: at most rank^(1/32) too much, 1.2 for a rank of 500."""
DEAD = 1e-6
"""Eigenvalues below this part of the largest one are rounding, or as good as none."""
NEW = 1e-3
"""What must be left of a unit vector beside the directions so far to count as another one."""


class HeadShape(NamedTuple):
    """A linear head: rows of a matrix, its columns without the bias, and whether it has one."""

    rows: int
    columns: int
    bias: bool

    @property
    def size(self) -> int:
        """Numbers of a head."""
        return self.rows * (self.columns + self.bias)

    def matrix(self, flat: Tensor) -> Tensor:
        """Heads [..., d], as their parameters lie, as matrices [..., rows, columns + 1] with the bias last."""
        weight = flat[..., : self.rows * self.columns].reshape(*flat.shape[:-1], self.rows, self.columns)
        return torch.cat([weight, flat[..., self.rows * self.columns :, None]], -1) if self.bias else weight

    def flat(self, matrix: Tensor) -> Tensor:
        """The inverse of `matrix`."""
        weight = matrix[..., : self.columns].flatten(-2)
        return torch.cat([weight, matrix[..., self.columns]], -1) if self.bias else weight


def linear_head(who: str, task: Task) -> HeadShape:
    """The head of a task, which must be one linear layer under a loss whose curvature is bounded.

    Raises:
        ConfigError: if it is not.
    """
    start, names = task.init(), task.need_head()
    layer = task.module.get_submodule(task.head_layer or "")
    if not isinstance(layer, nn.Linear) or len(names) != len(list(layer.parameters())):
        got = f"a {type(layer).__name__} with {len(names)} trained parameters"
        raise ConfigError(f"{who}: the head must be one nn.Linear, all of it trained. Got {got}; use pfl-mf.")
    if task.curvature_bound() is None:
        kind = "a loss of one's own" if task.own_loss else f"task.kind '{task.kind}'"
        raise ConfigError(
            f"{who}: heads are fitted by steps that need a bounded curvature: classification, multi-label or"
            f" regression with the usual loss. Got {kind}; use pfl-mf."
        )
    weight = next(start[k] for k in names if k.endswith("weight"))
    return HeadShape(weight.shape[0], weight.shape[1], len(names) > 1)


# ------------------------------------------------------------------------------------------------ fitting heads


class HeadExamples(NamedTuple):
    """What a head sees of some examples: features with a 1 for the bias, labels, and 1 or 0 for an empty slot."""

    h: Tensor
    y: Tensor
    w: Tensor
    mask: Tensor | None

    @property
    def inverse_scale(self) -> Tensor:
        """u² = 1/mean‖h‖², with which τ is the prior variance of an output."""
        squares = (self.h.square().sum(1) * self.w).sum() / self.w.sum().clamp_min(1)
        return 1 / squares.clamp_min(torch.finfo(squares.dtype).tiny ** 0.5)

    def repeated(self, times: int) -> tuple[Tensor, Tensor | None]:
        """Labels and mask, as often as there are heads."""
        mask = None if self.mask is None else self.mask.repeat(times)
        return self.y.repeat(times, *[1] * (self.y.ndim - 1)), mask


def seen_by_head(task: Task, shape: HeadShape, params: Params, stream: Batches) -> HeadExamples:
    """The features of a stream's examples under the body of `params`, computed once."""
    batch = stream.whole()
    with torch.no_grad():
        h = task.features(params, batch.x)
    if h.ndim != 2:
        raise ConfigError(f"PflMfAdaptive: a head must see one vector per example. Got features of {h.ndim - 1} axes.")
    h = torch.cat([h, torch.ones_like(h[:, :1])], 1) if shape.bias else h
    return HeadExamples(h, batch.y, batch.w.to(h.dtype), batch.mask)


def fit_heads(
    task: Task,
    part: HeadExamples,
    mu: Tensor,
    B: Tensor,
    scale: Tensor,
    widths: Sequence[tuple[float, float]],
    steps: int,
    precision: Tensor | float = 1.0,
) -> Tensor:
    """arg min over (z, δ) of a Σ loss(θ) + ½‖z‖² + ½‖δ‖² for pairs (κ, τ) at once: [K, rows, columns].

    θ = μ + √κ Bᵀz + √(τ/a) u δ: the residual is as wide as √τ of the noise. FISTA with restarts from z = δ = 0. A step
    is 1/L with L = c·a·λ_max(hᵀh)(κ‖B‖² + τu²/a) + 1, where c bounds the curvature of one example's loss (½ for the
    softmax), so that there is no step size to set.

    Args:
        mu: the mean head as a matrix, and B [r, rows, columns] the directions, orthogonal to one another.
        scale: u².
        precision: a, −log-likelihoods per unit of loss; not 1 for squared errors alone.
    """
    h, bound = part.h, task.curvature_bound()
    assert bound is not None
    c, scale = bound * precision, scale / precision
    kappa, tau = (torch.tensor([pair[k] for pair in widths], dtype=h.dtype, device=h.device) for k in (0, 1))
    most = B.square().sum((1, 2)).amax() if len(B) else mu.new_zeros(())
    L = c * eigenvalue_bound(h * part.w[:, None]) * (kappa * most + tau * scale) + 1
    wide, free = kappa.sqrt()[:, None], (tau * scale).sqrt()[:, None, None]
    y, mask = part.repeated(len(widths))
    target = task.target(h @ mu.T, part.y) if task.responds else None

    def head(z: Tensor, delta: Tensor) -> Tensor:
        theta: Tensor = mu + torch.tensordot(wide * z, B, 1) + free * delta
        return theta

    def slope(theta: Tensor) -> Tensor:
        out = h @ theta.mT  # [K, n, rows]
        if target is not None:
            residual = out.softmax(-1) - target
        else:
            residual = task.output_gradient(out.flatten(0, 1), y, mask).reshape(out.shape)
        return (residual * (precision * part.w[:, None])).mT @ h

    with torch.no_grad():
        z = z_ahead = mu.new_zeros(len(widths), len(B))
        delta = d_ahead = mu.new_zeros(len(widths), *mu.shape)
        speed = torch.ones_like(kappa)
        for _ in range(steps):
            g = slope(head(z_ahead, d_ahead))
            by_z = wide * torch.tensordot(g, B, ([1, 2], [1, 2])) + z_ahead
            by_d = free * g + d_ahead
            z_new, d_new = z_ahead - by_z / L[:, None], d_ahead - by_d / L[:, None, None]
            uphill = (by_z * (z_new - z)).sum(1) + (by_d * (d_new - delta)).sum((1, 2)) > 0
            following = (1 + (1 + 4 * speed.square()).sqrt()) / 2
            carry = torch.where(uphill, torch.zeros_like(speed), (speed - 1) / following)
            z_ahead = z_new + carry[:, None] * (z_new - z)
            d_ahead = d_new + carry[:, None, None] * (d_new - delta)
            speed = torch.where(uphill, torch.ones_like(speed), following)
            z, delta = z_new, d_new
        return head(z, delta)


def losses_of(task: Task, part: HeadExamples, theta: Tensor) -> Tensor:
    """The sum of the examples' losses under each of several heads, [K]."""
    y, mask = part.repeated(len(theta))
    with torch.no_grad():
        out = part.h @ theta.mT
        each = task.example_loss(out.flatten(0, 1), y, mask).reshape(out.shape[:2])
    return (each * part.w).sum(1)


def eigenvalue_bound(h: Tensor) -> Tensor:
    """λ_max(hᵀh) or a little more, never less: ‖(hᵀh)^m‖_F^(1/m) with m = 16.

    Power steps would come from below, and a step that is too long by a per cent diverges where the curvature of a loss
    is what it is bounded by, as with squared errors.
    """
    M = h @ h.T if h.shape[0] < h.shape[1] else h.T @ h  # both have the same eigenvalues but zeros
    least = torch.finfo(h.dtype).tiny ** 0.5
    size: Tensor = M.norm().clamp_min(least)
    M, log = M / size, size.log()
    for k in range(1, SQUARINGS + 1):
        M = M @ M
        size = M.norm().clamp_min(least)
        M, log = M / size, log + size.log() / 2**k
    return log.exp()


# ------------------------------------------------------------------------------------------------ the directions


def first_directions(d: int, columns: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Random orthonormal columns, where the search for directions begins."""
    Q: Tensor = torch.linalg.qr(normal(key(seed, "directions"), (d, columns), torch.float64)).Q
    return Q.to(dtype)


def covariance_step(Q: Tensor, s: Tensor, m: Tensor, E: Tensor, memory: float) -> tuple[Tensor, Tensor]:
    """Update the heads' covariance Q diag(s²) Qᵀ by one step of subspace iteration with Nyström's estimate.

    Y = β Q diag(s²) + (1 − β)(E − m mᵀQ) is the covariance times Q, where E = Σ w e (Qᵀe)ᵀ and m = Σ w e; F Fᵀ with
    F = Y (QᵀY)^{−1/2} has its image and its values there. What is left of r + 1 columns is filled up from the old Q.
    """
    dtype, (Q, s, m, E) = Q.dtype, (t.double() for t in (Q, s, m, E))
    beta = memory if bool(s.any()) else 0.0
    Y = beta * Q * s.square() + (1 - beta) * (E - torch.outer(m, m @ Q))
    G = Q.T @ Y
    values, vectors = torch.linalg.eigh((G + G.T) / 2)
    alive = values > DEAD * values[-1]
    if not bool(alive.any()) or float(values[-1]) <= 0:  # one client, or all alike: nothing to see
        return Q.to(dtype), torch.zeros_like(s).to(dtype)
    F = Y @ (vectors[:, alive] / values[alive].sqrt())
    V, found, _ = torch.linalg.svd(F, full_matrices=False)
    return completed(V, Q).to(dtype), torch.nn.functional.pad(found, (0, len(s) - len(found))).to(dtype)


def completed(V: Tensor, Q: Tensor) -> Tensor:
    """The orthonormal columns of V, each with its largest entry positive, and as many of Q beside them as there were.

    Of Q's columns those are taken, in turn, of which something is left beside the others; there are always enough.
    """
    signs = V.gather(0, V.abs().argmax(0, keepdim=True)).sign()
    columns = list((V * signs).T)
    for q in Q.T:
        if len(columns) == Q.shape[1]:
            break
        so_far = torch.stack(columns)
        left = q - (so_far @ q) @ so_far
        if float(left.norm()) > NEW:
            left = left / left.norm()
            left = left - (so_far @ left) @ so_far  # once more, as little was left and rounding with it
            columns.append(left / left.norm())
    return torch.stack(columns, 1)


def loadings(Q: Tensor, s: Tensor) -> Tensor:
    """B [r, d]: directions with the smallest of r + 1 taken as noise, p_j = (s_j² − s_{r+1}²)^{1/2}, B_j = c √p_j V_jᵀ.

    c keeps ‖B‖² = Σ p_j². The root is needed: with p_j itself the strongest direction would feed itself.
    """
    p = (s[:-1].square() - s[-1].square()).clamp_min(0).sqrt()
    total = p.sum()
    c = (p.square().sum() / total.clamp_min(torch.finfo(p.dtype).tiny)).sqrt()
    return (c * p.sqrt())[:, None] * Q[:, :-1].T


def clear_directions(s: Tensor, least: float = 2.0) -> int:
    """How many deviations stand clear of the next one: where the largest ratio of neighbours is, if it is `least`."""
    live = s[s > NEW * s.max()].double()
    ratios = live[:-1] / live[1:]
    return int(ratios.argmax()) + 1 if len(ratios) and float(ratios.max()) >= least else 0


def as_head(task: Task, shape: HeadShape, theta: Tensor) -> Params:
    """A head [d] or [rows, columns] under the names of its parameters."""
    like = tree.select(task.init(), task.head)
    return tree.unravel(theta if theta.ndim == 1 else shape.flat(theta), like)
