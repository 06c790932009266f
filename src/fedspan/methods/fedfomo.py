"""FedFOMO: clients download each other's models and take what helps on their own validation data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import Gt, Lt
from torch import Tensor

from fedspan import tree
from fedspan.learn.batches import Amount, Batches, Epochs, Validation
from fedspan.learn.task import Task
from fedspan.method import (
    About,
    Capacity,
    ClientInfo,
    Discloses,
    Down,
    Federation,
    Observed,
    Round,
    Sent,
    Sharing,
    Visit,
)
from fedspan.method.fields import Count, Fraction, NonNegative
from fedspan.randomness import fold, key, uniform
from fedspan.tree import Params, Tree


@dataclass(frozen=True, kw_only=True)
class FedFomo(Sharing, Observed):
    """FedFOMO. Zhang et al., ICLR 2021.

    Symbols: theta = the client's model θ_k (on the server: every client's last upload), P = affinities, w = weights of
    the downloaded models, models = M. A client holds out `validation` of its training data and moves along the models
    that lower its loss there. The server sends the M models of largest affinity, those of clients it never heard last;
    each place is given to a random one with probability ε_t = `epsilon` − `epsilon_decay`·(t − 1), not below 0.
    Kept: theta (and h, the private head if `private_head`). Sent: theta and w. Clients see each other's models.
    """

    about = About(
        reference="Zhang et al., ICLR 2021",
        discloses=Discloses(labels="set", model="whole", private=("theta",), examples=False, resembles=True),
    )

    weighting: Literal["samples", "uniform"] = "uniform"
    models: Count = 5
    """M, the number of other clients' models that a client receives in a round."""
    validation: Annotated[float, Gt(0), Lt(1)] = 0.2
    """Share of its training data that a client holds out to judge the models by."""
    epsilon: Fraction = 0.3
    """ε, the probability in the first round that one of the M models is a random one."""
    epsilon_decay: NonNegative = 0.05
    """What is taken from ε with every round, until it is 0."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.refuse_server_optimizer("clients mix the models themselves")

    def plan(self) -> Mapping[str, Amount]:
        return {"train": Epochs(), "validation": Validation(self.validation)}

    def init_server(self, task: Task, federation: Federation) -> Tree:
        theta, n = super().init_server(task, federation)["theta"], federation.clients
        return {
            "theta": tree.map(lambda a: a.expand(n, *a.shape).clone(), theta),
            "P": torch.eye(n, dtype=torch.float64),
            "seen": torch.zeros(n, dtype=torch.bool),
            "key": key(federation.seed, "explore"),
        }

    def init_client(self, task: Task, who: ClientInfo) -> Tree:
        theta, h = self.split(task, task.init())
        return {"theta": theta, "h": h}

    def chosen(self, server: Tree, ids: Tensor, round: int) -> Tensor:
        """Whose models each of the clients `ids` receives in a round, [S, M]; never its own."""
        n = len(server["P"])
        m = min(self.models, n - 1)
        explore = max(0.0, self.epsilon - self.epsilon_decay * max(0, round - 1))
        rows = []
        for i in ids.tolist():
            draw = fold(fold(server["key"], round), i)
            liking = torch.where(server["seen"], server["P"][i], -math.inf)  # who never sent a model comes last
            order = liking.argsort(descending=True, stable=True)
            order = order[order != i]
            curious = int((uniform(fold(draw, 0), (m,)) < explore).sum())
            best, rest = order[: m - curious], order[m - curious :]
            rows.append(torch.cat([best, rest[uniform(fold(draw, 1), (len(rest),)).argsort()[:curious]]]))
        return torch.stack(rows)

    def download(self, server: Tree, ids: Tensor, capacity: Capacity, round: int) -> Down:
        return Down(own={"theta": tree.take(server["theta"], self.chosen(server, ids, round))})

    def client_update(self, task: Task, client: Tree, down: Tree, visit: Visit) -> tuple[Tree, Sent]:
        old, h, others = client["theta"], client["h"], down["theta"]
        m = len(next(iter(others.values()))) if others else 0
        held = self._loss(task, old | h, visit["validation"])
        weights: list[Tensor] = []
        steps = [tree.sub(tree.take(others, j), old) for j in range(m)]
        for j, step in enumerate(steps):
            gain = held - self._loss(task, tree.take(others, j) | h, visit["validation"])
            far = torch.stack([a.square().sum() for a in tree.leaves(step)]).sum().sqrt()
            weights.append(gain / (far + 1e-5))  # w_j = (L(θ_k) − L(θ_j)) / ‖θ_j − θ_k‖
        w = torch.stack(weights) if weights else held.new_zeros(0)
        share = w.clamp_min(0) / w.clamp_min(0).sum().clamp_min(1e-30)  # all or nothing: no gain, no change
        theta = old
        for j, step in enumerate(steps):
            theta = tree.add(theta, step, share[j])  # θ_k ← θ_k + Σ_j w_j (θ_j − θ_k)
        theta, h = self.split(task, self.fit(task.loss, theta | h, visit["train"]))
        return {"theta": theta, "h": h}, Sent(weight=self.weigh(visit), each={"theta": theta, "w": w})

    def _loss(self, task: Task, params: Params, batches: Batches) -> Tensor:
        """Mean loss over all examples of a stream, in evaluation mode."""
        batch = batches.whole()
        with torch.no_grad():
            return task.mean_loss(task.predict(params, batch.x), batch)

    def server_update(self, server: Tree, round: Round) -> Tree:
        at = self.chosen(server, round.ids, round.round)
        gained = torch.zeros_like(server["P"][round.ids]).scatter(1, at, round.each["w"].to(torch.float64))
        return {
            "theta": tree.put(server["theta"], round.ids, round.each["theta"]),
            "P": server["P"].index_add(0, round.ids, gained),  # p_k ← p_k + w
            "seen": server["seen"].index_fill(0, round.ids, True),
            "key": server["key"],
        }

    def personal(self, task: Task, client: Tree, down: Tree, visit: Visit) -> Tree:
        return super().personal(task, client, {"theta": client["theta"]}, visit)

    def size(self, server: Tree) -> float:
        """Root mean square of the clients' models."""
        return math.sqrt(float(tree.squared_norm(server["theta"])) / max(1, len(server["P"])))
