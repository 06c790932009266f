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
from fedspan.tree import Tree


@dataclass(frozen=True, kw_only=True)
class Local(Training):
    """Local training, no federation.

    Every client trains its own model θ_i from the common start. Only sampled clients train, so that all columns of a
    table had the same local work. Kept: theta. Sent: nothing.
    """

    about = About(
        reference="no exchange",
        any_model=True,
        yardstick=Yardstick("alone", "training alone"),
        discloses=Discloses(labels="nothing", model="nothing", examples=True, resembles=False),
    )

    def init_server(self, task: Task, federation: Federation) -> Tree:
        return {}

    def init_client(self, task: Task, who: ClientInfo) -> Tree:
        return {"theta": task.init()}

    def download(self, server: Tree, ids: Tensor, capacity: Capacity, round: int) -> Down:
        return Down()

    def client_update(self, task: Task, client: Tree, down: Tree, visit: Visit) -> tuple[Tree, Sent]:
        return {"theta": self.fit(task.loss, client["theta"], visit["train"])}, Sent(weight=visit.examples)

    def server_update(self, server: Tree, round: Round) -> Tree:
        return server

    def personal(self, task: Task, client: Tree, down: Tree, visit: Visit) -> Tree:
        theta: Tree = client["theta"]
        return theta
