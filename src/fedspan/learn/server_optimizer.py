"""Steps of the server: the mean change of a round is taken as a gradient, as FedAvgM and FedOpt do.

Hsu, Qi and Brown, 2019 (momentum); Reddi et al., ICLR 2021, Algorithm 2 (Adagrad, Adam, Yogi).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import torch
from annotated_types import Ge, Gt, Lt
from torch import Tensor

from fedspan import tree
from fedspan.learn.sgd import is_statistic
from fedspan.tree import Tree

Rule: TypeAlias = Literal["none", "sgd", "adam", "adagrad", "yogi"]
"""What the server does with the mean of a round; `none` takes it as it is."""


@dataclass(frozen=True, kw_only=True)
class ServerOptimizer:
    """A server's optimiser: it takes the mean change of a round as a gradient, or (`none`) the mean as it is.

    `sgd` with momentum is FedAvgM; `adagrad`, `adam` and `yogi` are those of FedOpt, with β₁ = momentum.
    """

    KEYS: ClassVar[Mapping[str, str]] = {
        "server_optimizer": "rule",
        "server_lr": "lr",
        "server_momentum": "momentum",
        "server_beta2": "beta2",
        "server_epsilon": "epsilon",
        "server_corrected": "corrected",
    }

    rule: Rule = "none"
    """The server's optimiser; `none` takes the mean of the uploads as it is."""
    lr: Annotated[float, Gt(0)] | None = None
    """The server's learning rate; 1 for `sgd` and 0.01 for the adaptive rules if not given."""
    momentum: Annotated[float, Ge(0), Lt(1)] | None = None
    """The server's momentum, β₁ of the adaptive rules; 0.9 if not given, unless the method says otherwise."""
    beta2: Annotated[float, Ge(0), Lt(1)] = 0.99
    """β₂ of the server's second moments."""
    epsilon: Annotated[float, Gt(0)] = 1e-3
    """ε under the server's adaptive steps: the larger, the more alike they are."""
    corrected: bool = False
    """Whether the server's moments are divided by the weight they have gathered, as Adam does."""
    sgd_momentum: Annotated[float, Ge(0), Lt(1)] = 0.9
    """The momentum of `sgd` where none is given; a method's own constant, not a key."""

    @property
    def inertia(self) -> float:
        """β of momentum, β₁ of the adaptive rules."""
        if self.momentum is not None:
            return self.momentum
        return self.sgd_momentum if self.rule == "sgd" else 0.9

    @property
    def rate(self) -> float:
        """The learning rate in force."""
        if self.lr is not None:
            return self.lr
        return 1.0 if self.rule == "sgd" else 0.01

    def begin(self, parts: Tree, models: int | None = None) -> Tree:
        """The parts that the server averages, with the optimiser's state beside them; see `moments`."""
        if self.rule == "none":
            return parts
        return {**parts, "optimizer": moments(self.rule, self.inertia, parts, models)}

    def step(self, server: Tree, mean: Tree, live: Tensor | None = None) -> Tree:
        """The parts after a round: the means, or where the optimiser goes from `server` with them.

        `live`: which of stacked models were reported for.
        """
        if self.rule == "none":
            return mean
        new, state = step(
            self.rule,
            {k: server[k] for k in mean},
            mean,
            server["optimizer"],
            self.rate,
            momentum=self.inertia,
            beta2=self.beta2,
            epsilon=self.epsilon,
            corrected=self.corrected,
            live=live,
        )
        return {**new, "optimizer": state}


def momentum(lr: float = 1.0, beta: float = 0.9) -> ServerOptimizer:
    """FedAvgM: the server's SGD with momentum."""
    return ServerOptimizer(rule="sgd", lr=lr, momentum=beta)


def adam(lr: float = 0.01, *, beta1: float = 0.9, beta2: float = 0.99, epsilon: float = 1e-3) -> ServerOptimizer:
    """FedAdam."""
    return ServerOptimizer(rule="adam", lr=lr, momentum=beta1, beta2=beta2, epsilon=epsilon)


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
