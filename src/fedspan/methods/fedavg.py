"""FedAvg and FedProx: one model for all, averaged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from fedspan import tree
from fedspan.learn.sgd import Near
from fedspan.learn.task import Task
from fedspan.method import About, Cautions, ClientInfo, Discloses, Sent, Sharing, Visit, Yardstick
from fedspan.method.fields import NonNegative
from fedspan.method.local_steps import LocalSteps
from fedspan.tree import Tree


@dataclass(frozen=True, kw_only=True)
class FedAvg(Sharing):
    """FedAvg. McMahan et al., AISTATS 2017, Algorithm 1.

    Symbols: theta = the global model w, h = the private head if `private_head` (empty otherwise).
    Kept: h, and the velocity with `keep_momentum`. Sent: theta. Running statistics of batch normalisation are averaged
    with the parameters.
    """

    about = About(
        reference="McMahan et al., AISTATS 2017",
        yardstick=Yardstick("common", "FedAvg"),
        discloses=Discloses(labels="set", model="whole", examples=True, resembles=True),
    )

    local_stats: ClassVar[bool] = False

    steps: LocalSteps = LocalSteps()
    """Whether a client's momentum goes on from round to round."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.steps.check(type(self).__name__, self.optimizer)

    def init_client(self, task: Task, who: ClientInfo) -> Tree:
        return {**super().init_client(task, who), **self.steps.begin(task)}

    def client_update(self, task: Task, client: Tree, down: Tree, visit: Visit) -> tuple[Tree, Sent]:
        w = self.whole(client, down)
        w, kept = self.steps.fit(self.optimizer, task.loss, w, client, visit["train"], self.lr)  # ClientUpdate(k, w)
        theta, h = self.split(task, w)
        return {"h": h, **kept}, Sent(weight=self.weigh(visit), mean={"theta": theta})


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
