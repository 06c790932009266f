"""FedAlt and FedSim: partial personalisation, alternating or simultaneous, with an optimiser on the server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from fedspan import tree
from fedspan.learn.batches import Amount, Batch, Batches, Epochs
from fedspan.learn.frozen_body import FrozenBody
from fedspan.learn.server_optimizer import ServerOptimizer
from fedspan.learn.sgd import Loss
from fedspan.learn.task import LossBeside, Task
from fedspan.method import About, ClientInfo, Discloses, Sent, Sharing, Visit, named_layers
from fedspan.method.fields import Count, NonNegative
from fedspan.tree import Params, Tree

SERVER = ServerOptimizer(rule="sgd", beta2=0.999, epsilon=1e-8, corrected=True, sgd_momentum=0.0)
"""The server's SGD of step 1, and Adam with torch's constants and corrected moments for who asks for it."""


@dataclass(frozen=True, kw_only=True)
class FedSim(Sharing):
    """FedSim. Pillutla et al., ICML 2022.

    Symbols: theta = shared parameters u, h = personal parameters v_i: the head, or the parameters whose names start
    with one of `personal_layers`. Both are trained together, with `l2`/2 ‖v − v₀‖² if wanted, v₀ = 0 or the start.
    The server takes u^t − mean of the u_i as a gradient, by SGD of step 1 unless told otherwise; Adam's moments are
    corrected, as in published code. Kept: h. Sent: theta.
    """

    about = About(
        reference="Pillutla et al., ICML 2022",
        discloses=Discloses(labels="set", model="part", examples=True, resembles=True),
    )

    private_head: bool = True
    server: ServerOptimizer = SERVER
    l2: NonNegative = 0.0
    """Weight of the term l2/2 ‖v − v₀‖² on the personal parameters v."""
    l2_towards: Literal["zero", "start"] = "zero"
    """v₀, where that term pulls them: zero, or their start."""
    personal_layers: tuple[str, ...] = ()
    """Names, or beginnings of names, of the parameters that stay on the client; none: as `private_head` says."""

    def private(self, task: Task) -> list[str]:
        """The layers named, or the head."""
        return named_layers(self, task, self.personal_layers) or super().private(task)

    def client_update(self, task: Task, client: Tree, down: Tree, visit: Visit) -> tuple[Tree, Sent]:
        return self.train_together(task, regularised(self, task), client, down, visit)


@dataclass(frozen=True, kw_only=True)
class FedAlt(Sharing):
    """FedAlt. Pillutla et al., ICML 2022.

    As FedSim, but v is trained first, for `v_epochs` (at most `v_steps` minibatches) with u fixed, then u for
    `u_epochs` (default: the run's epochs) with v fixed. Not `stateful`: nothing is kept; v starts anew from the common
    start in every round, and is fitted again whenever the model is used. Symbols: theta = u, h = v_i, as in FedSim.
    Kept: h. Sent: theta.
    """

    about = About(
        reference="Pillutla et al., ICML 2022",
        discloses=Discloses(labels="set", model="part", examples=True, resembles=True),
    )

    private_head: bool = True
    server: ServerOptimizer = SERVER
    l2: NonNegative = 0.0
    """Weight of the term l2/2 ‖v − v₀‖² on the personal parameters v."""
    l2_towards: Literal["zero", "start"] = "zero"
    """v₀, where that term pulls them: zero, or their start."""
    personal_layers: tuple[str, ...] = ()
    """Names, or beginnings of names, of the parameters that stay on the client; none: as `private_head` says."""
    v_epochs: Count = 1
    """Epochs in which the personal parameters v are trained, with the shared ones fixed."""
    u_epochs: Count | None = None
    """Epochs in which the shared parameters u are trained, with the personal ones fixed; the run's if not given."""
    v_steps: Count | None = None
    """The most minibatches of a round that v is trained on; all of its epochs if not given."""
    stateful: bool = True
    """Whether v is kept from round to round; if not, it is fitted anew in every round and at every use."""

    def private(self, task: Task) -> list[str]:
        """The layers named, or the head."""
        return named_layers(self, task, self.personal_layers) or super().private(task)

    def plan(self) -> Mapping[str, Amount]:
        return {"v": Epochs(self.v_epochs), "u": Epochs(self.u_epochs)}

    def init_client(self, task: Task, who: ClientInfo) -> Tree:
        return super().init_client(task, who) if self.stateful else {"h": {}}

    def client_update(self, task: Task, client: Tree, down: Tree, visit: Visit) -> tuple[Tree, Sent]:
        u = down["theta"]
        h = self._fit_v(task, u, client["h"] or self.split(task, task.init())[1], visit["v"])
        u = self.fit(LossBeside(task, h), u, visit["u"])
        return {"h": h if self.stateful else {}}, Sent(weight=self.weigh(visit), mean={"theta": u})

    def _fit_v(self, task: Task, u: Params, h: Params, stream: Batches) -> Params:
        stream = stream if self.v_steps is None else stream.first(self.v_steps)
        if not self.l2:
            fixed = FrozenBody(task, u, h, stream)
            return self.fit(fixed.loss, h, fixed.batches)
        loss = regularised(self, task)
        return self.fit(lambda h, b: loss(u | h, b), h, stream)

    def personal_plan(self, task: Task) -> Mapping[str, Amount]:
        return {**super().personal_plan(task), **({} if self.stateful else {"v": Epochs(self.v_epochs)})}

    def personal(self, task: Task, client: Tree, down: Tree, visit: Visit) -> Tree:
        if not self.stateful:
            client = {"h": self._fit_v(task, down["theta"], self.split(task, task.init())[1], visit["v"])}
        return super().personal(task, client, down, visit)


def regularised(method: FedSim | FedAlt, task: Task) -> Loss:
    """The loss, with l2/2 ‖v − v₀‖² on the personal parameters v."""
    if not method.l2:
        return task.loss
    names = method.private(task)
    origin = task.init() if method.l2_towards == "start" else tree.zeros_like(tree.select(task.init(), names))

    def pulled(params: Params, batch: Batch) -> Tensor:
        far = sum((a - origin[k]).square().sum() for k, a in tree.select(params, names).items())
        return task.loss(params, batch) + method.l2 / 2 * far

    return pulled
