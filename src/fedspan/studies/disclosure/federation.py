"""Federations to attack: clients whose labels, sizes and likenesses are known, and others that a server makes up."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedspan.data.federated import FederatedData, Index
from fedspan.data.sources.load import load
from fedspan.learn.task import Task
from fedspan.models import build
from fedspan.randomness import generator

CLASSES = 10
CLIENTS = 40
"""Clients of one federation."""


@dataclass(frozen=True)
class Crowd:
    """A federation and the truth about it."""

    data: FederatedData
    held: NDArray[np.bool_]
    """Which client holds which class, [clients, classes]."""
    partner: Index
    """Who holds the same classes as a client."""


def crowd(x: Tensor, y: Tensor, name: str, *, pairs: bool, seed: int = 0) -> Crowd:
    """Clients that hold each class or not, like the throw of a coin, so that chance is one half.

    Of a class that it holds a client has 4 to 9 examples. With `pairs` two and two hold the same classes, in an order
    that shows nothing; without, each stands alone, and is its own partner.
    """
    rng = generator(seed, "disclosure", name)
    rows = [np.flatnonzero(y.numpy() == c) for c in range(CLASSES)]
    held = rng.random((CLIENTS, CLASSES)) < 0.5
    for k in np.flatnonzero(~held.any(1)):
        held[k, rng.integers(CLASSES)] = True
    partner = np.arange(CLIENTS)
    if pairs:
        order = rng.permutation(CLIENTS)
        held, partner = held[order // 2], np.argsort(order)[order ^ 1]
    train, validation = [], []
    for own in held:
        drawn = [rng.choice(rows[c], rng.integers(4, 10), replace=False) for c in np.flatnonzero(own)]
        more = [rng.choice(rows[c], 2, replace=False) for c in np.flatnonzero(own)]
        train.append(np.concatenate(drawn))
        validation.append(np.concatenate(more))
    groups = torch.arange(CLIENTS) % 4
    data = FederatedData(x, y, train, validation, validation, classes=CLASSES, groups=groups)
    return Crowd(data, held, partner)


def digits(seed: int = 0) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The bundled digits in two halves without a common example: the clients', and the server's own."""
    source = load("digits")
    x, y = source.x.flatten(1).float(), source.y
    order = torch.from_numpy(generator(seed, "disclosure", "halves").permutation(len(x)))
    mine, theirs = order[: len(x) // 2], order[len(x) // 2 :]
    return (x[mine], y[mine]), (x[theirs], y[theirs])


def perceptron(seed: int = 0) -> Task:
    """The model of all attacks: 64-32-10."""
    return Task(lambda: build("mlp", (64,), CLASSES, hidden=[32]), seed=seed)
