"""CFL: clients are split in two whenever their updates disagree, and each part goes on with a model of its own."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, TypeAlias

import torch
from annotated_types import Ge, Le
from torch import Tensor

from fedspan import tree
from fedspan.learn.aggregate import cluster_mean
from fedspan.learn.task import Task
from fedspan.method import (
    About,
    Begins,
    Capacity,
    Cautions,
    Discloses,
    Down,
    Federation,
    Observed,
    Round,
    Sent,
    Sharing,
    Visit,
)
from fedspan.method.fields import AtLeast1, Count, Decay
from fedspan.tree import Tree

Threshold: TypeAlias = Annotated[float, Ge(0), Le(math.inf)] | Literal["auto"]
"""Infinity says always (ε₁) or never (ε₂)."""


@dataclass(frozen=True, kw_only=True)
class Cfl(Sharing, Observed, Cautions):
    """Clustered federated learning. Sattler et al., IEEE TNNLS 2021.

    Symbols: theta = models stacked over clusters, cluster = the cluster of each client, delta = Δθ_k = the last update
    of each client, a and m = norm of the mean and largest norm of a cluster's updates in its last round.
    From round `start_round` a cluster of more than `min_size` known clients with a < ε₁ and m > ε₂ is split in two by
    the cosines of the updates: `complete` linkage as published code does, `single` linkage for the exact minimum of the
    largest similarity across. The norms depend on model and learning rate (the authors' notebook: 0.4 and 1.6): `auto`
    takes ε₁ = 0.4 m₀ and ε₂ = 0.8 m₀ with m₀ the m of the first round. With `gamma_max` a split must also have γ = √((1
    − largest similarity across)/2) > γ_max. Clients not sampled are placed by their last known update; one never heard
    stays with the larger part, and at its first update to the cluster most like it. Kept: h, the private head if
    `private_head`. Sent: delta, each client's own.
    """

    about = About(
        reference="Sattler et al., IEEE TNNLS 2021",
        discloses=Discloses(labels="set", model="whole", examples=False, resembles=True),
    )

    local_stats: ClassVar[bool] = False

    weighting: Literal["samples", "uniform"] = "uniform"
    eps_1: Threshold = "auto"
    """ε₁: a cluster is split only while its mean update's norm is below it; `auto`: 0.4 of round 1's largest."""
    eps_2: Threshold = "auto"
    """ε₂: a cluster is split only if its largest update's norm is above it; `auto`: 0.8 of round 1's."""
    gamma_max: Decay | None = None
    """γ_max, which γ = √((1 − largest similarity across)/2) of a split must exceed; not asked if not given."""
    min_size: AtLeast1 = 2
    """A cluster is split only if more than so many of its clients have been heard."""
    start_round: Count = 5
    """The first round in which clusters may be split."""
    linkage: Literal["complete", "single"] = "complete"
    """Linkage of the clustering that splits: `single` gives the exact minimum of the largest similarity across."""

    def begins(self) -> Begins:
        return Begins(self.start_round, "start_round", self.start_round, "it is FedAvg")

    def init_server(self, task: Task, federation: Federation) -> Tree:
        theta, n = super().init_server(task, federation)["theta"], federation.clients
        return {
            **self.server.begin({"theta": tree.map(lambda x: x[None].clone(), theta)}, 1),
            "delta": tree.map(lambda x: x.new_zeros(n, *x.shape), theta),
            "cluster": torch.zeros(n, dtype=torch.int64),
            "seen": torch.zeros(n, dtype=torch.bool),
            "a": torch.zeros(1, dtype=torch.float64),
            "m": torch.zeros(1, dtype=torch.float64),
            "m_0": torch.zeros((), dtype=torch.float64),
        }

    def download(self, server: Tree, ids: Tensor, capacity: Capacity, round: int) -> Down:
        return Down(own={"theta": tree.take(server["theta"], server["cluster"][ids])})

    def client_update(self, task: Task, client: Tree, down: Tree, visit: Visit) -> tuple[Tree, Sent]:
        theta, h = self.split(task, self.fit(task.loss, down["theta"] | client["h"], visit["train"]))
        delta = tree.sub(theta, down["theta"])  # Δθ_k = SGD(θ_c) − θ_c
        return {"h": h}, Sent(weight=self.weigh(visit), each={"delta": delta})

    def trained(self, down: Tree, sent: Sent, capacity: Capacity) -> Tree:
        return {"theta": tree.add(down["theta"], sent.each["delta"])}

    def server_update(self, server: Tree, round: Round) -> Tree:
        ids, cluster, heard, clusters = round.ids, server["cluster"], server["seen"], len(server["a"])
        delta, seen = tree.put(server["delta"], ids, round.each["delta"]), heard.index_fill(0, ids, True)
        a, m = self._norms(round, cluster, server["a"], server["m"])
        m_0 = server["m_0"] if bool(heard.any()) else m[0]
        eps_1 = 0.4 * float(m_0) if self.eps_1 == "auto" else self.eps_1
        eps_2 = 0.8 * float(m_0) if self.eps_2 == "auto" else self.eps_2
        parent = list(range(clusters))
        for c in sorted(set(cluster[ids].tolist())) if round.round >= self.start_round else []:
            known = ((cluster == c) & seen).nonzero().flatten()
            if len(known) > self.min_size and float(a[c]) < eps_1 and float(m[c]) > eps_2:
                direction = _directions(delta, known)
                part = self._bipartition(direction @ direction.T)  # stationary for all together, not for each
                if part is not None:
                    cluster = cluster.index_fill(0, known[part], len(parent))
                    parent.append(c)
        models = tree.take(
            {k: server[k] for k in ("theta", "optimizer") if k in server}, torch.tensor(parent, device=ids.device)
        )
        theta = models["theta"]
        step = cluster_mean(round.each["delta"], round.weights, cluster[ids], len(parent), tree.zeros_like(theta))
        a, m, moved = *self._norms(round, cluster, a[parent], m[parent]), cluster[ids]
        divided = {*parent[clusters:], *range(clusters, len(parent))}
        newcomers = ids[~heard[ids]]
        if clusters > 1 and len(newcomers):  # an earlier split left these where they were, as nobody had heard them
            known = heard.nonzero().flatten()
            S = _directions(delta, newcomers) @ _directions(delta, known).T
            for k, similar in zip(newcomers.tolist(), S):
                if int(cluster[k]) not in divided:
                    at = torch.tensor([k], device=ids.device)
                    cluster = cluster.index_fill(0, at, _nearest(similar, cluster[known], len(parent)))
        live = torch.zeros(len(parent), dtype=torch.bool, device=ids.device).index_fill(0, moved, True)
        return {
            **self.server.step(models, {"theta": tree.add(theta, step)}, live),  # θ_c ← θ_c + mean of its members' Δθ_k
            "delta": delta,
            "cluster": cluster,
            "seen": seen,
            "a": a,
            "m": m,
            "m_0": m_0,
        }

    def _norms(self, round: Round, cluster: Tensor, a: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
        """‖mean Δθ_k‖ and max ‖Δθ_k‖ of every cluster; a cluster nobody reported for keeps what it had."""
        updates = tree.matrix(round.each["delta"], len(round.ids)).to(torch.float64)
        for c in sorted(set(cluster[round.ids].tolist())):
            here = cluster[round.ids] == c
            w = round.weights[here].to(torch.float64)
            at = torch.tensor([c], device=cluster.device)
            a = a.index_fill(0, at, float((w @ updates[here] / w.sum()).norm()))
            m = m.index_fill(0, at, float(updates[here].norm(dim=1).max()))
        return a, m

    def _bipartition(self, S: Tensor) -> Tensor | None:
        """Which clients form the smaller part; None if the parts are too much alike."""
        from sklearn.cluster import AgglomerativeClustering

        model = AgglomerativeClustering(n_clusters=2, metric="precomputed", linkage=self.linkage)
        part = torch.from_numpy(model.fit_predict(1 - S.cpu().numpy())).bool().to(S.device)
        part = ~part if 2 * int(part.sum()) > len(part) else part
        across = float(S[~part][:, part].max())
        gamma = math.sqrt(max(0.0, 1 - across) / 2)
        return part if self.gamma_max is None or gamma > self.gamma_max else None

    def size(self, server: Tree) -> float:
        """Root mean square of the clusters' models: a split is no growth."""
        return math.sqrt(float(tree.squared_norm(server["theta"])) / len(server["a"]))

    def monitor(self, server: Tree) -> dict[str, float]:
        """The number of clusters, and a and m of each, to set the thresholds by."""
        norms = {f"{name}_{c}": float(x) for name in ("a", "m") for c, x in enumerate(server[name])}
        return {"clusters": float(len(server["a"])), **norms}


def _directions(delta: Tree, ids: Tensor) -> Tensor:
    """Last known updates of these clients at length 1 (an update of zero stays zero), whose products are cosines.

    Only where they are asked for: those of a thousand clients cost more than a round of training.
    """
    rows = tree.matrix(tree.take(delta, ids), len(ids)).to(torch.float64)
    length: Tensor = rows.norm(dim=1, keepdim=True)
    return rows / length.clamp_min(1e-12)


def _nearest(similar: Tensor, cluster: Tensor, clusters: int) -> int:
    """The cluster whose clients are most alike on average."""
    member = torch.nn.functional.one_hot(cluster, clusters).to(similar.dtype)
    return int((similar @ member / member.sum(0).clamp_min(1)).argmax())
