"""Heads trained on stored features are those trained on inputs; where they would not be, nothing is stored."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap

from conftest import assert_close, make_data, make_task
from fedspan import tree
from fedspan.learn import frozen_body
from fedspan.learn.batches import Batches
from fedspan.learn.folded import folding
from fedspan.learn.frozen_body import FrozenBody
from fedspan.learn.sgd import sgd
from fedspan.learn.task import Task
from fedspan.randomness import key
from fedspan.tree import Params, Tree

CLIENTS = 3
WAYS = ["vmap", "folded", "loop"]


class Softened(nn.Module):
    """Does something to what its head gives."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh()) / 2


class Reading(Softened):
    """Has a body that reads the head's weight."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x) * self.head.weight.mean())


def epochs(client: int) -> Tensor:
    """Index rows [K, B] of three epochs over a client's examples, another order in each, empty slots at the end."""
    n = (9, 7, 4)[client]
    rows = torch.full((3, 2, 5), -1)
    for k in range(3):
        rows[k].view(-1)[:n] = 10 * client + torch.randperm(n, generator=torch.Generator().manual_seed(k))
    return rows.view(6, 5)


def trained(task: Task, way: str, stored: bool, transform: Any = None, kind: str = "mlp") -> tuple[Tree, list[bool]]:
    """The heads of all clients, and for each whether its minibatches held features."""
    data, used = make_data(kind), []
    torch.manual_seed(0)
    starts = tree.stack([tree.map(lambda t: t + 0.1 * torch.randn_like(t), task.init()) for _ in range(CLIENTS)])
    rows = torch.stack([epochs(c) for c in range(CLIENTS)])
    names = torch.stack([torch.randperm(3) for _ in range(CLIENTS)])

    def train(start: Params, at: Tensor, renamed: Tensor) -> Tree:
        stream = Batches(data.x, data.y, at, key(1), renamed, way != "loop", transform)
        body, head = tree.without(start, task.head), tree.select(start, task.head)
        if not stored:
            return sgd(lambda h, b: task.loss(body | h, b), head, stream, 0.3)
        fixed = FrozenBody(task, body, head, stream)
        used.append(fixed.batches is not stream)
        return sgd(fixed.loss, head, fixed.batches, 0.3)

    if way == "loop":
        each = [train(tree.take(starts, c), rows[c], names[c]) for c in range(CLIENTS)]
        return tree.stack(each), used
    with folding() if way == "folded" else nullcontext(), torch.no_grad():
        return vmap(train)(starts, rows, names), used


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["mlp", "cnn"])
def test_the_same_heads(kind: str, way: str) -> None:
    found, used = trained(make_task(kind), way, stored=True, kind=kind)
    assert all(used) and used
    assert_close(found, trained(make_task(kind), "loop", stored=False, kind=kind)[0])


def noise(x: Tensor, k: Tensor) -> Tensor:
    return x * (1 + 0.01 * (k % 7))


CANNOT = [(what, way) for what in ("dropout", "softened", "reading", "transform") for way in WAYS]
CANNOT.remove(("reading", "folded"))  # a layer whose weight another one reads cannot be folded at all


@pytest.mark.parametrize(("what", "way"), CANNOT)
def test_what_cannot_be_stored(what: str, way: str) -> None:
    torch.manual_seed(1)
    own = {"softened": Softened, "reading": Reading}.get(what)
    task = make_task("dropout" if what == "dropout" else "mlp") if own is None else Task(own(), dtype=torch.float64)
    transform = noise if what == "transform" else None
    found, used = trained(task, way, True, transform)
    assert not any(used) and used
    assert_close(found, trained(task, "loop", False, transform)[0])


def test_batch_normalisation_and_other_parameters_are_not_stored() -> None:
    norm = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    assert Task(norm).head_alone(torch.zeros(2, 5)) is None
    task, data = make_task(), make_data()
    stream = Batches(data.x, data.y, epochs(0), key(1))
    assert FrozenBody(task, {}, task.names, stream).batches is stream
    first = stream.first(2)  # an epoch in which nothing comes twice
    assert FrozenBody(task, tree.without(task.init(), task.head), task.head, first).batches is first


@pytest.mark.parametrize("way", WAYS)
def test_features_of_other_examples_are_caught(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = frozen_body._each_once

    def shifted(rows: Tensor) -> tuple[Tensor, Tensor] | None:
        found = right(rows)
        return None if found is None else (found[0].flip(1), found[1])

    monkeypatch.setattr(frozen_body, "_each_once", shifted)
    with pytest.raises(AssertionError):
        assert_close(trained(make_task(), way, stored=True)[0], trained(make_task(), "loop", stored=False)[0])
