"""IFCA: k models, and every client trains the one that fits its data best."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedspan import tree
from fedspan.learn.aggregate import cluster_mean
from fedspan.learn.batches import All, Amount, Batches, Epochs
from fedspan.learn.sgd import mean_gradient
from fedspan.learn.task import Task
from fedspan.method import About, Capacity, Discloses, Down, Federation, Judged, Round, Sent, Sharing, Visit
from fedspan.method.fields import AtLeast1
from fedspan.tree import Params, Tree


@dataclass(frozen=True, kw_only=True)
class Ifca(Sharing, Judged):
    """IFCA. Ghosh et al., NeurIPS 2020, Algorithm 1.

    Symbols: theta = the models θ_j stacked over `clusters` k, s = the one-hot vector of the model a client chose.
    All k models are sent; client i takes ĵ = argmin_j F_i(θ_j) over its training examples and trains θ_ĵ. With
    `averaging = "model"` (option II) the server puts the mean of its members in the place of θ_j; with "gradient"
    (option I) clients send one full gradient step and θ_j moves by the sum of its members' steps over the number of all
    participants. A model nobody chose stays. The first model is the common start, the others are independent draws;
    the paper restarts with other draws if clusters collapse: use another seed. `clustered = "head"` is the paper's
    weight sharing: bodies are averaged over all, only heads form clusters. Before use a client chooses again.
    Kept: h, the private head if `private_head`. Sent: theta and s, each client's own.

    Settled with the published code: uniform means, τ full-batch local steps, random starts, the choice by mean loss.
    """

    about = About(
        reference="Ghosh et al., NeurIPS 2020",
        discloses=Discloses(labels="set", model="whole", examples=False, resembles=True),
    )

    local_stats: ClassVar[bool] = False

    weighting: Literal["samples", "uniform"] = "uniform"
    clusters: AtLeast1 = 4
    """k, the number of models."""
    averaging: Literal["model", "gradient"] = "model"
    """Whether clients send trained models (option II of the paper), or one full gradient step (option I)."""
    clustered: Literal["all", "head"] = "all"
    """Whether whole models form clusters, or only heads over a common body."""

    def plan(self) -> Mapping[str, Amount]:
        return {"train": Epochs(), "all": All()}

    def personal_plan(self, task: Task) -> Mapping[str, Amount]:
        return {"all": All()}

    def init_server(self, task: Task, federation: Federation) -> Tree:
        first = task.init()
        starts = [first, *(task.fresh(federation.seed, "ifca", j) for j in range(1, self.clusters))]
        if self.clustered == "head":
            starts = [first | tree.select(start, task.need_head()) for start in starts]
        theta = tree.stack([self.split(task, start)[0] for start in starts])
        return self.server.begin({"theta": theta}, self.clusters)

    def client_update(self, task: Task, client: Tree, down: Tree, visit: Visit) -> tuple[Tree, Sent]:
        s, theta = self._choice(task, client, down, visit["all"])
        if self.averaging == "gradient":
            start = tree.select(theta | client["h"], task.names)
            rest = tree.select(theta | client["h"], task.stats)
            g = mean_gradient(lambda p, b: task.loss(p | rest, b), start, visit["all"])
            new = tree.add(start, g, -self.lr) | rest
        else:
            new = self.fit(task.loss, theta | client["h"], visit["train"])
        theta, h = self.split(task, new)
        return {"h": h}, Sent(weight=self.weigh(visit), each={"theta": theta, "s": s})

    def unchanged(self, sent: Sent, down: Tree) -> Tree:
        """Return the model of the cluster that the client chose."""
        return {"theta": tree.take(down["theta"], sent.each["s"].to(torch.int64).argmax())}

    def trained(self, down: Tree, sent: Sent, capacity: Capacity) -> Tree:
        # Whichever model it chooses then is the one it made.
        return {"theta": tree.map(lambda old, new: new.expand_as(old), down["theta"], sent.each["theta"])}

    def _choice(self, task: Task, client: Tree, down: Tree, stream: Batches) -> tuple[Tensor, Params]:
        """The model with the least loss on a client's examples: its one-hot vector and its parameters."""
        batch = stream.whole()
        losses = []
        with torch.no_grad():
            for j in range(self.clusters):
                output = task.predict(tree.take(down["theta"], j) | client["h"], batch.x)
                losses.append(task.mean_loss(output, batch))
        F = torch.stack(losses)
        best = F.argmin()  # ĵ = argmin_j F_i(θ_j); the first of equals
        theta: Params = tree.map(lambda a: a.index_select(0, best[None])[0], down["theta"])
        return torch.arange(self.clusters, device=best.device) == best, theta

    def server_update(self, server: Tree, round: Round) -> Tree:
        cluster = round.each["s"].to(torch.int64).argmax(1)
        old, w = server["theta"], round.weights.to(torch.float64)
        mean = cluster_mean(round.each["theta"], round.weights, cluster, self.clusters, old)
        member = torch.nn.functional.one_hot(cluster, self.clusters).to(torch.float64)
        if self.averaging == "gradient":
            share = w @ member / w.sum()  # θ_j ← θ_j − (γ/m) Σ_i s_ij g_i
            mean = tree.map(lambda a, b: b + share.reshape(-1, *[1] * (a.ndim - 1)).to(a.dtype) * (a - b), mean, old)
        if self.clustered == "head":
            # Bodies are one: every model gets the mean over all participants.
            names = self._bodies(round.each["theta"], server)
            everyone = cluster_mean(tree.select(round.each["theta"], names), w, 0 * cluster, 1, tree.select(old, names))
            mean = mean | tree.map(lambda a: a[:1].expand(self.clusters, *a.shape[1:]).clone(), everyone)
        live = member.any(0) if self.clustered == "all" else member.new_ones(self.clusters, dtype=torch.bool)
        return self.server.step(server, {"theta": mean}, live)

    def _bodies(self, sent: Params, server: Tree) -> list[str]:
        """Names of what all models have in common: what was alike at the start stays alike."""
        return [k for k in sent if bool((server["theta"][k] == server["theta"][k][:1]).all())]

    def personal(self, task: Task, client: Tree, down: Tree, visit: Visit) -> Tree:
        theta: Tree = self._choice(task, client, down, visit["all"])[1]
        return {**theta, **client["h"]}

    def download(self, server: Tree, ids: Tensor, capacity: Capacity, round: int) -> Down:
        return Down(shared={"theta": server["theta"]})
