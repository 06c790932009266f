"""A client's steps with a momentum that may go on from round to round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from fedspan import tree
from fedspan.errors import ConfigError
from fedspan.learn.batches import Batches
from fedspan.learn.optimizer import Optimizer
from fedspan.learn.sgd import NO_PROX, Loss, Prox, sgd_from
from fedspan.learn.task import Task
from fedspan.tree import Params, Tree


@dataclass(frozen=True, kw_only=True)
class LocalSteps:
    """Whether a client's momentum starts anew in every round."""

    KEYS: ClassVar[Mapping[str, str]] = {"keep_momentum": "keep_momentum"}

    keep_momentum: bool = False
    """Whether a client's momentum goes on from round to round, as in the public code, instead of starting anew."""

    def check(self, who: str, optimizer: Optimizer, gauge: bool = False) -> None:
        """Check that there is a momentum to keep, and that it stays in one gauge.

        Raises:
            ConfigError: if not.
        """
        if self.keep_momentum and not optimizer.momentum:
            raise ConfigError(f"{who}: keep_momentum needs momentum > 0 (and sgd). Got momentum {optimizer.momentum}.")
        if self.keep_momentum and gauge:
            raise ConfigError(
                f"{who}: gauge must be false with keep_momentum, whose velocity belongs to one gauge. Got both."
            )

    def begin(self, task: Task) -> Tree:
        """What a client keeps besides its parameters before its first round."""
        return {"velocity": tree.zeros_like(tree.select(task.init(), task.names))} if self.keep_momentum else {}

    def fit(
        self,
        optimizer: Optimizer,
        loss: Loss,
        params: Params,
        client: Tree,
        stream: Batches,
        lr: float,
        prox: Prox = NO_PROX,
    ) -> tuple[Params, Tree]:
        """Train `params`: what they become, and what the client keeps besides."""
        if not self.keep_momentum:
            return optimizer.fit(loss, params, stream, lr, prox), {}
        momentum, decay = optimizer.momentum, optimizer.weight_decay
        start: tuple[Params, Params] = (params, client["velocity"])

        def train(rate: float) -> tuple[Params, Params]:
            clip = optimizer.clip
            return sgd_from(loss, *start, stream, rate, momentum=momentum, weight_decay=decay, clip=clip, prox=prox)

        params, velocity = optimizer.guarded(train, start, lambda both, batch: loss(both[0], batch), stream, lr)
        return params, {"velocity": velocity}
