"""FedBABU: the body is trained under one fixed head; heads are fitted when the model is used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from fedspan import tree
from fedspan.learn.batches import Amount, Epochs
from fedspan.learn.frozen_body import FrozenBody
from fedspan.learn.task import LossBeside, Task
from fedspan.method import About, Discloses, Sent, Sharing, Visit
from fedspan.method.fields import Count
from fedspan.tree import Params, Tree


@dataclass(frozen=True, kw_only=True)
class FedBabu(Sharing):
    """FedBABU. Oh et al., ICLR 2022, Algorithm 1.

    Symbols: theta = the body, trained and averaged; the head stays at the common start, the same on all clients and at
    all rounds. Before use, each client fine-tunes `finetune` (all, head or body) for `finetune_epochs`; the result is
    used and thrown away. Kept: running statistics only. Sent: theta.
    """

    about = About(
        reference="Oh et al., ICLR 2022",
        discloses=Discloses(labels="set", model="likeness", examples=True, resembles=True),
    )

    private_head: bool = False
    """Plays no part: the head is never sent."""
    finetune_epochs: Count = 10
    """Epochs in which a client fine-tunes the model before use; the result is thrown away afterwards."""
    finetune: Literal["all", "head", "body"] = "all"
    """What is fine-tuned before use: all parameters, the head, or the body."""

    def private(self, task: Task) -> list[str]:
        """The head is never sent."""
        return task.need_head()

    def personal_plan(self, task: Task) -> Mapping[str, Amount]:
        return {**super().personal_plan(task), "finetune": Epochs(self.finetune_epochs)}

    def client_update(self, task: Task, client: Tree, down: Tree, visit: Visit) -> tuple[Tree, Sent]:
        head, own = self._parts(task, client)
        body = self.fit(LossBeside(task, head), down["theta"] | own, visit["train"])
        theta, h = self.split(task, body)
        return {"h": head | h}, Sent(weight=self.weigh(visit), mean={"theta": theta})

    def personal(self, task: Task, client: Tree, down: Tree, visit: Visit) -> Tree:
        params = super().personal(task, client, down, visit)
        moving = {"all": task.names, "head": task.head, "body": task.body}[self.finetune]
        still = tree.without(params, [*moving, *task.stats])
        moved = tree.without(params, still)
        fixed = FrozenBody(task, still, moved, visit["finetune"])
        return still | self.fit(fixed.loss, moved, fixed.batches)

    def _parts(self, task: Task, client: Tree) -> tuple[Params, Params]:
        return tree.select(client["h"], task.head), tree.without(client["h"], task.head)
