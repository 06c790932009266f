"""Losses of the kinds of tasks, against the textbook written out, with empty slots left out."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from conftest import assert_close
from fedspan.errors import ConfigError
from fedspan.learn.batches import Batch
from fedspan.learn.losses import classes_first, cox_loss, kind_of_labels, label_loss, tag_accuracy, tag_loss
from fedspan.learn.task import Task
from fedspan.randomness import key

DOUBLE = torch.float64


def patients(n: int, seed: int, times: int = 5) -> tuple[Tensor, Tensor]:
    """Risks and (time, event), with many tied times."""
    rng = np.random.default_rng(seed)
    y = np.stack([rng.integers(1, times + 1, n).astype(float), (rng.random(n) < 0.6).astype(float)], 1)
    return torch.tensor(rng.normal(size=n)), torch.tensor(y)


def cox_by_hand(s: Tensor, y: Tensor, ties: str) -> float:
    """Σ over distinct event times, as in Kalbfleisch and Prentice (2002), section 4.2."""
    total = 0.0
    for t in sorted({float(a) for a, e in y if e == 1}):
        risk = [i for i in range(len(y)) if float(y[i, 0]) >= t]
        dead = [i for i in range(len(y)) if float(y[i, 0]) == t and float(y[i, 1]) == 1]
        all_at_risk = sum(math.exp(float(s[i])) for i in risk)
        their_share = sum(math.exp(float(s[i])) for i in dead)
        for k, i in enumerate(dead):
            taken = k / len(dead) * their_share if ties == "efron" else 0.0
            total += math.log(all_at_risk - taken) - float(s[i])
    return total / len(y)


@pytest.mark.parametrize("ties", ["efron", "breslow"])
def test_cox_is_the_partial_likelihood(ties: str) -> None:
    for seed in range(5):
        s, y = patients(17, seed)
        assert float(cox_loss(s, y, ties=ties)) == pytest.approx(cox_by_hand(s, y, ties), abs=1e-12)  # type: ignore[arg-type]
    s, y = patients(12, 9)
    assert_close(cox_loss(s + 300, y), cox_loss(s, y), 1e-11)  # only differences of risks count; nothing overflows
    y[:, 0] = torch.arange(12.0, dtype=DOUBLE)  # without ties both are one
    assert_close(cox_loss(s, y, ties="efron"), cox_loss(s, y, ties="breslow"))


@pytest.mark.parametrize("ties", ["efron", "breslow"])
def test_cox_leaves_out_empty_slots(ties: str) -> None:
    s, y = patients(9, 3)
    mask = torch.tensor([True] * 6 + [False] * 3)
    alone = torch.func.grad(lambda a: cox_loss(a, y[:6], ties=ties))(s[:6])  # type: ignore[arg-type]
    padded = torch.func.grad(lambda a: cox_loss(a, y, mask, ties=ties))(s)  # type: ignore[arg-type]
    assert_close(padded[:6], alone)
    assert not padded[6:].any()
    nobody = torch.func.grad(lambda a: cox_loss(a, y, torch.zeros(9, dtype=torch.bool), ties=ties))(s)  # type: ignore[arg-type]
    assert not nobody.any() and float(cox_loss(s, y, torch.zeros(9, dtype=torch.bool))) == 0.0
    censored = y * torch.tensor([1.0, 0.0], dtype=DOUBLE)
    assert float(cox_loss(s, censored)) == 0.0  # nobody has an event


def test_several_labels_and_positions() -> None:
    torch.manual_seed(0)
    z, y = torch.randn(4, 3, dtype=DOUBLE), torch.randint(0, 2, (4, 3))
    assert_close(label_loss(z, y), -(y * z.sigmoid().log() + (1 - y) * (1 - z.sigmoid()).log()).mean(1))
    z, y = torch.randn(2, 5, 4, 3, dtype=DOUBLE), torch.randint(0, 3, (2, 5, 4))  # pictures with the classes last
    y[0, :3], y[1] = -100, -100
    want = torch.stack([nn.functional.cross_entropy(z[0].reshape(-1, 3), y[0].reshape(-1)), torch.tensor(0.0)])
    for output in (z, z.movedim(-1, 1)):
        assert_close(tag_loss(output, y), want.to(DOUBLE))
        right = (z[0, 3:].argmax(-1) == y[0, 3:]).double().mean()
        assert_close(tag_accuracy(output, y)[0], right)
    tokens = torch.randn(2, 3, 3)  # three tokens, three classes: rows are tokens, as models of transformers have it
    assert torch.equal(classes_first(tokens, torch.zeros(2, 3)), tokens.transpose(1, 2))
    with pytest.raises(ConfigError, match=r"a row of logits for each.*positions \(4,\). Got \(5, 3\)"):
        tag_loss(torch.zeros(2, 5, 3), torch.zeros(2, 4, dtype=torch.long))


def test_what_labels_mean() -> None:
    assert kind_of_labels(torch.tensor([0, 3, 1])) == "classification"
    assert kind_of_labels(torch.tensor([0.5, 1.0])) == "regression"
    assert kind_of_labels(torch.rand(4, 2)) == "regression"
    assert kind_of_labels(torch.tensor([[0, 1], [1, 1]])) == "multi-label"
    assert kind_of_labels(torch.tensor([[0, 2], [1, -100]])) == "tagging"
    assert kind_of_labels(torch.rand(4, 2), "survival") == "survival"
    with pytest.raises(ConfigError, match=r"kind must be .*survival.*Got 'ranking'"):
        kind_of_labels(torch.rand(4), "ranking")


def spread(output: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """A loss of a batch: its examples' outputs should be apart."""
    w = mask.to(output.dtype)[:, None]
    mean = (output * w).sum(0) / w.sum().clamp_min(1)
    return -((output - mean) * w).square().sum() / w.sum().clamp_min(1)


def test_a_loss_of_a_batch_with_a_mask_leaves_out_empty_slots() -> None:
    task = Task(nn.Linear(4, 3), dtype=DOUBLE, loss=spread, loss_of="batch")
    assert not task.unmappable() and task.loss_of == "batch"
    x, y = torch.randn(5, 4, dtype=DOUBLE), torch.zeros(5, dtype=torch.long)
    slots = torch.tensor([0, 1, 2, -1, -1])
    padded = Batch(x, y, slots, key(0, "a"), 0)
    alone = Batch(x[:3], y[:3], None, key(0, "a"), 0)
    assert_close(task.loss(task.init(), padded), task.loss(task.init(), alone))
    gradients = [task.output_gradient(task.predict(task.init(), b.x), b.y, b.mask) for b in (padded, alone)]
    assert_close(gradients[0][:3], gradients[1])
    assert not gradients[0][3:].any()
