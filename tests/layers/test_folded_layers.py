"""Structured layers with clients folded into the batch axis train as they do one client after another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap

from conftest import assert_close
from fedspan import tree
from fedspan.layers import (
    Adapter,
    Dictionary,
    Factorized,
    Hadamard,
    LowRank,
    Principal,
    Structured,
    candidates,
    convert,
)
from fedspan.learn import folded
from fedspan.learn.batches import Batches
from fedspan.learn.folded import OwnParameters, folding
from fedspan.learn.sgd import Prox, sgd
from fedspan.learn.task import Task
from fedspan.randomness import key
from fedspan.tree import Params, Tree

COUNTS = (12, 3, 20, 11, 0)
"""Examples of the clients: minibatches run out at different times, and one of them has none."""


class Net(nn.Module):
    """Layers so wide that factors of rank one or two are applied one after the other, one of them at two positions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 24), nn.Linear(24, 16, bias=False)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.second(self.first(x).tanh()).tanh()
        return self.head(h.view(len(x), 2, 8)).sum(1)


KINDS: dict[str, Callable[[Any], Structured]] = {
    "lora": lambda m: Adapter(m, 1, alpha=0.7),
    "lora-added": lambda m: Adapter(m, 6),
    "lora-trained-base": lambda m: Adapter(m, 1, train_base=True),
    "own-pair": lambda m: Adapter(m, 1, own_rank=1, own_alpha=0.3),
    "own-pair-alone": lambda m: Adapter(m, 0, own_rank=6),
    "loha": lambda m: Adapter(m, 2, "loha"),
    "lokr": lambda m: Adapter(m, 2, "lokr"),
    "lowrank": lambda m: LowRank(m, 2),
    "lowrank-composed": lambda m: LowRank(m, 8),
    "principal": Principal,
    "hadamard": lambda m: Hadamard(m, 2, plus_one=True, tanh=True),
    "dictionary": lambda m: Dictionary(m, 5, 0.5),
    "factorized": lambda m: Factorized(m, 1, mu_start="dense"),
    "factorized-composed": lambda m: Factorized(m, 3, mu_start="dense"),
    "factorized-without-mu": lambda m: Factorized(m, 1, mu=False),
}


@pytest.fixture(params=["slots", "packed"])
def layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Small models keep empty slots; with calls that cost nothing they are left out, as in larger models."""
    monkeypatch.setattr(folded, "_CALL", 0 if request.param == "packed" else 10**12)
    return str(request.param)


def task_of(kind: str) -> Task:
    torch.manual_seed(1)
    plain = Task(Net(), dtype=torch.float64)
    return plain.converted(lambda module: convert(module, list(candidates(module)), KINDS[kind]))


def constants(task: Task) -> Params:
    """What a task's module holds and does not train."""
    return {k: p.detach().clone() for k, p in task.module.named_parameters() if k not in task.names}


def shifted(params: Params, by: float = 0.1) -> Params:
    return tree.map(lambda t: t + by * torch.randn_like(t), params)


def both_ways(task: Task, fixed: Params, own: Tree, train: Callable[[Params, Params, Batches], Tree]) -> None:
    """Compare `train(fixed and own constants, start, stream)` folded with one client after another."""
    x, y = torch.randn(40, 12, dtype=torch.float64), torch.arange(40) % 3
    rows = torch.full((len(COUNTS), 4, 5), -1)
    for c, n in enumerate(COUNTS):
        rows[c].view(-1)[:n] = torch.arange(c, c + n)
    starts = tree.stack([shifted(task.init()) for _ in COUNTS])
    keys = torch.stack([key(7, c) for c in range(len(COUNTS))])

    def mapped(mine: Params, start: Params, at: Tensor, k: Tensor) -> Tree:
        return train(fixed | mine, start, Batches(x, y, at, k, mapped=True))

    with folding(), torch.no_grad():
        together = vmap(mapped)(own, starts, rows, keys)
    alone = [
        train(fixed | tree.take(own, c), tree.take(starts, c), Batches(x, y, rows[c], keys[c]))
        for c in range(len(COUNTS))
    ]
    assert_close(together, tree.stack([tree.detach(a) for a in alone]))


def steps(task: Task, momentum: float, prox: Prox) -> Callable[[Params, Params, Batches], Tree]:
    def train(fixed: Params, start: Params, stream: Batches) -> Tree:
        loss = lambda p, b: task.loss(fixed | p, b)
        return sgd(loss, start, stream, 0.2, momentum=momentum, prox=prox)

    return train


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("kind", KINDS)
def test_training(kind: str, momentum: float, layout: str) -> None:
    task = task_of(kind)
    both_ways(task, shifted(constants(task)), {}, steps(task, momentum, {}))


@pytest.mark.parametrize("kind", ["lora", "lora-added", "own-pair", "loha"])
def test_constants_may_be_those_of_each_client(kind: str, layout: str) -> None:
    task = task_of(kind)
    fixed = constants(task)
    own = tree.stack([shifted(fixed) for _ in COUNTS])
    both_ways(task, {}, own, steps(task, 0.0, {}))


COMMON = {"lora": "AB", "own-pair": "AL", "lowrank": "UV", "factorized": ["u", "v", "mu"], "hadamard": ["X1"]}


@pytest.mark.parametrize(
    ("kind", "still"),
    [(kind, f"first.{name}") for kind, names in COMMON.items() for name in (*names, "bias")],
)
def test_some_parameters_may_be_common(kind: str, still: str, layout: str) -> None:
    task = task_of(kind)
    common = shifted(constants(task) | tree.select(task.init(), [still]))

    def train(fixed: Params, start: Params, stream: Batches) -> Tree:
        return steps(task, 0.0, {})(fixed, tree.without(start, [still]), stream)

    both_ways(task, common, {}, train)


def test_proximal_steps_come_after_the_step_in_the_product(layout: str) -> None:
    task = task_of("factorized")
    prox = {"first.mu": lambda w: w - w.clamp(-0.02, 0.02), "second.mu": lambda w: 0.9 * w}
    both_ways(task, {}, {}, steps(task, 0.0, prox))


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_features(kind: str, layout: str) -> None:
    task = task_of(kind)

    def seen(fixed: Params, start: Params, stream: Batches) -> Tree:
        found = [torch.zeros(16).double(), torch.zeros(16).double(), torch.zeros(3).double()]
        for batch in stream.first(1):
            features = task.features_of(fixed | start, batch)
            more, output = task.features_and_output(fixed | start, batch)
            live = batch.w[:, None]
            found = [(features.flatten(1) * live).sum(0), (more.flatten(1) * live).sum(0), (output * live).sum(0)]
        return {str(k): t for k, t in enumerate(found)}

    both_ways(task, shifted(constants(task)), {}, seen)


def test_no_layer_is_mapped_by_vmap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linear layers of every structure have a form of their own; convolutions are mapped."""
    seen: list[str] = []
    usual = OwnParameters.linear
    monkeypatch.setattr(OwnParameters, "linear", lambda *args: (seen.append(""), usual(*args))[1])
    monkeypatch.setattr(folded._Unit, "_mapped", lambda *_: pytest.fail("a layer was mapped"))
    for kind in KINDS:
        task = task_of(kind)
        starts = tree.stack([shifted(task.init()) for _ in range(2)])
        with folding():
            vmap(task.predict)(starts, torch.randn(2, 4, 12, dtype=torch.float64))
        assert len(seen) >= 3
        seen.clear()
