"""What FedARA's clients can afford: a rank ratio r_k each, the layers Q_k it goes for, and the ranks that follow."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal, Protocol

from fedspan.errors import ConfigError, nearest
from fedspan.layers import Chosen, Plain
from fedspan.learn.task import Task
from fedspan.linalg import lowrank
from fedspan.method import Averaging, Capacity, Ranked
from fedspan.method.factored import Shares, low_rank_layers, size_of_factors
from fedspan.method.fields import Share
from fedspan.tree import Tree

LEVELS: dict[str, tuple[float, ...]] = {
    # Five levels of CNN1: about as many parameters as CNN1 to CNN5 once fc1 and fc2 are decomposed.
    "fedara_cnn1": (1.0, 0.5, 0.375, 0.3, 0.2),
}
"""Rank ratios by name, for `ratio`."""


@dataclass(frozen=True, kw_only=True)
class RankRatios:
    """Rank ratios of the clients and the layers they go for: a value that FedARA holds.

    A capacity is a ratio r_k, with its layers Q_k where clients have sets of their own; None where all are alike.
    """

    KEYS: ClassVar[Mapping[str, str]] = {
        k: k for k in ("ratio", "rank_rule", "allow_larger", "layers", "layer_sets", "pointwise")
    }

    ratio: Share | Shares | str = 1.0
    """r_k, the share of a layer's full rank that a client trains, several in turn or by name; 1 is dense."""
    rank_rule: Literal["min_dim", "out_channels"] = "min_dim"
    """What a ratio is a share of: the smaller side of the matrix, or the layer's outputs."""
    allow_larger: bool = False
    """Whether factors may be larger than their layer; then a ratio of 1 means factors, too."""
    layers: Chosen = "main"
    """The layers that are decomposed: a group of them, or names that begin theirs."""
    layer_sets: tuple[str, ...] = ()
    """Q_k, the layers that a client decomposes, such as "fc1+fc2", in turn; none: `layers` for all."""
    pointwise: bool = False
    """Whether convolutions of 1×1 are decomposed, too."""

    def check(self, who: str) -> None:
        """Refuse a name that stands for no ratios.

        Raises:
            ConfigError: in one sentence that begins with `who`.
        """
        if isinstance(self.ratio, str) and self.ratio not in LEVELS:
            raise ConfigError(f"{who}: ratio must be numbers or a list of levels.{nearest(self.ratio, LEVELS)}")

    @property
    def ratios(self) -> tuple[float, ...]:
        """r_k of the clients, in turn."""
        if isinstance(self.ratio, str):
            return LEVELS[self.ratio]
        return self.ratio if isinstance(self.ratio, tuple) else (self.ratio,)

    # ------------------------------------------------------------------------------------------------ capacities

    @property
    def adapts(self) -> bool:
        """Whether ranks change during training."""
        return False

    def ladder(self, ratio: float) -> tuple[float, ...]:
        """A ratio, and those below it that its owner may come down to: none, as ranks stay."""
        return (ratio,)

    def rungs(self) -> list[float]:
        """Every ratio that a client may have, the largest first."""
        return sorted({s for r in self.ratios for s in self.ladder(r)}, reverse=True)

    def afforded(self, client: int) -> list[Capacity]:
        """The ratio of a client, then those below it, with its layers where clients have their own."""
        found, sets = self.ladder(lowrank.turn(self.ratios, client)), self.layer_sets
        return [(r, lowrank.turn(sets, client)) for r in found] if sets else list(found)

    @cached_property
    def capacities(self) -> list[Capacity]:
        """Every capacity that a client may have, once each."""
        turns = math.lcm(len(self.ratios), max(1, len(self.layer_sets)))
        found = {c for k in range(turns) for c in self.afforded(k)}
        return sorted(found, key=str) if len(found) > 1 else [None]

    def levels(self, client: int) -> Sequence[Capacity]:
        """What a client may train with: what it can afford, then less."""
        return self.afforded(client) if len(self.capacities) > 1 else (None,)

    def read(self, capacity: Capacity) -> tuple[float, str | None]:
        """The ratio of a capacity, and its layers where clients have their own."""
        found: Any = self.afforded(0)[0] if capacity is None else capacity
        return found if isinstance(found, tuple) else (float(found), None)

    # ------------------------------------------------------------------------------------------------ layers and ranks

    def rank_at(self, layer: str, shape: Sequence[int], capacity: Capacity) -> int | None:
        """The rank at which clients of one capacity train a layer; None where it is dense."""
        r, mine = self.read(capacity)
        dense = mine is not None and not any(layer.startswith(name) for name in _names(mine))
        if dense or (r == 1 and not self.allow_larger):
            return None
        full = lowrank.full_rank(shape)
        return min(max(1, round(r * (full if self.rank_rule == "min_dim" else shape[0]))), full)

    def chosen(self, method: Averaging, task: Task) -> dict[str, Plain]:
        """The layers that are decomposed for any client; none if all are dense."""
        if min(self.rungs()) == 1 and not self.allow_larger:
            return {}
        if not self.layer_sets:
            return low_rank_layers(method, task, self.layers, self.pointwise, self._largest)
        names = tuple(dict.fromkeys(name for names in self.layer_sets for name in _names(names)))
        return low_rank_layers(method, task, names, self.pointwise) if names else {}

    def _largest(self, layer: Plain) -> int:
        """Numbers in the largest factors of a layer that any client has."""
        ranks = [self.rank_at("", layer.weight.shape, r) for r in self.rungs()]  # only asked without layer_sets
        return max((size_of_factors(layer, r) for r in ranks if r is not None), default=0)

    def ranks(self, method: Averaging, task: Task, capacity: Capacity) -> dict[str, int]:
        """The layers that clients of one capacity train as factors, and their ranks.

        Raises:
            ConfigError: for factors that are larger than their layer, unless `allow_larger`.
        """
        found: dict[str, int] = {}
        for k, layer in self.chosen(method, task).items():
            r = self.rank_at(k, layer.weight.shape, capacity)
            if r is None:
                continue
            if size_of_factors(layer, r) > layer.weight.numel() and not self.allow_larger:
                full = lowrank.full_rank(layer.weight.shape)
                most = layer.weight.numel() / size_of_factors(layer, 1) / full
                raise ConfigError(
                    f"{type(method).__name__}: ratio must leave layer '{k}' smaller than dense, at most {most:.2f} of"
                    f" its full rank {full}. Got rank {r}; use a smaller ratio, 1 for dense, or allow_larger."
                )
            found[k] = r
        return found


class HasRanks(Protocol):
    """A method that holds rank ratios."""

    @property
    def ranks(self) -> RankRatios:
        """What its clients can afford."""


class Affords(Ranked):
    """The capability `Ranked` of a method that holds rank ratios as `ranks`."""

    def capacity_of(self: HasRanks, client: int) -> Capacity:
        """r_k, with Q_k if there are several; None where all are alike."""
        return self.ranks.levels(client)[0]

    def levels(self: HasRanks, client: int) -> Sequence[Capacity]:
        return self.ranks.levels(client)

    def level(self: HasRanks, server: Tree, client: int) -> int:
        return int(server["level"][client]) if self.ranks.adapts else 0


def _names(joined: str) -> list[str]:
    """The layers of a set like "fc1+fc2"; an empty one decomposes nothing."""
    return [name for name in joined.split("+") if name]
