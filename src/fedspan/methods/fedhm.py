"""FedHM, FedLMT and FedDLR: weights of low rank on the wire, by the singular value decomposition."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from annotated_types import Ge
from torch import Tensor

from fedspan import tree
from fedspan.errors import ConfigError
from fedspan.layers import Plain, Which
from fedspan.learn.task import Task
from fedspan.linalg import lowrank
from fedspan.method import About, Capacity, Coded, Converts, Ranked, Round, Visit
from fedspan.method.bases import weight_by_field
from fedspan.method.factored import Factored, Reconstructing, Truncating, factors
from fedspan.method.fields import Fraction, Positive
from fedspan.tree import Tree
from fedspan.wire import Codec, Energy


@dataclass(frozen=True, kw_only=True)
class Shrunk(Factored):
    """Ranks are outputs/ρ, and `weight_decay` acts on the products."""

    frobenius: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.frobenius and self.optimizer.weight_decay and self.optimizer.rule == "adamw":
            raise ConfigError(
                f"{type(self).__name__}: optimizer must be 'sgd' with weight_decay and frobenius. Got 'adamw'; set"
                " frobenius to false."
            )

    def decays(self) -> tuple[float, float]:
        return (self.optimizer.weight_decay, self.optimizer.weight_decay) if self.frobenius else (0.0, 0.0)

    def rank_of(self, shape: Sequence[int], rho: float) -> int:
        """r of a layer: its outputs shrunk by ρ, within what its matrix can have."""
        return min(max(1, round(shape[0] / rho)), lowrank.full_rank(shape))


@dataclass(frozen=True, kw_only=True)
class FedHM(Reconstructing, Shrunk, Ranked):
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

    about = About(
        reference="Yao et al., 2021",
        secure_sum=lambda m: "no" if max(m.rhos) > 1 else "yes",  # the server multiplies each client's factors
        weight=lambda m: weight_by_field(m) if m.temperature is None else "own",
    )

    weighting: Literal["samples", "uniform"] = "uniform"
    rho: float | tuple[float, ...] = 2.0
    keep_full_rank_history: bool = False
    temperature: Positive | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        ok = [isinstance(r, int | float) and not isinstance(r, bool) and 1 <= r < math.inf for r in self.rhos]
        if not ok or not all(ok):
            raise ConfigError(f"{type(self).__name__}: rho must be one or more finite numbers >= 1. Got {self.rho!r}.")

    @property
    def rhos(self) -> tuple[float, ...]:
        """ρ of the clients, in turn."""
        return self.rho if isinstance(self.rho, tuple) else (self.rho,)

    def weigh(self, visit: Visit) -> Tensor:
        if self.temperature is None:
            return super().weigh(visit)
        return torch.full_like(visit.examples, math.exp(-self.rho_of(visit.capacity) / self.temperature))

    def with_ratios(self, ratios: tuple[float, ...]) -> FedHM:
        return replace(self, rho=tuple(1 / r for r in ratios))

    def capacity_of(self, client: int) -> Capacity:
        """ρ of a client, if clients differ in it."""
        return lowrank.turn(self.rhos, client) if len(set(self.rhos)) > 1 else None

    def rho_of(self, capacity: Capacity) -> float:
        """ρ of the clients of one capacity."""
        return float(capacity) if isinstance(capacity, int | float) else self.rhos[0]

    def size_of(self, layer: Plain) -> int:
        rank = max(self.rank_of(layer.weight.shape, rho) for rho in self.rhos if rho > 1 or max(self.rhos) == 1)
        return factors(layer, rank)

    def capacities(self) -> Sequence[Capacity]:
        return sorted(set(self.rhos)) if len(set(self.rhos)) > 1 else [None]

    def rank_at(self, layer: str, shape: Sequence[int], capacity: Capacity) -> int | None:
        rho = self.rho_of(capacity)
        return None if rho == 1 else self.rank_of(shape, rho)

    # ------------------------------------------------------------------------------------------------ the server

    def server_update(self, server: Tree, round: Round) -> Tree:
        mean = {k: round.mean[k] for k in ("theta", "W")}
        full = any(self.rho_of(self.capacity_of(i)) == 1 for i in round.ids.tolist())
        if self.keep_full_rank_history and not full:
            # One more member, of average weight: what small ranks cannot carry is not lost at once.
            share = float(round.weights.mean() / (round.weights.sum() + round.weights.mean()))
            mean = tree.map(lambda a, b: (1 - share) * a + share * b, mean, {k: server[k] for k in mean})
        return self.decomposed(self.server.step(server, mean))


@dataclass(frozen=True, kw_only=True)
class FedLMT(Shrunk, Converts):
    """FedLMT. Liu et al., ICML 2024: FedAvg of a model whose layers are U Vᵀ from the start.

    U and V are averaged each for itself. They start as the best factors of the usual start, of rank outputs/ρ, with
    kernels read as o·k × i·k. `weight_decay` acts on U Vᵀ, not on U and V, unless `frobenius` is off. Kept: h, the
    private head, if any. Sent: theta (what is not factorised, running statistics included), U and V.
    """

    about = About(reference="Liu et al., ICML 2024")

    rho: Annotated[float, Ge(1)] = 2.0

    def size_of(self, layer: Plain) -> int:
        return factors(layer, self.rank_of(layer.weight.shape, self.rho))

    def model(self, task: Task, capacity: Capacity) -> Task:
        return self.factored(task, {k: self.rank_of(m.weight.shape, self.rho) for k, m in self.chosen(task).items()})


@dataclass(frozen=True, kw_only=True)
class FedDLR(Truncating, Coded):
    """FedDLR. Qiao et al., 2021: FedAvg whose weights travel as their leading singular triples, both ways.

    A triple is kept until `energy` (the share of the sum of σ²) is reached; a weight for which that is no shorter
    travels as it is. Clients train the full model. Kernels are read as outputs × all the rest. Kept: h, the private
    head, if any. Sent: theta (what is not cut, running statistics included) and W.
    """

    about = About(
        reference="Qiao et al., 2021",
        secure_sum="no",  # the server multiplies each client's triples
    )

    layers: Which = "body"
    energy: Fraction = 0.95

    def __post_init__(self) -> None:
        super().__post_init__()
        Energy(self.energy)

    def codecs(self, round: int) -> Mapping[str, Codec]:
        return {"W": Energy(self.energy)}


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
