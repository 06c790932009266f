"""Weights of low rank on the wire: building blocks of methods that cut weights, or train their factors U Vᵀ.

Payloads and server states of these methods name their parts: W = full weights of the chosen layers, U and V = their
factors, theta = all that is not factorised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, TypeAlias

from annotated_types import MinLen
from torch import Tensor, nn

from fedspan import tree
from fedspan.errors import ConfigError
from fedspan.layers import Chosen, LowRank, Plain, choose, convert, in_head, part
from fedspan.learn.optimizer import Optimizer
from fedspan.learn.task import Task
from fedspan.linalg import lowrank
from fedspan.method.bases import Averaging, Sharing
from fedspan.method.fields import Share
from fedspan.method.protocol import Capacity, Down, Sent, Visit
from fedspan.tree import Params, Tree

Shares: TypeAlias = Annotated[tuple[Share, ...], MinLen(1)]
"""One or more numbers in (0, 1], such as rank ratios of the clients in turn."""

RankAt: TypeAlias = Callable[[str, Sequence[int], Capacity], int | None]
"""The rank at which clients of one capacity train the layer of that name and shape; None where it is dense."""

# ------------------------------------------------------------------------------------------------ layers


def low_rank_layers(
    method: Averaging, task: Task, which: Chosen, pointwise: bool, size: Callable[[Plain], int] | None = None
) -> dict[str, Plain]:
    """The layers of low rank on the wire, by name: no convolutions of 1×1 unless `pointwise`, and no private head.

    Raises:
        ConfigError: if none is left.
    """
    who, plain = type(method).__name__, task.plain
    found = {
        k: m
        for k, m in choose(plain, which, who, size).items()
        if (pointwise or tuple(m.weight.shape[2:]) != (1, 1)) and not (method.private_head and in_head(plain, k))
    }
    if not found:
        raise ConfigError(f"{who}: layers must name a layer besides 1x1 convolutions and a private head. Got none.")
    return found


def size_of_factors(layer: Plain, rank: int) -> int:
    """Numbers in U and V of a layer: r k (i + o)."""
    o, i, h, w = *layer.weight.shape, *(1, 1)[layer.weight.ndim - 2 :]
    return rank * (o * h + i * w)


def factorised(task: Task, ranks: dict[str, int]) -> Task:
    """The task with layers U Vᵀ of these ranks; itself where there are none."""
    if not ranks:
        return task

    def change(module: nn.Module) -> nn.Module:
        of = {module.get_submodule(name): rank for name, rank in ranks.items()}
        return convert(module, ranks, lambda layer: LowRank(layer, of[layer]))

    return task.converted(change)


def need_sgd(method: Averaging, frobenius: bool) -> None:
    """Refuse AdamW where the weight decay acts on U Vᵀ, as it could not be decoupled from the gradient there."""
    optimizer: Optimizer = method.optimizer
    if frobenius and optimizer.weight_decay and optimizer.rule == "adamw":
        raise ConfigError(
            f"{type(method).__name__}: optimizer must be 'sgd' with weight_decay and frobenius. Got 'adamw'; set"
            " frobenius to false."
        )


# ------------------------------------------------------------------------------------------------ parts of a payload


def in_parts(shared: Params, layers: Iterable[str]) -> Tree:
    """Shared parameters by part: W, or U and V, of the layers named, and theta."""
    of = {part(k, name): tag for k in layers for name, tag in (("weight", "W"), ("U", "U"), ("V", "V"))}
    parts: Tree = {"theta": {}}
    for k, p in shared.items():
        parts.setdefault(of.get(k, "theta"), {})[k] = p
    return parts


class InParts:
    """What is shared travels in parts. Stands before `Sharing` among a method's bases, whose functions it replaces."""

    def download(self, server: Tree, ids: Tensor, capacity: Capacity, round: int) -> Down:
        """All parts."""
        return Down(shared={k: part for k, part in server.items() if k != "optimizer"})

    def whole(self, client: Tree, down: Tree) -> Params:
        """All parameters of a client's model."""
        h: Params = client["h"]
        return tree.merge(down) | h


def kept_and_sent(
    method: Sharing, task: Task, params: Params, layers: Iterable[str], visit: Visit
) -> tuple[Tree, Sent]:
    """What a client keeps of a trained model, and what it sends: all that is shared, in parts."""
    shared, h = method.split(task, params)
    return {"h": h}, Sent(weight=method.weigh(visit), mean=in_parts(shared, layers))


def layer_of(weight: str) -> str:
    """The layer a weight belongs to."""
    return weight.removesuffix("weight").removesuffix(".")


# ------------------------------------------------------------------------------------------------ W and its factors


def decomposed(server: Tree, rank_at: RankAt, capacities: Sequence[Capacity]) -> Tree:
    """A server's state with the leading factors U = P √Σ and V = Q √Σ of its weights W, of the largest rank in use.

    They are computed once per round; clients of smaller ranks get the first columns.
    """
    found: Tree = {"U": {}, "V": {}}
    for name, W in server.get("W", {}).items():
        ranks = [rank_at(layer_of(name), W.shape, c) for c in capacities]
        most = max((r for r in ranks if r is not None), default=None)
        if most is not None:
            k = name.removesuffix("weight")
            found["U"][k + "U"], found["V"][k + "V"] = lowrank.leading(W, most)
    return {**server, **found} if found["U"] else server


def truncated(server: Tree, rank_at: RankAt, capacity: Capacity) -> Tree:
    """What clients of one capacity are sent: as many columns of U and V as they train, or W where it is dense."""
    shared: Tree = {"theta": server["theta"], "W": {}, "U": {}, "V": {}}
    for name, W in server.get("W", {}).items():
        k, r = name.removesuffix("weight"), rank_at(layer_of(name), W.shape, capacity)
        if r is None:
            shared["W"][name] = W
            continue
        for f in "UV":
            shared[f][k + f] = server[f][k + f][..., :r].contiguous()
    return {k: v for k, v in shared.items() if v or k == "theta"}


def reconstructed(parts: Tree) -> Tree:
    """Parts of a payload with W = U Vᵀ in the place of the factors."""
    if "U" not in parts:
        return parts
    names = [k.removesuffix("U") for k in parts["U"]]
    W: Params = {k + "weight": lowrank.fold(parts["U"][k + "U"], parts["V"][k + "V"]) for k in names}
    return {"theta": parts["theta"], "W": W | parts.get("W", {})}
