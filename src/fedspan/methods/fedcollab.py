"""FedCollab: who trains with whom is settled first, from how far apart the clients' data lie and how many they are."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from annotated_types import Ge
from torch import Tensor

from fedspan import tree
from fedspan.errors import ConfigError
from fedspan.learn.aggregate import cluster_mean
from fedspan.learn.batches import Batch
from fedspan.learn.class_features import class_matrix, members
from fedspan.learn.task import Task
from fedspan.method import (
    About,
    Announces,
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
from fedspan.method.fields import AtLeast1, NonNegative
from fedspan.randomness import fold, generator, key, normal
from fedspan.tree import Params, Tree


@dataclass(frozen=True, kw_only=True)
class FedCollab(Sharing, Announces, Observed):
    """FedCollab. Bao et al., ICML 2023, with FedAvg inside the coalitions.

    Symbols: D = discriminators of all pairs of clients, d = distances d_ij, coalition = the coalition of each client,
    theta = models stacked over coalitions, n = examples of each client, C = `weight_of_samples`.
    For `distance_rounds` two clients at a time train a small network by FedAvg to tell whose an example (x, y) is; d_ij
    = largest sum of the two shares it gets right − 1. Coalitions then minimise the mean over clients of C/√(examples of
    the coalition) + Σ_j (n_j/examples) d_ij: beginning alone, clients move one after another wherever the bound falls
    most, until none does. From then on it is FedAvg inside each coalition. A pair is trained further only in rounds in
    which both answer; who never met counts as 1 apart, who was never heard stays alone. For n clients n(n − 1)/2
    networks are needed, as is the paper's setting (cross-silo): at most 50 clients. Kept: id (and h, the private head
    if `private_head`). Sent: first D and a, the shares that were right, then theta, each client's own.

    Settled with the published code: one hidden layer of 200, labels counting twice, scaled by C/√(C − 1); the search.
    There a held-out part can be used for the shares; here they are those of the training examples, its default.
    """

    about = About(
        reference="Bao et al., ICML 2023",
        needs_classes=True,
        discloses=Discloses(labels="set", model="part", examples=True, resembles=True),
    )

    local_stats: ClassVar[bool] = False

    private_head: bool = True
    """Whether the head stays on the client: a coalition that was put together wrongly then costs a client little."""
    distance_rounds: Annotated[int, Ge(2)] = 5
    """Rounds in which pairs of clients learn to tell their data apart, before coalitions are formed."""
    distance_hidden: AtLeast1 = 200
    """Units in the hidden layer of a pair's discriminator."""
    lr_distance: NonNegative = 1.0
    """Learning rate of the discriminators."""
    weight_of_samples: NonNegative = 2.0
    """C, how much a coalition's number of examples counts against the distances within it: the more, the larger the
    coalitions."""

    def common(self, task: Task, federation: Federation) -> Tree:
        return {"key": key(federation.seed, "discriminator")}

    def init_client(self, task: Task, who: ClientInfo) -> Tree:
        return {**super().init_client(task, who), "id": torch.tensor(who.id)}

    def init_server(self, task: Task, federation: Federation) -> Tree:
        n = federation.clients
        if n > 50:
            raise ConfigError(
                f"FedCollab: there must be at most 50 clients, as each pair of them trains a network. Got {n}; use ifca"
                " or cfl."
            )
        class_matrix(task, "FedCollab")
        theta, _ = self.split(task, task.init())
        return {
            **self.server.begin({"theta": tree.map(lambda a: a[None].clone(), theta)}, 1),
            "coalition": torch.zeros(n, dtype=torch.int64),
            "n": torch.zeros(n, dtype=torch.float64),
            "d": torch.eye(n, dtype=torch.float64) - 1,  # −1: not known
            "key": key(federation.seed, "discriminator"),
            "settled": torch.tensor(False),
        }

    def download(self, server: Tree, ids: Tensor, capacity: Capacity, round: int) -> Down:
        own: Tree = {"theta": tree.take(server["theta"], server["coalition"][ids])}
        if "D" in server and round <= self.distance_rounds:
            rows = torch.stack([_pairs(i, len(server["n"])) for i in ids.tolist()]).to(ids.device)
            return Down(own={"D": tree.take(server["D"], rows)})
        return Down(own={} if 0 < round <= self.distance_rounds and not bool(server["settled"]) else own)

    # ------------------------------------------------------------------------------------------------ the client

    def client_update(self, task: Task, client: Tree, down: Tree, visit: Visit) -> tuple[Tree, Sent]:
        weight = self.weigh(visit)
        if int(visit.round) > self.distance_rounds:
            theta, h = self.split(task, self.fit(task.loss, down["theta"] | client["h"], visit["train"]))
            return {**client, "h": h}, Sent(weight, each={"theta": theta})
        classes = len(task.init()[class_matrix(task, "FedCollab")])
        if "D" in down:
            D: Params = down["D"]
        else:  # the server cannot know yet how large an example is
            first = _drawn(
                visit.common["key"], visit["train"].x[0].numel(), classes, self.distance_hidden, weight.dtype
            )
            D = {name: one.expand(visit.clients - 1, *one.shape) + 0 * weight for name, one in first.items()}
        others = torch.arange(visit.clients - 1, device=weight.device)
        side = (others < client["id"]).to(weight.dtype)  # 1 for the second of a pair

        def tell_apart(D: Params, batch: Batch) -> Tensor:
            guess = _discriminate(D, batch, classes)
            wrong = F.binary_cross_entropy_with_logits(guess, side.expand_as(guess), reduction="none")
            return batch.mean(wrong.sum(1))  # the pairs share no parameters: each gets its own gradient

        total = [
            ((_discriminate(D, b, classes) > 0) == (side > 0)).to(weight.dtype) * b.w[:, None] for b in visit["train"]
        ]
        count = sum(b.w.sum() for b in visit["train"])
        right = torch.stack([t.sum(0) for t in total]).sum(0) / count if total else torch.zeros_like(side)
        new: Params = self.descend(tell_apart, D, visit["train"], self.lr_distance)
        return client, Sent(weight, each={"D": new, "a": right})

    # ------------------------------------------------------------------------------------------------ the server

    def server_update(self, server: Tree, round: Round) -> Tree:
        server = {**server, "n": server["n"].index_copy(0, round.ids, round.n.to(torch.float64))}
        if "D" in round.each:
            server = self._learn(server, round)
            return self._settled(server) if round.round >= self.distance_rounds else server
        if not bool(server["settled"]):
            server = self._settled(server)
        here, models = server["coalition"][round.ids], int(server["coalition"].max()) + 1
        theta = cluster_mean(round.each["theta"], round.weights, here, models, server["theta"])
        live = torch.zeros(models, dtype=torch.bool, device=here.device).index_fill(0, here, True)
        return {**server, **self.server.step(server, {"theta": theta}, live)}

    def _learn(self, server: Tree, round: Round) -> Tree:
        """Means over both members of each pair, and the distances they show."""
        ids, sent, n = round.ids.tolist(), round.each["D"], len(server["n"])
        D: Params = server.get("D", {})
        if not D:
            (inputs, hidden), classes = sent["x"].shape[-2:], sent["y"].shape[-2]
            first = _drawn(server["key"], inputs, classes, hidden, sent["x"].dtype)
            D = {name: one.expand(n * (n - 1) // 2, *one.shape) for name, one in first.items()}
        D, d = {name: a.clone() for name, a in D.items()}, server["d"].clone()
        at = {i: k for k, i in enumerate(ids)}
        for i in ids:
            for j in (j for j in ids if j > i):
                p, q, pair = at[i], at[j], _pair(i, j, n)
                for name, a in sent.items():
                    D[name][pair] = (a[p, j - 1] + a[q, i]) / 2
                if "D" in server:  # what was sent down, of which both now say how often it was right
                    apart = float(round.each["a"][p, j - 1] + round.each["a"][q, i]) - 1
                    d[i, j] = d[j, i] = max(float(d[i, j]), apart, 0.0)
        return {**server, "D": D, "d": d}

    def _settled(self, server: Tree) -> Tree:
        n: Tensor = server["n"]
        coalition = self.coalitions(_known(server["d"]).cpu(), n.cpu()).to(n.device)  # thousands of small sums
        count = int(coalition.max()) + 1
        models = {"theta": tree.map(lambda a: a[:1].expand(count, *a.shape[1:]).clone(), server["theta"])}
        left = {k: v for k, v in server.items() if k not in ("D", "optimizer")}
        return {**left, **self.server.begin(models, count), "coalition": coalition, "settled": torch.tensor(True)}

    def bound(self, d: Tensor, n: Tensor, coalition: Tensor) -> float:
        """The mean over clients of C/√(examples of its coalition) + Σ_j (n_j/examples) d_ij."""
        together = (coalition[:, None] == coalition[None]).to(d.dtype) * n
        m = together.sum(1).clamp_min(1)
        return float((self.weight_of_samples / m.sqrt() + (together * d).sum(1) / m)[n > 0].mean())

    def coalitions(self, d: Tensor, n: Tensor) -> Tensor:
        """The coalition of each client: from all alone, single moves that lower the bound most, until none does."""
        known = (n > 0).nonzero().flatten().tolist()
        coalition = torch.arange(len(n))
        for sweep in range(100 if known else 0):
            moved = False
            for i in generator(0, "coalitions", sweep).permutation(known).tolist():
                best, least = int(coalition[i]), self.bound(d, n, coalition)
                for c in known:
                    value = self.bound(d, n, coalition.index_fill(0, torch.tensor([i]), c))
                    if value < least - 1e-12:
                        best, least, moved = c, value, True
                coalition = coalition.index_fill(0, torch.tensor([i]), best)
            if not moved:
                break
        names: dict[int, int] = {}
        return torch.tensor([names.setdefault(c, len(names)) for c in coalition.tolist()])

    def personal(self, task: Task, client: Tree, down: Tree, visit: Visit) -> Tree:
        if "theta" not in down:  # the coalitions are not settled: nobody has trained
            return {**self.split(task, task.init())[0], **client["h"]}
        return super().personal(task, client, down, visit)

    def size(self, server: Tree) -> float:
        """The norm of the models, on average."""
        return math.sqrt(float(tree.squared_norm(server["theta"])) / (int(server["coalition"].max()) + 1))

    def monitor(self, server: Tree) -> dict[str, float]:
        """The number of coalitions and the mean distance."""
        return {"coalitions": float(int(server["coalition"].max()) + 1), "distance": float(_known(server["d"]).mean())}

    def matrices(self, server: Tree) -> dict[str, Tensor]:
        """Closeness of the clients' data, 1 − d."""
        return {"closeness": 1 - _known(server["d"])}


def _known(d: Tensor) -> Tensor:
    """Distances with 1, the largest, for pairs that never met."""
    return torch.where(d < 0, torch.ones_like(d), d)


def _drawn(k: Tensor, inputs: int, classes: int, hidden: int, dtype: torch.dtype) -> Params:
    """A discriminator before its first step: one draw, the same for all pairs and all clients."""
    shapes = {"x": (inputs, hidden), "y": (classes, hidden), "o": (hidden, 1)}
    start = {name: normal(fold(k, j), s, dtype) / s[0] ** 0.5 for j, (name, s) in enumerate(shapes.items())}
    start["o"] = start["o"][:, 0]
    return {**start, "b": start["o"].new_zeros(hidden), "c": start["o"].new_zeros(())}


def _discriminate(D: Params, batch: Batch, classes: int) -> Tensor:
    """How much an example looks like the second client's, for every pair, [B, pairs]."""
    nu = classes / max(1, classes - 1) ** 0.5  # labels on the scale of normalised inputs
    y = members(batch, classes, D["x"].dtype) * nu
    hidden = (
        torch.einsum("bd,pdm->bpm", batch.x.flatten(1), D["x"]) + D["b"] + 2 * torch.einsum("bc,pcm->bpm", y, D["y"])
    )
    return (hidden.relu() * D["o"]).sum(2) + D["c"]


def _pair(i: int, j: int, n: int) -> int:
    """The number of the pair i < j of n clients."""
    return i * n - i * (i + 1) // 2 + j - i - 1


def _pairs(i: int, n: int) -> Tensor:
    """The numbers of all pairs of client i, in the order of the others."""
    return torch.tensor([_pair(min(i, j), max(i, j), n) for j in range(n) if j != i], dtype=torch.int64)
