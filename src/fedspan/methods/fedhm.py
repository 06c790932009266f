"""FedHM, FedLMT and FedDLR: weights of low rank on the wire, by the singular value decomposition."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal, TypeAlias

import torch
from annotated_types import Ge, MinLen
from torch import Tensor

from fedspan import tree
from fedspan.errors import ConfigError
from fedspan.layers import Chosen, Plain, Which
from fedspan.layers.decay import fit_decayed
from fedspan.learn.batches import Batches
from fedspan.learn.optimizer import Optimizer, Schedule
from fedspan.learn.task import Task
from fedspan.linalg import lowrank
from fedspan.method import (
    About,
    Capacity,
    Coded,
    Converts,
    Discloses,
    Down,
    Federation,
    Observed,
    Ranked,
    Round,
    Sent,
    Sharing,
    Visit,
    norm_of_state,
)
from fedspan.method.bases import weight_by_field
from fedspan.method.factored import (
    InParts,
    decomposed,
    factorised,
    in_parts,
    kept_and_sent,
    low_rank_layers,
    need_sgd,
    reconstructed,
    size_of_factors,
    truncated,
)
from fedspan.method.fields import AtLeast1, Positive, Share
from fedspan.tree import Params, Tree
from fedspan.wire import Codec, Energy

Shrinking: TypeAlias = Annotated[float, Ge(1)]
"""ρ: a finite number of at least 1."""


@dataclass(frozen=True, kw_only=True)
class Factorisation:
    """Which layers clients train as factors U Vᵀ, and how these decay: a value that FedHM and FedLMT hold."""

    KEYS: ClassVar[Mapping[str, str]] = {k: k for k in ("layers", "pointwise", "frobenius", "decay_every")}

    layers: Chosen = "body"
    """The layers that are factorised: a group of them, or names that begin theirs."""
    pointwise: bool = False
    """Whether convolutions of 1×1 are factorised, too."""
    frobenius: bool = True
    """Whether `weight_decay` acts on U Vᵀ (Frobenius decay), or on U and V."""
    decay_every: AtLeast1 = 1
    """Steps from one decay of U Vᵀ to the next, each so many times as strong."""

    def decays(self, optimizer: Optimizer) -> tuple[float, float]:
        """λ of ‖U Vᵀ‖² and of all other parameters; both 0: the optimiser's own decay."""
        return (optimizer.weight_decay, optimizer.weight_decay) if self.frobenius else (0.0, 0.0)

    def fit(self, optimizer: Optimizer, task: Task, start: Params, batches: Batches, lr: float) -> Params:
        """Train on the loss + λ/2 ‖U Vᵀ‖², λ being the weight decay."""
        return fit_decayed(optimizer, task, task.loss, start, batches, lr, self.decays(optimizer), self.decay_every)


class Shrinks:
    """Ranks are outputs/ρ."""

    def rank_of(self, shape: Sequence[int], rho: float) -> int:
        """r of a layer: its outputs shrunk by ρ, within what its matrix can have."""
        return min(max(1, round(shape[0] / rho)), lowrank.full_rank(shape))


@dataclass(frozen=True, kw_only=True)
class FedHM(InParts, Sharing, Shrinks, Ranked, Observed):
    """FedHM. Yao et al., 2021; homogeneous, or with a rank for every client.

    The server holds full weights W and sends client k their best factors of rank r = outputs/ρ_k, U = P √Σ and V = Q √Σ
    with kernels read as o·k × i·k; a client of ρ = 1 gets W. What comes back is multiplied out and averaged. Kept: h,
    the private head, if any. Sent: theta (what is not factorised, running statistics included), and U and V, or W.

    The public code keeps the stem, the first block and all 1×1 convolutions dense: for ResNet-18 layers = ["layer1.1",
    "layer2", "layer3", "layer4"]. It also masks classes a client has not seen, without renormalising; that is left out.
    """

    about = About(
        family="fedhm",
        reference="Yao et al., 2021",
        secure_sum=lambda m: "no" if max(m.rhos) > 1 else "yes",  # the server multiplies each client's factors
        weight=lambda m: weight_by_field(m) if m.temperature is None else "own",
        discloses=Discloses(labels="set", model="whole", examples=False, resembles=True),
    )

    local_stats: ClassVar[bool] = False
    moves: ClassVar[bool] = True
    """Whether factors may change where the weights do not: the server factorises anew after every round."""

    weighting: Literal["samples", "uniform"] = "uniform"
    schedule: Schedule = Schedule()
    """How the clients' learning rate falls over the rounds."""
    rho: Shrinking | Annotated[tuple[Shrinking, ...], MinLen(1)] = 2.0
    """ρ, by which the outputs of a layer are divided to get its rank; clients take several in turn, and 1 is dense."""
    factors: Factorisation = Factorisation()
    """Which layers are factorised, and how the factors decay."""
    keep_full_rank_history: bool = False
    """Whether the last model is one more member of the average when no client of ρ = 1 answered, as in public code."""
    temperature: Positive | None = None
    """With it uploads weigh exp(−ρ/temperature), whatever `weighting` says."""

    def __post_init__(self) -> None:
        super().__post_init__()
        need_sgd(self, self.factors.frobenius)

    # ------------------------------------------------------------------------------------------------ capacities

    @property
    def rhos(self) -> tuple[float, ...]:
        """ρ of the clients, in turn."""
        return self.rho if isinstance(self.rho, tuple) else (self.rho,)

    def with_ratios(self, ratios: tuple[float, ...]) -> FedHM:
        return replace(self, rho=tuple(1 / r for r in ratios))

    def capacities(self) -> Sequence[Capacity]:
        """Every capacity that a client may have, once each."""
        return sorted(set(self.rhos)) if len(set(self.rhos)) > 1 else [None]

    def capacity_of(self, client: int) -> Capacity:
        """ρ of a client, if clients differ in it."""
        return lowrank.turn(self.rhos, client) if len(set(self.rhos)) > 1 else None

    def rho_of(self, capacity: Capacity) -> float:
        """ρ of the clients of one capacity."""
        return float(capacity) if isinstance(capacity, int | float) else self.rhos[0]

    def rank_at(self, layer: str, shape: Sequence[int], capacity: Capacity) -> int | None:
        """The rank at which clients of one capacity train a layer; None where it is dense."""
        rho = self.rho_of(capacity)
        return None if rho == 1 else self.rank_of(shape, rho)

    def size_of(self, layer: Plain) -> int:
        """Numbers in the largest factors of a layer that any client has."""
        rank = max(self.rank_of(layer.weight.shape, rho) for rho in self.rhos if rho > 1 or max(self.rhos) == 1)
        return size_of_factors(layer, rank)

    def chosen(self, task: Task) -> dict[str, Plain]:
        """The layers of low rank on the wire."""
        return low_rank_layers(self, task, self.factors.layers, self.factors.pointwise, self.size_of)

    def model(self, task: Task, capacity: Capacity) -> Task:
        """Layers U Vᵀ, or the plain ones for a client that can hold them."""
        ranks = {k: self.rank_at(k, m.weight.shape, capacity) for k, m in self.chosen(task).items()}
        return factorised(task, {k: r for k, r in ranks.items() if r is not None})

    # ------------------------------------------------------------------------------------------------ the round

    def init_server(self, task: Task, federation: Federation) -> Tree:
        shared, _ = self.split(task.plain, task.plain.init())
        return self.factorise(self.server.begin(in_parts(shared, self.chosen(task))))

    def factorise(self, server: Tree) -> Tree:
        """The server's weights with their factors of the largest rank in use."""
        return decomposed(server, self.rank_at, self.capacities())

    def download(self, server: Tree, ids: Tensor, capacity: Capacity, round: int) -> Down:
        """The leading factors U = P √Σ, V = Q √Σ of W that a client can afford."""
        return Down(shared=truncated(server, self.rank_at, capacity))

    def client_update(self, task: Task, client: Tree, down: Tree, visit: Visit) -> tuple[Tree, Sent]:
        start, lr = self.whole(client, down), self.schedule.rate(self.lr, int(visit.round))
        new = self.factors.fit(self.optimizer, task, start, visit["train"], lr)
        return kept_and_sent(self, task, new, self.chosen(task), visit)

    def weigh(self, visit: Visit) -> Tensor:
        if self.temperature is None:
            return super().weigh(visit)
        return torch.full_like(visit.examples, math.exp(-self.rho_of(visit.capacity) / self.temperature))

    def lift(self, mean: Tree, shared: Tree, capacity: Capacity) -> Tree:
        """W_k = U_k V_kᵀ, before they are averaged."""
        return reconstructed(mean)

    def server_update(self, server: Tree, round: Round) -> Tree:
        """W ← Σ_k w_k W_k, or a step towards it, factorised anew."""
        mean = {k: round.mean[k] for k in ("theta", "W")}
        full = any(self.rho_of(self.capacity_of(i)) == 1 for i in round.ids.tolist())
        if self.keep_full_rank_history and not full:
            # One more member, of average weight: what small ranks cannot carry is not lost at once.
            share = float(round.weights.mean() / (round.weights.sum() + round.weights.mean()))
            mean = tree.map(lambda a, b: (1 - share) * a + share * b, mean, {k: server[k] for k in mean})
        return self.factorise(self.server.step(server, mean))

    def size(self, server: Tree) -> float:
        """The norm of the model."""
        return norm_of_state({k: server[k] for k in ("theta", "W")})


@dataclass(frozen=True, kw_only=True)
class FedLMT(InParts, Sharing, Shrinks, Converts):
    """FedLMT. Liu et al., ICML 2024: FedAvg of a model whose layers are U Vᵀ from the start.

    U and V are averaged each for itself. They start as the best factors of the usual start, of rank outputs/ρ, with
    kernels read as o·k × i·k. Kept: h, the private head, if any. Sent: theta (what is not factorised, running
    statistics included), U and V.
    """

    about = About(
        family="fedhm",
        reference="Liu et al., ICML 2024",
        discloses=Discloses(labels="set", model="whole", examples=True, resembles=True),
    )

    local_stats: ClassVar[bool] = False

    schedule: Schedule = Schedule()
    """How the clients' learning rate falls over the rounds."""
    rho: Shrinking = 2.0
    """ρ, by which the outputs of a layer are divided to get its rank."""
    factors: Factorisation = Factorisation()
    """Which layers are factorised, and how the factors decay."""

    def __post_init__(self) -> None:
        super().__post_init__()
        need_sgd(self, self.factors.frobenius)

    def chosen(self, task: Task) -> dict[str, Plain]:
        """The layers that are factorised."""

        def size(layer: Plain) -> int:
            return size_of_factors(layer, self.rank_of(layer.weight.shape, self.rho))

        return low_rank_layers(self, task, self.factors.layers, self.factors.pointwise, size)

    def model(self, task: Task, capacity: Capacity) -> Task:
        return factorised(task, {k: self.rank_of(m.weight.shape, self.rho) for k, m in self.chosen(task).items()})

    def init_server(self, task: Task, federation: Federation) -> Tree:
        return self.server.begin(in_parts(self.split(task, task.init())[0], self.chosen(task)))

    def client_update(self, task: Task, client: Tree, down: Tree, visit: Visit) -> tuple[Tree, Sent]:
        start, lr = self.whole(client, down), self.schedule.rate(self.lr, int(visit.round))
        new = self.factors.fit(self.optimizer, task, start, visit["train"], lr)
        return kept_and_sent(self, task, new, self.chosen(task), visit)

    def server_update(self, server: Tree, round: Round) -> Tree:
        """U ← Σ_k w_k U_k and V ← Σ_k w_k V_k, or steps towards them."""
        return self.server.step(server, round.mean)


@dataclass(frozen=True, kw_only=True)
class FedDLR(InParts, Sharing, Coded):
    """FedDLR. Qiao et al., 2021: FedAvg whose weights travel as their leading singular triples, both ways.

    A weight for which its triples are no shorter travels as it is. Clients train the full model. Kernels are read as
    outputs × all the rest. Kept: h, the private head, if any. Sent: theta (what is not cut, running statistics
    included) and W.
    """

    about = About(
        family="fedhm",
        reference="Qiao et al., 2021",
        secure_sum="no",  # the server multiplies each client's triples
        discloses=Discloses(labels="set", model="whole", examples=True, resembles=True),
    )

    local_stats: ClassVar[bool] = False

    schedule: Schedule = Schedule()
    """How the clients' learning rate falls over the rounds."""
    energy: Share = 0.95
    """The share of the sum of σ² that the triples of a weight hold together."""
    layers: Which = "body"
    """The layers whose weights are cut: all, all but the head, or names that begin theirs."""
    pointwise: bool = False
    """Whether convolutions of 1×1 are cut, too."""

    def codecs(self, round: int) -> Mapping[str, Codec]:
        return {"W": Energy(self.energy)}

    def chosen(self, task: Task) -> dict[str, Plain]:
        """The layers whose weights are cut."""
        return low_rank_layers(self, task, self.layers, self.pointwise)

    def init_server(self, task: Task, federation: Federation) -> Tree:
        return self.server.begin(in_parts(self.split(task, task.init())[0], self.chosen(task)))

    def client_update(self, task: Task, client: Tree, down: Tree, visit: Visit) -> tuple[Tree, Sent]:
        lr = self.schedule.rate(self.lr, int(visit.round))
        new = self.fit(task.loss, self.whole(client, down), visit["train"], lr)
        return kept_and_sent(self, task, new, self.chosen(task), visit)

    def server_update(self, server: Tree, round: Round) -> Tree:
        """W ← Σ_k w_k W_k, or a step towards it."""
        return self.server.step(server, round.mean)


def matching_rho(task: Task, parameters: int, method: FedHM | FedLMT) -> float:
    """The smallest ρ at which a client of `method` has no more than so many parameters, all others counted in.

    Raises:
        ConfigError: if even rank one has more.
    """
    layers = list(method.chosen(task).values())
    rest = sum(task.init()[k].numel() for k in task.names) - sum(m.weight.numel() for m in layers)

    def count(rho: float) -> int:
        return rest + sum(size_of_factors(m, method.rank_of(m.weight.shape, rho)) for m in layers)

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
