"""FedAvg fitted to a client when its model is used: the controls that no table of personal models should lack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedspan import tree
from fedspan.learn.batches import Amount, Batch, Epochs
from fedspan.learn.frozen_body import FrozenBody
from fedspan.learn.task import Task
from fedspan.method import About, Cautions, Discloses, Sent, Sharing, Training, Visit
from fedspan.method.fields import Count, NonNegative
from fedspan.tree import Params, Tree


@dataclass(frozen=True, kw_only=True)
class FineTuning:
    """How a client fits the received model before use; the result is used and thrown away."""

    KEYS: ClassVar[Mapping[str, str]] = {"finetune_epochs": "epochs", "lr_finetune": "lr", "l2": "l2"}

    epochs: Count | None = 10
    """Epochs in which a client fits the received model before use; the run's if none, 0 is FedAvg."""
    lr: NonNegative | None = None
    """The learning rate of that fit; `lr` if not given."""
    l2: NonNegative = 0.0
    """λ, the weight of λ/2 ‖θ_i − θ‖², which holds the fit near the received model θ."""

    def pull(self, method: Training) -> Mapping[str, float]:
        """The step size of that term by its name."""
        return {"lr_finetune·l2": method.optimizer.pull(method.lr if self.lr is None else self.lr, self.l2)}

    def fit(self, method: Training, task: Task, received: Params, names: Sequence[str], visit: Visit) -> Tree:
        """The received model with the parameters of these names fitted on the stream `finetune`."""
        still = tree.without(received, [*names, *task.stats])
        start = tree.without(received, still)
        fixed = FrozenBody(task, still, start, visit["finetune"])

        def f_i(theta: Params, batch: Batch) -> Tensor:
            loss = fixed.loss(theta, batch)
            if self.l2 == 0:
                return loss
            return loss + self.l2 / 2 * sum((theta[k] - received[k]).square().sum() for k in names)

        # Where nothing is added and nothing stands still it is the task's own loss, whose steps are the quickest.
        loss = task.loss if not still and self.l2 == 0 else f_i
        return still | method.fit(loss, start, fixed.batches, self.lr)


@dataclass(frozen=True, kw_only=True)
class FedAvgFineTuned(Sharing, Cautions):
    """FedAvg + fine-tuning. Cheng, Chadha, Duchi, 2021; Collins et al., NeurIPS 2022.

    A control: what FedAvg's model is worth after the client has trained it on its own data. Before use each client
    trains all of it for `finetune_epochs`; the result is used and thrown away. Symbols: theta = the global model θ,
    h = the private head if `private_head`. Kept: h. Sent: theta. Running statistics are averaged, as in FedAvg.
    """

    about = About(
        reference="Cheng, Chadha, Duchi, 2021; Collins et al., NeurIPS 2022",
        discloses=Discloses(labels="set", model="likeness", examples=True, resembles=True),
    )

    local_stats: ClassVar[bool] = False

    finetune: FineTuning = FineTuning()
    """How a client fits all of the received model."""

    def proximal_steps(self) -> Mapping[str, float]:
        return self.finetune.pull(self)

    def personal_plan(self, task: Task) -> Mapping[str, Amount]:
        return {**super().personal_plan(task), "finetune": Epochs(self.finetune.epochs)}

    def client_update(self, task: Task, client: Tree, down: Tree, visit: Visit) -> tuple[Tree, Sent]:
        return self.train_together(task, task.loss, client, down, visit)  # FedAvg: ClientUpdate(k, w)

    def personal(self, task: Task, client: Tree, down: Tree, visit: Visit) -> Tree:
        return self.finetune.fit(self, task, super().personal(task, client, down, visit), task.names, visit)


@dataclass(frozen=True, kw_only=True)
class FedAvgHead(Sharing, Cautions):
    """FedAvg's body with a head fitted by each client. Collins et al., NeurIPS 2022.

    A control: what FedAvg's representation is worth without any further exchange. Body and head are trained and
    averaged as in FedAvg; before use each client trains the head for `finetune_epochs` with the body fixed, and throws
    it away. Symbols: theta = the global model θ, h = the private head if `private_head`. Kept: h. Sent: theta.
    """

    about = About(
        reference="Collins et al., NeurIPS 2022",
        discloses=Discloses(labels="set", model="part", examples=True, resembles=True),
    )

    local_stats: ClassVar[bool] = False

    finetune: FineTuning = FineTuning()
    """How a client fits the head."""

    def proximal_steps(self) -> Mapping[str, float]:
        return self.finetune.pull(self)

    def personal_plan(self, task: Task) -> Mapping[str, Amount]:
        return {**super().personal_plan(task), "finetune": Epochs(self.finetune.epochs)}

    def client_update(self, task: Task, client: Tree, down: Tree, visit: Visit) -> tuple[Tree, Sent]:
        return self.train_together(task, task.loss, client, down, visit)  # FedAvg: ClientUpdate(k, w)

    def personal(self, task: Task, client: Tree, down: Tree, visit: Visit) -> Tree:
        return self.finetune.fit(self, task, super().personal(task, client, down, visit), task.need_head(), visit)
