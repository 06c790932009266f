"""Weight decay that acts on what factors make, not on the factors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torch import Tensor

from fedspan.layers import part, structured
from fedspan.learn.batches import Batch
from fedspan.learn.optimizer import Optimizer
from fedspan.learn.sgd import Loss
from fedspan.learn.task import Task
from fedspan.linalg import lowrank
from fedspan.tree import Params


def product_decay(task: Task, loss: Loss, product: float, rest: float, every: int = 1) -> Loss:
    """A loss with `product`/2 ‖U Vᵀ‖² for the factors of structured layers, and `rest`/2 ‖p‖² for other parameters.

    ‖U Vᵀ‖² takes r²(m + n) products, more than the layer itself for a minibatch smaller than the rank. With `every` = k
    it is taken in every k-th step, k times as strong: the same decay to first order in the learning rate.
    """
    layers = structured(task.module)
    pairs = [(part(k, "U"), part(k, "V")) for k in layers] if product else []
    factors = {part(k, f) for k in layers for f in "UV"}
    others = [k for k in task.names if k not in factors] if rest else []

    def decayed(p: Params, batch: Batch) -> Tensor:
        far = rest / 2 * sum(p[k].square().sum() for k in others)
        if batch.step % every == 0:
            far = far + every * product / 2 * sum(lowrank.squared_product(p[u], p[v]) for u, v in pairs)
        return loss(p, batch) + far

    return decayed if pairs or others else loss


def fit_decayed(
    optimizer: Optimizer,
    task: Task,
    loss: Loss,
    params: Params,
    batches: Iterable[Batch],
    lr: float,
    decays: tuple[float, float],
    every: int = 1,
) -> Params:
    """Train with `product_decay` of these strengths in the place of the optimiser's weight decay; both 0: as it is."""
    if any(decays):
        loss, optimizer = product_decay(task, loss, *decays, every), replace(optimizer, weight_decay=0.0)
    return optimizer.fit(loss, params, batches, lr)
