"""pFL-MF as the public code runs it: FedPer on (U, v). Its own training function stands outside its class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from fedspan import tree
from fedspan.learn.batches import All, Amount, Batch, Epochs
from fedspan.learn.optimizer import Schedule
from fedspan.learn.task import Task
from fedspan.method import (
    About,
    Adapts,
    Averaging,
    Capacity,
    Cautions,
    ClientInfo,
    Discloses,
    Down,
    Federation,
    Round,
    Sent,
    Visit,
    norm_of_state,
)
from fedspan.method.fields import AtLeast1, NonNegative
from fedspan.methods.pfl_mf.coefficients import InSubspace
from fedspan.methods.pfl_mf.gauge import common_v, dtype_of, need_rank, need_sgd, standard_columns
from fedspan.randomness import key, normal, uniform
from fedspan.tree import Params, Tree


@dataclass(frozen=True, kw_only=True)
class PflMfJoint(Averaging, InSubspace, Adapts, Cautions):
    """pFL-MF as the published code runs it: U and v are trained together for the run's epochs, and both are averaged.

    All clients start from one v. With `start = "published"` it is normal, with entries of U uniform in ±1/√r, which
    makes weights several times as large as a network's usual ones; with `"standard"` columns of U are usual starts of
    the network, and v has length 1. A client keeps the v it has trained; one that was never sampled has the mean v of
    the common model, and starts from it. Biases of convolutional networks (and scales of norms, of which the published
    ones have none) are outside U v, in theta, and start from zero. Kept: v. Sent: U, v and theta, (d + 1) r + d'
    numbers.
    """

    about = About(
        family="pfl-mf",
        reference="Dadras, Stich and Yurtsever, TMLR 2025",
        discloses=Discloses(labels="set", model="whole", private=("v",), examples=True, resembles=True),
    )

    lr: NonNegative = 0.05
    """The learning rate of U and v."""
    schedule: Schedule = Schedule()
    """How the learning rate falls over the rounds."""
    rank: AtLeast1 = 10
    """r, the dimension of the subspace in which all client models lie."""
    start: Literal["standard", "published"] = "standard"
    """How U and v start: with the usual size of the network's weights, or as in the published code."""

    def __post_init__(self) -> None:
        super().__post_init__()
        need_sgd(self)

    def factorised(self, task: Task) -> list[str]:
        """Return the names of the parameters that are U v: all, but of a convolutional network weights only."""
        start = task.init()
        weights_only = task.has(nn.Conv1d, nn.Conv2d, nn.Conv3d)
        return [k for k in task.names if start[k].ndim > 1 or not weights_only]

    def directions(self) -> int:
        return self.rank

    def plan(self) -> Mapping[str, Amount]:
        return {"U": Epochs()}

    def init_server(self, task: Task, federation: Federation) -> Tree:
        names, start = self.factorised(task), task.init()
        need_rank(self, self.rank, task, names)
        d = sum(start[k].numel() for k in names)
        if self.start == "standard":
            U = standard_columns(task, names, self.rank, federation.seed)
        else:
            U = (2 * uniform(key(federation.seed, "U"), (d, self.rank), dtype_of(task)) - 1) / self.rank**0.5
        theta = tree.without(start, [*names, *task.stats])
        theta = {k: torch.zeros_like(p) if k.endswith("bias") else p for k, p in theta.items()}
        return self.server.begin({"U": U, "v": self._first_v(task, federation.seed), "theta": theta})

    def init_client(self, task: Task, who: ClientInfo) -> Tree:
        stats = tree.select(task.init(), task.stats)
        return {"v": self._first_v(task, who.seed), "trained": torch.tensor(False), "stats": stats}

    def _first_v(self, task: Task, seed: int) -> Tensor:
        if self.start == "standard":
            return common_v(task, self.rank)
        return normal(key(seed, "v"), (self.rank,), dtype_of(task))

    def download(self, server: Tree, ids: Tensor, capacity: Capacity, round: int) -> Down:
        return Down(shared={k: server[k] for k in ("U", "v", "theta")})

    def coefficients(self, client: Tree, down: Tree, common: Tree) -> Tensor:
        """Return the v this client has trained, or the mean v if it was never sampled."""
        return torch.where(client["trained"], client["v"], down["v"])

    def client_update(self, task: Task, client: Tree, down: Tree, visit: Visit) -> tuple[Tree, Sent]:
        like = tree.select(task.init(), self.factorised(task))

        def f(q: Tree, batch: Batch) -> Tensor:
            params: Params = q["rest"] | tree.unravel(q["U"] @ q["v"], like)
            return task.loss(params, batch)  # f_i(U v_i), eq. (6)

        v, rest = self.coefficients(client, down, visit.common), self.rest(client, down)
        rate = self.schedule.rate(self.lr, int(visit.round))
        new = self.fit(f, {"U": down["U"], "v": v, "rest": rest}, visit["U"], rate)
        theta, stats = tree.without(new["rest"], task.stats), tree.select(new["rest"], task.stats)
        kept = {"v": new["v"], "trained": torch.ones_like(client["trained"]), "stats": stats}
        return kept, Sent(self.weigh(visit), {"U": new["U"], "v": new["v"], "theta": theta})

    def server_update(self, server: Tree, round: Round) -> Tree:
        return self.server.step(server, {k: round.mean[k] for k in ("U", "v", "theta")})

    def trained(self, down: Tree, sent: Sent, capacity: Capacity) -> Tree:
        """Return what the client made of the download."""
        return {**down, **sent.mean}

    def personal_plan(self, task: Task) -> Mapping[str, Amount]:
        return {"all": All()} if task.stats else {}

    def personal(self, task: Task, client: Tree, down: Tree, visit: Visit) -> Tree:
        v = self.coefficients(client, down, visit.common)
        return self.compose(task, self.rest(client, down), down["U"], v, visit)

    def size(self, server: Tree) -> float:
        """Return the norm of U, v and theta, which are averaged as they are."""
        return norm_of_state(server)
