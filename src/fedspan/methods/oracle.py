"""The oracle: FedAvg inside the true groups, for scenarios that know them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedspan import tree
from fedspan.errors import ConfigError
from fedspan.learn.aggregate import cluster_mean
from fedspan.learn.task import Task
from fedspan.method import About, Capacity, Discloses, Down, Federation, Round, Sent, Sharing, Visit, Yardstick
from fedspan.tree import Tree


@dataclass(frozen=True, kw_only=True)
class Oracle(Sharing):
    """Oracle: one FedAvg model per true group of clients.

    A yardstick, not a method to deploy: the server is told the groups. Symbols: theta = models stacked over groups,
    group = the group of each client. Kept: h, the private head if `private_head`. Sent: theta, each client's own.
    """

    about = About(
        reference="yardstick",
        needs_groups=True,
        yardstick=Yardstick("told", "knowing the groups"),
        discloses=Discloses(labels="set", model="whole", examples=True, resembles=True),
    )

    local_stats: ClassVar[bool] = False

    def init_server(self, task: Task, federation: Federation) -> Tree:
        if federation.groups is None:
            raise ConfigError(
                "Oracle: the partition must know the groups of its clients. Got none; use permuted-groups,"
                " shifted-groups, label-groups or domains, or choose another method."
            )
        groups = int(federation.groups.max()) + 1
        theta = super().init_server(task, federation)["theta"]
        models = {"theta": tree.map(lambda a: a.expand(groups, *a.shape).clone(), theta)}
        return {**self.server.begin(models, groups), "group": federation.groups.long()}

    def download(self, server: Tree, ids: Tensor, capacity: Capacity, round: int) -> Down:
        return Down(own={"theta": tree.take(server["theta"], server["group"][ids])})

    def client_update(self, task: Task, client: Tree, down: Tree, visit: Visit) -> tuple[Tree, Sent]:
        theta, h = self.split(task, self.fit(task.loss, down["theta"] | client["h"], visit["train"]))
        return {"h": h}, Sent(weight=self.weigh(visit), each={"theta": theta})

    def server_update(self, server: Tree, round: Round) -> Tree:
        groups = len(next(iter(tree.leaves(server["theta"])), torch.empty(0)))
        here = server["group"][round.ids]
        theta = cluster_mean(round.each["theta"], round.weights, here, groups, server["theta"])
        live = torch.zeros(groups, dtype=torch.bool, device=here.device).index_fill(0, here, True)
        return {**self.server.step(server, {"theta": theta}, live), "group": server["group"]}
