"""A model with factors beside its weights: which layers have them, what of it is shared and what is private."""

from __future__ import annotations

from dataclasses import dataclass

from fedspan import tree
from fedspan.layers import Adapter, AdapterKind, AdapterStart, Chosen, Plain, choose, convert, part, structured
from fedspan.learn.task import Task
from fedspan.linalg import lowrank
from fedspan.method import Adapts, Capacity, Converts, Sent
from fedspan.tree import Params, Tree


@dataclass(frozen=True)
class PersonalPair:
    """A client's own pair L U beside A B: its rank, and what it is multiplied by."""

    rank: int = 0
    alpha: float = 1.0


class AdaptedModel(Converts, Adapts):
    """W + α A B in some layers: factors are shared by name, all else as theta, and what is private stays as h."""

    rank: int
    alpha: float
    alpha_over_r: bool
    adapter: AdapterKind
    start: AdapterStart
    freeze_A: bool
    layers: Chosen

    @property
    def scale(self) -> float:
        """What the product is multiplied by: α, or α/r."""
        return self.alpha / self.rank if self.alpha_over_r else self.alpha

    def private(self, task: Task) -> list[str]:
        """Names of the parameters that stay on the client."""
        return []

    def own_pair(self, capacity: Capacity) -> PersonalPair:
        """The pair that clients of one capacity have of their own; none unless the method says so."""
        return PersonalPair()

    def model(self, task: Task, capacity: Capacity) -> Task:
        """Linear and convolutional layers as a constant and its adapter."""
        own = self.own_pair(capacity)
        size = lambda layer: lowrank.size(self.adapter, layer, self.rank)
        names = choose(task, self.layers, type(self).__name__, size)

        def adapt(layer: Plain) -> Adapter:
            return Adapter(layer, self.rank, self.adapter, self.scale, own.rank, own.alpha, self.start)

        return task.converted(lambda module: convert(module, names, adapt))

    @property
    def factors(self) -> tuple[str, ...]:
        """The factors that travel."""
        return tuple(f for f in lowrank.FACTORS[self.adapter] if not (self.freeze_A and f == "A"))

    def split(self, task: Task, params: Params) -> tuple[Params, Params]:
        """What is shared and what stays at home."""
        mine = self.private(task)
        return tree.without(params, mine), tree.select(params, mine)

    def apart(self, task: Task, params: Params) -> tuple[Tree, Params]:
        """What is shared, factors by name and the rest as theta, and what stays at home."""
        shared, h = self.split(task, params)
        of = {part(k, f): f for k in structured(task.module) for f in lowrank.FACTORS[self.adapter]}
        parts: Tree = {"theta": {}, **{f: {} for f in self.factors}}
        for k, p in shared.items():
            if (name := of.get(k, "theta")) in parts:
                parts[name][k] = p
        return parts, h

    def trained(self, down: Tree, sent: Sent, capacity: Capacity) -> Tree:
        """The client's own upload."""
        return sent.mean
