"""pFL-MF as the public code runs it: U and v trained together, U averaged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedspan import tree
from fedspan.learn.batches import All, Amount, Batch, Epochs
from fedspan.learn.optimizer import Schedule
from fedspan.learn.task import Task
from fedspan.method import About, Adapts, Averaging, Capacity, ClientInfo, Down, Federation, Round, Sent, Visit
from fedspan.method.fields import AtLeast1
from fedspan.methods.pfl_mf.coefficients import InSubspace
from fedspan.methods.pfl_mf.gauge import dtype_of, need_plain_sgd, need_rank, own_v, standard_columns
from fedspan.randomness import key, normal, uniform
from fedspan.tree import Tree


@dataclass(frozen=True, kw_only=True)
class PflMfJoint(Averaging, InSubspace, Adapts):
    """pFL-MF as the published code runs it: U and v are trained together for the run's epochs, U is averaged.

    The published training function stands outside its class and is never called; what runs is FedPer on (U, v), with
    entries of U uniform in ±1/√r and v normal. Kept: v. Sent: U, d·r numbers.
    """

    about = About(family="pfl-mf", reference="Dadras, Stich and Yurtsever, TMLR 2025")

    schedule: Schedule = Schedule()
    """How the learning rate falls over the rounds."""
    rank: AtLeast1 = 10
    """r, the dimension of the subspace in which all client models lie."""
    start: Literal["random", "published"] = "published"
    """Where U and v start."""

    def __post_init__(self) -> None:
        super().__post_init__()
        need_plain_sgd(self)

    def plan(self) -> Mapping[str, Amount]:
        return {"U": Epochs()}

    def init_server(self, task: Task, federation: Federation) -> Tree:
        need_rank(self, self.rank, task, task.names)
        if self.start == "published":
            d = sum(task.init()[k].numel() for k in task.names)
            U = (2 * uniform(key(federation.seed, "U"), (d, self.rank), dtype_of(task)) - 1) / self.rank**0.5
        else:
            U = standard_columns(task, task.names, self.rank, federation.seed)
        return {**self.server.begin({"U": U}), "C": torch.eye(self.rank, dtype=U.dtype) / self.rank}

    def init_client(self, task: Task, who: ClientInfo) -> Tree:
        published = normal(who.key, (self.rank,), dtype_of(task))
        v = published if self.start == "published" else own_v(task, self.rank, who)
        return {"v": v, "stats": tree.select(task.init(), task.stats)}

    def download(self, server: Tree, ids: Tensor, capacity: Capacity, round: int) -> Down:
        return Down(shared={"U": server["U"]})

    def client_update(self, task: Task, client: Tree, down: Tree, visit: Visit) -> tuple[Tree, Sent]:
        def f(q: Tree, batch: Batch) -> Tensor:
            like = tree.select(task.init(), task.names)
            return task.loss(q["stats"] | tree.unravel(q["U"] @ q["v"], like), batch)

        both = {"U": down["U"], "v": client["v"], "stats": client["stats"]}
        both = self.fit(f, both, visit["U"], self.schedule.rate(self.lr, int(visit.round)))
        return {"v": both["v"], "stats": both["stats"]}, Sent(self.weigh(visit), {"U": both["U"]})

    def server_update(self, server: Tree, round: Round) -> Tree:
        return {**server, **self.server.step(server, {"U": round.mean["U"]})}

    def trained(self, down: Tree, sent: Sent, capacity: Capacity) -> Tree:
        return {**down, **sent.mean}

    def personal_plan(self, task: Task) -> Mapping[str, Amount]:
        return {"all": All()} if task.stats else {}

    def personal(self, task: Task, client: Tree, down: Tree, visit: Visit) -> Tree:
        v = self.coefficients(client, down, visit.common)
        return self.compose(task, self.rest(client, down), down["U"], v, visit)
