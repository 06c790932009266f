"""FedLoRU and its kin: every client trains small factors, and the server lets them add up to a model of high rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedspan import tree
from fedspan.errors import ConfigError
from fedspan.layers import Adapter, AdapterKind, AdapterStart, Chosen, Plain, choose, convert, part, parts, structured
from fedspan.learn.batches import Amount, Batch, Epochs
from fedspan.learn.optimizer import Schedule
from fedspan.learn.task import Task
from fedspan.linalg import lowrank
from fedspan.method import (
    About,
    Announces,
    Capacity,
    Converts,
    Down,
    Federation,
    Observed,
    Ranked,
    Round,
    Sent,
    Sharing,
    Visit,
    named_layers,
)
from fedspan.method.fields import AtLeast1, Count, NonNegative, Positive
from fedspan.randomness import fold, key
from fedspan.tree import Params, Tree


@dataclass(frozen=True, kw_only=True)
class FedLoRU(Sharing, Announces, Converts, Observed):
    """FedLoRU. Park and Klabjan, 2024, Algorithm 1.

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

    about = About(family="fedloru", reference="Park and Klabjan, 2024")

    local_stats: ClassVar[bool] = False

    schedule: Schedule = Schedule()
    rank: AtLeast1 = 16
    alpha: Positive = 1.0
    alpha_over_r: bool = False
    tau: AtLeast1 | None = 20
    reinit: Literal["random", "momentum", "momentum_A"] = "random"
    adapter: AdapterKind = "lora"
    start: AdapterStart = "gaussian"
    freeze_A: bool = False
    layers: Chosen = "body"
    personal_layers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.adapter != "lora" and self.freeze_A:
            raise ConfigError(f"{type(self).__name__}: freeze_A goes with adapter 'lora' only. Got {self.adapter!r}.")

    # ------------------------------------------------------------------------------------------------ what is where

    @property
    def scale(self) -> float:
        """What the product is multiplied by: α, or α/r."""
        return self.alpha / self.rank if self.alpha_over_r else self.alpha

    @property
    def factors(self) -> tuple[str, ...]:
        """The factors that travel."""
        return tuple(f for f in lowrank.FACTORS[self.adapter] if not (self.freeze_A and f == "A"))

    def ranks_of(self, capacity: Capacity) -> tuple[int, int]:
        """The rank a client trains the factors with, and that of its own pair."""
        return self.rank, 0

    def model(self, task: Task, capacity: Capacity) -> Task:
        """Linear and convolutional layers as a constant and its adapter."""
        own_rank = self.ranks_of(capacity)[1]
        size = lambda layer: lowrank.size(self.adapter, layer, self.rank)
        names = choose(task, self.layers, type(self).__name__, size)

        def adapted(layer: Plain) -> Adapter:
            return Adapter(layer, self.rank, self.adapter, self.scale, own_rank, self.own_scale, self.start)

        return task.converted(lambda module: convert(module, names, adapted))

    @property
    def own_scale(self) -> float:
        """What a client's own product is multiplied by."""
        return 1.0

    def private(self, task: Task) -> list[str]:
        """The head if wanted, and the layers named."""
        named = named_layers(self, task, self.personal_layers) if self.personal_layers else []
        return [*super().private(task), *named]

    def apart(self, task: Task, params: Params) -> tuple[Tree, Params]:
        """What is shared, factors by name and the rest as theta, and what stays at home."""
        theta, h = self.split(task, params)
        of = {part(k, f): f for k in structured(task.module) for f in lowrank.FACTORS[self.adapter]}
        parts: Tree = {"theta": {}, **{f: {} for f in self.factors}}
        for k, p in theta.items():
            if of.get(k, "theta") in parts:
                parts[of.get(k, "theta")][k] = p
        return parts, h

    def whole(self, client: Tree, down: Tree) -> Params:
        h: Params = client["h"]
        return tree.merge(down) | h

    def common(self, task: Task, federation: Federation) -> Tree:
        state = dict(task.module.named_parameters())
        layers = structured(task.module)
        held: Tree = {"W": {part(k, "weight"): state[part(k, "weight")].detach().clone() for k in layers}}
        if self.freeze_A:
            held["A"] = {part(k, "A"): state[part(k, "A")].detach().clone() for k in layers}
            held["last"] = {"key": key(federation.seed, "A"), "count": torch.zeros((), dtype=torch.int64)}
        return held

    def constants(self, visit: Visit) -> Params:
        """What a client holds and does not train."""
        W: Params = visit.common["W"]
        A: Params = visit.common["A"] if self.freeze_A else {}
        return W | A

    # ------------------------------------------------------------------------------------------------ the client

    def client_update(self, task: Task, client: Tree, down: Tree, visit: Visit) -> tuple[Tree, Sent]:
        parts, h = self.learn(task, self.whole(client, down), self.constants(visit), visit)
        return {"h": h}, Sent(weight=self.weigh(visit), mean=parts)

    def learn(self, task: Task, free: Params, fixed: Params, visit: Visit) -> tuple[Tree, Params]:
        """Train `free` beside what is fixed: what is sent, and what of it stays at home."""
        loss = lambda p, b: task.loss(fixed | p, b)  # f(W + α A B), eq. (6)
        return self.apart(task, self.fit(loss, free, visit["train"], self.schedule.rate(self.lr, int(visit.round))))

    def personal(self, task: Task, client: Tree, down: Tree, visit: Visit) -> Tree:
        return self.constants(visit) | self.whole(client, down)

    # ------------------------------------------------------------------------------------------------ the server

    def init_server(self, task: Task, federation: Federation) -> Tree:
        server = self.server.begin(self.apart(task, task.init())[0])
        if self.tau is not None:
            none = torch.zeros((), dtype=torch.int64)
            pair = tree.zeros_like({f: server[f] for f in self.factors})
            server["last"] = {"round": none, "key": key(federation.seed, "A"), "added": pair}
        return server

    def download(self, server: Tree, ids: Tensor, capacity: Capacity, round: int) -> Down:
        return Down(shared={k: server[k] for k in ("theta", *self.factors)})

    def server_update(self, server: Tree, round: Round) -> Tree:
        server = {**server, **self.server.step(server, round.mean)}  # A ← Σ p_k A^(k), B ← Σ p_k B^(k)
        due = self.tau is not None and round.round % self.tau == 0
        return self._accumulate(server, round.round) if due else server

    def _accumulate(self, server: Tree, t: int) -> Tree:
        """Hand the product over to W, which all clients hold, and start the factors again."""
        last = {**server["last"], "round": torch.tensor(t), "added": {f: server[f] for f in self.factors}}
        new = {**server, "last": last}
        if self.reinit != "momentum":
            new |= {f: self._restart(f, server[f], last["key"], t) for f in self.factors}
        gone = tree.zeros_like({f: server[f] for f in self.factors})
        if "optimizer" in server:
            old = server["optimizer"]
            new["optimizer"] = {**old, **{k: old[k] | gone for k in ("m", "s") if k in old}}
        return new

    def monitor(self, server: Tree) -> dict[str, float]:
        """‖AB‖_F² / ‖AB‖₂² of the factors, or of those just handed over to W: how much of the rank is used."""
        if self.adapter != "lora" or self.freeze_A:
            return {}
        fresh = self.tau is not None and not any(bool(B.any()) for B in server["B"].values())
        at = server["last"]["added"] if fresh else server
        ranks = [lowrank.stable_rank(A, B) for A, B in zip(at["A"].values(), at["B"].values())]
        known = [r for r in ranks if r is not None]
        return {"stable rank of the update": sum(known) / len(known)} if known else {}

    def _restart(self, factor: str, old: Params, k: Tensor, t: int | Tensor) -> Params:
        if self.reinit == "momentum_A" and factor != lowrank.FACTORS[self.adapter][-1]:
            return old
        # One key for all: means of factors that every client drew for itself would mean nothing.
        keys = fold(fold(k, t), lowrank.FACTORS[self.adapter].index(factor))
        return {name: lowrank.draw(factor, p, fold(keys, j), self.start) for j, (name, p) in enumerate(old.items())}

    def announce(self, server: Tree, round: int) -> Tree | None:
        if self.tau is None or int(server["last"]["round"]) != round:
            return None
        added: Tree = server["last"]["added"]
        return added

    def hear(self, common: Tree, news: Tree) -> Tree:
        factors = news | ({"A": common["A"]} if self.freeze_A else {})
        new = {**common, "W": lowrank.accumulate(common["W"], factors, self.scale)}  # W ← W + α A B
        if self.freeze_A and self.reinit == "random":
            count = common["last"]["count"] + 1
            new["A"] = self._restart("A", common["A"], common["last"]["key"], count)
            new["last"] = {**common["last"], "count": count}
        return new

    def size(self, server: Tree) -> float:
        """The norm of what is shared."""
        return super().size({k: server[k] for k in ("theta", *self.factors)})


@dataclass(frozen=True, kw_only=True)
class FedLoRA(FedLoRU):
    """FedLoRA, the baseline of FedLoRU: one pair of factors for the whole run, nothing is accumulated.

    A model that is not pre-trained keeps its random W. Kept: h, if any. Sent: theta and the factors.
    """

    tau: int | None = None


@dataclass(frozen=True, kw_only=True)
class MFedLoRU(FedLoRU, Ranked):
    """mFedLoRU: FedLoRU for clients of different ranks. Park and Klabjan, 2024, Algorithm 3.

    Client k trains A + α_A A_d A_u and B + α_B B_d B_u with A and B fixed, in its own rank r_k, and sends the inner
    factors; the server makes A and B of them and averages. Clients take the `ranks` in turn; one whose rank is r (if
    `opt_out`) trains A and B themselves. Inner products start at zero in every round: A_u and B_d are Gaussian (or the
    identity), A_d and B_u zero. Kept: h, if any. Sent: theta and A_d, A_u, B_d, B_u (or A, B).

    α_A/r_A = 1/2, as the paper sets it, is taken for the factor on the product, as LoRA counts α; `alpha_inner_by_rank`
    reads it word for word, α_A = r_A/2.
    """

    about = About(
        secure_sum=lambda m: "no" if m.ranks else "yes",  # the server multiplies each client's inner factors
    )

    ranks: tuple[int, ...] = (2, 4, 8, 16)
    alpha_inner: Positive = 0.5
    alpha_inner_by_rank: bool = False
    inner_start: AdapterStart = "gaussian"
    inner_frozen: bool = False
    opt_out: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        whole = [isinstance(r, int) and not isinstance(r, bool) and 1 <= r <= self.rank for r in self.ranks]
        if not all(whole):
            raise ConfigError(
                f"{type(self).__name__}: ranks must be integers in 1..{self.rank}, the global rank. Got"
                f" {list(self.ranks)}."
            )
        if self.ranks and (self.freeze_A or self.adapter != "lora"):
            raise ConfigError(
                f"{type(self).__name__}: ranks go with adapter 'lora' and freeze_A=false only. Got"
                f" {self.adapter!r} and {self.freeze_A}."
            )

    def capacity_of(self, client: int) -> Capacity:
        """A client's ranks, if clients differ in them."""
        return lowrank.turn(self.ranks, client) if len(set(self.ranks)) > 1 else None

    def ranks_of(self, capacity: Capacity) -> tuple[int, int]:
        if isinstance(capacity, int):
            return capacity, 0
        return (self.ranks or (self.rank,))[0], 0

    def alpha_of(self, rank: int) -> float:
        """α_A = α_B of a client."""
        return self.alpha_inner * rank if self.alpha_inner_by_rank else self.alpha_inner

    def learn(self, task: Task, free: Params, fixed: Params, visit: Visit) -> tuple[Tree, Params]:
        r_k = self.ranks_of(visit.capacity)[0]
        if not self.ranks or (r_k == self.rank and self.opt_out):
            return super().learn(task, free, fixed, visit)
        parts, h = self.apart(task, free)
        A, B, alpha = parts.pop("A"), parts.pop("B"), self.alpha_of(r_k)
        outer = {"A_d": self._inner("A_d", A, r_k, visit), "B_u": self._inner("B_u", B, r_k, visit)}
        inner = {"A_u": self._inner("A_u", A, r_k, visit), "B_d": self._inner("B_d", B, r_k, visit)}

        def f(p: Tree, batch: Batch) -> Tensor:
            q = inner | p
            made = nested(A, q["A_d"], q["A_u"], alpha) | nested(B, q["B_d"], q["B_u"], alpha)
            return task.loss(fixed | p["rest"] | made, batch)  # eq. (9)

        start = {"rest": parts["theta"] | h, **outer, **({} if self.inner_frozen else inner)}
        new = inner | self.fit(f, start, visit["train"], self.schedule.rate(self.lr, int(visit.round)))
        theta, h = self.split(task, new.pop("rest"))
        return {"theta": theta, **new}, h

    def _inner(self, factor: str, of: Params, rank: int, visit: Visit) -> Params:
        at = ("A_d", "A_u", "B_d", "B_u").index(factor)
        found = {}
        for j, (name, p) in enumerate(of.items()):
            shape = (p.shape[0], rank) if factor.endswith("d") else (rank, p.shape[1])
            k = fold(fold(visit.key, at), j)
            found[name] = lowrank.draw(factor, p.new_zeros(shape), k, self.inner_start)
        return found

    def lift(self, mean: Tree, shared: Tree, capacity: Capacity) -> Tree:
        """A^(k) = A + α_A A_d A_u, and B likewise, before they are averaged."""
        if "A_d" not in mean:
            return mean
        alpha = self.alpha_of(self.ranks_of(capacity)[0])
        A = nested(shared["A"], mean["A_d"], mean["A_u"], alpha)  # eq. (33)
        B = nested(shared["B"], mean["B_d"], mean["B_u"], alpha)
        return {"theta": mean["theta"], "A": A, "B": B}


def nested(X: Params, down: Params, up: Params, alpha: float) -> Params:
    """X + α X_d X_u, layer by layer."""
    return {k: x + alpha * down[k] @ up[k] for k, x in X.items()}


@dataclass(frozen=True, kw_only=True)
class PFedLoRU(MFedLoRU, Ranked):
    """pFedLoRU: FedLoRU with a pair of factors of every client's own. Park and Klabjan, 2024, Algorithm 2.

    W + α A B + α_p L U: a client trains L and U for `personal_epochs` with A and B fixed, then A and B for
    `global_epochs` (the run's epochs if not given) with L and U fixed. Clients take `own_ranks` in turn, and `ranks` as
    in mFedLoRU if those are given. What is not factorised is trained with A and B and averaged; a private head or
    `personal_layers` are trained with L and U. Kept: h = L, U and what else is private. Sent: theta and the factors.

    The paper leaves open the ranks and epochs of the two phases, and prints its result without the α, which belong
    there.
    """

    ranks: tuple[int, ...] = ()
    own_ranks: tuple[int, ...] = (2,)
    alpha_own: NonNegative = 1.0
    personal_epochs: Count = 1
    global_epochs: Count | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        ok = [isinstance(r, int) and not isinstance(r, bool) and r >= 1 for r in self.own_ranks]
        if not ok or not all(ok):
            raise ConfigError(
                f"{type(self).__name__}: own_ranks must be one or more integers >= 1. Got {list(self.own_ranks)}."
            )

    @property
    def own_scale(self) -> float:
        return self.alpha_own

    def plan(self) -> Mapping[str, Amount]:
        return {"own": Epochs(self.personal_epochs), "train": Epochs(self.global_epochs)}

    def capacity_of(self, client: int) -> Capacity:
        """Both ranks of a client, if clients differ in them."""
        alike = len(set(self.ranks)) <= 1 and len(set(self.own_ranks)) == 1
        return (
            None if alike else (lowrank.turn(self.ranks or (self.rank,), client), lowrank.turn(self.own_ranks, client))
        )

    def ranks_of(self, capacity: Capacity) -> tuple[int, int]:
        if isinstance(capacity, tuple):
            return capacity[0], capacity[1]
        return super().ranks_of(None)[0], self.own_ranks[0]

    def private(self, task: Task) -> list[str]:
        return [*parts(task.module, "L", "U"), *super().private(task)]

    def client_update(self, task: Task, client: Tree, down: Tree, visit: Visit) -> tuple[Tree, Sent]:
        fixed, shared = self.constants(visit), tree.merge(down)
        loss = lambda h, b: task.loss(fixed | shared | h, b)
        h = self.fit(loss, client["h"], visit["own"], self.schedule.rate(self.lr, int(visit.round)))  # eq. (7)
        parts, _ = self.learn(task, shared, fixed | h, visit)  # eq. (8)
        return {"h": h}, Sent(weight=self.weigh(visit), mean=parts)
