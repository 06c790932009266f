"""Ranks that adapt, an addition to FedARA: a client comes down a ladder of ratios as far as its changes allow.

After local training a client knows what it changed in each decomposed layer, Δ_q = U′V′ᵀ − UVᵀ, and its singular values
σ_q. What the ranks r_q(s) at level s would hold of all of them together is

    share(s) = Σ_q Σ_{i ≤ r_q(s)} σ_{q,i}² / Σ_q ‖Δ_q‖².

It asks for one step down if share(next lower) ≥ e, for one up if share(present) < e, and otherwise to stay.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedspan.errors import ConfigError
from fedspan.linalg import lowrank
from fedspan.method import Capacity, Round, Visit
from fedspan.method.factored import Shares, layer_of
from fedspan.method.fields import AtLeast1, Share
from fedspan.methods.fedara.capacities import RankRatios
from fedspan.tree import Tree


@dataclass(frozen=True, kw_only=True)
class AdaptiveRanks(RankRatios):
    """Rank ratios from which clients may come down during training; the server keeps the `level` of each."""

    KEYS: ClassVar[Mapping[str, str]] = {
        **RankRatios.KEYS,
        **{k: k for k in ("adapt_energy", "adapt_ratios", "adapt_every")},
    }

    adapt_energy: Share = 1.0
    """e, the share of the energy of a client's change that its rank must hold; 1: ranks stay as `ratio` says."""
    adapt_ratios: Shares = (0.5, 0.25, 0.1, 0.05)
    """The ratios clients may come down to; each uses those below its own entry of `ratio`."""
    adapt_every: AtLeast1 = 1
    """Rounds from one in which ranks may change to the next."""

    def check(self, who: str) -> None:
        super().check(who)
        if self.adapts and min(self.adapt_ratios) >= max(self.ratios):
            raise ConfigError(
                f"{who}: adapt_ratios must hold one below the largest ratio, {max(self.ratios):g}, for ranks to adapt."
                f" Got {self.adapt_ratios!r}."
            )

    @property
    def adapts(self) -> bool:
        return self.adapt_energy < 1

    def ladder(self, ratio: float) -> tuple[float, ...]:
        """A ratio, and those below it that its owner may come down to."""
        below = sorted({r for r in self.adapt_ratios if r < ratio}, reverse=True) if self.adapts else ()
        return (ratio, *below)

    # ------------------------------------------------------------------------------------------------ the client

    def step(self, down: Tree, parts: Tree, visit: Visit) -> Tensor:
        """Down if the next lower rank holds enough of what was changed, up if this one does not: −1, 0 or 1."""
        ratio, mine = self.read(visit.capacity)
        levels: list[Capacity] = [r if mine is None else (r, mine) for r in self.ladder(ratio)[:2]]
        total = torch.zeros_like(visit.examples)
        held = [total for _ in levels]
        if int(visit.round) % self.adapt_every == 0:
            for ranks, energy in self._changes(down, parts, levels):
                total = total + energy.sum()
                held = [h + energy[:r].sum() for h, r in zip(held, ranks)]
        enough = torch.stack([h >= self.adapt_energy * total for h in held]).sum(0)  # share(s) ≥ e
        return torch.where(total > 0, 1 - enough, 0 * enough).to(torch.int8)

    def _changes(
        self, down: Tree, parts: Tree, levels: Sequence[Capacity]
    ) -> Iterator[tuple[list[int | None], Tensor]]:
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
                half = [None if r is None else max(1, r // 2) for r in ranks]
                yield half, lowrank.energies(lowrank.unfold(parts["W"][name] - W))

    # ------------------------------------------------------------------------------------------------ the server

    def moved(self, level: Tensor, round: Round) -> Tensor:
        """The levels after a round: those who answered go one step at most, within what they have."""
        rungs = [len(self.ladder(lowrank.turn(self.ratios, i))) - 1 for i in round.ids.tolist()]
        lowest = torch.tensor(rungs, device=level.device)
        new = level[round.ids] - round.each["step"].sign()
        return level.index_copy(0, round.ids, torch.minimum(new.clamp_min(0), lowest))

    def spread(self, level: Tensor) -> dict[str, float]:
        """The mean ratio of the clients, and their share at each."""
        now = [self.ladder(lowrank.turn(self.ratios, i))[k] for i, k in enumerate(level.tolist())]
        found = {f"clients at {r:g}": now.count(r) / len(now) for r in self.rungs()}
        return {"mean ratio": sum(now) / len(now), **found}
