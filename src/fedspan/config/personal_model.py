"""A client's personal model as one safetensors file, with what a person needs to use it in its header."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors.torch import save_file

from fedspan import tree
from fedspan.layers import plain_weights, structured
from fedspan.learn.task import Task
from fedspan.storage.atomic import replacing
from fedspan.tree import Tree

if TYPE_CHECKING:
    from fedspan.config import RunConfig


def as_described(trained: Task, plain: Task, weights: Tree) -> tuple[Tree, Collection[str]]:
    """Weights of the plain network that [model] describes, if they are a whole model; and the names it knows."""
    if trained.whole(weights) and structured(trained.module):
        return plain_weights(trained.module, weights), plain.init().keys()
    return weights, trained.init().keys()


def write_personal(
    file: Path,
    config: RunConfig,
    weights: Tree,
    known: Collection[str],
    *,
    client: str,
    name: str,
    round: int,
    shape: Sequence[int],
    classes: int | None,
) -> int:
    """Write the file, all or nothing; how many numbers it holds."""
    flat = {k: t.detach().contiguous().clone() for k, t in tree.flatten(weights).items()}
    about = {
        "format": "fedspan personal model",
        "method": config.method["name"],
        "experiment": config.name,
        "client": client,
        "client_name": name,
        "round": str(round),
        "seed": str(config.seed),
        "model": json.dumps(config.to_dict()["model"]),
        "input_shape": json.dumps(list(shape)),
        "classes": json.dumps(classes),
        "names": json.dumps(list(flat)),
        "plain": json.dumps(sorted(flat) == sorted(known)),
    }
    with replacing(file) as place:
        save_file(flat, place, metadata=about)
    return sum(t.numel() for t in flat.values())
