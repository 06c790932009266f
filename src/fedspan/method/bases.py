"""Bases that most methods share: training by gradient steps, averaging uploads, one shared and one private part."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedspan import tree
from fedspan.errors import ConfigError
from fedspan.learn.batches import All, Amount, Batch
from fedspan.learn.optimizer import Optimizer, Schedule
from fedspan.learn.server_optimizer import ServerOptimizer
from fedspan.learn.sgd import NO_PROX, Loss, Prox
from fedspan.learn.task import Task
from fedspan.method.capabilities import Adapts, Lifts
from fedspan.method.fields import NonNegative
from fedspan.method.protocol import About, Capacity, ClientInfo, Down, Federation, Method, Round, Sent, Visit, Weight
from fedspan.tree import Params, Tree


@dataclass(frozen=True, kw_only=True)
class Training(Method):
    """A method whose clients train by gradient steps."""

    lr: NonNegative = 0.1
    """The clients' learning rate."""
    optimizer: Optimizer = Optimizer()
    """The clients' optimiser."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.optimizer.rule == "adamw" and self.optimizer.momentum:
            raise ConfigError(
                f"{type(self).__name__}: momentum must be 0 with optimizer 'adamw'. Got {self.optimizer.momentum}."
            )
        schedule = getattr(self, "schedule", None)
        if isinstance(schedule, Schedule) and schedule.cycle is not None and schedule.lr_min > self.lr:
            raise ConfigError(
                f"{type(self).__name__}: lr_min must be at most lr = {self.lr} with a cycle. Got {schedule.lr_min}."
            )

    def fit(
        self,
        loss: Loss,
        params: Tree,
        batches: Iterable[Batch],
        lr: float | None = None,
        prox: Prox = NO_PROX,
        measured: Loss | None = None,
    ) -> Tree:
        """Train `params` on a stream with the method's optimiser; it starts anew each time.

        `prox` is applied to single parameters after every step. `measured` is what the safeguard measures, where the
        values of `loss` are not those of an objective.
        """
        return self.optimizer.fit(loss, params, batches, self.lr if lr is None else lr, prox, measured)

    def descend(self, loss: Loss, params: Tree, batches: Iterable[Batch], lr: float) -> Tree:
        """Train `params` by plain steps, whatever the method's optimiser is; its safeguard is kept."""
        return Optimizer(safeguard=self.optimizer.safeguard).fit(loss, params, batches, lr)


def weight_by_field(method: Averaging) -> Weight:
    """How uploads are weighted, as the field `weighting` says."""
    return "samples" if method.weighting == "samples" else "one"


@dataclass(frozen=True, kw_only=True)
class Averaging(Training):
    """A method that averages uploads: by examples or all alike, with the head kept private or not."""

    about = About(weight=weight_by_field)

    weighting: Literal["samples", "uniform"] = "samples"
    """Whether uploads weigh by their clients' numbers of examples, or all alike."""
    private_head: bool = False
    """Whether the head stays on the client."""
    server: ServerOptimizer = ServerOptimizer()
    """What the server does with the mean of a round."""

    def refuse_server_optimizer(self, why: str) -> None:
        """For methods whose server takes other steps: no optimiser, and why not."""
        if self.server.rule != "none":
            raise ConfigError(
                f"{type(self).__name__}: server_optimizer must be 'none', as {why}. Got {self.server.rule!r}."
            )

    def weigh(self, visit: Visit) -> Tensor:
        """This client's weight in the mean."""
        return visit.examples if self.weighting == "samples" else torch.ones_like(visit.examples)


@dataclass(frozen=True, kw_only=True)
class Sharing(Averaging, Adapts):
    """One tree `theta` is averaged, the rest `h` stays on the client; a method says how they are trained."""

    local_stats: ClassVar[bool] = True
    """Whether running statistics of batch normalisation stay on the client, re-estimated before use."""

    def private(self, task: Task) -> list[str]:
        """Names of the parameters that stay on the client."""
        return task.need_head() if self.private_head else []

    def split(self, task: Task, params: Params) -> tuple[Params, Params]:
        """Split parameters into what is shared and what stays on the client."""
        mine = [*self.private(task), *(task.stats if self.local_stats else ())]
        return tree.without(params, mine), tree.select(params, mine)

    def init_server(self, task: Task, federation: Federation) -> Tree:
        """The shared part of the common start."""
        return self.server.begin({"theta": self.split(task, task.init())[0]})

    def init_client(self, task: Task, who: ClientInfo) -> Tree:
        """The private part of the common start."""
        return {"h": self.split(task, task.init())[1]}

    def download(self, server: Tree, ids: Tensor, capacity: Capacity, round: int) -> Down:
        """The shared part."""
        return Down(shared={"theta": server["theta"]})

    def server_update(self, server: Tree, round: Round) -> Tree:
        """The weighted mean, or a step towards it."""
        return self.server.step(server, {"theta": round.mean["theta"]})

    def whole(self, client: Tree, down: Tree) -> Params:
        """All parameters of a client's model."""
        params: Params = down["theta"] | client["h"]
        return params

    def trained(self, down: Tree, sent: Sent, capacity: Capacity) -> Tree:
        """The client's own upload, as far as it is of the download's form, or can be brought into it by `lift`."""
        own = {**sent.mean, **sent.each}
        if not down.keys() <= own.keys() and isinstance(self, Lifts):
            own |= self.lift(sent.mean, down, capacity)
        return {k: own.get(k, v) for k, v in down.items()}

    def train_together(self, task: Task, loss: Loss, client: Tree, down: Tree, visit: Visit) -> tuple[Tree, Sent]:
        """Train shared and private part together on the stream `train`; the private one is kept, the other one sent."""
        theta, h = self.split(task, self.fit(loss, self.whole(client, down), visit["train"]))
        return {"h": h}, Sent(weight=self.weigh(visit), mean={"theta": theta})

    def personal_plan(self, task: Task) -> Mapping[str, Amount]:
        """One pass over the training data where statistics must be re-estimated."""
        return {"all": All()} if task.stats and self.local_stats else {}

    def personal(self, task: Task, client: Tree, down: Tree, visit: Visit) -> Tree:
        """Shared and private part together."""
        params = self.whole(client, down)
        return task.estimate_statistics(params, visit["all"]) if "all" in visit.batches else params


def named_layers(method: Method, task: Task, prefixes: tuple[str, ...]) -> list[str]:
    """Names of the parameters that start with one of `prefixes`, the layers that are to be personal.

    Raises:
        ConfigError: if there are prefixes and no such parameter.
    """
    names = [k for k in task.names if k.startswith(prefixes)]
    if prefixes and not names:
        raise ConfigError(
            f"{type(method).__name__}: personal_layers must begin the name of a parameter. Got {list(prefixes)}; the"
            f" model has {', '.join(task.names)}."
        )
    return names
