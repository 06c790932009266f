"""pFedLoRA: a full model for all, and a pair of small factors of every client's own beside each weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from fedspan.layers import Adapter, Chosen, Plain, choose, convert, parts
from fedspan.learn.batches import Amount, Epochs
from fedspan.learn.optimizer import Schedule
from fedspan.learn.task import Task
from fedspan.linalg import lowrank
from fedspan.method import About, Capacity, Converts, Discloses, Sent, Sharing, Visit
from fedspan.method.fields import AtLeast1, Count, NonNegative
from fedspan.tree import Tree


@dataclass(frozen=True, kw_only=True)
class PersonalAdapter:
    """The pair L U of a client's own beside each weight W: a value that both forms of pFedLoRA hold."""

    KEYS: ClassVar[Mapping[str, str]] = {k: k for k in ("rank", "alpha", "layers")}

    rank: AtLeast1 = 2
    """r_p, the rank of L U."""
    alpha: NonNegative = 0.1
    """α_p, by which L U is multiplied before it is added to W; with 1 steps on U are as many times longer as L has
    rows per column."""
    layers: Chosen = "body"
    """The layers that get a pair: a group of them, or names that begin theirs."""

    def beside(self, task: Task, who: str) -> Task:
        """The task with W + α_p L U in linear and convolutional layers; L starts Gaussian, U at zero."""
        names = choose(task, self.layers, who, lambda layer: lowrank.size("lora", layer, self.rank))

        def adapted(layer: Plain) -> Adapter:
            return Adapter(layer, 0, own_rank=self.rank, own_alpha=self.alpha, train_base=True)

        return task.converted(lambda module: convert(module, names, adapted))


@dataclass(frozen=True, kw_only=True)
class PFedLoRAJoint(Sharing, Converts):
    """pFedLoRA(2). Wu et al., 2024, as Park and Klabjan, 2024, Algorithm 4, write it.

    W + α_p L U with W averaged as in FedAvg; W, L and U are trained together. Symbols: theta = W and all that is not
    factorised, running statistics included, h = L, U and the head if `private_head`. Kept: h. Sent: theta.
    """

    about = About(
        family="fedloru",
        reference="Wu et al., 2024",
        discloses=Discloses(labels="set", model="part", examples=True, resembles=True),
    )

    local_stats: ClassVar[bool] = False

    private_head: bool = True
    """Whether the head stays on the client; the paper's is averaged with the rest."""
    schedule: Schedule = Schedule()
    """How the clients' learning rate falls over the rounds."""
    pair: PersonalAdapter = PersonalAdapter()
    """The factors of a client's own."""

    def model(self, task: Task, capacity: Capacity) -> Task:
        return self.pair.beside(task, type(self).__name__)

    def private(self, task: Task) -> list[str]:
        return [*parts(task.module, "L", "U"), *super().private(task)]

    def client_update(self, task: Task, client: Tree, down: Tree, visit: Visit) -> tuple[Tree, Sent]:
        lr = self.schedule.rate(self.lr, int(visit.round))
        both = self.fit(task.loss, self.whole(client, down), visit["train"], lr)  # eq. (36)
        theta, h = self.split(task, both)
        return {"h": h}, Sent(weight=self.weigh(visit), mean={"theta": theta})


@dataclass(frozen=True, kw_only=True)
class PFedLoRA(Sharing, Converts):
    """pFedLoRA(1). Wu et al., 2024, as Park and Klabjan, 2024, Algorithm 4, write it.

    As pFedLoRA(2), but in two phases: L and U (and a private head) with W fixed, then W with L and U fixed. Symbols as
    there. Kept: h. Sent: theta.
    """

    about = About(
        family="fedloru",
        reference="Wu et al., 2024",
        discloses=Discloses(labels="set", model="part", examples=True, resembles=True),
    )

    local_stats: ClassVar[bool] = False

    private_head: bool = True
    """Whether the head stays on the client; the paper's is averaged with the rest."""
    personal_epochs: Count = 1
    """Epochs on L and U (and a private head), with W fixed."""
    global_epochs: Count | None = None
    """Epochs on W, with L and U fixed; the run's own number if not given."""
    pair: PersonalAdapter = PersonalAdapter()
    """The factors of a client's own."""
    schedule: Schedule = Schedule()
    """How the clients' learning rate falls over the rounds."""

    def plan(self) -> Mapping[str, Amount]:
        return {"own": Epochs(self.personal_epochs), "train": Epochs(self.global_epochs)}

    def model(self, task: Task, capacity: Capacity) -> Task:
        return self.pair.beside(task, type(self).__name__)

    def private(self, task: Task) -> list[str]:
        return [*parts(task.module, "L", "U"), *super().private(task)]

    def client_update(self, task: Task, client: Tree, down: Tree, visit: Visit) -> tuple[Tree, Sent]:
        theta, lr = down["theta"], self.schedule.rate(self.lr, int(visit.round))
        h = self.fit(lambda h, b: task.loss(theta | h, b), client["h"], visit["own"], lr)  # eq. (34)
        theta = self.fit(lambda p, b: task.loss(p | h, b), theta, visit["train"], lr)  # eq. (35)
        return {"h": h}, Sent(weight=self.weigh(visit), mean={"theta": theta})
