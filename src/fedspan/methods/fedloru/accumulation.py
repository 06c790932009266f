"""Accumulating low-rank updates: how factors start again once their product is added to W, and what ends with them."""

from __future__ import annotations

from typing import Literal, TypeAlias

from torch import Tensor

from fedspan import tree
from fedspan.layers import AdapterKind, AdapterStart, part, structured
from fedspan.learn.task import Task
from fedspan.linalg import lowrank
from fedspan.method import Observed
from fedspan.randomness import fold
from fedspan.tree import Params, Tree

Reinit: TypeAlias = Literal["random", "momentum", "momentum_A"]
"""What becomes of the factors after an accumulation: all drawn anew, all kept, or all but the last kept."""


def held(task: Task, name: str) -> Params:
    """The parameters of that name in all adapted layers, as they start."""
    state = dict(task.module.named_parameters())
    return {k: state[k].detach().clone() for k in (part(layer, name) for layer in structured(task.module))}


def restarted(factors: Tree, kind: AdapterKind, reinit: Reinit, start: AdapterStart, key: Tensor) -> Tree:
    """The factors after an accumulation.

    One key for all: means of factors that every client drew for itself would mean nothing.
    """
    names = lowrank.FACTORS[kind]
    kept = {"random": (), "momentum": names, "momentum_A": names[:-1]}[reinit]
    return {f: old if f in kept else _drawn(f, old, fold(key, names.index(f)), start) for f, old in factors.items()}


def _drawn(factor: str, like: Params, key: Tensor, start: AdapterStart) -> Params:
    return {name: lowrank.draw(factor, p, fold(key, j), start) for j, (name, p) in enumerate(like.items())}


def without_moments(server: Tree, factors: Tree) -> Tree:
    """The server's optimiser, if any, after an accumulation: moments of factors end with them."""
    if "optimizer" not in server:
        return {}
    old, gone = server["optimizer"], tree.zeros_like(factors)
    return {"optimizer": {**old, **{k: old[k] | gone for k in ("m", "s") if k in old}}}


class ObservedFactors(Observed):
    """How much of their rank the factors use."""

    adapter: AdapterKind
    freeze_A: bool

    def size(self, server: Tree) -> float:
        """The norm of what is shared, without what was added to W last."""
        return super().size({k: part for k, part in server.items() if k != "last"})

    def monitor(self, server: Tree) -> dict[str, float]:
        """‖AB‖_F² / ‖AB‖₂² of the factors, or of those just handed over to W: how much of the rank is used."""
        if self.adapter != "lora" or self.freeze_A:
            return {}
        fresh = "last" in server and not any(bool(B.any()) for B in server["B"].values())
        at = server["last"]["added"] if fresh else server
        ranks = [lowrank.stable_rank(A, B) for A, B in zip(at["A"].values(), at["B"].values())]
        known = [r for r in ranks if r is not None]
        return {"stable rank of the update": sum(known) / len(known)} if known else {}
