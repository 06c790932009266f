"""What can be seen of FedARA's extractor: the ranks it has, and what is lost on its way to clients of small rank."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from fedspan import tree
from fedspan.linalg import lowrank
from fedspan.method import Observed, norm_of_state
from fedspan.method.factored import layer_of
from fedspan.methods.fedara.adaptive import AdaptiveRanks
from fedspan.methods.fedara.capacities import RankRatios
from fedspan.methods.fedara.objective import Alignment
from fedspan.tree import Tree


class HasAnchors(Protocol):
    """A method that holds ranks that may adapt, and an alignment to anchors."""

    @property
    def ranks(self) -> AdaptiveRanks:
        """What its clients can afford."""

    @property
    def alignment(self) -> Alignment:
        """How features are held near their anchors."""


class Monitored(Observed):
    """The capability `Observed` of FedARA."""

    def observe(self: HasAnchors, client: Tree) -> Mapping[str, Tensor]:
        """The distance to the anchors after local training."""
        return {"alignment": client["gap"]} if self.alignment.watch else {}

    def monitor(self: HasAnchors, server: Tree) -> dict[str, float]:
        """Where clients are on their ladders, ranks of the extractor, and what truncation loses."""
        clients = self.ranks.spread(server["level"]) if self.ranks.adapts else {}
        return clients | ranks_and_truncation(server, self.ranks)

    def size(self, server: Tree) -> float:
        """The norm of the model."""
        return norm_of_state({k: v for k, v in server.items() if k in ("theta", "W")})


def ranks_and_truncation(server: Tree, ranks: RankRatios) -> dict[str, float]:
    """Per layer the rank of ω as a share of the full one, by σ and by energy; per level ‖ω − R(D(ω))‖/‖ω‖."""
    seen: dict[str, float] = {}
    lost = dict.fromkeys(ranks.capacities, 0.0)
    for name, W in server.get("W", {}).items():
        s, layer = torch.linalg.svdvals(lowrank.unfold(W)), layer_of(name)
        energy = s.square().cumsum(0) / s.square().sum().clamp_min(torch.finfo(s.dtype).tiny)
        live = s > s[0] * max(lowrank.unfold(W).shape) * torch.finfo(s.dtype).eps
        seen[f"rank {layer}"] = int(live.sum()) / len(s)
        seen[f"rank of 99 % energy {layer}"] = min(int((energy < 0.99).sum()) + 1, len(s)) / len(s)
        for c in lost:
            r = ranks.rank_at(layer, W.shape, c)
            lost[c] += 0.0 if r is None else float(s[r:].square().sum())
    if not seen:
        return {}
    size = max(float(tree.squared_norm({k: v for k, v in server.items() if k in ("theta", "W")})), 1e-300)
    levels = {ranks.afforded(0)[0] if c is None else c: v for c, v in lost.items()}
    return seen | {f"truncation at {c}": math.sqrt(v / size) for c, v in levels.items()}
