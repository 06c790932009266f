"""Local training: the yardstick that shares nothing."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedspan.learn.task import Task
from fedspan.method import (
    About,
    Capacity,
    ClientInfo,
    Discloses,
    Down,
    Federation,
    Round,
    Sent,
    Training,
    Visit,
    Yardstick,
)
from fedspan.method.local_steps import LocalSteps
from fedspan.tree import Tree


@dataclass(frozen=True, kw_only=True)
class Local(Training):
    """Local training, no federation.

    Every client trains its own model θ_i from the common start. Only sampled clients train, so that all columns of a
    table had the same local work. Kept: theta, and the velocity with `keep_momentum`. Sent: nothing.
    """

    about = About(
        reference="no exchange",
        any_model=True,
        yardstick=Yardstick("alone", "training alone"),
        discloses=Discloses(labels="nothing", model="nothing", examples=True, resembles=False),
    )

    steps: LocalSteps = LocalSteps()
    """Whether a client's momentum goes on from round to round."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.steps.check(type(self).__name__, self.optimizer)

    def init_server(self, task: Task, federation: Federation) -> Tree:
        return {}

    def init_client(self, task: Task, who: ClientInfo) -> Tree:
        return {"theta": task.init(), **self.steps.begin(task)}

    def download(self, server: Tree, ids: Tensor, capacity: Capacity, round: int) -> Down:
        return Down()

    def client_update(self, task: Task, client: Tree, down: Tree, visit: Visit) -> tuple[Tree, Sent]:
        theta, kept = self.steps.fit(self.optimizer, task.loss, client["theta"], client, visit["train"], self.lr)
        return {"theta": theta, **kept}, Sent(weight=visit.examples)

    def server_update(self, server: Tree, round: Round) -> Tree:
        return server

    def personal(self, task: Task, client: Tree, down: Tree, visit: Visit) -> Tree:
        theta: Tree = client["theta"]
        return theta
