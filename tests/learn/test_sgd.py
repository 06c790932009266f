"""The training loops: mapped or not the same steps, those of torch.optim, and none for an empty batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap

from conftest import assert_close, assert_same, make_task
from fedspan import tree
from fedspan.learn.batches import Batch, Batches
from fedspan.learn.sgd import adamw, gradient, mean_gradient, sgd
from fedspan.learn.task import Task
from fedspan.randomness import key
from fedspan.tree import Tree

G = torch.Generator().manual_seed(0)
X, Y = torch.randn(12, 5, dtype=torch.float64, generator=G), torch.randint(0, 3, (12,), generator=G)
RAGGED = torch.tensor(  # three clients: full, one that ends early, one with a hole and a half-empty row
    [
        [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]],
        [[3, 1, -1], [8, -1, -1], [-1, -1, -1], [-1, -1, -1]],
        [[4, 5, 6], [-1, -1, -1], [7, -1, -1], [2, 1, 0]],
    ]
)
EMPTY_ROWS = torch.full((2, 3), -1)
FITS: dict[str, Callable[..., Tree]] = {
    "sgd": lambda *a: sgd(*a, 0.1),
    "decay": lambda *a: sgd(*a, 0.1, weight_decay=0.05),
    "momentum": lambda *a: sgd(*a, 0.1, momentum=0.9),
    "both": lambda *a: sgd(*a, 0.1, momentum=0.9, weight_decay=0.05),
    "clip": lambda *a: sgd(*a, 0.1, clip=0.3),
    "clip both": lambda *a: sgd(*a, 0.1, momentum=0.9, weight_decay=0.05, clip=0.3),
    "adamw": lambda *a: adamw(*a, 0.01),
    "adamw clip": lambda *a: adamw(*a, 0.01, clip=0.3),
    "adamw decay": lambda *a: adamw(*a, 0.01, weight_decay=0.3, betas=(0.8, 0.95), eps=1e-6),
}
FIT = pytest.mark.parametrize("fit", FITS)


def stream(rows: Tensor, mapped: bool = False) -> Batches:
    return Batches(X, Y, rows, key(3), mapped=mapped)


def optimiser(fit: str, params: list[Tensor]) -> torch.optim.Optimizer:
    made: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "sgd": lambda: torch.optim.SGD(params, 0.1),
        "decay": lambda: torch.optim.SGD(params, 0.1, weight_decay=0.05),
        "momentum": lambda: torch.optim.SGD(params, 0.1, momentum=0.9),
        "both": lambda: torch.optim.SGD(params, 0.1, momentum=0.9, weight_decay=0.05),
        "clip": lambda: torch.optim.SGD(params, 0.1),
        "clip both": lambda: torch.optim.SGD(params, 0.1, momentum=0.9, weight_decay=0.05),
        "adamw": lambda: torch.optim.AdamW(params, 0.01, weight_decay=0.0),
        "adamw clip": lambda: torch.optim.AdamW(params, 0.01, weight_decay=0.0),
        "adamw decay": lambda: torch.optim.AdamW(params, 0.01, weight_decay=0.3, betas=(0.8, 0.95), eps=1e-6),
    }
    return made[fit]()


def cut_to(most: float, params: dict[str, Tensor]) -> None:
    """Clip gradients by their common norm, exactly: torch's own function adds 1e-6 to it."""
    size = float(torch.cat([p.grad.reshape(-1) for p in params.values() if p.grad is not None]).norm())
    for p in params.values():
        if p.grad is not None and size > most:
            p.grad *= most / size


@FIT
def test_mapped_loop_and_torch_optim_agree(fit: str) -> None:
    task = make_task()
    start = task.init()
    mapped = vmap(lambda rows: FITS[fit](task.loss, start, stream(rows, True)))(RAGGED)
    for c, rows in enumerate(RAGGED):
        looped = FITS[fit](task.loss, start, stream(rows))
        params = {k: p.clone().requires_grad_() for k, p in start.items()}
        steps = optimiser(fit, list(params.values()))
        for row in rows:
            at = row[row >= 0]
            if len(at):
                steps.zero_grad()
                out = torch.func.functional_call(task.module, params, (X[at],))
                torch.nn.functional.cross_entropy(out, Y[at]).backward()
                if "clip" in fit:
                    cut_to(0.3, params)
                steps.step()
        assert_close(looped, tree.detach(params))
        assert_close(tree.take(mapped, c), looped)
    assert_same(start, task.init())  # never in place


@FIT
def test_an_empty_batch_is_no_step(fit: str) -> None:
    task = make_task()
    start = task.init()
    nothing = FITS[fit](task.loss, start, stream(EMPTY_ROWS, True))
    assert_same(nothing, start)
    assert_same(FITS[fit](task.loss, start, stream(EMPTY_ROWS)), start)
    assert_same(FITS[fit](task.loss, start, stream(EMPTY_ROWS[:0])), start)
    # In the middle and at the end it stops neither the momentum nor the step count, nor does it advance them.
    rows = RAGGED[0]
    holes = torch.cat([EMPTY_ROWS, rows[:2], EMPTY_ROWS, rows[2:], EMPTY_ROWS])
    assert_close(
        FITS[fit](task.loss, start, stream(holes, True)), FITS[fit](task.loss, start, stream(rows, True)), 1e-15
    )


@FIT
def test_a_loss_that_ignores_a_parameter_moves_it_only_by_decay(fit: str) -> None:
    params = {"used": torch.ones(5, dtype=torch.float64), "idle": torch.ones(2, dtype=torch.float64)}

    def loss(p: Tree, b: Batch) -> Tensor:
        return ((b.x @ p["used"]).square() * b.w).sum() / b.w.sum().clamp_min(1)

    looped = FITS[fit](loss, params, stream(RAGGED[0]))
    assert_close(looped, FITS[fit](loss, params, stream(RAGGED[0], True)))
    assert torch.equal(looped["idle"], params["idle"]) == (fit in ("sgd", "momentum", "clip", "adamw", "adamw clip"))


def test_gradient_mapped_and_looped_agree() -> None:
    task = make_task()
    start = task.init()
    rows = RAGGED[:, :1]
    mapped = vmap(lambda r: gradient(task.loss, start, next(iter(stream(r, True)))))(rows)
    for c in range(3):
        batch = next(iter(stream(rows[c])))
        params = {k: p.clone().requires_grad_() for k, p in start.items()}
        out = torch.func.functional_call(task.module, params, (batch.x,))
        torch.nn.functional.cross_entropy(out, batch.y).backward()
        looped = gradient(task.loss, start, batch)
        assert_close(looped, {k: p.grad for k, p in params.items()})
        assert_close(tree.take(mapped, c), looped)
    assert not any(p.requires_grad for p in start.values())


def test_gradient_of_nested_trees_and_idle_leaves() -> None:
    params = {"a": {"b": torch.ones(5, dtype=torch.float64)}, "idle": torch.ones(2), "none": {}}
    batch = next(iter(stream(RAGGED[0])))

    def loss(p: Tree, b: Batch) -> Tensor:
        return (b.x @ p["a"]["b"]).sum()

    assert_close(gradient(loss, params, batch), {"a": {"b": batch.x.sum(0)}, "idle": torch.zeros(2), "none": {}})


def test_mean_gradient_is_the_gradient_on_all_examples_however_they_are_cut() -> None:
    task = make_task()
    start = task.init()
    whole = gradient(task.loss, start, Batch(X, Y, None, key(0), 0))
    for rows in (RAGGED[0], torch.tensor([[*range(5)], [*range(5, 10)], [10, 11, -1, -1, -1]])):
        for mapped in (False, True):
            assert_close(mean_gradient(task.loss, start, stream(rows, mapped)), whole)
    assert_same(mean_gradient(task.loss, start, stream(EMPTY_ROWS, True)), tree.zeros_like(start))
    assert_same(mean_gradient(task.loss, start, stream(EMPTY_ROWS)), tree.zeros_like(start))


def test_nothing_to_train_gives_back_what_came() -> None:
    def loss(p: Tree, b: Batch) -> Tensor:
        raise AssertionError("there is nothing to train")

    statistics: dict[str, Any] = {"norm.running_mean": torch.ones(2)}
    for params in ({}, {"h": {}}, statistics):
        assert sgd(loss, params, stream(RAGGED[0]), 0.1) is params
        assert adamw(loss, params, stream(RAGGED[0]), 0.1) is params


def test_empty_sub_trees_survive_training() -> None:
    params = {"e": {}, "a": {"w": torch.zeros(5, dtype=torch.float64)}}

    def loss(p: Tree, b: Batch) -> Tensor:
        return (b.x @ p["a"]["w"] * b.w).sum()

    for mapped in (False, True):
        trained = sgd(loss, params, stream(RAGGED[0], mapped), 0.1)
        assert list(trained) == ["e", "a"] and trained["e"] == {} and float(trained["a"]["w"].norm()) > 0


def test_statistics_ride_along_and_the_start_keeps_its_own() -> None:
    task: Task = make_task("batchnorm")
    images = torch.randn(12, 1, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    start = task.init()
    before = tree.digest(start)
    trained = sgd(task.loss, start, Batches(images, Y, RAGGED[0], key(0)), 0.0, momentum=0.9)
    assert tree.digest(start) == before
    mean = torch.zeros(4, dtype=torch.float64)
    for row in RAGGED[0]:
        z = torch.nn.functional.conv2d(images[row], start["conv.weight"], start["conv.bias"], padding=1)
        mean = 0.9 * mean + 0.1 * z.mean((0, 2, 3))
    assert_close(trained["norm.running_mean"], mean)
    assert_same(tree.without(trained, task.stats), tree.without(start, task.stats))
    task.loss(trained, next(iter(Batches(images, Y, RAGGED[0], key(0)))))  # using them does not change them any more
    assert_close(trained["norm.running_mean"], mean)


class Direct(nn.Module):
    """Calls its layer once and uses the layer's weight once more by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x).relu() @ self.inner.weight)


def test_a_weight_used_outside_its_layer_gets_its_whole_gradient() -> None:
    task = Task(Direct(), dtype=torch.float64, seed=0)
    start = task.init()
    looped = sgd(task.loss, start, stream(RAGGED[0]), 0.1)
    assert_close(looped, sgd(lambda p, b: task.loss(p, b), start, stream(RAGGED[0]), 0.1))
    assert_close(looped, sgd(task.loss, start, stream(RAGGED[0], True), 0.1))


def test_training_some_of_the_parameters_leaves_the_others_alone() -> None:
    task = make_task()
    head = tree.select(task.init(), task.head)
    first = sgd(task.loss, head, stream(RAGGED[0]), 0.1)
    assert_close(first, sgd(lambda p, b: task.loss(p, b), head, stream(RAGGED[0]), 0.1))
    assert_same(first, sgd(task.loss, head, stream(RAGGED[0]), 0.1))  # nothing is remembered in the task


def test_a_weight_that_is_computed_from_a_parameter_trains_that_parameter() -> None:
    torch.manual_seed(0)
    task = Task(nn.Sequential(nn.utils.spectral_norm(nn.Linear(5, 4)), nn.Linear(4, 3)), dtype=torch.float64)
    start = task.init()
    assert "0.weight_orig" in start
    trained = sgd(task.loss, start, stream(RAGGED[0]), 0.1)
    assert float((trained["0.weight_orig"] - start["0.weight_orig"]).abs().max()) > 1e-4
