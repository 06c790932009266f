"""PriSM: every client trains some of the singular triples of each weight, the large ones more often."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedspan import tree
from fedspan.errors import ConfigError
from fedspan.layers import Principal, Which, choose, convert, in_head, part, triples
from fedspan.layers.decay import fit_decayed
from fedspan.learn.task import Task
from fedspan.linalg import lowrank
from fedspan.method import About, Capacity, Discloses, Down, Federation, Observed, Ranked, Round, Sent, Sharing, Visit
from fedspan.method.factored import Shares, need_sgd
from fedspan.method.fields import NonNegative, Share
from fedspan.randomness import fold, key, uniform
from fedspan.tree import Params, Tree


@dataclass(frozen=True, kw_only=True)
class PriSM(Sharing, Ranked, Observed):
    """PriSM. Niu et al., TMLR 2023.

    Symbols: U [o, R] and V [n, R] = the singular triples of a weight (kernels read as outputs × all the rest), each
    column times √σ; theta = what is not factorised, running statistics included; c = which triples a client had; kappa
    = κ. In every round client k gets a share `keep` of the triples of each layer, drawn without replacement with
    probability ∝ σ^κ, and trains them. Each triple becomes the mean over the clients that had it, a triple nobody had
    stays, and the weight U Vᵀ is decomposed anew. A model is used whole, as the paper evaluates it. Kept: h, the
    private head, if any. Sent: theta, U and V of a client's triples, and at, their numbers.

    Settled with the published code: balanced factors, uniform means, Frobenius decay, decomposition in every round, σ^κ
    (one of its layers uses exp σ instead). It also averages momentum and clips gradients at 5; both are left out.
    """

    about = About(
        reference="Niu et al., TMLR 2023",
        secure_sum="no",  # the server must see who had which triples
        discloses=Discloses(labels="set", model="whole", examples=False, resembles=True),
    )

    local_stats: ClassVar[bool] = False
    moves: ClassVar[bool] = True
    """Whether factors may change where the weights do not: the server decomposes anew after every round."""

    weighting: Literal["samples", "uniform"] = "uniform"
    keep: Share | Shares = 0.4
    """The share of the singular triples of a layer that a client gets; clients take several in turn."""
    kappa: NonNegative = 2.5
    """κ, the power of σ that a triple is drawn by; 0 draws all alike."""
    layers: Which = "body"
    """The layers that travel as triples: all, all but the head, or names that begin theirs."""
    frobenius: bool = True
    """Whether `weight_decay` acts on U Vᵀ (Frobenius decay), or on U and V."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.refuse_server_optimizer("the triples are others in every round")
        need_sgd(self, self.frobenius)

    @property
    def keeps(self) -> tuple[float, ...]:
        """The share of the triples, of the clients in turn."""
        return self.keep if isinstance(self.keep, tuple) else (self.keep,)

    def capacity_of(self, client: int) -> Capacity:
        """A client's share, if clients differ in it."""
        return lowrank.turn(self.keeps, client) if len(set(self.keeps)) > 1 else None

    def count_of(self, triples: int, capacity: Capacity) -> int:
        """How many triples of a layer a client gets."""
        share = float(capacity) if isinstance(capacity, int | float) else self.keeps[0]
        return max(1, math.ceil(share * triples - 1e-9))

    def model(self, task: Task, capacity: Capacity) -> Task:
        names = [k for k in choose(task, self.layers, "PriSM") if not (self.private_head and in_head(task, k))]
        if not names:
            raise ConfigError("PriSM: layers must name a layer besides a private head. Got none.")
        return task.converted(lambda module: convert(module, names, Principal))

    def apart(self, task: Task, params: Params) -> tuple[Tree, Params]:
        """What is shared: U, V and theta, and what stays at home."""
        shared, h = self.split(task, params)
        of = {part(k, f): f for k, m in task.module.named_modules() if isinstance(m, Principal) for f in "UV"}
        parts: Tree = {"theta": {}, "U": {}, "V": {}}
        for k, p in shared.items():
            parts[of.get(k, "theta")][k] = p
        return parts, h

    # ------------------------------------------------------------------------------------------------ the client

    def client_update(self, task: Task, client: Tree, down: Tree, visit: Visit) -> tuple[Tree, Sent]:
        start = {**down["theta"], **down["U"], **down["V"], **client["h"]}
        lam = self.optimizer.weight_decay if self.frobenius else 0.0  # λ/2 ‖U Vᵀ‖²
        new = fit_decayed(self.optimizer, task, task.loss, start, visit["train"], self.lr, (lam, lam))
        parts, h = self.apart(task, new)
        return {"h": h}, Sent(weight=self.weigh(visit), mean={**parts, "at": down["at"]})

    # ------------------------------------------------------------------------------------------------ the server

    def init_server(self, task: Task, federation: Federation) -> Tree:
        parts, _ = self.apart(task, task.init())
        return self._decomposed(parts) | {"key": key(federation.seed, "triples")}

    def _decomposed(self, server: Tree) -> Tree:
        """The server's weights by their singular triples."""
        new = {**server, "U": {}, "V": {}, "sigma": {}}
        for name, U in server["U"].items():
            k = name[:-1]
            new["U"][name], new["V"][k + "V"], new["sigma"][k] = triples(U @ server["V"][k + "V"].T)
        return new

    def chosen(self, server: Tree, client: int, capacity: Capacity, round: int) -> dict[str, Tensor]:
        """The triples of every layer that a client gets in a round, drawn one after another without replacement."""
        at = {}
        for j, (k, sigma) in enumerate(server["sigma"].items()):
            u = uniform(fold(fold(fold(server["key"], round), client), j), sigma.shape, torch.float64)
            # p ∝ σ^κ: the largest of log p + Gumbel noise are such a draw; log 0 comes last, yet before nothing.
            score = self.kappa * sigma.to(torch.float64).clamp_min(1e-150).log() - (-u.log()).log()
            at[k] = score.topk(self.count_of(len(sigma), capacity)).indices.sort().values
        return at

    def download(self, server: Tree, ids: Tensor, capacity: Capacity, round: int) -> Down:
        rows = []
        for i in ids.tolist():
            at = self.chosen(server, i, capacity, round)
            row: Tree = {"at": {k + "at": a.to(torch.int32) for k, a in at.items()}}
            row |= {f: {k + f: server[f][k + f][:, a] for k, a in at.items()} for f in "UV"}
            rows.append(row)
        return Down({"theta": server["theta"]}, tree.stack(rows))

    def download_for_use(self, server: Tree, ids: Tensor, capacity: Capacity, round: int) -> Down:
        return Down({k: server[k] for k in ("theta", "U", "V")})

    def lift(self, mean: Tree, shared: Tree, capacity: Capacity) -> Tree:
        """Triples in their places among all, zero where a client had none, and c = 1 where it had one."""
        out: Tree = {"theta": mean["theta"], "U": {}, "V": {}, "c": {}}
        for name, U in mean["U"].items():
            k = name[:-1]
            at = mean["at"][k + "at"].to(torch.int64)
            V = mean["V"][k + "V"]
            R = min(len(U), len(V))
            for f, factor in (("U", U), ("V", V)):
                place = (torch.arange(R, device=at.device) == at[:, None]).to(factor.dtype)  # [r, R]
                out[f][k + f] = factor @ place
            out["c"][k] = place.sum(0)
        return out

    def server_update(self, server: Tree, round: Round) -> Tree:
        mean: Tree = {"theta": round.mean["theta"], "U": {}, "V": {}}
        for k, c in round.mean["c"].items():
            for f in "UV":  # each triple: the mean over who had it; who had none leaves it as it was
                had, old = round.mean[f][k + f] / c.clamp_min(torch.finfo(c.dtype).tiny), server[f][k + f]
                mean[f][k + f] = torch.where(c > 0, had, old)
        return self._decomposed(mean) | {"key": server["key"]}

    def personal(self, task: Task, client: Tree, down: Tree, visit: Visit) -> Tree:
        return {**down["theta"], **down["U"], **down["V"], **client["h"]}

    def size(self, server: Tree) -> float:
        """The norm of the model."""
        rest = float(tree.squared_norm(server["theta"]))
        return math.sqrt(rest + sum(float(s.square().sum()) for s in server["sigma"].values()))
