"""FedAS: the received body is aligned with the client's own past, and clients count by their Fisher information."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedspan import tree
from fedspan.learn.batches import All, Amount, Batch, Batches, Epochs
from fedspan.learn.class_features import class_matrix, class_means, members
from fedspan.learn.sgd import gradient
from fedspan.learn.task import Task
from fedspan.method import About, ClientInfo, Discloses, Sent, Sharing, Visit
from fedspan.method.bases import weight_by_field
from fedspan.method.fields import Count, NonNegative
from fedspan.tree import Params, Tree


@dataclass(frozen=True, kw_only=True)
class FedAs(Sharing):
    """FedAS. Yang et al., CVPR 2024, Algorithm 1.

    Symbols: theta = the shared body (kept: the client's last one), h = the private head. A client that took part before
    first aligns: `align_epochs` of plain SGD of size `lr_align` on the received body, so that the features of each
    class in a minibatch come near the class's mean feature under its last body (their mean, or each of them: `align`).
    Then body and head are trained together. It counts by the trace of the Fisher information: squared gradients of the
    mean loss, summed over its minibatches, in evaluation mode; the trace also grows with the number of minibatches. Not
    `fisher`: by `weighting`. Before use the newest body is aligned in the same way. Kept: theta and h. Sent: theta, and
    the trace as its weight.
    """

    about = About(
        reference="Yang et al., CVPR 2024",
        needs_classes=True,
        weight=lambda m: "own" if m.fisher else weight_by_field(m),
        weight_bound=math.inf,  # a trace has no natural bound; one that is not finite stops the run
        discloses=Discloses(labels="set", model="likeness", private=("theta",), examples=False, resembles=True),
    )

    private_head: bool = True
    fisher: bool = True
    """Whether clients count by the trace of their Fisher information; if not, as `weighting` says."""
    align: Literal["class-mean", "example"] = "class-mean"
    """What comes near a class's mean feature under the last body: the mean of a minibatch, or every example."""
    align_epochs: Count = 1
    """Epochs of alignment before training, and before use."""
    lr_align: NonNegative = 0.01
    """Learning rate of the alignment."""

    def plan(self) -> Mapping[str, Amount]:
        return {"align": Epochs(self.align_epochs), "train": Epochs(), "all": All()}

    def personal_plan(self, task: Task) -> Mapping[str, Amount]:
        return {"align": Epochs(self.align_epochs), "all": All()}

    def init_client(self, task: Task, who: ClientInfo) -> Tree:
        theta, h = self.split(task, task.init())
        return {"theta": theta, "h": h, "met": torch.tensor(False)}

    def client_update(self, task: Task, client: Tree, down: Tree, visit: Visit) -> tuple[Tree, Sent]:
        start = self._aligned(task, client, down["theta"], visit)
        both = self.fit(task.loss, start | client["h"], visit["train"])
        theta, h = self.split(task, both)
        weight = self.trace(task, both, visit["all"]) if self.fisher else self.weigh(visit)
        return {"theta": theta, "h": h, "met": torch.ones_like(client["met"])}, Sent(weight, mean={"theta": theta})

    def _aligned(self, task: Task, client: Tree, new: Params, visit: Visit) -> Params:
        """The received body, moved so that the head finds what it knows; as it came for a client without a past."""
        h, name = client["h"], class_matrix(task, "FedAs")
        like = (new | h)[name]
        p, _ = class_means(task, client["theta"] | h, visit["all"], like)  # prototypes of the last body

        def apart(theta: Params, batch: Batch) -> Tensor:
            features, _ = task.features_and_output(theta | h, batch)
            member = members(batch, len(p), p.dtype)
            count = member.sum(0)
            if self.align == "class-mean":
                gap = (member.T @ features / count.clamp_min(1)[:, None] - p).square().mean(1)
            else:
                gap = member.T @ (features - p[batch.y]).square().mean(1) / count.clamp_min(1)
            return (gap * (count > 0)).sum()  # Σ over the classes of the minibatch

        aligned = self.descend(apart, new, visit["align"], self.lr_align)
        result: Params = tree.where(client["met"], aligned, new)
        return result

    def trace(self, task: Task, params: Params, stream: Batches) -> Tensor:
        """Σ over minibatches of ‖∇ mean loss‖², in evaluation mode: the trace of the Fisher information."""
        stats = tree.select(params, task.stats)

        def loss(p: Params, batch: Batch) -> Tensor:
            return task.mean_loss(task.predict(p | stats, batch.x), batch)

        total = torch.zeros_like(next(iter(params.values())).reshape(-1)[0])
        for batch in stream:
            g = gradient(loss, tree.without(params, task.stats), batch)
            total = total + tree.dot(g, g)
        return total.clamp_min(1e-12)  # if all have nothing left to learn, they count alike

    def personal(self, task: Task, client: Tree, down: Tree, visit: Visit) -> Tree:
        return self._ready(task, self._aligned(task, client, down["theta"], visit) | client["h"], visit)

    def personal_trained(self, task: Task, client: Tree, down: Tree, visit: Visit) -> Tree:
        return self._ready(task, client["theta"] | client["h"], visit)  # aligned before it was trained

    def _ready(self, task: Task, params: Params, visit: Visit) -> Tree:
        return task.estimate_statistics(params, visit["all"]) if task.stats else params
