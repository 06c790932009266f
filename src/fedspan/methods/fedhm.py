"""FedHM, FedLMT and FedDLR: weights of low rank on the wire, by the singular value decomposition."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from fedspan import lowrank, tree
from fedspan.anneal import Annealed
from fedspan.batches import Batches
from fedspan.decay import product_decay
from fedspan.errors import ConfigError
from fedspan.layers import Chosen, LowRank, Plain, choose, convert, in_head, part
from fedspan.local import sgd
from fedspan.method import Capacity, Down, Federation, Round, Sent, Visit
from fedspan.task import Task
from fedspan.tree import Params, Tree
from fedspan.wire import Codec, Energy


@dataclass(frozen=True, kw_only=True)
class Truncating(Annealed):
    """What the three have in common: which layers are of low rank on the wire, and how a payload names its parts."""

    family: ClassVar[str] = "fedhm"
    local_stats: ClassVar[bool] = False

    layers: Chosen = "body"
    pointwise: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.layers, str):
            self.one_of("layers", "all", "body", "large")

    def size_of(self, layer: Plain) -> int:
        """Numbers in the factors of a layer, where those are known beforehand."""
        return 0

    def chosen(self, task: Task) -> dict[str, Plain]:
        """The layers of low rank: no convolutions of 1×1 unless `pointwise`, and no private head."""
        who, plain = type(self).__name__, task.plain
        found = {
            k: m
            for k, m in choose(plain, self.layers, who, self.size_of).items()
            if (self.pointwise or tuple(m.weight.shape[2:]) != (1, 1)) and not (self.private_head and in_head(plain, k))
        }
        if not found:
            raise ConfigError(f"{who}: layers must name a layer besides 1x1 convolutions and a private head. Got none.")
        return found

    def apart(self, task: Task, params: Params) -> tuple[Tree, Params]:
        """What is shared: W or its factors U and V, and the rest as theta; and what stays at home."""
        theta, h = self.split(task, params)
        of = {part(k, name): tag for k in self.chosen(task) for name, tag in (("weight", "W"), ("U", "U"), ("V", "V"))}
        parts: Tree = {"theta": {}}
        for k, p in theta.items():
            parts.setdefault(of.get(k, "theta"), {})[k] = p
        return parts, h

    def whole(self, client: Tree, down: Tree) -> Params:
        h: Params = client["h"]
        return tree.merge(down) | h

    def client_update(self, task: Task, client: Tree, down: Tree, visit: Visit) -> tuple[Tree, Sent]:
        parts, h = self.apart(task, self.descend(task, self.whole(client, down), visit["train"], self.rate(visit)))
        return {"h": h}, Sent(weight=self.weigh(visit), mean=parts)

    def descend(self, task: Task, params: Params, stream: Batches, lr: float) -> Params:
        """Train a model."""
        return self.fit(task.loss, params, stream, lr)

    def init_server(self, task: Task, federation: Federation) -> Tree:
        """The shared parts of the common start."""
        return self.with_moments(self.apart(task, task.init())[0])

    def download(self, server: Tree, ids: Tensor, capacity: Capacity, round: int) -> Down:
        """All parts."""
        return Down(shared={k: part for k, part in server.items() if k != "optimizer"})

    def server_update(self, server: Tree, round: Round) -> Tree:
        """Their means, or a step towards them."""
        return self.stepped(server, round.mean)


@dataclass(frozen=True, kw_only=True)
class Factored(Truncating):
    """A client trains factors U and V, with a decay of their product."""

    frobenius: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.frobenius and self.weight_decay and self.optimizer == "adamw":
            raise ConfigError(
                f"{type(self).__name__}: optimizer must be 'sgd' with weight_decay and frobenius. Got 'adamw'; set"
                " frobenius to false."
            )

    def rank_of(self, shape: torch.Size, rho: float) -> int:
        """r of a layer: its outputs shrunk by ρ, within what its matrix can have."""
        return min(max(1, round(shape[0] / rho)), lowrank.full_rank(shape))

    def factored(self, task: Task, rho: float) -> Task:
        """The task with layers U Vᵀ."""
        names = self.chosen(task)
        make = lambda layer: LowRank(layer, self.rank_of(layer.weight.shape, rho))
        return task.converted(lambda module: convert(module, names, make))

    def descend(self, task: Task, params: Params, stream: Batches, lr: float) -> Params:
        if not (self.frobenius and self.weight_decay):
            return super().descend(task, params, stream, lr)
        return sgd(product_decay(task, self.weight_decay), params, stream, lr, momentum=self.momentum)


@dataclass(frozen=True, kw_only=True)
class FedHM(Factored):
    """FedHM. Yao et al., 2021; homogeneous, or with a rank for every client.

    The server holds full weights W and sends client k their best factors of rank r = outputs/ρ_k, U = P √Σ and V = Q √Σ
    with kernels read as o·k × i·k; a client of ρ = 1 gets W. What comes back is multiplied out and averaged. Clients
    take the `rho` in turn. `weight_decay` acts on U Vᵀ, not on U and V, unless `frobenius` is off. Kept: h, the private
    head, if any. Sent: theta (what is not factorised, running statistics included), and U and V, or W.

    `keep_full_rank_history` lets the last model be one more member of the average when no client of ρ = 1 answered, as
    in the public code; with a `temperature` the weights are exp(−ρ/temperature) instead of `weighting`. That code keeps
    the stem, the first block and all 1×1 convolutions dense: for ResNet-18 layers = ["layer1.1", "layer2", "layer3",
    "layer4"]. It also masks classes a client has not seen, without renormalising; that is left out.
    """

    reference: ClassVar[str] = "Yao et al., 2021"
    moves: ClassVar[bool] = True
    """Whether factors may change where the weights do not: the server factorises anew after every round."""

    weighting: Literal["samples", "uniform"] = "uniform"
    rho: float | tuple[float, ...] = 2.0
    keep_full_rank_history: bool = False
    temperature: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        ok = [isinstance(r, int | float) and not isinstance(r, bool) and 1 <= r < math.inf for r in self.rhos]
        if not ok or not all(ok):
            raise ConfigError(f"{type(self).__name__}: rho must be one or more finite numbers >= 1. Got {self.rho!r}.")
        if self.temperature is not None:
            self.require("temperature", 0.0)

    @property
    def rhos(self) -> tuple[float, ...]:
        """ρ of the clients, in turn."""
        return self.rho if isinstance(self.rho, tuple) else (self.rho,)

    @property
    def weight(self) -> Literal["samples", "one", "own"]:
        return super().weight if self.temperature is None else "own"

    @property
    def secure_sum(self) -> str:
        return "no" if max(self.rhos) > 1 else "yes"  # the server multiplies each client's factors

    def weigh(self, visit: Visit) -> Tensor:
        if self.temperature is None:
            return super().weigh(visit)
        return torch.full_like(visit.examples, math.exp(-self.rho_of(visit.capacity) / self.temperature))

    def capacity_of(self, client: int) -> Capacity:
        """ρ of a client, if clients differ in it."""
        return lowrank.turn(self.rhos, client) if len(set(self.rhos)) > 1 else None

    def rho_of(self, capacity: Capacity) -> float:
        """ρ of the clients of one capacity."""
        return float(capacity) if isinstance(capacity, int | float) else self.rhos[0]

    def size_of(self, layer: Plain) -> int:
        rank = max(self.rank_of(layer.weight.shape, rho) for rho in self.rhos if rho > 1 or max(self.rhos) == 1)
        return factors(layer, rank)

    def model(self, task: Task, capacity: Capacity) -> Task:
        """Layers U Vᵀ, or the plain ones for a client that can hold them."""
        rho = self.rho_of(capacity)
        return task if rho == 1 else self.factored(task, rho)

    # ------------------------------------------------------------------------------------------------ the server

    def init_server(self, task: Task, federation: Federation) -> Tree:
        parts, _ = self.apart(task.plain, task.plain.init())
        return self._decomposed(self.with_moments(parts))

    def _decomposed(self, server: Tree) -> Tree:
        """The server's weights with their leading factors, of which every client gets as many columns as it can use."""
        least = min((rho for rho in self.rhos if rho > 1), default=None)
        if least is None:
            return server
        server = {**server, "U": {}, "V": {}}
        for name, W in server["W"].items():
            k = name.removesuffix("weight")
            server["U"][k + "U"], server["V"][k + "V"] = lowrank.leading(W, self.rank_of(W.shape, least))
        return server

    def download(self, server: Tree, ids: Tensor, capacity: Capacity, round: int) -> Down:
        rho = self.rho_of(capacity)
        if rho == 1:
            return Down(shared={"theta": server["theta"], "W": server["W"]})
        shared: Tree = {"theta": server["theta"], "U": {}, "V": {}}
        for name, W in server["W"].items():
            k, r = name.removesuffix("weight"), self.rank_of(W.shape, rho)
            for f in "UV":
                shared[f][k + f] = server[f][k + f][..., :r].contiguous()
        return Down(shared=shared)

    def lift(self, mean: Tree, shared: Tree, capacity: Capacity) -> Tree:
        """W_k = U_k V_kᵀ, before they are averaged."""
        if "U" not in mean:
            return mean
        names = [k.removesuffix("U") for k in mean["U"]]
        W = {k + "weight": lowrank.fold(mean["U"][k + "U"], mean["V"][k + "V"]) for k in names}
        return {"theta": mean["theta"], "W": W}

    def server_update(self, server: Tree, round: Round) -> Tree:
        mean = {k: round.mean[k] for k in ("theta", "W")}
        full = any(self.rho_of(self.capacity_of(i)) == 1 for i in round.ids.tolist())
        if self.keep_full_rank_history and not full:
            # One more member, of average weight: what small ranks cannot carry is not lost at once.
            share = float(round.weights.mean() / (round.weights.sum() + round.weights.mean()))
            mean = tree.map(lambda a, b: (1 - share) * a + share * b, mean, {k: server[k] for k in mean})
        return self._decomposed(self.stepped(server, mean))

    def size(self, server: Tree) -> float:
        """The norm of the model."""
        return super().size({k: server[k] for k in ("theta", "W")})


@dataclass(frozen=True, kw_only=True)
class FedLMT(Factored):
    """FedLMT. Liu et al., ICML 2024: FedAvg of a model whose layers are U Vᵀ from the start.

    U and V are averaged each for itself. They start as the best factors of the usual start, of rank outputs/ρ, with
    kernels read as o·k × i·k. `weight_decay` acts on U Vᵀ, not on U and V, unless `frobenius` is off. Kept: h, the
    private head, if any. Sent: theta (what is not factorised, running statistics included), U and V.
    """

    reference: ClassVar[str] = "Liu et al., ICML 2024"
    rho: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("rho", 1.0, allow_zero=True)

    def size_of(self, layer: Plain) -> int:
        return factors(layer, self.rank_of(layer.weight.shape, self.rho))

    def model(self, task: Task, capacity: Capacity) -> Task:
        return self.factored(task, self.rho)


@dataclass(frozen=True, kw_only=True)
class FedDLR(Truncating):
    """FedDLR. Qiao et al., 2021: FedAvg whose weights travel as their leading singular triples, both ways.

    A triple is kept until `energy` (the share of the sum of σ²) is reached; a weight for which that is no shorter
    travels as it is. Clients train the full model. Kernels are read as outputs × all the rest. Kept: h, the private
    head, if any. Sent: theta (what is not cut, running statistics included) and W.
    """

    reference: ClassVar[str] = "Qiao et al., 2021"
    energy: float = 0.95

    def __post_init__(self) -> None:
        super().__post_init__()
        self.fraction("energy")
        Energy(self.energy)
        if isinstance(self.layers, str):
            self.one_of("layers", "all", "body")

    @property
    def secure_sum(self) -> str:
        return "no"  # the server multiplies each client's triples

    def codecs(self, round: int) -> Mapping[str, Codec]:
        return {"W": Energy(self.energy)}


def factors(layer: nn.Linear | nn.Conv2d, rank: int) -> int:
    """Numbers in U and V of a layer: r k (i + o)."""
    o, i, h, w = *layer.weight.shape, *(1, 1)[layer.weight.ndim - 2 :]
    return rank * (o * h + i * w)


def matching_rho(task: Task, parameters: int, method: FedHM | FedLMT) -> float:
    """The smallest ρ at which a client of `method` has no more than so many parameters, all others counted in.

    Raises:
        ConfigError: if even rank one has more.
    """
    layers = list(method.chosen(task).values())
    rest = sum(task.init()[k].numel() for k in task.names) - sum(m.weight.numel() for m in layers)

    def count(rho: float) -> int:
        return rest + sum(factors(m, method.rank_of(m.weight.shape, rho)) for m in layers)

    low, high = 1.0, 2.0 * max(m.weight.shape[0] for m in layers)
    if count(high) > parameters:
        raise ConfigError(
            f"{type(method).__name__}: the model must have at least {count(high)} parameters. Got {parameters}."
        )
    if count(low) <= parameters:
        return low
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if count(middle) <= parameters else (middle, high)
    return high
