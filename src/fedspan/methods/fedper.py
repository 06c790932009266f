"""FedPer and LG-FedAvg: some layers are shared, the others stay at home, all are trained together."""

from __future__ import annotations

from dataclasses import dataclass

from fedspan.learn.task import Task
from fedspan.method import About, Discloses, Sent, Sharing, Visit, named_layers
from fedspan.tree import Tree


@dataclass(frozen=True, kw_only=True)
class FedPer(Sharing):
    """FedPer. Arivazhagan et al., 2019, Algorithms 1 and 2.

    Symbols: theta = base layers W_B, h = personalisation layers W_P of client j: the head, or the parameters whose
    names start with one of `personal_layers`. Kept: h. Sent: theta.
    """

    about = About(
        reference="Arivazhagan et al., 2019",
        discloses=Discloses(labels="set", model="part", examples=True, resembles=True),
    )

    private_head: bool = True
    personal_layers: tuple[str, ...] = ()
    """Names, or beginnings of names, of the parameters that stay on the client; none: as `private_head` says."""

    def private(self, task: Task) -> list[str]:
        """The layers named, or the head."""
        return named_layers(self, task, self.personal_layers) or super().private(task)

    def client_update(self, task: Task, client: Tree, down: Tree, visit: Visit) -> tuple[Tree, Sent]:
        return self.train_together(task, task.loss, client, down, visit)  # SGD on (W_B, W_Pj), Algorithm 1


@dataclass(frozen=True, kw_only=True)
class LgFedAvg(Sharing):
    """LG-FedAvg. Liang et al., 2020, Algorithm 1.

    The complement of FedPer: every client keeps its own representation, the head is shared.
    Symbols: theta = global head, h = local representation layers. Kept: h. Sent: theta.
    The paper starts from a model trained by FedAvg; here training starts from the common initialisation.
    """

    about = About(
        reference="Liang et al., 2020",
        any_model=True,
        discloses=Discloses(labels="set", model="part", examples=True, resembles=True),
    )

    private_head: bool = False
    """Plays no part: the head is what is shared."""
    personal_layers: tuple[str, ...] = ()
    """Names, or beginnings of names, of the parameters that stay on the client; none: all below the head."""

    def private(self, task: Task) -> list[str]:
        """The layers named, or all below the head."""
        if self.personal_layers:
            return named_layers(self, task, self.personal_layers)
        head = set(task.need_head())
        return [k for k in task.names if k not in head]

    def client_update(self, task: Task, client: Tree, down: Tree, visit: Visit) -> tuple[Tree, Sent]:
        return self.train_together(task, task.loss, client, down, visit)
