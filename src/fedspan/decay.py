"""Weight decay that acts on what factors make, not on the factors."""

from __future__ import annotations

from torch import Tensor

from fedspan import lowrank
from fedspan.batches import Batch
from fedspan.layers import part, structured
from fedspan.local import Loss
from fedspan.task import Task
from fedspan.tree import Params


def product_decay(task: Task, decay: float) -> Loss:
    """The loss with λ/2 ‖U Vᵀ‖² for the factors of structured layers, and λ/2 ‖p‖² for all other parameters."""
    pairs = [(part(k, "U"), part(k, "V")) for k in structured(task.module)]
    others = [k for k in task.names if k not in {name for pair in pairs for name in pair}]

    def decayed(p: Params, batch: Batch) -> Tensor:
        far = sum(lowrank.squared_product(p[u], p[v]) for u, v in pairs) + sum(p[k].square().sum() for k in others)
        # An empty slot in a mapped run is no step: the decay must vanish with the batch.
        return task.loss(p, batch) + decay / 2 * far * batch.live

    return decayed
