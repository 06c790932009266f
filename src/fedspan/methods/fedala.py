"""FedALA: before training, each client blends the global model into its own, entry by entry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedspan import tree
from fedspan.learn.accelerator import widest
from fedspan.learn.batches import Amount, Batch, Batches, Epochs, Portion
from fedspan.learn.sgd import gradient_and_value
from fedspan.learn.task import Task
from fedspan.method import About, ClientInfo, Discloses, Sent, Sharing, Visit
from fedspan.method.fields import AtLeast1, Count, Fraction, NonNegative
from fedspan.tree import Params, Tree

_LOSSES = 10  # how many passes must agree before the first blend counts as settled


@dataclass(frozen=True, kw_only=True)
class FedAla(Sharing):
    """FedALA. Zhang et al., AAAI 2023.

    Symbols: theta = the global model (kept: the client's last one, Θ_i), A = the weights W_i of the blend, one for each
    entry of the last `top` parameter tensors; lower ones are taken from the global model. The blend Θ_i + (Θ − Θ_i)∘A
    is learnt on a random `share` of the training data with A in [0, 1]: one pass a round, but when the two models first
    differ, passes until ten successive losses vary by less than `threshold`, at most `start_passes`. Before use the
    blend with the newest global model is learnt in the same way and thrown away. Kept: theta, A (and h, the private
    head if `private_head`). Sent: theta.
    """

    about = About(
        reference="Zhang et al., AAAI 2023",
        discloses=Discloses(labels="set", model="whole", private=("theta",), examples=True, resembles=True),
    )

    top: Count = 2
    """How many of the last parameter tensors are blended entry by entry; those below come from the global model."""
    lr_a: NonNegative = 100.0
    """Learning rate of the blend's weights A; with the paper's 1 they hardly move where the two models are near."""
    share: Fraction = 0.8
    """Share of the training data, drawn anew, on which the blend is learnt."""
    threshold: NonNegative = 0.1
    """The first blend is settled once ten successive losses have a standard deviation below this."""
    start_passes: AtLeast1 = 20
    """The most passes over that share in which the first blend is learnt."""

    def blended(self, task: Task, theta: Params) -> list[str]:
        """Names of the last `top` shared parameter tensors."""
        names = [k for k in task.names if k in theta]
        return names[len(names) - min(self.top, len(names)) :]

    def plan(self) -> Mapping[str, Amount]:
        return {"train": Epochs(), "blend": Portion(self.share)}

    def personal_plan(self, task: Task) -> Mapping[str, Amount]:
        return {**super().personal_plan(task), "blend": Portion(self.share)}

    def init_client(self, task: Task, who: ClientInfo) -> Tree:
        theta, h = self.split(task, task.init())
        A = {k: torch.ones_like(theta[k]) for k in self.blended(task, theta)}
        return {"theta": theta, "h": h, "A": A, "fresh": torch.tensor(True)}

    def client_update(self, task: Task, client: Tree, down: Tree, visit: Visit) -> tuple[Tree, Sent]:
        start, A, fresh = self._blend(task, client, down["theta"], visit["blend"])
        theta, h = self.split(task, self.fit(task.loss, start | client["h"], visit["train"]))
        return {"theta": theta, "h": h, "A": A, "fresh": fresh}, Sent(self.weigh(visit), {"theta": theta})

    def _blend(self, task: Task, client: Tree, new: Params, stream: Batches) -> tuple[Params, Params, Tensor]:
        """The model to start from, the weights that gave it, and whether the two models are still the same."""
        A, fresh, own = client["A"], client["fresh"], client["theta"]
        gap = {k: new[k] - own[k] for k in A}
        lower = tree.without(new, A) | client["h"]

        def at(A: Params) -> Params:
            return {k: own[k] + gap[k] * A[k] for k in A}  # Θ̂_i = Θ_i + (Θ − Θ_i) ∘ W_i

        def loss(top: Params, batch: Batch) -> Tensor:
            return task.loss(lower | top, batch)

        differ = torch.stack([(g != 0).any() for g in gap.values()] or [torch.tensor(False)]).any()
        active, losses = torch.ones_like(fresh), list[Tensor]()
        for k in range(self.start_passes if A else 0):
            total = weight = torch.zeros_like(fresh, dtype=widest(fresh.device))
            for batch in stream:
                slope, value = gradient_and_value(loss, at(A), batch)
                # W ← clip(W − η ∇L(Θ̂_i) ∘ (Θ − Θ_i))
                step = {k: (A[k] - self.lr_a * slope[k] * gap[k]).clamp(0, 1) for k in A}
                A = tree.where(active & batch.live, step, A)
                total, weight = total + value * batch.w.sum(), weight + batch.w.sum()
            losses.append(total / weight.clamp_min(1))
            active = active & fresh & differ
            if k >= _LOSSES:
                active = active & (torch.stack(losses[-_LOSSES:]).std(correction=0) >= self.threshold)
            if not stream.mapped and not bool(active):
                break
        return tree.without(new, A) | at(A), A, fresh & ~differ

    def personal(self, task: Task, client: Tree, down: Tree, visit: Visit) -> Tree:
        start, _, _ = self._blend(task, client, down["theta"], visit["blend"])
        return super().personal(task, client, {"theta": start}, visit)
