"""FedRep: head first, then body."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from fedspan.learn.batches import Amount, Epochs
from fedspan.learn.frozen_body import FrozenBody
from fedspan.learn.task import LossBeside, Task
from fedspan.method import About, Discloses, Sent, Sharing, Visit
from fedspan.method.fields import Count
from fedspan.tree import Tree


@dataclass(frozen=True, kw_only=True)
class FedRep(Sharing):
    """FedRep. Collins et al., ICML 2021, Algorithm 1.

    Symbols: theta = shared representation φ, h = the private head h_i. Kept: h. Sent: theta.
    The head is trained for `head_epochs` with φ fixed, then φ for `body_epochs` (default: the run's epochs) with the
    head fixed; what is fixed is not touched by momentum or weight decay.
    """

    about = About(
        reference="Collins et al., ICML 2021",
        discloses=Discloses(labels="set", model="part", examples=False, resembles=True),
    )

    private_head: bool = True
    weighting: Literal["samples", "uniform"] = "uniform"
    head_epochs: Count = 10
    """Epochs in which the head is trained, with the representation fixed."""
    body_epochs: Count | None = None
    """Epochs in which the representation is trained, with the head fixed; the run's if not given."""

    def plan(self) -> Mapping[str, Amount]:
        return {"head": Epochs(self.head_epochs), "body": Epochs(self.body_epochs)}

    def client_update(self, task: Task, client: Tree, down: Tree, visit: Visit) -> tuple[Tree, Sent]:
        phi, h = down["theta"], client["h"]
        fixed = FrozenBody(task, phi, h, visit["head"])
        h = self.fit(fixed.loss, h, fixed.batches)  # h_i ← GRD(f_i(h, φ^t), h), lines 7-9
        phi = self.fit(LossBeside(task, h), phi, visit["body"])  # φ_i ← GRD(f_i(h_i, φ), φ), line 10
        return {"h": h}, Sent(weight=self.weigh(visit), mean={"theta": phi})
