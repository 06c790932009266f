"""Per-FedAvg: a common start that a few steps at home turn into a good personal model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from fedspan import tree
from fedspan.learn.batches import Amount, Batch, Epochs, Steps
from fedspan.learn.sgd import Loss, gradient, hessian_product
from fedspan.learn.task import Task
from fedspan.method import About, Discloses, Sent, Sharing, Visit
from fedspan.method.fields import Count, NonNegative, Positive
from fedspan.tree import Params, Tree


@dataclass(frozen=True, kw_only=True)
class PerFedAvg(Sharing):
    """Per-FedAvg. Fallah et al., NeurIPS 2020, with its first-order and Hessian-free variants.

    Symbols: theta = the meta-model w, lr = β, lr_inner = α (default: lr), delta = δ of the Hessian-free variant.
    A step minimises f(w − α∇f(w)): D' runs over the client's minibatches as in FedAvg, D and D'' are the next two of
    the same pass, so that no short last batch leaves one of them empty. Before use each client takes `adapt` plain
    steps (or epochs) of size α and throws them away afterwards. Kept: h, the private head if `private_head`. Sent:
    theta.
    """

    about = About(
        reference="Fallah et al., NeurIPS 2020",
        discloses=Discloses(labels="set", model="likeness", examples=False, resembles=True),
    )

    weighting: Literal["samples", "uniform"] = "uniform"
    variant: Literal["first-order", "hessian-free", "exact"] = "first-order"
    """How the meta-gradient sees the curvature: not at all, by differences of gradients, or by exact products."""
    lr_inner: NonNegative | None = None
    """α, the learning rate of the adaptation; `lr` if not given."""
    delta: Positive = 1e-3
    """δ, the step of the differences in the Hessian-free variant."""
    adapt: Count = 10
    """How many steps, or epochs, a client adapts the model before use; the paper's objective foresees one step."""
    adapt_unit: Literal["step", "epoch"] = "epoch"
    """Whether `adapt` counts minibatches or epochs."""

    @property
    def alpha(self) -> float:
        """The learning rate of the adaptation."""
        return self.lr if self.lr_inner is None else self.lr_inner

    def personal_plan(self, task: Task) -> Mapping[str, Amount]:
        steps: Amount = Steps(self.adapt) if self.adapt_unit == "step" else Epochs(self.adapt)
        return {**super().personal_plan(task), "adapt": steps}

    def client_update(self, task: Task, client: Tree, down: Tree, visit: Visit) -> tuple[Tree, Sent]:
        start = down["theta"] | client["h"]
        stats = tree.select(start, task.stats)
        D, D2 = (list(visit["train"].shifted(by)) for by in (1, 2))

        def f(w: Params, batch: Batch) -> Tensor:
            return task.loss(w | stats, batch)

        def linear(w: Params, batch: Batch) -> Tensor:
            # The optimiser needs a function whose gradient is the meta-gradient: ⟨w, ∇F⟩ with ∇F held fixed.
            return tree.dot(w, self.meta_gradient(f, tree.detach(w), D[batch.step], batch, D2[batch.step]))

        def adapted(w: Params, batch: Batch) -> Tensor:
            return f(tree.add(w, gradient(f, w, batch), -self.alpha), batch)  # F(w) = f(w − α∇f(w))

        start = tree.without(start, task.stats)
        new = self.fit(linear, start, visit["train"], measured=adapted)  # w ← w − β ∇F(w)
        theta, h = self.split(task, new | stats)
        return {"h": h}, Sent(weight=self.weigh(visit), mean={"theta": theta})

    def meta_gradient(self, f: Loss, w: Params, D: Batch, D1: Batch, D2: Batch) -> Params:
        """The variant's estimate of ∇F(w) = (I − α∇²f(w)) ∇f(w − α∇f(w)) from three minibatches."""
        tilde = tree.add(w, gradient(f, w, D), -self.alpha)  # w̃ = w − α∇f(w; D)
        g: Params = gradient(f, tilde, D1)  # ∇f(w̃; D')
        if self.variant == "first-order":
            return g
        if self.variant == "exact":
            curved = hessian_product(f, w, g, D2)  # ∇²f(w; D'') g
        else:
            ahead, behind = (gradient(f, tree.add(w, g, side), D2) for side in (self.delta, -self.delta))
            curved = tree.map(lambda a: a / (2 * self.delta), tree.sub(ahead, behind))  # the same by differences
        result: Params = tree.add(g, curved, -self.alpha)
        return result

    def personal(self, task: Task, client: Tree, down: Tree, visit: Visit) -> Tree:
        return self.descend(task.loss, super().personal(task, client, down, visit), visit["adapt"], self.alpha)
