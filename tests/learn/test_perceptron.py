"""Steps of perceptrons that are written out are those of autograd, and only perceptrons are taken for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vmap

from conftest import assert_close
from fedspan import tree
from fedspan.learn import folded, sgd
from fedspan.learn.batches import Batches
from fedspan.learn.folded import folding
from fedspan.learn.perceptron import LinearLayer, perceptron_of
from fedspan.learn.sgd import Loss, Near
from fedspan.learn.task import LossBeside, Task
from fedspan.models import build
from fedspan.randomness import key
from fedspan.tree import Params, Tree

CLIENTS, EXAMPLES, INPUTS, CLASSES = 4, 60, 24, 3


@pytest.fixture(autouse=True)
def _nothing_is_kept() -> Iterator[None]:
    yield
    folded._packed_clients.cache_clear()


@pytest.fixture(params=["slots", "few", "packed"])
def layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """All empty slots are kept, or those up to a multiple of eight rows, or none."""
    monkeypatch.setattr(folded, "_CALL", 10**12 if request.param == "slots" else 0)
    monkeypatch.setattr(folded, "SMALL", 0 if request.param == "few" else 10**9)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Fits that were written out, so that no test passes because another way was taken."""
    fits: list[int] = []
    usual = sgd.descend
    monkeypatch.setattr(sgd, "descend", lambda *args: fits.append(1) or usual(*args))
    return fits


def task_of(hidden: tuple[int, ...] = (8, 7)) -> Task:
    return Task(lambda: build("mlp", (4, 6), CLASSES, hidden=hidden), dtype=torch.float64, seed=1)


def streams() -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, labels, and ragged rows [C, K, B]; a client runs out of them early, and one has none."""
    torch.manual_seed(0)
    rows = torch.full((CLIENTS, 3, 20), -1)
    for c, n in enumerate((45, 20, 9, 0)):
        rows[c].view(-1)[:n] = torch.randperm(EXAMPLES)[:n]
    return torch.randn(EXAMPLES, 4, 6, dtype=torch.float64), torch.randint(CLASSES, (EXAMPLES,)), rows


def compare(train: Callable[[Params, Batches], Tree], starts: Params, own: bool, names: Tensor | None = None) -> None:
    """Folded, and one client after another; `own` says that starts differ, otherwise all have the first."""
    x, y, rows = streams()

    def mapped(at: Tensor, start: Params, k: Tensor, called: Tensor | None) -> Tree:
        return train(start if own else common, Batches(x, y, at, k, called, mapped=True))

    common, keys = tree.take(starts, 0), torch.stack([key(7, c) for c in range(CLIENTS)])
    with folding(), torch.no_grad():
        together = vmap(mapped, in_dims=(0, 0, 0, None if names is None else 0))(rows, starts, keys, names)
    alone = []
    for c in range(CLIENTS):
        start = tree.take(starts, c if own else 0)
        found = train(start, Batches(x, y, rows[c], keys[c], None if names is None else names[c]))
        alone.append(tree.detach(found))
    assert_close(together, tree.stack(alone))


def starts_of(task: Task) -> Params:
    torch.manual_seed(3)
    found: Params = tree.stack([tree.map(lambda t: t + 0.1 * torch.randn_like(t), task.init()) for _ in range(CLIENTS)])
    return found


def near(task: Task) -> Loss:
    return Near(task.loss, {k: v + 0.1 for k, v in task.init().items() if k != task.names[1]}, 0.7)


LOSSES: dict[str, Callable[[Task], Loss]] = {"plain": lambda task: task.loss, "near": near}


@pytest.mark.parametrize("own", [True, False], ids=["own-starts", "common-start"])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("hidden", [(8, 7), ()], ids=["mlp", "linear"])
def test_steps_are_those_of_one_client_alone(
    hidden: tuple[int, ...], loss: str, own: bool, layout: None, counted: list[int]
) -> None:
    task = task_of(hidden) if hidden else Task(lambda: build("linear", (4, 6), CLASSES), dtype=torch.float64, seed=1)
    compare(lambda p, b: sgd.sgd(LOSSES[loss](task), p, b, 0.3), starts_of(task), own)
    assert len(counted) == 1


@pytest.mark.parametrize("own", [True, False], ids=["own-starts", "common-start"])
@pytest.mark.parametrize("part", ["head", "body", "biases"])
def test_layers_that_stay_as_they_are(part: str, own: bool, layout: None, counted: list[int]) -> None:
    task = task_of()
    moved = {"head": task.head, "body": task.body, "biases": [k for k in task.names if k.endswith("bias")]}[part]

    def train(p: Params, b: Batches) -> Tree:
        return sgd.sgd(LossBeside(task, tree.without(p, moved)), tree.select(p, moved), b, 0.3)

    compare(train, starts_of(task), own)
    assert len(counted) == 1


def test_clients_that_call_classes_differently(layout: None, counted: list[int]) -> None:
    task = task_of()
    names = torch.stack([torch.randperm(CLASSES) for _ in range(CLIENTS)])
    compare(lambda p, b: sgd.sgd(task.loss, p, b, 0.3), starts_of(task), True, names)
    assert len(counted) == 1


class Forked(nn.Module):
    """Two layers that are added."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) + self.two(x)


class Branching(Forked):
    """What it does depends on values."""

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) if x.sum() > 0 else self.two(x)


class Scaled(Forked):
    """Something between its layers."""

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) * 2.0


class Squashed(nn.Module):
    """A model that reads its weight itself."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.one.weight.tanh())


def hooked() -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 3))
    module[0].register_forward_hook(lambda *_: None)
    return module


def twice() -> nn.Module:
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.ReLU(), layer)


OTHERS: dict[str, Callable[[], nn.Module]] = {
    "forked": Forked,
    "branching": Branching,
    "scaled": Scaled,
    "reads-its-weight": Squashed,
    "hooked": hooked,
    "a-layer-twice": twice,
    "tanh": lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)),
    "relu-at-the-end": lambda: nn.Sequential(nn.Linear(4, 3), nn.ReLU()),
    "normed": lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 3)),
    "convolution": lambda: nn.Sequential(nn.Conv1d(1, 2, 3), nn.Flatten(), nn.Linear(4, 3)),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_what_is_no_perceptron(kind: str) -> None:
    assert perceptron_of(OTHERS[kind]()) is None


def test_what_is_one() -> None:
    found = perceptron_of(nn.Sequential(nn.Flatten(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3, bias=False)))
    assert found is not None and found.flat
    assert found.layers == (LinearLayer("1.weight", "1.bias", True), LinearLayer("3.weight", None, False))
    assert perceptron_of(build("mlp", (2, 2), 3)) is not None


def test_an_own_loss_is_differentiated() -> None:
    assert Task(build("mlp", (2, 2), 3), loss=lambda o, y: o.square().sum(1)).perceptron is None
