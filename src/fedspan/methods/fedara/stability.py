"""How large steps of FedARA's alignment are: the curvature of λ_t L_FAC, measured on examples of a client.

With c the factor of the squared distance (1/D, 1, or 1 over the mean squared norm of the features) and J_i the
derivative of F(ω; x_i) by ω, the Gauss–Newton curvature of c/n Σ_i ‖F(ω; x_i) − a_{y_i}‖² is 2c · 1/n Σ_i J_iᵀ J_i.
Steps of size η on λ_t times that term alone grow along its leading direction once η λ_t 2c λ_max(1/n Σ_i J_iᵀ J_i) is
beyond 2.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from fedspan import tree
from fedspan.learn.task import Task
from fedspan.method.capabilities import OVERSHOOT, MeasuredStep
from fedspan.methods.fedara.objective import Alignment
from fedspan.tree import Inputs, Params

_ITERATIONS = 8
_GAIN = 1.01  # an iteration that finds no more than that is the last
_STEP = 1e-3  # of the norm of ω; it only chooses the next direction, whose quotient is exact


class Movement(NamedTuple):
    """How features answer to the extractor's parameters, and how large they are."""

    curvature: float
    """λ_max(1/n Σ_i J_iᵀ J_i), from below."""
    square: Tensor
    """The mean squared norm of the features."""
    features: int
    """D."""


def movement(task: Task, params: Params, x: Inputs) -> Movement:
    """λ_max(1/n Σ_i J_iᵀ J_i) over all parameters of the extractor, from below, in evaluation mode.

    Power iteration from the features themselves. For a direction u of all features together ‖Jᵀu‖²/‖u‖² never exceeds
    the eigenvalue, and one backward pass gives it exactly; where to look next, J Jᵀu, is a difference of two forward
    passes, so that a model only has to do what training asks of it.
    """
    start = {k: params[k].detach().requires_grad_() for k in task.body}
    rest = tree.without(params, task.body)
    with torch.enable_grad():
        R = task.features(rest | start, x)
    u, found, size = R.detach(), 0.0, float(tree.squared_norm(tree.detach(start))) ** 0.5
    square = u.square().sum() / len(u)
    for _ in range(_ITERATIONS):
        length = float(u.square().sum())
        if not length > 0:
            break
        g = torch.autograd.grad(R, list(start.values()), u, retain_graph=True, allow_unused=True)
        pulled = {k: torch.zeros_like(p) if d is None else d for (k, p), d in zip(start.items(), g)}
        energy = float(tree.squared_norm(pulled))
        before, found = found, max(found, energy / length / len(u))
        if not found > _GAIN * before:
            break
        with torch.no_grad():
            ahead = {k: p + _STEP * size / energy**0.5 * pulled[k] for k, p in start.items()}
            u = task.features(rest | ahead, x) - R
    return Movement(found, square, R.shape[1])


def alignment_step(
    near: Alignment, task: Task, params: Params, x: Inputs, pull: float, most: float
) -> MeasuredStep | None:
    """η_t λ_t times the curvature of L_FAC on some examples of a client, under the extractor it receives.

    It covers all parameters of the extractor, factors as factors, and is a lower bound for these weights and these
    examples, as far as features are linear in ω within a step: beyond 2 the term by itself overshoots. It does not
    cover what local training makes of the weights, the curvature of the cross-entropy, which comes on top, nor
    minibatches of fewer examples, which are mostly steeper: training may be unstable below 2. A model that keeps
    running statistics is not measured, as it is trained with those of its minibatches.

    Args:
        pull: η_t λ_t, what momentum allows taken off.
        most: η λ, which it rises to: another reduction is only advised where that is stable with it, too.
    """
    if task.stats:
        return None
    moved = movement(task, params, x)
    value, relative = (
        size * 2 * float(how.factor(moved.features, moved.square)) * moved.curvature
        for how, size in ((near, pull), (replace(near, fac_reduction="relative"), max(pull, most)))
    )
    helps = ', or set fac_reduction = "relative"' if relative < OVERSHOOT else ""
    return MeasuredStep("lr·lam·curvature", value, f"lower lr or lam{helps}")
