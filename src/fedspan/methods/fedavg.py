"""FedAvg and FedProx: one model for all, averaged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedspan.learn.batches import Batch
from fedspan.learn.sgd import Loss
from fedspan.learn.task import Task
from fedspan.method import About, Sent, Sharing, Visit, Yardstick
from fedspan.method.fields import NonNegative
from fedspan.tree import Params, Tree


@dataclass(frozen=True, kw_only=True)
class FedAvg(Sharing):
    """FedAvg. McMahan et al., AISTATS 2017, Algorithm 1.

    Symbols: theta = the global model w, h = the private head if `private_head` (empty otherwise).
    Kept: h. Sent: theta. Running statistics of batch normalisation are averaged with the parameters.
    """

    about = About(reference="McMahan et al., AISTATS 2017", yardstick=Yardstick("common", "FedAvg"))

    local_stats: ClassVar[bool] = False

    def objective(self, task: Task, start: Params) -> Loss:
        """What a client minimises: its own loss."""
        return task.loss

    def client_update(self, task: Task, client: Tree, down: Tree, visit: Visit) -> tuple[Tree, Sent]:
        start = down["theta"] | client["h"]
        theta, h = self.split(task, self.fit(self.objective(task, down["theta"]), start, visit["train"]))
        return {"h": h}, Sent(weight=self.weigh(visit), mean={"theta": theta})  # ClientUpdate(k, w)


@dataclass(frozen=True, kw_only=True)
class FedProx(FedAvg):
    """FedProx. Li et al., MLSys 2020, Algorithm 2.

    FedAvg whose clients minimise F_k(w) + μ/2 ‖w − w^t‖² on the shared parameters. Kept and sent as in FedAvg.
    """

    about = About(reference="Li et al., MLSys 2020")

    mu: NonNegative = 0.01

    def objective(self, task: Task, start: Params) -> Loss:
        """The loss with the proximal term."""
        names = [k for k in start if k in set(task.names)]

        def h_k(theta: Params, batch: Batch) -> Tensor:
            far = sum((theta[k] - start[k]).square().sum() for k in names)
            return task.loss(theta, batch) + self.mu / 2 * far  # h_k(w; w^t), eq. (2)

        return h_k
