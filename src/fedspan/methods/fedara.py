"""FedARA: every client trains the rank it can afford, held near anchors that the received extractor gives."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fedspan import tree
from fedspan.errors import ConfigError, nearest
from fedspan.layers import Plain
from fedspan.learn.batches import All, Amount, Batch, Batches, Epochs
from fedspan.learn.class_features import class_matrix, class_means
from fedspan.learn.sgd import Loss
from fedspan.learn.task import Task
from fedspan.linalg import lowrank
from fedspan.method import About, Capacity, ClientInfo, Federation, Observed, Ranked, Round, Sent, Visit
from fedspan.method.factored import Reconstructing, factors, layer_of
from fedspan.method.fields import AtLeast1, NonNegative, Share
from fedspan.method.levels import LEVELS
from fedspan.tree import Params, Tree


@dataclass(frozen=True, kw_only=True)
class FedAra(Reconstructing, Ranked, Observed):
    """FedARA. CVPR 2026; read from a summary without its displayed formulas, see docs/methods/fedara.md.

    Symbols: W and theta = ω, the extractor, full on the server; U, V = its factors at a client's rank ratio r_k; h =
    θ_k, the personal classifier; lam = λ, rho = ρ. Clients take the entries of `ratio` in turn (or those of a list of
    `fedspan.method.levels.LEVELS`, by its name); 1 is dense. Ranks are r_k·min(m, n) of an m × n matrix, or r_k·outputs
    (`rank_rule`); kernels are read as o·k × i·k. Decomposed are `layers` ("main": the fewest that hold 80 % of the
    extractor, not the first convolution), or per client, in turn, those of `layer_sets` ("fc1+fc2"). A client minimises
    CE + λ_t·(distance of features to the anchor of their class) + ρ/2 ‖U Vᵀ‖² (`rho_rule`: or ρ); anchors are class
    means under the extractor as received; λ_t is 0 in round 1 and reaches λ after `warmup` more.

    A ratio whose factors are larger than the layer is refused unless `allow_larger`, which also makes a ratio of 1
    factors. With `aggregate` = "changes" the server adds the mean of what clients changed in what they were sent: the
    part of ω that a small rank cannot carry stays, where the mean of the models takes it for zero. `weight_decay` acts
    on what is not decomposed. `watch` records the distance to the anchors after training, for one more pass.

    With `adapt_energy` below 1 ranks adapt: every `adapt_every` rounds a client goes one step down, from its entry of
    `ratio` over those of `adapt_ratios` below it, if the lower rank would hold that share of the energy of what it
    changed in the decomposed layers, and one step back up if the present one does not. The server keeps its `level`.

    Kept: h. Sent: theta (what is not decomposed), and U and V, or W; `step` (−1, 0 or 1) if ranks adapt.
    """

    about = About(family="fedara", reference="FedARA, CVPR 2026", needs_classes=True)

    local_stats: ClassVar[bool] = True

    private_head: bool = True
    layers: Literal["all", "body", "large", "main"] | tuple[str, ...] = "main"
    layer_sets: tuple[str, ...] = ()
    ratio: float | str | tuple[float, ...] = 1.0
    rank_rule: Literal["min_dim", "out_channels"] = "min_dim"
    allow_larger: bool = False
    lam: NonNegative = 10.0
    warmup: AtLeast1 = 10
    fac_reduction: Literal["mse", "sum"] = "mse"
    rho: NonNegative = 1e-3
    rho_rule: Literal["half", "whole"] = "half"
    aggregate: Literal["models", "changes"] = "models"
    watch: bool = False
    adapt_energy: Share = 1.0
    adapt_ratios: tuple[float, ...] = (0.5, 0.25, 0.1, 0.05)
    adapt_every: AtLeast1 = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        who = type(self).__name__
        if isinstance(self.ratio, str) and self.ratio not in LEVELS:
            raise ConfigError(f"{who}: ratio must be numbers or a list of levels.{nearest(self.ratio, LEVELS)}")
        if not self.ratios or not all(map(_is_ratio, self.ratios)):
            raise ConfigError(f"{who}: ratio must be one or more numbers in (0, 1]. Got {self.ratio!r}.")
        if not self.adapt_ratios or not all(map(_is_ratio, self.adapt_ratios)):
            raise ConfigError(f"{who}: adapt_ratios must be one or more numbers in (0, 1]. Got {self.adapt_ratios!r}.")
        if self.adapts and min(self.adapt_ratios) >= max(self.ratios):
            raise ConfigError(
                f"{who}: adapt_ratios must hold one below the largest ratio, {max(self.ratios):g}, for ranks to adapt."
                f" Got {self.adapt_ratios!r}."
            )

    # ------------------------------------------------------------------------------------------------ capacities

    @property
    def ratios(self) -> tuple[float, ...]:
        """r_k of the clients, in turn."""
        if isinstance(self.ratio, str):
            return LEVELS[self.ratio]
        return self.ratio if isinstance(self.ratio, tuple) else (self.ratio,)

    def with_ratios(self, ratios: tuple[float, ...]) -> FedAra:
        return replace(self, ratio=ratios)

    @property
    def adapts(self) -> bool:
        """Whether ranks change during training."""
        return self.adapt_energy < 1

    def ladder(self, ratio: float) -> tuple[float, ...]:
        """A ratio, and those below it that its owner may come down to."""
        below = sorted({r for r in self.adapt_ratios if r < ratio}, reverse=True) if self.adapts else ()
        return (ratio, *below)

    def rungs(self) -> list[float]:
        """Every ratio that a client may have, the largest first."""
        return sorted({s for r in self.ratios for s in self.ladder(r)}, reverse=True)

    def capacity_of(self, client: int) -> Capacity:
        """r_k, with Q_k if there are several; None where all are alike."""
        return self.levels(client)[0]

    def levels(self, client: int) -> Sequence[Capacity]:
        return self._afforded(client) if len(self.capacities()) > 1 else (None,)

    def level(self, server: Tree, client: int) -> int:
        return int(server["level"][client]) if self.adapts else 0

    def _afforded(self, client: int) -> list[float | tuple[float, str]]:
        found, mine = self.ladder(lowrank.turn(self.ratios, client)), self.layer_sets
        return [(r, lowrank.turn(mine, client)) for r in found] if mine else list(found)

    def capacities(self) -> Sequence[Capacity]:
        return self._capacities

    @cached_property
    def _capacities(self) -> list[Capacity]:
        turns = math.lcm(len(self.ratios), max(1, len(self.layer_sets)))
        found: set[Capacity] = {c for k in range(turns) for c in self._afforded(k)}
        return sorted(found, key=str) if len(found) > 1 else [None]

    def read(self, capacity: Capacity) -> tuple[float, str | None]:
        """The ratio of a capacity, and its layers where clients have their own."""
        found: Any = self._afforded(0)[0] if capacity is None else capacity
        return found if isinstance(found, tuple) else (float(found), None)

    def rank_at(self, layer: str, shape: Sequence[int], capacity: Capacity) -> int | None:
        r, mine = self.read(capacity)
        dense = mine is not None and not any(layer.startswith(name) for name in _names(mine))
        if dense or (r == 1 and not self.allow_larger):
            return None
        full = lowrank.full_rank(shape)
        return min(max(1, round(r * (full if self.rank_rule == "min_dim" else shape[0]))), full)

    def size_of(self, layer: Plain) -> int:
        ranks = [self.rank_at("", layer.weight.shape, r) for r in self.rungs()]  # only asked without layer_sets
        return max((factors(layer, r) for r in ranks if r is not None), default=0)

    def chosen(self, task: Task) -> dict[str, Plain]:
        """The layers that are decomposed for any client; none if all are dense."""
        if all(r == 1 for r in self.ratios) and not (self.allow_larger or self.adapts):
            return {}
        if not self.layer_sets:
            return super().chosen(task)
        names = tuple(dict.fromkeys(name for names in self.layer_sets for name in _names(names)))
        return self.among(task, names) if names else {}

    def ranks(self, task: Task, capacity: Capacity) -> dict[str, int]:
        found, layers = super().ranks(task, capacity), self.chosen(task)
        for k, r in found.items():
            if factors(layers[k], r) > layers[k].weight.numel() and not self.allow_larger:
                full = lowrank.full_rank(layers[k].weight.shape)
                most = layers[k].weight.numel() / factors(layers[k], 1) / full
                raise ConfigError(
                    f"{type(self).__name__}: ratio must leave layer '{k}' smaller than dense, at most {most:.2f} of its"
                    f" full rank {full}. Got rank {r}; use a smaller ratio, 1 for dense, or allow_larger."
                )
        return found

    # ------------------------------------------------------------------------------------------------ the client

    def strength(self, round: int) -> float:
        """λ_t: 0 in the first round, rising in equal steps to λ in round `warmup` + 1."""
        return self.lam * min(1.0, (round - 1) / self.warmup)

    def decays(self) -> tuple[float, float]:
        return self.rho * (1 if self.rho_rule == "half" else 2), self.optimizer.weight_decay

    def plan(self) -> Mapping[str, Amount]:
        return {"train": Epochs(), "all": All()} if self.lam or self.watch else {"train": Epochs()}

    def init_client(self, task: Task, who: ClientInfo) -> Tree:
        start = super().init_client(task, who)
        return start | {"gap": torch.zeros_like(next(iter(task.init().values())).sum())} if self.watch else start

    def client_update(self, task: Task, client: Tree, down: Tree, visit: Visit) -> tuple[Tree, Sent]:
        start, lam = self.whole(client, down), self.strength(int(visit.round))
        a = self.anchors(task, start, visit["all"]) if lam or self.watch else None
        loss = self.aligned(task, a, lam) if a is not None and lam else task.loss
        new = self.descend(task, start, visit["train"], self.schedule.rate(self.lr, int(visit.round)), loss)
        parts, h = self.apart(task, new)
        seen = {"gap": self.gap(task, new, a, visit["all"])} if self.watch and a is not None else {}
        each = {"step": self.step(down, parts, visit)} if self.adapts else {}
        return {"h": h, **seen}, Sent(weight=self.weigh(visit), mean=parts, each=each)

    def step(self, down: Tree, parts: Tree, visit: Visit) -> Tensor:
        """Down if the next lower rank holds enough of what was changed, up if this one does not: −1, 0 or 1."""
        ratio, mine = self.read(visit.capacity)
        levels: list[Capacity] = [r if mine is None else (r, mine) for r in self.ladder(ratio)[:2]]
        total = torch.zeros_like(visit.examples)
        held = [total for _ in levels]
        if int(visit.round) % self.adapt_every == 0:
            for ranks, energy in self.changes(down, parts, levels):
                total = total + energy.sum()
                held = [h + energy[:r].sum() for h, r in zip(held, ranks)]
        enough = torch.stack([h >= self.adapt_energy * total for h in held]).sum(0)
        return torch.where(total > 0, 1 - enough, 0 * enough).to(torch.int8)

    def changes(self, down: Tree, parts: Tree, levels: Sequence[Capacity]) -> Iterator[tuple[list[int | None], Tensor]]:
        """σ² of what was changed in every layer that is decomposed at one of these levels, and how many each can hold.

        A change that is dense and of rank g has rank 2g once it is made by two factors.
        """
        for name, U in down.get("U", {}).items():
            k = name.removesuffix("U")
            V, new = down["V"][k + "V"], (parts["U"][k + "U"], parts["V"][k + "V"])
            shape = (U.shape[0], V.shape[0], *U.shape[1:-1], *V.shape[1:-1])
            yield [self.rank_at(layer_of(k), shape, c) for c in levels], lowrank.changed_energies((U, V), new)
        for name, W in down.get("W", {}).items():
            ranks = [self.rank_at(layer_of(name), W.shape, c) for c in levels]
            if any(r is not None for r in ranks):
                yield (
                    [None if r is None else max(1, r // 2) for r in ranks],
                    lowrank.energies(lowrank.unfold(parts["W"][name] - W)),
                )

    def anchors(self, task: Task, received: Params, stream: Batches) -> Tensor:
        """a_{k,c}: mean feature of every class under the extractor as received, [C, D]; in evaluation mode."""
        if task.stats:  # kept at home, they belong to the weights of the last visit
            received = task.estimate_statistics(received, stream)
        return class_means(task, received, stream, received[class_matrix(task, type(self).__name__)])[0]

    def apartness(self, features: Tensor, a: Tensor) -> Tensor:
        """‖R_i − a_{k,y_i}‖² of each example, as a mean or a sum over the D features."""
        far = (features - a).square()
        return far.mean(1) if self.fac_reduction == "mse" else far.sum(1)

    def aligned(self, task: Task, a: Tensor, lam: float) -> Loss:
        """L_CE + λ_t L_FAC, the latter a mean over the examples of a batch."""

        def near(p: Params, batch: Batch) -> Tensor:
            features, output = task.features_and_output(p, batch)
            return batch.mean(task.example_loss(output, batch.y) + lam * self.apartness(features, a[batch.y]))

        return near

    def gap(self, task: Task, params: Params, a: Tensor, stream: Batches) -> Tensor:
        """L_FAC over all training examples, in evaluation mode."""
        total, n = torch.zeros_like(a[0, 0]), torch.zeros_like(a[0, 0])
        with torch.no_grad():
            for batch in stream:
                total = total + (self.apartness(task.features(params, batch.x), a[batch.y]) * batch.w).sum()
                n = n + batch.w.sum()
        return total / n.clamp_min(1)

    # ------------------------------------------------------------------------------------------------ the server

    def init_server(self, task: Task, federation: Federation) -> Tree:
        start = super().init_server(task, federation)
        if not self.adapts:
            return start
        for c in self.capacities():
            self.ranks(task, c)  # what cannot be trained must be refused before somebody comes to it
        return {**start, "level": torch.zeros(federation.clients, dtype=torch.int64)}

    def lift(self, mean: Tree, shared: Tree, capacity: Capacity) -> Tree:
        """R(ω̃_k), or what it changed of R(D(ω))."""
        full = super().lift(mean, shared, capacity)
        if self.aggregate == "models":
            return full
        change: Tree = tree.sub(full, super().lift(shared, shared, capacity))
        return change

    def server_update(self, server: Tree, round: Round) -> Tree:
        """ω ← Σ_k n_k/n R(ω̃_k), factorised anew."""
        mean = round.mean
        if self.aggregate == "changes":
            mean = {k: tree.add(server[k], part) for k, part in mean.items()}
        new = self.decomposed(self.server.step(server, mean))
        return {**new, "level": self.moved(server["level"], round)} if self.adapts else new

    def moved(self, level: Tensor, round: Round) -> Tensor:
        """The levels after a round: those who answered go one step at most, within what they have."""
        lowest = torch.tensor([len(self.ladder(lowrank.turn(self.ratios, i))) - 1 for i in round.ids.tolist()])
        new = level[round.ids] - round.each["step"].sign()
        return level.index_copy(0, round.ids, torch.minimum(new.clamp_min(0), lowest))

    # ------------------------------------------------------------------------------------------------ what is seen

    def observe(self, client: Tree) -> Mapping[str, Tensor]:
        return {"alignment": client["gap"]} if self.watch else {}

    def monitor(self, server: Tree) -> dict[str, float]:
        """Per layer the rank of ω as a share of the full one, by σ and by energy; per level what truncation loses."""
        seen: dict[str, float] = {}
        lost = dict.fromkeys(self.capacities(), 0.0)
        for name, W in server.get("W", {}).items():
            s, layer = torch.linalg.svdvals(lowrank.unfold(W)), layer_of(name)
            energy = s.square().cumsum(0) / s.square().sum().clamp_min(torch.finfo(s.dtype).tiny)
            live = s > s[0] * max(lowrank.unfold(W).shape) * torch.finfo(s.dtype).eps
            seen[f"rank {layer}"] = int(live.sum()) / len(s)
            seen[f"rank of 99 % energy {layer}"] = min(int((energy < 0.99).sum()) + 1, len(s)) / len(s)
            for c in lost:
                r = self.rank_at(layer, W.shape, c)
                lost[c] += 0.0 if r is None else float(s[r:].square().sum())
        size = max(float(tree.squared_norm({k: v for k, v in server.items() if k in ("theta", "W")})), 1e-300)
        levels = {self._afforded(0)[0] if c is None else c: v for c, v in lost.items()}
        seen |= {f"truncation at {c}": math.sqrt(v / size) for c, v in levels.items()} if seen else {}
        return (self.spread(server["level"]) if self.adapts else {}) | seen

    def spread(self, level: Tensor) -> dict[str, float]:
        """The mean ratio of the clients, and their share at each."""
        now = [self.ladder(lowrank.turn(self.ratios, i))[k] for i, k in enumerate(level.tolist())]
        found = {f"clients at {r:g}": now.count(r) / len(now) for r in self.rungs()}
        return {"mean ratio": sum(now) / len(now), **found}


@dataclass(frozen=True, kw_only=True)
class FedAraStar(FedAra):
    """FedARA* (FedARA, CVPR 2026): FedARA with a rank ratio of one half for all clients.

    Kept: h. Sent: theta (what is not decomposed), U and V.
    """

    ratio: float | str | tuple[float, ...] = 0.5


def _is_ratio(r: object) -> bool:
    return isinstance(r, int | float) and not isinstance(r, bool) and 0 < r <= 1


def _names(joined: str) -> list[str]:
    """The layers of a set like "fc1+fc2"; an empty one decomposes nothing."""
    return [name for name in joined.split("+") if name]
