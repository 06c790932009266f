"""pFL-MF: all client models lie in one r-dimensional subspace, θ_i = U v_i."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedspan import tree
from fedspan.batches import All, Amount, Batch, Epochs, Steps
from fedspan.errors import ConfigError
from fedspan.local import mean_gradient, sgd
from fedspan.method import Averaging, Capacity, Down, Federation, Round, Sent, Visit, Who
from fedspan.randomness import normal
from fedspan.task import Task
from fedspan.tree import Outer, Params, Tree


@dataclass(frozen=True, kw_only=True)
class PflMf(Averaging):
    """pFL-MF. Dadras, Stich and Yurtsever, TMLR 2025, Algorithm 1 (Burer–Monteiro factorisation across clients).

    Symbols: U [d, r] = shared dictionary of r models, v [r] = coefficients of client i, G = ∇f_i(U v_i) v_iᵀ.
    Kept: v (and running statistics). Sent: G as its two factors, d + r numbers, or as a matrix (`wire = "full"`).
    `v_scale = "1/n"` is the paper's factor from ψ = (1/n) Σ f_i; `g_at = "old"` takes G before the v-steps, as the
    algorithm box does. Columns of U are independent standard initialisations and v_i a random unit vector, which the
    paper leaves open. The published code trains U and v together instead; that is not this form.
    """

    family: ClassVar[str] = "pfl-mf"
    paper: ClassVar[str] = "Dadras, Stich and Yurtsever, TMLR 2025"
    rank: int = 10
    lr: float = 0.1
    lr_v: float | None = None
    v_steps: int = 5
    v_unit: Literal["step", "epoch"] = "step"
    v_scale: Literal["1", "1/n"] = "1"
    g_at: Literal["old", "new"] = "old"
    wire: Literal["rank-one", "full"] = "rank-one"
    weighting: Literal["samples", "uniform"] = "uniform"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.count("rank", 1)
        self.count("v_steps")
        if self.lr_v is not None:
            self.require("lr_v", 0.0, allow_zero=True)
        self.one_of("v_unit", "step", "epoch")
        self.one_of("v_scale", "1", "1/n")
        self.one_of("g_at", "old", "new")
        self.one_of("wire", "rank-one", "full")
        if self.private_head or self.optimizer != "sgd" or self.momentum or self.weight_decay:
            raise ConfigError("PflMf: private_head, momentum, weight_decay and adamw are not part of Algorithm 1.")

    def plan(self) -> Mapping[str, Amount]:
        return {"v": Steps(self.v_steps) if self.v_unit == "step" else Epochs(self.v_steps), "G": All()}

    def init_server(self, task: Task, federation: Federation) -> Tree:
        columns = [tree.ravel(self._trained(task, task.fresh(federation.seed, "U", j))) for j in range(self.rank)]
        return {"U": torch.stack(columns, 1)}

    def init_client(self, task: Task, who: Who) -> Tree:
        start = task.init()
        dtype = next(iter(start.values())).dtype
        v = normal(who.key, (self.rank,), dtype)
        return {"v": v / v.norm(), "stats": tree.select(start, task.stats)}

    def download(self, server: Tree, ids: Tensor, capacity: Capacity, round: int) -> Down:
        return Down(shared={"U": server["U"]})

    def client_update(self, task: Task, client: Tree, down: Tree, visit: Visit) -> tuple[Tree, Sent]:
        U, v, stats = down["U"], client["v"], client["stats"]
        like = self._trained(task, task.init())

        def f(theta: Tensor, batch: Batch) -> Tensor:
            return task.loss(tree.unravel(theta, like) | stats, batch)

        lr_v = (self.lr if self.lr_v is None else self.lr_v) / (visit.clients if self.v_scale == "1/n" else 1)
        psi = lambda p, batch: f(U @ p["v"], batch)
        new = sgd(psi, {"v": v}, visit["v"], lr_v)["v"]  # v ← v − η_v Uᵀ∇f_i(U v), eq. (8)
        at = v if self.g_at == "old" else new
        g = mean_gradient(lambda p, b: f(p["theta"], b), {"theta": U @ at}, visit["G"])["theta"]
        G = Outer(g, at) if self.wire == "rank-one" else torch.outer(g, at)  # G_i = ∇f_i(U v_i) v_iᵀ, eq. (7)
        return {"v": new, "stats": stats}, Sent(weight=self.weigh(visit), mean={"G": G})

    def server_update(self, server: Tree, round: Round) -> Tree:
        return {"U": server["U"] - self.lr * round.mean["G"]}  # U ← U − η_u/|S| Σ G_i, eq. (9)

    def personal_plan(self, task: Task) -> Mapping[str, Amount]:
        return {"all": All()} if task.stats else {}

    def personal(self, task: Task, client: Tree, down: Tree, visit: Visit) -> Tree:
        theta = tree.unravel(down["U"] @ client["v"], self._trained(task, task.init())) | client["stats"]  # θ_i = U v_i
        return task.estimate_statistics(theta, visit["all"]) if task.stats else theta

    def _trained(self, task: Task, params: Params) -> Params:
        return tree.select(params, task.names)
