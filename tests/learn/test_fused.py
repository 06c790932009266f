"""The fused SGD step is the ordinary step, whatever the model, and leaves what it was given alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from conftest import assert_close, make_data, make_task
from fedspan import tree
from fedspan.learn.batches import Batches
from fedspan.learn.sgd import sgd
from fedspan.learn.task import Task
from fedspan.randomness import key


class Twice(nn.Module):
    """Uses one layer two times in a forward pass: not to be fused."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(self.inner(x).relu()).relu())


class Tied(nn.Module):
    """Two layers share one weight: neither is fused."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.b(self.a(x).relu()).relu())


class Idle(nn.Module):
    """Has a layer that the output does not depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.ones(4))
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)


def stream(task: Task, kind: str = "mlp") -> Batches:
    data = make_data(kind, clients=3)
    rows = torch.arange(18).reshape(3, 6)
    rows[-1, 4:] = -1
    return Batches(data.x, data.y, rows, key(1))


def check(task: Task, kind: str = "mlp") -> None:
    start = task.init()
    before = tree.digest(start)
    batches = stream(task, kind)
    fused = sgd(task.loss, start, batches, 0.2)
    plain = sgd(lambda p, b: task.loss(p, b), start, batches, 0.2)  # a function of its own is never fused
    assert_close(fused, plain)
    assert tree.digest(start) == before
    assert not any(fused[k].data_ptr() == start[k].data_ptr() for k in start)
    assert not any(t.requires_grad for t in fused.values())


@pytest.mark.parametrize("kind", ["mlp", "cnn", "dropout"])
def test_fused_steps_are_ordinary_steps(kind: str) -> None:
    task = make_task(kind)
    assert task._fused is not None
    check(task, kind)


@pytest.mark.parametrize("model", [Twice, Tied, Idle])
def test_models_that_do_not_fit_are_stepped_the_ordinary_way(model: type[nn.Module]) -> None:
    torch.manual_seed(0)
    task = Task(model(), dtype=torch.float64)
    check(task)
    assert (task._fused is None) == (model is Twice)


def test_no_bias_and_no_batches() -> None:
    torch.manual_seed(0)
    task = Task(nn.Sequential(nn.Linear(5, 4, bias=False), nn.ReLU(), nn.Linear(4, 3)), dtype=torch.float64)
    check(task)
    start = task.init()
    assert sgd(task.loss, start, stream(task).first(0), 0.2) is start
