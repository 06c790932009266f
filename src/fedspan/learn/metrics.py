"""Metrics of a client's gathered predictions, by scikit-learn's names and functions, and those that it lacks.

A metric is a function of labels and predictions as `Task.scores` gives them: probabilities [n, classes] of classes,
[n, labels] of several labels, targets, or risks. Where a client's examples do not define it (ROC AUC with one class),
the client is left out of it, and the result says so.
"""

from __future__ import annotations

import importlib
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedspan.errors import ConfigError, nearest

Array: TypeAlias = NDArray[Any]
MetricFunction: TypeAlias = Callable[[Array, Array], float]
"""`function(y, predictions)`: one number for one client."""

CLASSES = frozenset({"classification", "multi-label", "tagging"})
SINGLE = frozenset({"classification", "tagging"})
TARGETS = frozenset({"regression"})
SURVIVAL = frozenset({"survival"})

BINS = 15
"""Of the expected calibration error, equally wide."""


class UndefinedMetric(ValueError):
    """What a client's examples lack for a metric to be defined."""


@dataclass(frozen=True)
class Metric:
    """A number about a client's predictions, and which way is better.

    Args:
        function: `function(y, predictions)`; it may return NaN, or raise a ValueError, where it is not defined.
        higher: whether a higher value is better.
        low: the least value it can have.
        high: the largest.
        kinds: the kinds of tasks it is for; None: all.
        binary: whether it needs exactly two classes.
    """

    name: str
    function: MetricFunction
    higher: bool = True
    low: float = -math.inf
    high: float = math.inf
    kinds: frozenset[str] | None = None
    binary: bool = False

    def __call__(self, y: Array, predictions: Array) -> float:
        """Its value.

        Raises:
            UndefinedMetric: if these examples do not define it.
            ConfigError: if the function fails in another way, or gives no number.
        """
        try:
            with warnings.catch_warnings(), np.errstate(all="ignore"):
                warnings.simplefilter("ignore")  # of scikit-learn, about classes that a client lacks
                value = float(self.function(y, predictions))
        except UndefinedMetric:
            raise
        except ValueError as e:
            raise UndefinedMetric(_line(e)) from None
        except Exception as e:  # whatever a function of somebody's own raises
            raise ConfigError(f"Evaluate: metric '{self.name}' failed ({type(e).__name__}: {_line(e)}).") from e
        if not math.isfinite(value):
            raise UndefinedMetric(f"it gave {value}")
        return value


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")[:160]


# ------------------------------------------------------------------------------------------------ classes


def _need_two_classes(y: Array) -> None:
    if len(np.unique(y)) < 2:
        raise UndefinedMetric("it needs examples of two classes")


def _predicted(y: Array, p: Array) -> Array:
    """The label of each example, or each of its labels."""
    found: Array = (p > 0.5).astype(np.int64) if p.ndim == y.ndim else p.argmax(1)
    return found


def _of_labels(name: str, y: Array, p: Array, *, two: bool = False, **options: Any) -> float:
    """A function of scikit-learn that compares labels."""
    if two:
        _need_two_classes(y)
    y = y.astype(np.int64)
    return float(_sklearn(name)(y, _predicted(y, p), **options))


def _of_scores(name: str, y: Array, p: Array, *, average: str = "macro") -> float:
    """A function of scikit-learn that ranks two classes by score; of several the mean over those that are there.

    With all classes present it is scikit-learn's one-versus-rest average.
    """
    function, y = _sklearn(name), y.astype(np.int64)
    if p.ndim == 1:  # one label alone
        y, p = y[:, None], p[:, None]
    if y.ndim == 1 and p.shape[1] == 2:
        _need_two_classes(y)
        return float(function(y, p[:, 1]))
    member = y if y.ndim > 1 else (y[:, None] == np.arange(p.shape[1])).astype(np.int64)
    count = member.sum(0)
    there = np.flatnonzero((count > 0) & (count < len(member)))
    if not len(there):
        raise UndefinedMetric("it needs examples of two classes")
    if average == "micro":
        return float(function(member.ravel(), p.ravel()))
    values = np.array([function(member[:, c], p[:, c]) for c in there])
    weights = count[there] if average == "weighted" else None
    return float(np.average(values, weights=weights))


def _log_loss(y: Array, p: Array) -> float:
    p = np.clip(p.astype(np.float64), np.finfo(np.float64).eps, 1.0)
    return float(-np.log(p[np.arange(len(y)), y.astype(np.int64)]).mean())


def _top_5(y: Array, p: Array) -> float:
    rank = (p > p[np.arange(len(y)), y.astype(np.int64)][:, None]).sum(1)
    return float((rank < 5).mean())


def calibration_error(y: Array, p: Array, bins: int = BINS) -> float:
    """Expected calibration error: |accuracy − confidence| of equally wide bins of confidence, weighted by examples."""
    confidence, right = p.max(1), (p.argmax(1) == y).astype(np.float64)
    place = np.minimum((confidence * bins).astype(np.int64), bins - 1)
    gaps = np.zeros(bins)
    np.add.at(gaps, place, right - confidence)  # n_b (accuracy − confidence)
    return float(np.abs(gaps).sum() / max(1, len(y)))


# ------------------------------------------------------------------------------------------------ targets, survival


def _of_targets(name: str, y: Array, p: Array, *, spread: bool = False) -> float:
    if spread and (len(y) < 2 or not (y.reshape(len(y), -1).std(0) > 0).all()):
        raise UndefinedMetric("it needs two examples with different targets")
    return float(_sklearn(name)(y.reshape(len(y), -1), p.reshape(len(y), -1)))


def concordance(y: Array, risk: Array) -> float:
    """Harrell's concordance index: how often, of two patients, the one with the earlier event has the higher risk.

    A pair counts if the earlier time is an event's, or if the times are equal and one of them is; equal risks count
    half. `y` holds times and events.
    """
    time, event, risk = y[:, 0], y[:, 1] > 0.5, risk.reshape(-1)
    right = pairs = 0.0
    for i in np.flatnonzero(event):
        later = (time > time[i]) | ((time == time[i]) & ~event)
        pairs += float(later.sum())
        right += float((risk[i] > risk[later]).sum()) + 0.5 * float((risk[i] == risk[later]).sum())
    if not pairs:
        raise UndefinedMetric("it needs two examples of which one is known to have its event first")
    return right / pairs


def _sklearn(name: str) -> Callable[..., float]:
    function: Callable[..., float] = getattr(importlib.import_module("sklearn.metrics"), name)
    return function


# ------------------------------------------------------------------------------------------------ the table


def _labels(name: str, kinds: frozenset[str], low: float = 0.0, high: float = 1.0, **options: Any) -> dict[str, Any]:
    return {"function": partial(_of_labels, name, **options), "kinds": kinds, "low": low, "high": high}


def _scores(name: str, average: str = "macro") -> dict[str, Any]:
    return {"function": partial(_of_scores, name, average=average), "kinds": CLASSES, "low": 0.0, "high": 1.0}


def _error(name: str) -> dict[str, Any]:
    return {"function": partial(_of_targets, name), "kinds": TARGETS, "low": 0.0, "higher": False}


def _explained(name: str) -> dict[str, Any]:
    return {"function": partial(_of_targets, name, spread=True), "kinds": TARGETS, "high": 1.0}


_AVERAGES = ("macro", "micro", "weighted")
_TABLE: dict[str, dict[str, Any]] = {
    "accuracy": _labels("accuracy_score", CLASSES),
    "balanced_accuracy": _labels("balanced_accuracy_score", SINGLE),
    "matthews_corrcoef": _labels("matthews_corrcoef", SINGLE, low=-1.0, two=True),
    "cohen_kappa": _labels("cohen_kappa_score", SINGLE, low=-1.0, two=True),
    "hamming_loss": {**_labels("hamming_loss", CLASSES), "higher": False},
    "top_5_accuracy": {"function": _top_5, "kinds": SINGLE, "low": 0.0, "high": 1.0},
    "log_loss": {"function": _log_loss, "kinds": SINGLE, "low": 0.0, "higher": False},
    "ece": {"function": calibration_error, "kinds": SINGLE, "low": 0.0, "high": 1.0, "higher": False},
    "roc_auc": _scores("roc_auc_score"),
    "average_precision": _scores("average_precision_score"),
    **{f"{n}_{a}": _scores(f"{n}_score", a) for n in ("roc_auc", "average_precision") for a in ("micro", "weighted")},
    **{
        name: {**_labels(f"{name}_score", SINGLE, zero_division=0, two=True), "binary": True}
        for name in ("f1", "precision", "recall", "jaccard")
    },
    **{
        f"{name}_{average}": _labels(f"{name}_score", CLASSES, zero_division=0, average=average)
        for name in ("f1", "precision", "recall", "jaccard")
        for average in _AVERAGES
    },
    "r2": _explained("r2_score"),
    "explained_variance": _explained("explained_variance_score"),
    "mae": _error("mean_absolute_error"),
    "mse": _error("mean_squared_error"),
    "rmse": _error("root_mean_squared_error"),
    "median_absolute_error": _error("median_absolute_error"),
    "concordance": {"function": concordance, "kinds": SURVIVAL, "low": 0.0, "high": 1.0},
}
METRICS: dict[str, Metric] = {name: Metric(name, **about) for name, about in _TABLE.items()}
"""The metrics that can be named."""

SUMMED: dict[str, Metric] = {
    "loss": Metric("loss", _log_loss, higher=False),
    "perplexity": Metric("perplexity", _log_loss, higher=False, low=0.0, kinds=frozenset({"language"})),
}
"""What every evaluation of a task has as sums over examples, so that the functions here are never called."""


def known_metric(name: str) -> Metric:
    """The metric of this name.

    Raises:
        ConfigError: naming the nearest.
    """
    found = METRICS.get(name) or SUMMED.get(name)
    if found is None:
        plain = name.removeprefix("neg_").replace("mean_absolute_error", "mae").replace("mean_squared_error", "mse")
        hint = nearest(name[:60], [*METRICS, *SUMMED]) if plain not in METRICS else f" Did you mean '{plain}'?"
        raise ConfigError(
            f"Evaluate: metrics must be names of fedspan's list, or code as 'package.module:function'. Got"
            f" {name[:60]!r}.{hint}"
        )
    return found


def own_metric(function: MetricFunction, name: str | None = None) -> Metric:
    """A function of one's own as a metric; its attribute `higher_is_better = False` says that lower is better.

    Raises:
        ConfigError: if that attribute is no bool, or there is no usable name.
    """
    name = name or str(getattr(function, "__name__", ""))
    if not name.isidentifier():
        raise ConfigError(f"Evaluate: a metric of one's own needs a name. Got {name!r}; use Metric(name, function).")
    higher = getattr(function, "higher_is_better", True)
    if not isinstance(higher, bool):
        raise ConfigError(f"Evaluate: higher_is_better of metric '{name}' must be true or false. Got {higher!r}.")
    return Metric(name, function, higher=higher)


def check_metrics(metrics: Sequence[Metric], kind: str, classes: int | None) -> None:
    """Refuse metrics that this kind of task does not have, before anything runs.

    Raises:
        ConfigError: naming one, and those there are.
    """
    for m in metrics:
        if m.kinds is not None and kind not in m.kinds:
            able = ", ".join(k for k, v in METRICS.items() if v.kinds and kind in v.kinds) or "loss, perplexity"
            raise ConfigError(f"Evaluate: metric '{m.name}' is not for a {kind} task. Got it; this task has {able}.")
        if m.binary and classes != 2:
            raise ConfigError(
                f"Evaluate: metric '{m.name}' needs exactly two classes. Got {classes}; use '{m.name}_macro'."
            )
        if kind == "language" and m.name not in SUMMED:
            raise ConfigError(
                f"Evaluate: metric '{m.name}' would need the logits of every token of every client. Got it for a"
                " language task; use loss or perplexity."
            )
