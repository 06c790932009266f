"""bf16: products of training passes in 16 bits, everything else in 32; the same mapped, folded and in the loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap

from fedspan import tree
from fedspan.learn.batches import Batch
from fedspan.learn.folded import folding
from fedspan.learn.precision import training_in
from fedspan.learn.sgd import gradient, sgd
from fedspan.learn.task import Task
from fedspan.randomness import key

PICTURE = (2, 8, 8)
NETS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "linear": (nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), (6,)),
    "convolution": (nn.Sequential(nn.Conv2d(2, 4, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 3)), PICTURE),
    "group norm": (nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(144, 3)), PICTURE),
    "layer norm": (nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3)), (6,)),
    "dropout": (nn.Sequential(nn.Linear(6, 64), nn.Dropout(0.3), nn.ReLU(), nn.Linear(64, 3)), (6,)),
}


def task_of(name: str) -> tuple[Task, Tensor, Tensor]:
    net, shape = NETS[name]
    torch.manual_seed(1)
    return Task(net, seed=3), torch.randn(2, 5, *shape), torch.randint(3, (2, 5))


def slopes(task: Task, x: Tensor, y: Tensor, precision: Any, way: str = "loop") -> dict[str, Tensor]:
    """Gradients of two clients with weights of their own."""
    starts = [task.init(), tree.map(lambda t: t * 0.9 + 0.01, task.init())]
    slots = torch.arange(5).expand(2, 5)

    def one(params: Any, a: Tensor, b: Tensor, at: Tensor) -> Any:
        return gradient(task.loss, params, Batch(a, b, at, key(0), 0))

    with training_in(precision):
        if way == "loop":
            alone = [gradient(task.loss, p, Batch(x[k], y[k], None, key(0), 0)) for k, p in enumerate(starts)]
            return tree.stack(alone)
        if way == "vmap":
            return vmap(one)(tree.stack(starts), x, y, slots)
        with folding():
            return vmap(one)(tree.stack(starts), x, y, slots)


@pytest.mark.parametrize("name", NETS)
def test_every_mapping_gives_the_gradients_of_bf16_which_are_near_those_of_float32(name: str) -> None:
    task, x, y = task_of(name)
    full, half = (tree.ravel(slopes(task, x, y, p)) for p in ("float32", "bf16"))
    assert 1e-5 < float((half - full).norm() / full.norm()) < 0.05  # another precision, and no other function
    for way in ("vmap", "folded"):
        found = slopes(task, x, y, "bf16", way)
        assert {g.dtype for g in found.values()} == {torch.float32}
        assert float((tree.ravel(found) - half).norm() / full.norm()) < 0.02


def test_outputs_losses_and_trained_weights_are_float32_and_evaluation_is_not_rounded() -> None:
    task, x, y = task_of("linear")
    batch, params = Batch(x[0], y[0], None, key(0), 0), task.init()
    plain = task.predict(params, x[0])
    with training_in("bf16"):
        features, output = task.features_and_output(params, batch)
        assert features.dtype == output.dtype == task.loss(params, batch).dtype == torch.float32
        assert not torch.equal(output, plain) and torch.allclose(output, plain, atol=0.05)
        assert torch.equal(features, features.bfloat16().float())  # what the head reads is a bf16 number
        assert torch.equal(task.predict(params, x[0]), plain)
        small = sgd(task.loss, params, [batch] * 3, 1e-4)  # steps that a bf16 weight could not hold
    assert all(t.dtype == torch.float32 for t in small.values())
    moved = tree.ravel(tree.sub(small, params))
    assert 0 < float(moved.abs().max()) < 1e-3
    with training_in("float32"):
        assert torch.equal(task.output(params, batch), plain)


def test_the_dropout_mask_is_that_of_float32() -> None:
    task = task_of("dropout")[0]
    layer = next(m for m in task.module.modules() if type(m).__name__ == "Dropout")
    whole, rounded = layer(torch.ones(64, 64)), layer(torch.ones(64, 64, dtype=torch.bfloat16))
    assert rounded.dtype == torch.bfloat16 and torch.equal(whole > 0, rounded > 0)
