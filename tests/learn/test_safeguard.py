"""The safeguard: steps that explode are shortened, others are left alone to the last bit, in every mapping."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import vmap

from conftest import assert_close, finished, make_data, make_task
from fedspan import tree
from fedspan.learn.batches import Batch, Batches
from fedspan.learn.folded import folding
from fedspan.learn.optimizer import Optimizer
from fedspan.learn.safeguard import FEW, MOST, QUIET, SHORTER, shortened, some
from fedspan.learn.sgd import sgd
from fedspan.methods import FedAvg
from fedspan.randomness import key

ROWS = torch.tensor([[[0, 1, 2], [3, 4, -1]], [[5, 6, 7], [8, -1, -1]], [[9, 10, -1], [-1, -1, -1]]])
RATES = [0.05, 2.0, 50.0]
GUARDED, PLAIN = Optimizer(), Optimizer(safeguard=False)


def stream(client: int, rows: Tensor = ROWS) -> Batches:
    data = make_data()
    return Batches(data.x, data.y, rows[client], key(0, "s", client))


def distance(theta: Tensor) -> Tensor:
    return (10 * theta).square().sum() / 2


def descended(steps: int) -> Any:
    def train(lr: float) -> Tensor:
        theta = torch.ones(2, dtype=torch.float64)
        for _ in range(steps):
            theta = theta - lr * 100 * theta
        return theta

    return train


def test_a_step_that_explodes_is_taken_at_a_quarter_until_it_does_not() -> None:
    start, tried = torch.ones(2, dtype=torch.float64), list[float]()

    def train(lr: float) -> Tensor:
        tried.append(lr)
        return descended(3)(lr)

    new = shortened(train, start, distance, 1.0)
    assert tried == [SHORTER**k for k in range(len(tried))]
    assert float(distance(new)) <= 1.5 * float(distance(start))
    assert all(float(distance(descended(3)(lr))) > 1.5 * float(distance(start)) for lr in tried[:-1])
    assert torch.equal(new, descended(3)(tried[-1]))


def test_a_single_step_may_overshoot_as_a_mean_follows() -> None:
    start = torch.ones(2, dtype=torch.float64)
    far = 10 * start
    assert shortened(lambda lr: far, start, distance, 1.0, several=False) is far
    assert torch.equal(shortened(lambda lr: far, start, distance, 1.0), start)


def test_what_no_step_improves_stays_where_it_was() -> None:
    start, calls = torch.ones(2, dtype=torch.float64), list[float]()

    def nowhere(lr: float) -> Tensor:
        calls.append(lr)
        return torch.full_like(start, torch.nan)

    assert torch.equal(shortened(nowhere, start, distance, 1.0), start)
    assert len(calls) == MOST + 1


def test_a_small_loss_may_grow() -> None:
    start, end = (torch.full((2,), x, dtype=torch.float64) for x in (0.01, 0.09))
    assert float(distance(end)) < QUIET and float(distance(end)) > 50 * float(distance(start))
    assert shortened(lambda lr: end, start, distance, 1.0) is end


@pytest.mark.parametrize("rule", [{}, {"momentum": 0.9, "weight_decay": 0.01}, {"rule": "adamw"}])
def test_steps_that_do_not_explode_keep_their_bits(rule: dict[str, Any]) -> None:
    task = make_task()
    for client in range(3):
        plain = Optimizer(safeguard=False, **rule).fit(task.loss, task.init(), stream(client), 0.05)
        guarded = Optimizer(**rule).fit(task.loss, task.init(), stream(client), 0.05)
        assert all(torch.equal(plain[k], guarded[k]) for k in plain)
    assert_close(PLAIN.fit(task.loss, task.init(), stream(0), 50.0), sgd(task.loss, task.init(), stream(0), 50.0))


@pytest.mark.parametrize("lr", RATES)
def test_mapped_folded_and_alone_are_shortened_alike(lr: float) -> None:
    task = make_task()
    alone = [GUARDED.fit(task.loss, task.init(), stream(i), lr) for i in range(3)]

    def one(rows: Tensor, relabelled: Tensor) -> Any:
        data = make_data()
        return GUARDED.fit(task.loss, task.init(), Batches(data.x, data.y, rows, relabelled, mapped=True), lr)

    keys = torch.stack([key(0, "s", i) for i in range(3)])
    mapped = vmap(one)(ROWS, keys)
    with folding():
        together = vmap(one)(ROWS, keys)
    for i in range(3):
        assert_close(tree.take(mapped, i), alone[i])
        assert_close(tree.take(together, i), alone[i])


def test_the_rates_of_that_test_reach_from_no_shortening_to_some() -> None:
    task = make_task()
    same = [
        all(
            torch.equal(a, b)
            for a, b in zip(
                tree.leaves(GUARDED.fit(task.loss, task.init(), stream(0), lr)),
                tree.leaves(PLAIN.fit(task.loss, task.init(), stream(0), lr)),
            )
        )
        for lr in RATES
    ]
    assert same[0] and not same[-1]


def test_a_thousandfold_learning_rate_trains_nevertheless() -> None:
    calm, wild = (finished(FedAvg(lr=lr), rounds=6).result for lr in (0.1, 100.0))  # type: ignore[attr-defined]
    assert wild.measures["loss"]["mean"] < 2 * calm.measures["loss"]["mean"]
    plain = finished(FedAvg(lr=100.0, optimizer=PLAIN), rounds=6).result  # type: ignore[attr-defined]
    assert plain.measures["loss"]["mean"] > 10 * wild.measures["loss"]["mean"]


def test_a_phase_is_judged_by_few_examples() -> None:
    data = make_data()
    rows = torch.arange(80).remainder(len(data.y)).reshape(2, 40)
    for mapped in (False, True):
        few = some(Batches(data.x, data.y, rows, key(0), mapped=mapped))
        assert few is not None and torch.equal(few.x, data.x[rows[0, :FEW]]) and len(few.y) == FEW
        assert (few.slots is not None) == mapped
    listed = some([Batch(data.x[rows[0]], data.y[rows[0]], rows[0], key(0), 0)])
    assert listed is not None and torch.equal(listed.x, data.x[rows[0, :FEW]]) and listed.slots is not None
    assert some([]) is None
