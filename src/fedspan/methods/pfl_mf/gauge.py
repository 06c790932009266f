"""Starts of U and v, and changes of gauge: (U P⁺, P v) are the same models, so every v follows the maps P announced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedspan import tree
from fedspan.errors import ConfigError
from fedspan.learn.task import Task
from fedspan.method import Averaging, ClientInfo
from fedspan.randomness import normal
from fedspan.tree import Tree

# ------------------------------------------------------------------------------------------------ starts


def dtype_of(task: Task) -> torch.dtype:
    """Return the type of a model's parameters."""
    return next(iter(task.init().values())).dtype


def standard_columns(task: Task, names: Sequence[str], rank: int, seed: int) -> Tensor:
    """Return U⁰ [d, r]: one independent standard initialisation per column, so that U v has their spread if ‖v‖ = 1."""
    columns = (tree.select(task.fresh(seed, "U", j), names) for j in range(rank))
    return torch.stack([tree.ravel(c) for c in columns], 1)


def own_v(task: Task, rank: int, who: ClientInfo) -> Tensor:
    """Return a random unit vector of the client's own."""
    v = normal(who.key, (rank,), dtype_of(task))
    unit: Tensor = v / v.norm()
    return unit


def common_v(task: Task, rank: int) -> Tensor:
    """Return one unit vector for all clients: data, not noise, must separate them."""
    return torch.full((rank,), rank**-0.5, dtype=dtype_of(task))


def need_rank(method: Averaging, rank: int, task: Task, names: Sequence[str]) -> None:
    """Check that a subspace of this rank exists.

    Raises:
        ConfigError: if there are fewer factorised parameters than columns.
    """
    start = task.init()
    d = sum(start[k].numel() for k in names)
    if rank > d:
        who = type(method).__name__
        raise ConfigError(f"{who}: rank must be at most {d}, the number of factorised parameters. Got {rank}.")


def need_no_statistics(method: Averaging, task: Task) -> None:
    """Check that a model is all parameters.

    Raises:
        ConfigError: if it has running statistics.
    """
    if task.stats:
        who = type(method).__name__
        raise ConfigError(f"{who}: the model must have no running statistics, as they are not U v; use pfl-mf-paper.")


def need_sgd(method: Averaging, plain: bool = False) -> None:
    """Check that clients share their heads and train by SGD, or (`plain`) that each of their steps is a gradient.

    Raises:
        ConfigError: for what has no meaning in a shared subspace.
    """
    who = type(method).__name__
    if method.private_head or method.optimizer.rule != "sgd":
        raise ConfigError(
            f"{who}: private_head and adamw do not go with a shared subspace; use private_head=false, sgd."
        )
    if plain and not method.optimizer.plain:
        clip = method.optimizer.clip
        got = _given(method) if clip is None else f"clip_norm {clip:g}; leave it out"
        raise ConfigError(f"{who}: momentum and weight_decay must be 0, as G_i is a gradient. Got {got}.")


def _given(method: Averaging) -> str:
    return f"momentum {method.optimizer.momentum:g}, weight_decay {method.optimizer.weight_decay:g}"


# ------------------------------------------------------------------------------------------------ changes of gauge


def follow(v: Tensor, generation: Tensor, maps: Mapping[str, Tensor], width: int) -> Tensor:
    """Bring a client's v from the generation of the gauge it was last seen in to the present one, padded by zeros."""
    for g, P in sorted((int(k), P) for k, P in maps.items()):
        moved = torch.nn.functional.pad(P @ v[: P.shape[1]], (0, width - P.shape[0]))
        v = torch.where(generation < g, moved, v)
    return v


def announced(maps: Mapping[str, Tensor], P: Tensor) -> Tree:
    """Return the maps so far with one more, numbered by its generation."""
    return {**maps, str(len(maps) + 1): P}
