"""pFedSim: after a warm-up, bodies are mixed by how alike the clients' classifiers are."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedspan import tree
from fedspan.learn.aggregate import mix
from fedspan.learn.task import Task
from fedspan.method import (
    About,
    Announces,
    Begins,
    Capacity,
    Cautions,
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
from fedspan.method.fields import Count
from fedspan.tree import Params, Tree


@dataclass(frozen=True, kw_only=True)
class PFedSim(Sharing, Announces, Observed, Cautions):
    """pFedSim. Tan et al., 2023.

    Symbols: theta = the global model during `warmup_rounds` of FedAvg (the paper's ρT), then the clients' bodies φ_i on
    the server and a mixture Σ_j a_ij φ_j on the way down; h = classifiers ω_i; S = similarities s_ij, the mean over
    classes of the cosine between classifier rows, not below 0, known for clients that reported in one round. a_ij ∝
    −log(1 − s_ij), the own similarity set to 0.9999. When the warm-up ends all clients are told its classifier. With
    `private_head` classifiers are never averaged, not even in the warm-up, which alone has a server optimiser. Kept: h.
    Sent: theta during the warm-up, then theta and h, each client's own.
    """

    about = About(
        reference="Tan et al., 2023",
        discloses=Discloses(labels="set", model="whole", private=("h",), examples=True, resembles=True),
    )

    warmup_rounds: Count = 5
    """Rounds of FedAvg before every client has a model of its own: the paper's ρT."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.warmup_rounds:
            self.refuse_server_optimizer("only a warm-up has one model to step with")

    def begins(self) -> Begins:
        return Begins(self.warmup_rounds + 1, "warmup_rounds", self.warmup_rounds, "it is FedAvg")

    def init_server(self, task: Task, federation: Federation) -> Tree:
        start = tree.without(task.init(), task.stats)
        head = task.need_head()
        state = {
            "theta": tree.without(start, head),
            "h": tree.select(start, head),
            "S": torch.eye(federation.clients, dtype=torch.float64),
            "apart": torch.tensor(-1),  # the round in which the clients parted
        }
        if not self.warmup_rounds:
            return self._part(state, 0)
        averaged = ("theta",) if self.private_head else ("theta", "h")
        return {**state, **self.server.begin({k: state[k] for k in averaged})}

    def init_client(self, task: Task, who: ClientInfo) -> Tree:
        start = task.init()
        h, stats = tree.select(start, task.need_head()), tree.select(start, task.stats)
        return {"h": h, "stats": stats, "own": torch.tensor(self.private_head)}

    # ---- clients know that the warm-up is over by the classifier they are told then

    def common(self, task: Task, federation: Federation) -> Tree:
        if self.warmup_rounds:
            return {}
        return {"h": {} if self.private_head else tree.select(task.init(), task.need_head())}

    def announce(self, server: Tree, round: int) -> Tree | None:
        if int(server["apart"]) != round:
            return None
        return {"h": {}} if self.private_head else {"h": tree.take(server["h"], 0)}

    def hear(self, common: Tree, news: Tree) -> Tree:
        return news

    def _part(self, server: Tree, round: int) -> Tree:
        """Every client gets a model of its own, the same for all."""
        n = len(server["S"])
        own = {k: tree.map(lambda a: a.expand(n, *a.shape).clone(), server[k]) for k in ("theta", "h")}
        return {"S": server["S"], **own, "apart": torch.tensor(round)}

    def download(self, server: Tree, ids: Tensor, capacity: Capacity, round: int) -> Down:
        if int(server["apart"]) >= 0:
            return Down(own={"theta": mix(server["theta"], self.mixing(server["S"])[ids])})  # φ_i ← Σ_j a_ij φ_j
        return Down(shared={k: server[k] for k in (("theta",) if self.private_head else ("theta", "h"))})

    def mixing(self, S: Tensor) -> Tensor:
        """Row-stochastic a_ij ∝ −log(1 − s_ij)."""
        a = -torch.log(1 - S.clamp(0, 0.9999).fill_diagonal_(0.9999))
        return a / a.sum(1, keepdim=True)

    def client_update(self, task: Task, client: Tree, down: Tree, visit: Visit) -> tuple[Tree, Sent]:
        new = self.fit(task.loss, self._model(client, down, visit), visit["train"])
        stats, h = tree.select(new, task.stats), tree.select(new, task.head)
        theta = tree.without(new, [*task.stats, *task.head])
        warm = "h" not in visit.common
        own = torch.full_like(client["own"], self.private_head or not warm)
        kept = {"h": h, "stats": stats, "own": own}
        if warm:
            return kept, Sent(self.weigh(visit), {"theta": theta} if self.private_head else {"theta": theta, "h": h})
        return kept, Sent(self.weigh(visit), each={"theta": theta, "h": h})

    def _model(self, client: Tree, down: Tree, visit: Visit) -> Params:
        told = down.get("h") or visit.common.get("h")
        h = tree.where(client["own"], client["h"], told) if told else client["h"]
        return {**down["theta"], **h, **client["stats"]}

    def server_update(self, server: Tree, round: Round) -> Tree:
        if int(server["apart"]) < 0:
            server = {**server, **self.server.step(server, round.mean)}
            return self._part(server, round.round) if round.round >= self.warmup_rounds else server
        ids = round.ids
        classes = [a.to(torch.float64) for a in round.each["h"].values() if a.ndim == 3]  # [S, C, D]
        unit = [torch.nn.functional.normalize(a, dim=2, eps=1e-12) for a in classes]
        total = torch.stack([torch.einsum("icd,jcd->ij", u, u) for u in unit]).sum(0)
        similar = total / sum(u.shape[1] for u in unit)
        S = server["S"].clone()
        S[ids[:, None], ids] = similar.clamp(0, 1)  # s_ij = max(0, mean over classes of cos(ω_i,c, ω_j,c))
        return {
            **server,
            "theta": tree.put(server["theta"], ids, round.each["theta"]),
            "h": tree.put(server["h"], ids, round.each["h"]),
            "S": S,
        }

    def personal(self, task: Task, client: Tree, down: Tree, visit: Visit) -> Tree:
        params = self._model(client, down, visit)
        return task.estimate_statistics(params, visit["all"]) if "all" in visit.batches else params

    def size(self, server: Tree) -> float:
        """Root mean square of the clients' models."""
        models = len(server["S"]) if int(server["apart"]) >= 0 else 1
        return math.sqrt(float(tree.squared_norm((server["theta"], server["h"]))) / models)
