"""Weight decay that acts on what factors make, not on the factors."""

from __future__ import annotations

from torch import Tensor

from fedspan.layers import part, structured
from fedspan.learn.batches import Batch
from fedspan.learn.sgd import Loss
from fedspan.learn.task import Task
from fedspan.linalg import lowrank
from fedspan.tree import Params


def product_decay(task: Task, loss: Loss, product: float, rest: float, every: int = 1) -> Loss:
    """A loss with `product`/2 ‖U Vᵀ‖² for the factors of structured layers, and `rest`/2 ‖p‖² for other parameters.

    The first is taken in every `every`-th step, so many times as strong.
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
