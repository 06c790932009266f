"""How clients take their steps, and how learning rates fall over the rounds: values that a method holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, TypeVar

from annotated_types import Ge, Gt, Lt
from torch import Tensor

from fedspan.learn.batches import Batch, Batches
from fedspan.learn.safeguard import more_than_one, shortened, some
from fedspan.learn.sgd import NO_PROX, Loss, Prox, adamw, sgd
from fedspan.tree import Tree

P = TypeVar("P")


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """A client's optimiser: SGD with momentum and weight decay, or AdamW, on gradients as they are or clipped.

    It starts anew in every round.
    """

    KEYS: ClassVar[Mapping[str, str]] = {
        "optimizer": "rule",
        "momentum": "momentum",
        "weight_decay": "weight_decay",
        "clip_norm": "clip",
        "safeguard": "safeguard",
    }

    rule: Literal["sgd", "adamw"] = "sgd"
    """The clients' optimiser."""
    momentum: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Momentum of the clients' SGD."""
    weight_decay: Annotated[float, Ge(0)] = 0.0
    """Weight decay of the clients' optimiser, decoupled for AdamW."""
    clip: Annotated[float, Gt(0)] | None = None
    """The norm to which the gradient of a step, of all parameters together, is cut; none: as it is."""
    safeguard: bool = True
    """Whether local training that raised the loss of its own examples is taken again with shorter steps."""

    @property
    def plain(self) -> bool:
        """Whether a step is −lr·gradient and nothing else."""
        return self.rule == "sgd" and not self.momentum and not self.weight_decay and self.clip is None

    def pull(self, lr: float, strength: float) -> float:
        """lr·λ of a term λ/2 ‖x − a‖² in the loss, in units in which steps of that term grow from 2 on.

        Momentum β allows 1 + β times as much; AdamW's steps do not grow with λ.
        """
        return 0.0 if self.rule == "adamw" else lr * strength / (1 + self.momentum)

    def fit(
        self,
        loss: Loss,
        params: Tree,
        batches: Iterable[Batch],
        lr: float,
        prox: Prox = NO_PROX,
        measured: Loss | None = None,
    ) -> Tree:
        """Train `params` on a stream, one step per batch; `prox` is applied to single parameters after every step.

        Args:
            measured: what the safeguard measures, where the values of `loss` are not those of an objective.
        """
        stream = batches if isinstance(batches, Batches) else list(batches)
        train = lambda rate: self._train(loss, params, stream, rate, prox)
        return self.guarded(train, params, loss if measured is None else measured, stream, lr)

    def guarded(
        self,
        train: Callable[[float], P],
        start: P,
        loss: Callable[[P, Batch], Tensor],
        batches: Iterable[Batch],
        lr: float,
        alone: bool = False,
    ) -> P:
        """`train(lr)`, shortened by the safeguard if there is one: judged by `loss` on some of the first batch.

        `alone` says that no mean over clients follows, so that even a single step is judged.
        """
        few = some(batches) if self.safeguard and lr else None
        if few is None:
            return train(lr)
        return shortened(train, start, lambda at: loss(at, few), lr, alone or more_than_one(batches))

    def _train(self, loss: Loss, params: Tree, batches: Iterable[Batch], lr: float, prox: Prox) -> Tree:
        decay, clip = self.weight_decay, self.clip
        if self.rule == "adamw":
            return adamw(loss, params, batches, lr, weight_decay=decay, clip=clip, prox=prox)
        return sgd(loss, params, batches, lr, momentum=self.momentum, weight_decay=decay, clip=clip, prox=prox)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How the learning rate falls over the rounds: along a cosine, or not at all."""

    KEYS: ClassVar[Mapping[str, str]] = {"lr_min": "lr_min", "cycle": "cycle"}

    lr_min: Annotated[float, Ge(0)] = 0.001
    """The learning rate at the end of a cycle."""
    cycle: Annotated[int, Ge(1)] | None = None
    """Rounds in which the learning rate falls from `lr` to `lr_min` along a cosine, then starts anew; none: no fall."""

    def rate(self, lr: float, round: int) -> float:
        """The learning rate of a round."""
        if self.cycle is None:
            return lr
        done = (round - 1) % self.cycle / self.cycle
        return self.lr_min + (lr - self.lr_min) * (1 + math.cos(math.pi * done)) / 2


def cosine(cycle: int, lr_min: float = 0.001) -> Schedule:
    """A learning rate that falls along a cosine in `cycle` rounds, then starts anew."""
    return Schedule(cycle=cycle, lr_min=lr_min)
