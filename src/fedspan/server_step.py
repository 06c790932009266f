"""Adaptive steps on the server: the mean change of a round is taken as a gradient."""

from __future__ import annotations

from typing import Any, Literal

import torch

from fedspan import tree
from fedspan.tree import Tree


def moments(like: Tree) -> Tree:
    """The state of an adaptive step before the first: mean m and second moment s of the gradients, and their number."""
    return {"m": tree.zeros_like(like), "s": tree.zeros_like(like), "steps": torch.zeros(())}


def adaptive_step(
    x: Tree,
    g: Tree,
    state: Tree,
    lr: float,
    *,
    rule: Literal["adam", "adagrad"] = "adam",
    betas: tuple[float, float] = (0.9, 0.999),
    epsilon: float = 1e-8,
    corrected: bool = True,
) -> tuple[Tree, Tree]:
    """x − lr · m / (√s + ε) and the new state; `corrected` divides the moments by the weight they have gathered."""
    b1, b2 = betas
    steps = state["steps"] + 1
    m = tree.map(lambda a, b: b1 * a + (1 - b1) * b, state["m"], g)
    if rule == "adam":
        s = tree.map(lambda a, b: b2 * a + (1 - b2) * b * b, state["s"], g)
    else:
        s = tree.map(lambda a, b: a + b * b, state["s"], g)
    one = 1 - b1 ** float(steps) if corrected else 1.0
    two = 1 - b2 ** float(steps) if corrected and rule == "adam" else 1.0
    move: Any = tree.map(lambda a, b: (a / one) / ((b / two).sqrt() + epsilon), m, s)
    return tree.add(x, move, -lr), {"m": m, "s": s, "steps": steps}
