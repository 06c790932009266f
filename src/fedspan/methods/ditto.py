"""Ditto: a global model by FedAvg, and a personal one held near it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fedspan import tree
from fedspan.learn.batches import Amount, Epochs
from fedspan.learn.sgd import Near
from fedspan.learn.task import Task
from fedspan.method import About, Cautions, ClientInfo, Discloses, Sent, Sharing, Visit
from fedspan.method.fields import Count, NonNegative
from fedspan.tree import Params, Tree


@dataclass(frozen=True, kw_only=True)
class Ditto(Sharing, Cautions):
    """Ditto. Li et al., ICML 2021, Algorithm 1.

    Symbols: theta = the global model w, v = the personal model of client k, lam = λ.
    v minimises F_k(v) + λ/2 ‖v − w^t‖² for `personal_epochs` on the same batches. Kept: v (and h, the private head of
    the global model if `private_head`). Sent: theta.
    """

    about = About(
        reference="Li et al., ICML 2021",
        discloses=Discloses(labels="set", model="likeness", examples=True, resembles=True),
    )

    lam: NonNegative = 0.1
    """λ, how strongly the personal model is held to the global one; 0 is local training."""
    personal_epochs: Count | None = None
    """Epochs in which the personal model is trained in a round; the run's if not given."""
    lr_personal: NonNegative | None = None
    """The personal model's learning rate; `lr` if not given."""

    def proximal_steps(self) -> Mapping[str, float]:
        lr = self.lr if self.lr_personal is None else self.lr_personal
        name = "lr·lam" if self.lr_personal is None else "lr_personal·lam"
        return {name: self.optimizer.pull(lr, self.lam)}

    def plan(self) -> Mapping[str, Amount]:
        return {"train": Epochs(), "personal": Epochs(self.personal_epochs)}

    def init_client(self, task: Task, who: ClientInfo) -> Tree:
        return {**super().init_client(task, who), "v": task.init()}

    def client_update(self, task: Task, client: Tree, down: Tree, visit: Visit) -> tuple[Tree, Sent]:
        w: Params = down["theta"]
        theta, h = self.split(task, self.fit(task.loss, w | client["h"], visit["train"]))
        near = Near(task.loss, tree.select(w, task.names), self.lam)  # h_k(v; w^t), eq. (Ditto)
        v = self.fit(near, client["v"], visit["personal"], self.lr_personal)
        return {"h": h, "v": v}, Sent(weight=self.weigh(visit), mean={"theta": theta})

    def personal(self, task: Task, client: Tree, down: Tree, visit: Visit) -> Tree:
        v: Tree = client["v"]
        return v
