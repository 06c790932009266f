"""Metrics against scikit-learn and against definitions written out; who is left out, and what is refused."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics as sk
from torch import nn

from fedspan.errors import ConfigError
from fedspan.learn.metrics import (
    METRICS,
    Metric,
    UndefinedMetric,
    calibration_error,
    check_metrics,
    concordance,
    known_metric,
    own_metric,
)
from fedspan.learn.task import Task

RNG = np.random.default_rng(0)


def scores(n: int, classes: int) -> Any:
    p = RNG.random((n, classes)) + 0.05
    return p / p.sum(1, keepdims=True)


def test_classes_as_scikit_learn_has_them() -> None:
    y, p = RNG.integers(0, 2, 40), scores(40, 2)
    assert METRICS["roc_auc"](y, p) == pytest.approx(sk.roc_auc_score(y, p[:, 1]), abs=1e-12)
    assert METRICS["average_precision"](y, p) == pytest.approx(sk.average_precision_score(y, p[:, 1]), abs=1e-12)
    assert METRICS["f1"](y, p) == pytest.approx(sk.f1_score(y, p.argmax(1)), abs=1e-12)
    y, p = np.arange(60) % 3, scores(60, 3)
    want = sk.roc_auc_score(y, p, multi_class="ovr", average="macro")
    assert METRICS["roc_auc"](y, p) == pytest.approx(want, abs=1e-12)
    want = sk.roc_auc_score(y, p, multi_class="ovr", average="weighted")
    assert METRICS["roc_auc_weighted"](y, p) == pytest.approx(want, abs=1e-12)
    assert METRICS["log_loss"](y, p) == pytest.approx(sk.log_loss(y, p), abs=1e-12)
    assert METRICS["top_5_accuracy"](np.arange(30) % 9, q := scores(30, 9)) == pytest.approx(
        sk.top_k_accuracy_score(np.arange(30) % 9, q, k=5), abs=1e-12
    )
    for name, function in (("accuracy", sk.accuracy_score), ("balanced_accuracy", sk.balanced_accuracy_score)):
        assert METRICS[name](y, p) == pytest.approx(function(y, p.argmax(1)), abs=1e-12)
    for name in ("f1", "precision", "recall", "jaccard"):
        want = getattr(sk, f"{name}_score")(y, p.argmax(1), average="macro")
        assert METRICS[f"{name}_macro"](y, p) == pytest.approx(want, abs=1e-12)


def test_one_label_alone_is_judged_as_two_classes_are() -> None:
    y, p = RNG.integers(0, 2, 40).astype(np.float32), RNG.random(40)
    for name in ("roc_auc", "accuracy", "f1"):
        both = METRICS[name](y.astype(np.int64), np.stack([1 - p, p], 1))
        assert METRICS[name](y, p) == pytest.approx(both, abs=1e-12), name
        if name != "f1":
            assert METRICS[name](y[:, None], p[:, None]) == pytest.approx(both, abs=1e-12), name


def test_several_labels_as_scikit_learn_has_them() -> None:
    y, p = RNG.integers(0, 2, (50, 4)), RNG.random((50, 4))
    assert METRICS["roc_auc"](y, p) == pytest.approx(sk.roc_auc_score(y, p, average="macro"), abs=1e-12)
    assert METRICS["roc_auc_micro"](y, p) == pytest.approx(sk.roc_auc_score(y, p, average="micro"), abs=1e-12)
    assert METRICS["f1_macro"](y, p) == pytest.approx(sk.f1_score(y, p > 0.5, average="macro"), abs=1e-12)
    assert METRICS["hamming_loss"](y, p) == pytest.approx(sk.hamming_loss(y, p > 0.5), abs=1e-12)


def test_targets_as_scikit_learn_has_them() -> None:
    y = RNG.normal(size=(30, 2))
    p = y + RNG.normal(size=(30, 2))
    named = {"r2": "r2_score", "explained_variance": "explained_variance_score", "mae": "mean_absolute_error"}
    for name, function in (named | {"rmse": "root_mean_squared_error", "mse": "mean_squared_error"}).items():
        assert METRICS[name](y, p) == pytest.approx(getattr(sk, function)(y, p), abs=1e-12)


def test_concordance_counts_pairs() -> None:
    for seed in range(5):
        rng = np.random.default_rng(seed)
        y = np.stack([rng.integers(1, 6, 15), rng.random(15) < 0.6], 1).astype(float)
        risk = rng.integers(0, 4, 15).astype(float)
        right = pairs = 0.0
        for (ta, ea, ra), (tb, eb, rb) in itertools.permutations([(*row, r) for row, r in zip(y, risk)], 2):
            if ea and (ta < tb or (ta == tb and not eb)):  # a is known to come first
                pairs += 1
                right += 1.0 if ra > rb else 0.5 if ra == rb else 0.0
        assert concordance(y, risk) == pytest.approx(right / pairs, abs=1e-12)
    assert concordance(np.array([[1.0, 1], [2, 1], [3, 0]]), np.array([3.0, 2, 1])) == 1.0


def test_calibration_error_of_known_bins() -> None:
    p = np.array([[0.8, 0.2]] * 10)
    y = np.array([0] * 6 + [1] * 4)  # 80 % sure and 60 % right
    assert calibration_error(y, p) == pytest.approx(0.2, abs=1e-12)
    assert calibration_error(np.zeros(5, np.int64), np.array([[1.0, 0.0]] * 5)) == 0.0


def test_who_does_not_define_a_metric_is_told_why() -> None:
    one, p = np.ones(5, np.int64), scores(5, 2)
    for name in ("roc_auc", "average_precision", "f1", "matthews_corrcoef"):
        with pytest.raises(UndefinedMetric, match="two classes"):
            METRICS[name](one, p)
    assert 0.0 <= METRICS["balanced_accuracy"](one, p) <= 1.0  # one class is enough for it
    two_of_three = METRICS["roc_auc"](np.array([0, 2, 0, 2]), scores(4, 3))  # over the classes that are there
    assert 0.0 <= two_of_three <= 1.0
    with pytest.raises(UndefinedMetric, match="different targets"):
        METRICS["r2"](np.ones(4), RNG.random(4))
    with pytest.raises(UndefinedMetric, match="known to have its event first"):
        concordance(np.array([[1.0, 0], [2.0, 1]]), np.zeros(2))


def test_a_metric_of_ones_own() -> None:
    def half(y: Any, p: Any) -> float:
        return 0.5

    assert own_metric(half) == Metric("half", half) and own_metric(half).higher
    half.higher_is_better = False  # type: ignore[attr-defined]
    assert not own_metric(half).higher
    with pytest.raises(UndefinedMetric, match="it gave nan"):
        Metric("nothing", lambda y, p: float("nan"))(np.zeros(1), np.zeros(1))
    with pytest.raises(ConfigError, match=r"metric 'broken' failed \(KeyError"):
        Metric("broken", lambda y, p: {}["x"])(np.zeros(1), np.zeros(1))
    with pytest.raises(ConfigError, match=r"needs a name. Got '<lambda>'; use Metric"):
        own_metric(lambda y, p: 0.0)
    half.higher_is_better = "no"  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"higher_is_better of metric 'half' must be true or false"):
        own_metric(half)


def test_bad_names_are_refused_with_what_is_near() -> None:
    with pytest.raises(ConfigError, match=r"Got 'rocauc'. Did you mean 'roc_auc'"):
        known_metric("rocauc")
    with pytest.raises(ConfigError, match=r"Got 'neg_mean_absolute_error'. Did you mean 'mae'"):
        known_metric("neg_mean_absolute_error")
    with pytest.raises(ConfigError, match=r"'r2' is not for a classification task.*accuracy"):
        check_metrics([METRICS["r2"]], "classification", 3)
    with pytest.raises(ConfigError, match=r"'f1' needs exactly two classes. Got 3; use 'f1_macro'"):
        check_metrics([METRICS["f1"]], "classification", 3)
    with pytest.raises(ConfigError, match="'half' would need the logits of every token"):
        check_metrics([Metric("half", lambda y, p: 0.5)], "language", 9)
    check_metrics([known_metric("perplexity")], "language", 9)


def test_scores_are_probabilities_targets_and_risks() -> None:
    z = torch.randn(4, 3, dtype=torch.float64)
    of = lambda kind: Task(nn.Linear(2, 3), kind, dtype=torch.float64)
    assert torch.equal(of("classification").scores(z, torch.zeros(4))[1], z.softmax(1))
    assert torch.equal(of("multi-label").scores(z, torch.zeros(4, 3))[1], z.sigmoid())
    assert of("survival").scores(z[:, :1], torch.zeros(4, 2))[1].shape == (4,)
    y = torch.tensor([[0, -100], [2, 1], [1, 1], [-100, 0]])
    labels, p = of("tagging").scores(torch.randn(4, 2, 3), y)
    assert labels.tolist() == [0, 2, 1, 1, 1, 0] and p.shape == (6, 3)
