"""FedAvg and FedProx: one model for all, averaged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from fedspan import tree
from fedspan.learn.sgd import Near
from fedspan.learn.task import Task
from fedspan.method import About, Cautions, Discloses, Sent, Sharing, Visit, Yardstick
from fedspan.method.fields import NonNegative
from fedspan.tree import Tree


@dataclass(frozen=True, kw_only=True)
class FedAvg(Sharing):
    """FedAvg. McMahan et al., AISTATS 2017, Algorithm 1.

    Symbols: theta = the global model w, h = the private head if `private_head` (empty otherwise).
    Kept: h. Sent: theta. Running statistics of batch normalisation are averaged with the parameters.
    """

    about = About(
        reference="McMahan et al., AISTATS 2017",
        yardstick=Yardstick("common", "FedAvg"),
        discloses=Discloses(labels="set", model="whole", examples=True, resembles=True),
    )

    local_stats: ClassVar[bool] = False

    def client_update(self, task: Task, client: Tree, down: Tree, visit: Visit) -> tuple[Tree, Sent]:
        return self.train_together(task, task.loss, client, down, visit)  # ClientUpdate(k, w)


@dataclass(frozen=True, kw_only=True)
class FedProx(Sharing, Cautions):
    """FedProx. Li et al., MLSys 2020, Algorithm 2.

    FedAvg whose clients minimise F_k(w) + μ/2 ‖w − w^t‖² on the shared parameters. Symbols: theta = the global model w,
    mu = μ, h = the private head if `private_head`. Kept: h. Sent: theta. Running statistics are averaged, as in FedAvg.
    """

    about = About(
        reference="Li et al., MLSys 2020",
        discloses=Discloses(labels="set", model="whole", examples=True, resembles=True),
    )

    local_stats: ClassVar[bool] = False

    mu: NonNegative = 0.01
    """μ, the weight of the proximal term μ/2 ‖w − w^t‖² in a client's loss; 0 is FedAvg."""

    def proximal_steps(self) -> Mapping[str, float]:
        return {"lr·mu": self.optimizer.pull(self.lr, self.mu)}

    def client_update(self, task: Task, client: Tree, down: Tree, visit: Visit) -> tuple[Tree, Sent]:
        h_k = Near(task.loss, tree.select(down["theta"], task.names), self.mu)  # h_k(w; w^t), eq. (2)
        return self.train_together(task, h_k, client, down, visit)
