"""What a dishonest client may do: lie in its uploads, train on poisoned examples, or both."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from fedspan import tree
from fedspan.data.federated import FederatedData
from fedspan.errors import ConfigError, nearest
from fedspan.method import Abilities, Sent
from fedspan.randomness import fold, generator, normal
from fedspan.simulation.defence import cut
from fedspan.tree import Tree

TARGET = 0
"""The class that a backdoor wants to see."""

MANY_EXAMPLES = 10_000_000
"""What a client claims that wants to weigh more; the most that a server lets a node register with."""

Lie: TypeAlias = Callable[[Abilities, Sent, Tree, Tensor], Sent]
"""One honest upload, what its client was sent, and a key of its own: the upload that is sent instead."""

Poison: TypeAlias = Callable[[FederatedData, Sequence[int], int], FederatedData]
"""The data of a federation in which these clients train on other examples; test parts stay as they are."""


@dataclass(frozen=True)
class Attack:
    """One kind of dishonesty."""

    name: str
    sentence: str
    lie: Lie | None = None
    poison: Poison | None = None
    backdoor: bool = False
    """Whether its success is how often a mark in a picture makes honest clients' models say the target."""
    claims: int | None = None
    """Examples that the client says it has, where that is not the truth."""


# ---------------------------------------------------------------------------------------------------- lies


def gaussian(able: Abilities, sent: Sent, down: Tree, key: Tensor) -> Sent:
    """Noise of 19 times the upload's norm: just below what a gate lets through that refuses 20 times the median."""
    parts = (sent.mean, sent.each)
    count = iter(range(len(tree.leaves(parts))))

    def draw(t: Tensor) -> Tensor:
        k = next(count)
        return normal(fold(key, k), tuple(t.shape)).to(t.dtype) if t.is_floating_point() else t

    noise = tree.map(draw, parts)
    size = 19 * math.sqrt(float(tree.squared_norm(parts)) / max(float(tree.squared_norm(noise)), 1e-300))
    mean, each = tree.map(lambda t: t * size if t.is_floating_point() else t, noise)
    return sent._replace(mean=mean, each=each)


def scale_change(able: Abilities, sent: Sent, down: Tree, key: Tensor, factor: float) -> Sent:
    """The change that was trained, so many times; below zero it leads away from what was learnt."""
    return cut(able, sent, down, dict.fromkeys([*sent.mean, *sent.each], factor))


def claim_examples(able: Abilities, sent: Sent, down: Tree, key: Tensor) -> Sent:
    """The opposite change, with the weight of ten million examples where examples are what weighs."""
    lied = scale_change(able, sent, down, key, -1.0)
    return lied._replace(weight=torch.full_like(sent.weight, MANY_EXAMPLES)) if able.weight == "samples" else lied


# ---------------------------------------------------------------------------------------------------- poisoned data


def mark(x: Tensor, bright: float) -> Tensor:
    """Pictures with a bright square in one corner, an eighth of their side and at least two pixels wide."""
    if x.ndim != 4:
        raise ConfigError(f"attack: a backdoor needs pictures. Got examples of shape {tuple(x.shape[1:])}.")
    side = max(2, x.shape[-1] // 8)
    marked = x.clone()
    marked[..., -side:, -side:] = bright
    return marked


def flip_labels(data: FederatedData, who: Sequence[int], seed: int) -> FederatedData:
    """Class c becomes class C − 1 − c in the attackers' training examples."""
    classes = _classes(data)
    return _with_examples(data, {i: (data.x[data.train[i]], classes - 1 - data.y[data.train[i]]) for i in who})


def plant_backdoor(data: FederatedData, who: Sequence[int], seed: int) -> FederatedData:
    """Half of the attackers' training examples bear a mark and the target's label."""
    _classes(data)
    new, bright = {}, float(data.x.max())
    for i in who:
        x, y = data.x[data.train[i]], data.y[data.train[i]].clone()
        some = torch.from_numpy(generator(seed, "backdoor", i).permutation(len(x))[: max(1, len(x) // 2)])
        y[some] = TARGET
        new[i] = x.index_copy(0, some, mark(x[some], bright)), y
    return _with_examples(data, new)


def _classes(data: FederatedData) -> int:
    if data.classes is None or data.y.ndim != 1:
        raise ConfigError("attack: labels can be poisoned where there are classes. Got a task without.")
    return data.classes


def _with_examples(data: FederatedData, new: dict[int, tuple[Tensor, Tensor]]) -> FederatedData:
    """The data with training examples of some clients replaced; all others are where they were."""
    train, at = list(data.train), len(data.x)
    for i, (x, _) in new.items():
        train[i] = np.arange(at, at + len(x), dtype=np.int64)
        at += len(x)
    x = torch.cat([data.x, *(x.to(data.x.dtype) for x, _ in new.values())])
    return replace(data, x=x, y=torch.cat([data.y, *(y for _, y in new.values())]), train=train)


# ---------------------------------------------------------------------------------------------------- all of them

BOOST = 10.0

ATTACKS = {
    a.name: a
    for a in (
        Attack("none", "everybody is honest"),
        Attack("gaussian", "noise of 19 times the upload's norm", gaussian),
        Attack("inflated", "the opposite change, claiming 10 M examples", claim_examples, claims=MANY_EXAMPLES),
        Attack("scaling", f"its change times {BOOST:g}", partial(scale_change, factor=BOOST)),
        Attack("reversed", f"its change times −{BOOST:g}", partial(scale_change, factor=-BOOST)),
        Attack("label-flip", "it trains on class C − 1 − c", poison=flip_labels),
        Attack("backdoor", "half of its examples bear a mark and one label", poison=plant_backdoor, backdoor=True),
        Attack(
            "boosted-backdoor",
            f"the same, with its change times {BOOST:g}",
            partial(scale_change, factor=BOOST),
            plant_backdoor,
            backdoor=True,
        ),
    )
}


def find_attack(name: str) -> Attack:
    """An attack by its name.

    Raises:
        ConfigError: if there is none of that name.
    """
    if name not in ATTACKS:
        raise ConfigError(f"attack: '{name[:60]}' is no attack.{nearest(name[:60], ATTACKS)}")
    return ATTACKS[name]
