"""Steps of the server: the mean change of a round is taken as a gradient, as FedAvgM and FedOpt do.

Hsu, Qi and Brown, 2019 (momentum); Reddi et al., ICLR 2021, Algorithm 2 (Adagrad, Adam, Yogi).
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from fedspan import tree
from fedspan.learn.sgd import is_statistic
from fedspan.tree import Tree

Rule: TypeAlias = Literal["none", "sgd", "adam", "adagrad", "yogi"]
"""What the server does with the mean of a round; `none` takes it as it is."""


def moments(rule: Rule, momentum: float, like: Tree, models: int | None = None) -> Tree:
    """The state of an optimiser before its first step: m = mean gradient, s = second moment, steps taken.

    With `models` the leaves of `like` are stacked over so many models, each of which counts its own steps.
    """
    if rule == "sgd":
        return {"m": tree.zeros_like(like)} if momentum else {}
    steps = torch.zeros(() if models is None else (models,))
    return {"m": tree.zeros_like(like), "s": tree.zeros_like(like), "steps": steps}


def step(
    rule: Rule,
    x: Tree,
    mean: Tree,
    state: Tree,
    lr: float,
    *,
    momentum: float = 0.9,
    beta2: float = 0.99,
    epsilon: float = 1e-3,
    corrected: bool = False,
    live: Tensor | None = None,
) -> tuple[Tree, Tree]:
    """The server's parameters and its optimiser's state after a round with this mean.

    Running statistics become means whatever the rule. `corrected` divides the moments of Adam by the weight they have
    gathered. `live` says which of stacked models were reported for; the others stay as they are, moments included.
    """
    g = tree.sub(x, mean)
    if rule == "sgd":
        m = tree.add(g, state["m"], momentum) if momentum else g  # v ← β v + Δ
        new, after = tree.add(x, m, -lr), {"m": m} if momentum else {}
    else:
        new, after = _adaptive(rule, x, g, state, lr, momentum, beta2, epsilon, corrected)
    if live is not None:
        new, after = _kept(live, (new, after), (x, state))
    return _with_statistics(new, mean), after


def _adaptive(
    rule: Rule, x: Tree, g: Tree, state: Tree, lr: float, beta1: float, beta2: float, epsilon: float, corrected: bool
) -> tuple[Tree, Tree]:
    steps = state["steps"] + 1
    m = tree.map(lambda a, b: beta1 * a + (1 - beta1) * b, state["m"], g)
    if rule == "adam":
        s = tree.map(lambda a, b: beta2 * a + (1 - beta2) * b * b, state["s"], g)
    elif rule == "yogi":
        s = tree.map(lambda a, b: a - (1 - beta2) * b * b * torch.sign(a - b * b), state["s"], g)
    else:
        s = tree.map(lambda a, b: a + b * b, state["s"], g)
    t = steps.to(torch.float64)
    one = 1 - beta1**t if corrected else torch.ones_like(t)
    two = 1 - beta2**t if corrected and rule == "adam" else torch.ones_like(t)

    def move(a: Tensor, b: Tensor) -> Tensor:
        p, q = (w.reshape(*w.shape, *[1] * (a.ndim - w.ndim)).to(a.dtype) for w in (one, two))
        return (a / p) / ((b / q).sqrt() + epsilon)

    moved: Any = tree.map(move, m, s)
    return tree.add(x, moved, -lr), {"m": m, "s": s, "steps": steps}


def _kept(live: Tensor, new: Any, old: Any) -> Any:
    return tree.map(lambda a, b: torch.where(live.reshape(-1, *[1] * (a.ndim - 1)), a, b), new, old)


def _with_statistics(new: Any, mean: Any, name: str = "") -> Any:
    """`new` with the running statistics of `mean`."""
    if isinstance(new, dict):
        return {k: _with_statistics(a, mean[k], k) for k, a in new.items()}
    return mean if is_statistic(name) else new
