"""FedAlt and FedSim: partial personalisation, alternating or simultaneous, with an optimiser on the server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from fedspan import tree
from fedspan.learn.batches import Amount, Batch, Batches, Epochs
from fedspan.learn.server_optimizer import ServerOptimizer
from fedspan.learn.task import Task
from fedspan.method import About, ClientInfo, Sent, Sharing, Visit, named_layers
from fedspan.method.fields import Count, NonNegative
from fedspan.tree import Params, Tree


@dataclass(frozen=True, kw_only=True)
class FedSim(Sharing):
    """FedSim. Pillutla et al., ICML 2022.

    Symbols: theta = shared parameters u, h = personal parameters v_i: the head, or the parameters whose names start
    with one of `personal_layers`. Both are trained together, with `l2`/2 ‖v − v₀‖² if wanted, v₀ = 0 or the start.
    The server takes u^t − mean of the u_i as a gradient, by SGD of step 1 unless told otherwise; Adam's moments are
    corrected, as in published code. Kept: h. Sent: theta.
    """

    about = About(reference="Pillutla et al., ICML 2022")

    l2: NonNegative = 0.0
    l2_towards: Literal["zero", "start"] = "zero"
    server: ServerOptimizer = ServerOptimizer(rule="sgd", beta2=0.999, epsilon=1e-8, corrected=True, sgd_momentum=0.0)
    private_head: bool = True
    personal_layers: tuple[str, ...] = ()

    def private(self, task: Task) -> list[str]:
        """The head, or the layers named."""
        return named_layers(self, task, self.personal_layers) if self.personal_layers else super().private(task)

    def objective(self, task: Task, params: Params, batch: Batch) -> Tensor:
        """The loss with the pull on v."""
        loss = task.loss(params, batch)
        if not self.l2:
            return loss
        v = tree.select(params, self.private(task))
        origin = task.init() if self.l2_towards == "start" else tree.zeros_like(v)
        return loss + self.l2 / 2 * sum((a - origin[k]).square().sum() for k, a in v.items())

    def client_update(self, task: Task, client: Tree, down: Tree, visit: Visit) -> tuple[Tree, Sent]:
        both = self.fit(lambda p, b: self.objective(task, p, b), down["theta"] | client["h"], visit["train"])
        u, h = self.split(task, both)
        return {"h": h}, Sent(weight=self.weigh(visit), mean={"theta": u})


@dataclass(frozen=True, kw_only=True)
class FedAlt(FedSim):
    """FedAlt. Pillutla et al., ICML 2022.

    As FedSim, but v is trained first, for `v_epochs` (at most `v_steps` minibatches) with u fixed, then u for
    `u_epochs` (default: the run's epochs) with v fixed. Not `stateful`: nothing is kept; v starts anew from the common
    start in every round, and is fitted again whenever the model is used. Kept: h. Sent: theta.
    """

    v_epochs: Count = 1
    u_epochs: Count | None = None
    v_steps: Count | None = None
    stateful: bool = True

    def plan(self) -> Mapping[str, Amount]:
        return {"v": Epochs(self.v_epochs), "u": Epochs(self.u_epochs)}

    def init_client(self, task: Task, who: ClientInfo) -> Tree:
        return super().init_client(task, who) if self.stateful else {"h": {}}

    def client_update(self, task: Task, client: Tree, down: Tree, visit: Visit) -> tuple[Tree, Sent]:
        u = down["theta"]
        h = self._fit_v(task, u, client["h"] or self.split(task, task.init())[1], visit["v"])
        u = self.fit(lambda u, b: task.loss(u | h, b), u, visit["u"])
        return {"h": h if self.stateful else {}}, Sent(weight=self.weigh(visit), mean={"theta": u})

    def _fit_v(self, task: Task, u: Params, h: Params, stream: Batches) -> Params:
        stream = stream if self.v_steps is None else stream.first(self.v_steps)
        return self.fit(lambda h, b: self.objective(task, u | h, b), h, stream)

    def personal_plan(self, task: Task) -> Mapping[str, Amount]:
        return {**super().personal_plan(task), **({} if self.stateful else {"v": Epochs(self.v_epochs)})}

    def personal(self, task: Task, client: Tree, down: Tree, visit: Visit) -> Tree:
        if not self.stateful:
            client = {"h": self._fit_v(task, down["theta"], self.split(task, task.init())[1], visit["v"])}
        return super().personal(task, client, down, visit)
