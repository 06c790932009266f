"""FedARA: every client trains the rank it can afford, held near anchors that the received extractor gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedspan import tree
from fedspan.learn.batches import All, Amount, Epochs
from fedspan.learn.optimizer import Schedule
from fedspan.learn.task import Task
from fedspan.method import (
    About,
    Adapts,
    Averaging,
    Begins,
    Capacity,
    Cautions,
    ClientInfo,
    Discloses,
    Down,
    Federation,
    MeasuredStep,
    Round,
    Sent,
    Visit,
)
from fedspan.method.factored import decomposed, factorised, in_parts, reconstructed, truncated
from fedspan.methods.fedara.adaptive import AdaptiveRanks
from fedspan.methods.fedara.capacities import Affords
from fedspan.methods.fedara.monitoring import Monitored
from fedspan.methods.fedara.objective import Alignment, FactorDecay, anchors
from fedspan.methods.fedara.stability import alignment_step
from fedspan.tree import Inputs, Params, Tree


@dataclass(frozen=True, kw_only=True)
class FedAra(Averaging, Affords, Adapts, Monitored, Cautions):
    """FedARA. CVPR 2026; steps are numbered as on FedARA's page in the docs.

    A summary was read, without its displayed formulas: that page says what is stated and what is derived.
    Symbols: W and theta = ω, the extractor, full on the server; U, V = its factors at a client's rank ratio r_k
    (kernels are read as o·k × i·k); h = θ_k, the personal classifier, with the running statistics; lam = λ, rho = ρ.
    Kept: h. Sent: theta (what is not decomposed), and U and V, or W; `step` (−1, 0 or 1) if ranks adapt.
    """

    # No secure sum, as the server multiplies each client's factors.
    about = About(
        family="fedara",
        reference="FedARA, CVPR 2026",
        needs_classes=True,
        secure_sum="no",
        discloses=Discloses(labels="set", model="part", examples=True, resembles=True),
    )

    moves: ClassVar[bool] = True
    """Whether factors may change where the weights do not: the server factorises anew after every round."""

    private_head: bool = True
    schedule: Schedule = Schedule()
    """How the clients' learning rate falls over the rounds."""
    ranks: AdaptiveRanks = AdaptiveRanks()
    """What clients can afford: r_k and Q_k."""
    alignment: Alignment = Alignment()
    """How features are held near their anchors."""
    decay: FactorDecay = FactorDecay()
    """How what the factors make decays."""
    aggregate: Literal["models", "changes"] = "models"
    """What the server averages: clients' models, or what they changed, so that what small ranks cannot carry stays."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.ranks.check(type(self).__name__)

    def begins(self) -> Begins | None:
        until = "its alignment is weaker than lam"
        near = self.alignment
        return Begins(near.warmup + 1, "warmup", near.warmup, until) if near.lam else None

    def measured_pull(self, round: int) -> float:
        """η_t λ_t."""
        return self.optimizer.pull(self.schedule.rate(self.lr, round), self.alignment.strength(round))

    def measured_step(self, task: Task, weights: Tree, x: Inputs, pull: float) -> MeasuredStep | None:
        """η_t λ_t times the curvature of L_FAC."""
        most = self.optimizer.pull(self.lr, self.alignment.lam)
        return alignment_step(self.alignment, task, weights, x, pull, most)

    # ------------------------------------------------------------------------------------------------ 1. the download

    def model(self, task: Task, capacity: Capacity) -> Task:
        """Layers U Vᵀ of the ranks that clients of one capacity can afford."""
        return factorised(task, self.ranks.ranks(self, task, capacity))

    def with_ratios(self, ratios: tuple[float, ...]) -> FedAra:
        return replace(self, ranks=replace(self.ranks, ratio=ratios))

    def init_server(self, task: Task, federation: Federation) -> Tree:
        omega, _ = self.split(task.plain, task.plain.init())
        start = self.decompose(self.server.begin(in_parts(omega, self.ranks.chosen(self, task))))
        if not self.ranks.adapts:
            return start
        for c in self.ranks.capacities:
            self.ranks.ranks(self, task, c)  # what cannot be trained must be refused before somebody comes to it
        return {**start, "level": torch.zeros(federation.clients, dtype=torch.int64)}

    def decompose(self, server: Tree) -> Tree:
        """ω with U = P √Σ and V = Q √Σ of every layer that is decomposed for anybody."""
        return decomposed(server, self.ranks.rank_at, self.ranks.capacities)

    def download(self, server: Tree, ids: Tensor, capacity: Capacity, round: int) -> Down:
        """D(ω; r_k, Q_k): factors of the rank a client can afford, and the other layers as they are."""
        return Down(shared=truncated(server, self.ranks.rank_at, capacity))

    # ------------------------------------------------------------------------------------------------ 2., 3. the client

    def plan(self) -> Mapping[str, Amount]:
        return {"train": Epochs(), "all": All()} if self.alignment.used else {"train": Epochs()}

    def split(self, task: Task, params: Params) -> tuple[Params, Params]:
        """The extractor ω, and what stays at home: the classifier θ_k and running statistics."""
        home = [*(task.need_head() if self.private_head else ()), *task.stats]
        return tree.without(params, home), tree.select(params, home)

    def init_client(self, task: Task, who: ClientInfo) -> Tree:
        start = task.init()
        gap = {"gap": torch.zeros_like(next(iter(start.values())).sum())} if self.alignment.watch else {}
        return {"h": self.split(task, start)[1], **gap}

    def client_update(self, task: Task, client: Tree, down: Tree, visit: Visit) -> tuple[Tree, Sent]:
        """Train factors, dense layers and classifier together on L = L_CE + λ_t L_FAC + ρ/2 Σ_q ‖U_q V_qᵀ‖²."""
        start: Params = tree.merge(down) | client["h"]
        t, near = int(visit.round), self.alignment
        lam = near.strength(t)  # λ_t
        a = anchors(task, start, visit["all"], type(self).__name__) if lam or near.watch else None  # a_{k,c}, scale
        lr = self.schedule.rate(self.lr, t)
        new = self.decay.fit(self.optimizer, task, near.loss(task, a, lam), start, visit["train"], lr)
        omega, h = self.split(task, new)
        parts = in_parts(omega, self.ranks.chosen(self, task))
        gap = {"gap": near.gap(task, new, a, visit["all"])} if near.watch and a is not None else {}
        each = {"step": self.ranks.step(down, parts, visit)} if self.ranks.adapts else {}
        return {"h": h, **gap}, Sent(weight=self.weigh(visit), mean=parts, each=each)

    # ------------------------------------------------------------------------------------------------ 4. the server

    def lift(self, mean: Tree, shared: Tree, capacity: Capacity) -> Tree:
        """R(ω̃_k), or what it changed of R(D(ω))."""
        full = reconstructed(mean)
        return full if self.aggregate == "models" else tree.sub(full, reconstructed(shared))

    def server_update(self, server: Tree, round: Round) -> Tree:
        """ω ← Σ_k n_k/n R(ω̃_k), factorised anew."""
        mean = round.mean
        if self.aggregate == "changes":
            mean = {k: tree.add(server[k], part) for k, part in mean.items()}
        new = self.decompose(self.server.step(server, mean))
        return {**new, "level": self.ranks.moved(server["level"], round)} if self.ranks.adapts else new

    # ------------------------------------------------------------------------------------------------ the model in use

    def personal_plan(self, task: Task) -> Mapping[str, Amount]:
        return {"all": All()} if task.stats else {}

    def personal(self, task: Task, client: Tree, down: Tree, visit: Visit) -> Tree:
        """The extractor at the client's rank with its own classifier, statistics estimated anew."""
        params: Params = tree.merge(down) | client["h"]
        return task.estimate_statistics(params, visit["all"]) if "all" in visit.batches else params

    def trained(self, down: Tree, sent: Sent, capacity: Capacity) -> Tree:
        return {k: sent.mean[k] for k in down}


@dataclass(frozen=True, kw_only=True)
class FedAraStar(FedAra):
    """FedARA* (FedARA, CVPR 2026): FedARA with a rank ratio of one half for all clients.

    Kept: h. Sent: theta (what is not decomposed), U and V.
    """

    about = About(discloses=Discloses(labels="set", model="part", examples=True, resembles=True))

    ranks: AdaptiveRanks = AdaptiveRanks(ratio=0.5)
