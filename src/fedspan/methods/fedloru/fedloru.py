"""FedLoRU: every client trains small factors, and the server lets them add up to a model of high rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedspan import tree
from fedspan.errors import ConfigError
from fedspan.layers import AdapterKind, AdapterStart, Chosen
from fedspan.learn.optimizer import Schedule
from fedspan.learn.task import Task
from fedspan.linalg import lowrank
from fedspan.method import (
    About,
    Announces,
    Averaging,
    Capacity,
    ClientInfo,
    Discloses,
    Down,
    Federation,
    Round,
    Sent,
    Visit,
)
from fedspan.method.bases import named_layers
from fedspan.method.fields import AtLeast1, Positive
from fedspan.methods.fedloru.accumulation import ObservedFactors, Reinit, held, restarted, without_moments
from fedspan.methods.fedloru.adapted import AdaptedModel
from fedspan.randomness import fold, key
from fedspan.tree import Params, Tree


@dataclass(frozen=True, kw_only=True)
class FedLoRU(Averaging, Announces, AdaptedModel, ObservedFactors):
    """FedLoRU. Park and Klabjan, 2024, Algorithm 1; line numbers are those in the paper's margin.

    A weight is W + α A B. All clients hold W; A and B are trained and averaged factor by factor, and every `tau` rounds
    their product is added to W, for which they go to all clients, sampled or not. Symbols: A [m, r], B [r, n] (for
    `adapter` "loha" or "lokr" their factors), theta = what is not factorised, running statistics included, averaged as
    in FedAvg. Kept: h, the private head or layers, if any. Sent: theta and the factors.

    After an accumulation (`reinit`) "random" draws A anew, the same for all, and zeroes B; "momentum" keeps both, so
    that the product then counts twice, as the paper has it; "momentum_A" keeps A and zeroes B. The paper's return value
    drops a product that was not accumulated at the end; here it is used. The deviation of A, which the paper leaves
    open, is 1/√r. With `freeze_A` all hold one A that is neither trained nor sent: means of factors are then means of
    products. Moments of a server optimiser end with the factors they belong to.
    """

    about = About(
        family="fedloru",
        reference="Park and Klabjan, 2024",
        discloses=Discloses(labels="set", model="whole", examples=True, resembles=True),
    )

    schedule: Schedule = Schedule()
    """How the learning rate falls over the rounds."""
    rank: AtLeast1 = 16
    """r, the rank of A B."""
    alpha: Positive = 1.0
    """α, what A B is multiplied by."""
    alpha_over_r: bool = False
    """Whether A B is multiplied by α/r instead, as LoRA counts it."""
    tau: AtLeast1 | None = 20
    """τ, the rounds after which A B is added to W, again and again; none: never."""
    reinit: Reinit = "random"
    """What becomes of the factors then: A drawn anew and B zero, both kept (`momentum`), or A kept and B zero."""
    adapter: AdapterKind = "lora"
    """What the factors make: A B, (A1 B1) ∘ (A2 B2) of LoHa, or C ⊗ (A B) of LoKr."""
    start: AdapterStart = "gaussian"
    """How A starts: Gaussian, or as the identity."""
    freeze_A: bool = False
    """Whether A is the same for all and constant, so that only B is trained and sent."""
    layers: Chosen = "body"
    """The layers with factors: all, those below the head, the large or main ones of those, or beginnings of names."""
    personal_layers: tuple[str, ...] = ()
    """Beginnings of names of parameters without factors that stay on the client."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.adapter != "lora" and self.freeze_A:
            raise ConfigError(f"{type(self).__name__}: freeze_A goes with adapter 'lora' only. Got {self.adapter!r}.")

    def private(self, task: Task) -> list[str]:
        """The head if wanted, and the layers named."""
        head = task.need_head() if self.private_head else []
        return [*head, *(named_layers(self, task, self.personal_layers) if self.personal_layers else ())]

    # ------------------------------------------------------------------------------------------------ the client

    def init_client(self, task: Task, who: ClientInfo) -> Tree:
        return {"h": self.split(task, task.init())[1]}

    def common(self, task: Task, federation: Federation) -> Tree:
        W: Tree = {"W": held(task, "weight")}  # line 327
        if not self.freeze_A:
            return W
        last = {"key": key(federation.seed, "A"), "count": torch.zeros((), dtype=torch.int64)}
        return W | {"A": held(task, "A"), "last": last}

    def constants(self, visit: Visit) -> Params:
        """What a client holds and does not train."""
        return tree.merge({k: visit.common[k] for k in ("W", "A") if k in visit.common})

    def client_update(self, task: Task, client: Tree, down: Tree, visit: Visit) -> tuple[Tree, Sent]:
        parts, h = self.learn(task, tree.merge(down) | client["h"], self.constants(visit), visit)
        return {"h": h}, Sent(weight=self.weigh(visit), mean=parts)  # line 332

    def learn(self, task: Task, free: Params, fixed: Params, visit: Visit) -> tuple[Tree, Params]:
        """Train `free` beside what is fixed, from where it is: what is sent, and what of it stays at home."""
        loss = lambda p, b: task.loss(fixed | p, b)  # f(W + α A B), eq. (6)
        lr = self.schedule.rate(self.lr, int(visit.round))
        return self.apart(task, self.fit(loss, free, visit["train"], lr))  # line 331

    def hear(self, common: Tree, news: Tree) -> Tree:
        factors = news | ({"A": common["A"]} if self.freeze_A else {})
        new = {**common, "W": lowrank.accumulate(common["W"], factors, self.scale)}  # W ← W + α A B, line 337
        if self.freeze_A and self.reinit == "random":
            last = {**common["last"], "count": common["last"]["count"] + 1}
            new |= self.restarted({"A": common["A"]}, last["key"], last["count"]) | {"last": last}
        return new

    def personal(self, task: Task, client: Tree, down: Tree, visit: Visit) -> Tree:
        return {**self.constants(visit), **tree.merge(down), **client["h"]}  # line 340

    # ------------------------------------------------------------------------------------------------ the server

    def init_server(self, task: Task, federation: Federation) -> Tree:
        server = self.server.begin(self.apart(task, task.init())[0])
        if self.tau is None:
            return server
        none = torch.zeros((), dtype=torch.int64)
        pair = tree.zeros_like({f: server[f] for f in self.factors})
        return {**server, "last": {"round": none, "key": key(federation.seed, "A"), "added": pair}}

    def download(self, server: Tree, ids: Tensor, capacity: Capacity, round: int) -> Down:
        return Down(shared={k: server[k] for k in ("theta", *self.factors)})  # line 329

    def server_update(self, server: Tree, round: Round) -> Tree:
        server = {**server, **self.server.step(server, round.mean)}  # A ← Σ p_k A^(k), B ← Σ p_k B^(k), line 334
        if self.tau is None or round.round % self.tau:  # line 335
            return server
        pair = {f: server[f] for f in self.factors}
        last = {**server["last"], "round": torch.tensor(round.round), "added": pair}
        new = self.restarted(pair, last["key"], round.round) | without_moments(server, pair)
        return {**server, **new, "last": last}

    def restarted(self, factors: Tree, k: Tensor, t: int | Tensor) -> Tree:
        """The factors after the accumulation of round t."""
        return restarted(factors, self.adapter, self.reinit, self.start, fold(k, t))

    def announce(self, server: Tree, round: int) -> Tree | None:
        if self.tau is None or int(server["last"]["round"]) != round:
            return None
        added: Tree = server["last"]["added"]
        return added  # line 336

    def silent(self) -> bool:
        return self.tau is None
