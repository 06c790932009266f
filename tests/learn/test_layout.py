"""Pictures channels last: the same numbers in another order in memory, for models that take it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conftest import make_data, make_model
from fedspan import tree
from fedspan.learn.batches import Batch
from fedspan.learn.layout import channels_last
from fedspan.learn.sgd import gradient, sgd
from fedspan.learn.task import Task
from fedspan.methods import FedAvg
from fedspan.randomness import key
from fedspan.simulation.settings import Settings
from fedspan.simulation.simulator import Simulation


class Seen(nn.Module):
    """Two convolutions that note in which layout the second one is given its inputs."""

    def __init__(self, flat: str = "flatten", norm: bool = False) -> None:
        super().__init__()
        self.flat, self.layouts = flat, []  # type: ignore[var-annotated]
        self.first, self.second = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3)
        self.norm = nn.BatchNorm2d(4) if norm else nn.Identity()
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x)).relu()
        self.layouts.append(x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous())
        x = self.second(x)
        y: Tensor = self.head(x.flatten(1) if self.flat == "flatten" else x.view(len(x), -1))
        return y


def batch(dtype: torch.dtype = torch.float32) -> Batch:
    torch.manual_seed(0)
    return Batch(torch.randn(5, 1, 6, 6, dtype=dtype), torch.randint(3, (5,)), None, key(0), 0)


def test_pictures_of_one_and_of_several_channels_are_told_apart_by_their_strides() -> None:
    for channels in (1, 3):
        x = torch.randn(2, channels, 4, 5)
        y = channels_last(x)
        assert torch.equal(x, y) and y.stride() == (20 * channels, 1, 5 * channels, channels)
        assert nn.Conv2d(channels, 4, 3)(y).stride(1) == 1


def test_a_model_that_convolves_is_computed_channels_last_in_32_bits_and_gives_the_same() -> None:
    net = Seen()
    task = Task(net, seed=0)
    params, b = task.init(), batch()
    out = task.output(params, b)
    assert task.module.layouts == [True] and task.layout.tried  # type: ignore[union-attr]
    usual = torch.func.functional_call(net, params, (b.x,))
    assert torch.allclose(out, usual, atol=1e-6) and net.layouts == [False]
    double = Task(Seen(), dtype=torch.float64, seed=0)
    double.output(double.init(), batch(torch.float64))
    assert double.module.layouts == [False]  # type: ignore[union-attr]


@pytest.mark.parametrize("norm", [False, True])
def test_a_model_that_relies_on_the_usual_order_keeps_it_and_learns_the_same(norm: bool) -> None:
    plain, strict = (Task(Seen(flat, norm), seed=0) for flat in ("flatten", "view"))
    strict.layout.tried = plain.layout.tried = False
    ends = [sgd(t.loss, t.init(), [batch()] * 3, 0.1) for t in (plain, strict)]
    assert plain.layout.last and not strict.layout.last
    assert float((tree.ravel(ends[0]) - tree.ravel(ends[1])).abs().max()) < 1e-5  # statistics included


def test_an_error_of_the_model_itself_is_the_one_that_is_raised() -> None:
    task = Task(Seen(), seed=0)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        task.output(task.init(), Batch(torch.randn(2, 1, 9, 9), torch.zeros(2).long(), None, key(0), 0))
    assert task.layout.last  # it says nothing about layouts


@pytest.mark.parametrize("mapping", ["vmap", "folded"])
def test_mapped_and_folded_runs_equal_the_loop(mapping: Any) -> None:
    def run(way: Any, dtype: torch.dtype, precision: Any) -> Tensor:
        settings = Settings(mapping=way, workers=1, batch_size=8, precision=precision, evaluate_every=100)
        task = Task(make_model("cnn"), dtype=dtype)
        sim = Simulation(FedAvg(), task, make_data("cnn").to(dtype), rounds=2, settings=settings)
        sim.run()
        return tree.ravel(sim.record.server["theta"])

    for dtype, precision, near in ((torch.float32, "float32", 1e-5), (torch.float64, "float64", 1e-12)):
        gap = run(mapping, dtype, precision) - run("loop", dtype, precision)
        assert float(gap.abs().max()) < near


def test_gradients_keep_the_values_of_the_usual_layout() -> None:
    task = Task(Seen(), seed=0)
    params, b = task.init(), batch()
    last = gradient(task.loss, params, b)
    task.layout.last = False
    usual = gradient(task.loss, params, b)
    assert float((tree.ravel(last) - tree.ravel(usual)).abs().max()) < 1e-6
