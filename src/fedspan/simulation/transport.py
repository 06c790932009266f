"""What brings work to clients and answers back: the protocol between the round driver and its transports.

A transport knows how to reach clients and what may go wrong on the way. When a round happens, who is sampled, what
becomes of the answers and what is written down is the driver's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from fedspan import tree
from fedspan.data.federated import Index
from fedspan.learn.aggregate import Mean, sums_by_part
from fedspan.method import Abilities, Capacity, Sent
from fedspan.simulation.engine import Engine
from fedspan.simulation.protocols import RECEIVED, JudgedModel
from fedspan.tree import Tree
from fedspan.wire import Direction, Ledger

Sums: TypeAlias = Mapping[str, Mapping[int, float]]
"""Of every measure each client's sum over its held-out examples; `n` is their number."""


@dataclass
class MeasuredClients:
    """What clients measured of their models."""

    sums: Sums
    metrics: dict[str, dict[int, float]] = field(default_factory=dict)
    """Metrics of gathered predictions, of the clients that have them."""
    left_out: dict[str, dict[int, str]] = field(default_factory=dict)
    """By metric the clients that do not define it, and why."""
    pooled: dict[str, float] = field(default_factory=dict)
    """Metrics over the predictions of all clients together; empty where predictions stay on the clients."""


@dataclass
class Collected:
    """What the clients of a round sent, as far as it came and was accepted."""

    asked: Sequence[int]
    weights: dict[int, float] = field(default_factory=dict)
    each: dict[int, Tree] = field(default_factory=dict)
    mean: Mean = field(default_factory=Mean)
    enough: bool = True
    """Whether the server may go on with it."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What else the round's line of metrics says."""

    def add(self, ids: Sequence[int], weights: Sequence[float], each: Tree, total: Tree) -> None:
        """Add a chunk: single uploads stacked in the order of `ids`, and what `partial_sum` made of the others."""
        if not ids:
            return
        self.mean.add(total["sums"], sum(weights), total["totals"])
        for k, i in enumerate(ids):
            self.weights[i], self.each[i] = weights[k], tree.take(each, k)


class Transport(Protocol):
    """Reaches clients: worker processes of a simulation, nodes of a deployment."""

    engine: Engine
    who: str
    """How error sentences of a run over it begin."""
    counted: tuple[Direction, ...]
    """The bytes it counts."""
    repeats: bool
    """Whether a round can be taken back and done again; nodes of others do not train twice on request."""

    @property
    def sizes(self) -> Index:
        """Training examples of every client; 0 where they are not known."""
        ...

    def advice(self) -> str:
        """What to do about divergence: the end of an error sentence."""
        ...

    def ready(self) -> None:
        """Prepare to reach clients: start workers, wait for nodes. Called before every round."""
        ...

    def train(self, t: int, sampled: Sequence[int], ledger: Ledger) -> Collected:
        """Let clients do round t; nothing they keep replaces anything before `keep`.

        Raises:
            Divergence: if a client's numbers are not finite.
        """
        ...

    def keep(self) -> None:
        """Let what the clients keep of the round replace what they had: the whole round is known to be finite."""
        ...

    def take_back(self) -> None:
        """Undo `keep`."""
        ...

    def announce(self, news: Tree, ledger: Ledger) -> None:
        """Tell every client, sampled or not; the server's record has heard it."""
        ...

    def measure(self, t: int, chosen: Sequence[int], ledger: Ledger, way: JudgedModel = RECEIVED) -> MeasuredClients:
        """Let clients measure one of their models."""
        ...

    def close(self) -> None:
        """Let go of workers and connections; `ready` may be called again."""
        ...


def in_order(ids: Sequence[int], sizes: Mapping[int, int]) -> list[int]:
    """The largest clients first, so that a chunk wastes little on empty slots; the order in which uploads are added."""
    return sorted(ids, key=lambda i: (-sizes[i], i))


def partial_sum(able: Abilities, sent: Sent, shared: Tree, capacity: Capacity) -> Tree:
    """Σ w·lift(mean) over stacked uploads of one capacity, and Σ w of parts with weights of their own."""
    sums, totals = sums_by_part(lifted(able, sent, shared, capacity), sent.weight, sent.weights, keep_factors=True)
    return {"sums": sums, "totals": totals}


def lifted(able: Abilities, sent: Sent, shared: Tree, capacity: Capacity) -> Tree:
    """What the server averages of stacked uploads of one capacity: `lift(mean)` of each."""
    lifts = able.lifts
    if lifts is None or not len(sent.weight):
        return sent.mean
    found: Tree = torch.func.vmap(lambda mean: lifts.lift(mean, shared, capacity))(sent.mean)
    return found


def stacked(sent: Sent) -> Sent:
    """One upload as a stack of one."""
    return Sent(*(tree.map(_row, part) for part in sent))


def _row(t: Tensor) -> Tensor:
    return t[None]
