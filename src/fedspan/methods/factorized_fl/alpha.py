"""Factorized-FL α: every weight is u v + μ; clients share u alone, averaged over those whose v is similar."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedspan import tree
from fedspan.learn.aggregate import mix
from fedspan.learn.task import Task
from fedspan.method import (
    About,
    Averaging,
    Capacity,
    ClientInfo,
    Coded,
    Converts,
    Discloses,
    Down,
    Federation,
    Round,
    Sent,
    Visit,
)
from fedspan.method.local_steps import LocalSteps
from fedspan.methods.factorized_fl.factorization import Factorization, corrections
from fedspan.methods.factorized_fl.matching import SimilarityMatching, with_z, z_of
from fedspan.methods.factorized_fl.observing import ObservedMatching
from fedspan.methods.factorized_fl.penalty import Penalty
from fedspan.methods.factorized_fl.sharing import AdaptedParts, SharedParts
from fedspan.tree import Params, Tree
from fedspan.wire import Codec, Sparse


@dataclass(frozen=True, kw_only=True)
class FactorizedFL(Averaging, Converts, Coded, AdaptedParts, ObservedMatching):
    """Factorized-FL α. Jeong and Hwang, NeurIPS 2022, Section 4 and eq. (1) to (6).

    Symbols: u [rows, γ] = base filter, v [γ, columns] = coefficients, mu = sparse correction μ, b = biases and norms'
    affine parts (they go with u), z = v^{L−1}, that of the last factorised layer below the head, sigma = cosines of the
    z, M = all μ. Kept: h, all that is not shared. Sent: u, b and z, each client's own; received: a personal average of
    u and b over the last uploads of similar clients. Weights that are not factorised go with v.

    Beside the paper: clients below τ are left out (a literal zero in eq. (5) would still weigh exp 0), and at least
    `m_min` clients are averaged, as in the public code. Beside that code: the penalty on μ has a gradient (there it has
    none: `penalty = "none"`), kernels are not scrambled (`layout`), and averages are of the uploads as they came in.
    `likeness_of` = "change" compares what training made of the common first v instead of v: fedspan's own.
    The server's state `seen` holds the cosines (sigma) and how often each client was averaged into each (matched).
    """

    about = About(
        family="factorized-fl",
        reference="Jeong and Hwang, NeurIPS 2022",
        # Sent as its non-zeros, μ shows where they are.
        secure_sum=lambda m: "with mu = false" if m.factors.mu and "mu" in m.sharing.tags else "yes",
        discloses=Discloses(labels="set", model="part", private=("v",), examples=True, resembles=True),
    )

    private_head: bool = True
    """Whether the head stays on the client, as it must where clients name their classes differently."""
    factors: Factorization = Factorization()
    """The form of a weight, u v + μ."""
    penalty: Penalty = Penalty()
    """λ‖M‖₁, and how it is minimised."""
    sharing: SharedParts = SharedParts()
    """What leaves a client, and in which form."""
    matching: SimilarityMatching = SimilarityMatching()
    """Who is averaged into whom."""
    steps: LocalSteps = LocalSteps()
    """Whether a client's momentum goes on from round to round."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.steps.check(type(self).__name__, self.optimizer, self.sharing.gauge)
        if not self.one_mean:
            self.refuse_server_optimizer("no one average is made of what clients send")

    @property
    def personal_average(self) -> bool:
        """Whether every client gets an average of its own, for which the server keeps all last uploads."""
        return self.matching.rule != "none" and self.sharing.parts != "nothing"

    @property
    def one_mean(self) -> bool:
        """Whether all get one mean of what clients send: Factorized-FedAvg."""
        return self.matching.rule == "none" and self.sharing.parts != "nothing"

    def model(self, task: Task, capacity: Capacity) -> Task:
        """W = u v + μ in linear layers, π(u v + μ) in convolutions; all clients start from the same u and v."""
        return self.factors.convert(task, type(self).__name__)  # eq. (1), eq. (2), eq. (3)

    def begin(self, task: Task) -> Params:
        """The common start, in the gauge of the uploads: a newcomer's v must fit the u of the others."""
        return self.sharing.aligned(task, task.init())

    def apart(self, task: Task, params: Params) -> tuple[Tree, Params]:
        """What is shared, by tag, and what stays at home."""
        return self.sharing.apart(task, params, task.need_head() if self.private_head else [])

    def z(self, task: Task) -> str:
        """The name of v^{L−1}."""
        return self.matching.layer(task, type(self).__name__)

    def codecs(self, round: int) -> Mapping[str, Codec]:
        return {"mu": Sparse()}

    # ------------------------------------------------------------------------------------------------ the client

    def init_client(self, task: Task, who: ClientInfo) -> Tree:
        return {"h": self.apart(task, self.begin(task))[1], **self.steps.begin(task)}

    def client_update(self, task: Task, client: Tree, down: Tree, visit: Visit) -> tuple[Tree, Sent]:
        start, M = client["h"] | tree.merge(down), corrections(task)
        loss, prox = self.penalty.objective(task.loss, M), self.penalty.prox(M, self.lr, self.optimizer.momentum)
        params, kept = self.steps.fit(self.optimizer, loss, start, client, visit["train"], self.lr, prox)  # eq. (6)
        params = self.sharing.aligned(task, params)
        parts, kept["h"] = self.apart(task, params)
        if not self.personal_average:
            return kept, Sent(weight=self.weigh(visit), mean=parts)
        return kept, Sent(weight=self.weigh(visit), each=with_z(parts, params, self.z(task)))

    def personal(self, task: Task, client: Tree, down: Tree, visit: Visit) -> Tree:
        params = self.penalty.pruned(client["h"] | tree.merge(down), corrections(task))
        return task.estimate_statistics(params, visit["all"]) if "all" in visit.batches else params

    # ------------------------------------------------------------------------------------------------ the server

    def init_server(self, task: Task, federation: Federation) -> Tree:
        start, n = self.begin(task), federation.clients
        parts, _ = self.apart(task, start)
        if not self.personal_average:
            return self.server.begin(parts)
        z = self.z(task)
        seen = self.matching.begin(n, federation.seed, start[z])
        if z in parts.get("v", {}):
            seen["layer"] = torch.tensor(sorted(parts["v"]).index(z))  # which of the uploaded v is z
        rows: Tree = tree.map(lambda a: a.expand(n, *a.shape).clone(), with_z(parts, start, z))
        return {**rows, "seen": seen}

    def server_update(self, server: Tree, round: Round) -> Tree:
        if not self.personal_average:
            return self.server.step(server, round.mean)  # Σ n_k/n of u, v and μ: Factorized-FedAvg
        rows = tree.put({k: server[k] for k in round.each}, round.ids, round.each)
        seen = self.matching.compare(server["seen"], z_of(rows, server["seen"]), round)  # σ_i, eq. (4)
        return {**rows, "seen": seen}

    def download(self, server: Tree, ids: Tensor, capacity: Capacity, round: int) -> Down:
        parts = {k: some for k, some in server.items() if k not in ("seen", "z", "optimizer")}
        if not self.personal_average:
            return Down(shared=self.sharing.thinned(parts, stacked=False))
        omega = self.matching.omega(server["seen"])[ids]  # exp(ε σ_i) / Σ exp(ε σ_i) over the matched i
        return Down(own=self.sharing.thinned(mix(parts, omega), stacked=True))  # u_k ← Σ_i ω_ki u_i, eq. (5)
