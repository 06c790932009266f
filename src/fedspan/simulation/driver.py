"""What a server does with the uploads of a round, wherever they come from: the simulator and a deployment share it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedspan import tree
from fedspan.data.federated import Index
from fedspan.errors import Divergence
from fedspan.learn.aggregate import Mean, weighted_sum
from fedspan.method import Abilities, Capacity, Method, Round, Sent
from fedspan.method.promises import Unchanged, check_server
from fedspan.tree import Tree


def in_order(ids: Sequence[int], sizes: Mapping[int, int]) -> list[int]:
    """The largest clients first, so that a chunk wastes little on empty slots; the order in which uploads are added."""
    return sorted(ids, key=lambda i: (-sizes[i], i))


def partial_sum(able: Abilities, sent: Sent, shared: Tree, capacity: Capacity) -> Tree:
    """Σ w·lift(mean) over stacked uploads of one capacity."""
    lifted, lifts = sent.mean, able.lifts
    if lifts is not None and len(sent.weight):
        lifted = torch.func.vmap(lambda mean: lifts.lift(mean, shared, capacity))(lifted)
    total: Tree = weighted_sum(lifted, sent.weight, keep_factors=True)
    return total


def advance(
    method: Method,
    server: Tree,
    t: int,
    *,
    asked: Sequence[int],
    weights: Mapping[int, float],
    each: Mapping[int, Tree],
    mean: Mean,
    sizes: Index,
    dtype: torch.dtype,
) -> Tree | None:
    """The server's state after round t; None if the uploads have no weight, and it stays as it is."""
    if sum(weights.values()) == 0.0:
        return None
    ids = sorted(weights)
    told = Round(
        round=t,
        ids=torch.tensor(ids),
        n=torch.from_numpy(sizes[ids]).to(dtype),
        weights=torch.tensor([weights[i] for i in ids], dtype=dtype),
        mean=mean.result(),
        each=tree.stack([each[i] for i in ids]),
        missing=torch.tensor([i for i in asked if i not in weights], dtype=torch.int64),
    )
    given = Unchanged(server=server, mean=told.mean, each=told.each)
    new = check_server(method, server, method.server_update(server, told), t)
    given.check(method, "server_update", t)
    return new


def watch(able: Abilities, t: int, server: Tree, *, before: float, start: float, who: str, advice: str) -> float:
    """The norm of a new server state, before it replaces a good one.

    Raises:
        Divergence: if the state is not finite, or grows without measure.
    """
    if not tree.all_finite(server):
        raise Divergence(f"{who}: the server's state is not finite after round {t}; {advice}")
    norm, before, start = able.observed.size(server), max(before, 1.0), max(start, 1.0)
    if t >= 10 and (norm > 100 * start or norm > 10 * before):
        raise Divergence(
            f"{who}: the norm of the server's state rose to {norm:.3g} in round {t}, from {before:.3g} before"
            f" and {start:.3g} at the start; {advice}"
        )
    return norm


def stacked(sent: Sent) -> Sent:
    """One upload as a stack of one."""
    return Sent(*(tree.map(_row, part) for part in sent))


def _row(t: Tensor) -> Tensor:
    return t[None]
