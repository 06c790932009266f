"""FedLoRU's claim that few samples give a loss of higher rank (its Theorem 3.2 and Figure 2a), measured.

Theorem 3.2 speaks of one set of weights and two sets of samples, the small one a part of the large one: the arm `same`
takes the stable rank of both at the weights trained on many. The paper's figure trains models separately on few and on
many samples; epochs of few samples have fewer steps, so that its two curves differ in how far training got as well: the
arm `control` follows the model of few samples at equal steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import nn

from fedspan.data import Source, load
from fedspan.errors import ConfigError
from fedspan.learn.batches import Batches, Steps, draw
from fedspan.learn.sgd import sgd
from fedspan.learn.task import Task
from fedspan.models import build
from fedspan.randomness import generator, key
from fedspan.report.canvas import panels
from fedspan.studies.hessian import StableRank, hessian_products, stable_rank
from fedspan.studies.theory.outcome import BLUE, GREEN, GREY, RED, Outcome
from fedspan.tree import Params

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SETTLED = 10
"""Epochs of training after which curves are compared: before, they show the start."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is measured."""

    source: str = "digits"
    root: str | None = None
    size: int | None = None
    model: str = "mlp"
    hidden: int = 10
    activation: Literal["relu", "tanh"] = "relu"
    few: int = 50
    many: int = 500
    epochs: int = 40
    every: int = 5
    seeds: int = 5
    first_seed: int = 200
    batch: int = 32
    lr: float = 0.1
    samples: int = 30

    def __post_init__(self) -> None:
        for name in ("hidden", "few", "epochs", "every", "seeds", "batch"):
            if getattr(self, name) < 1:
                raise ConfigError(f"hessian-rank: {name} must be at least 1. Got {getattr(self, name)}.")
        if self.activation != "relu" and self.model != "mlp":
            raise ConfigError(f"hessian-rank: activation goes with the model mlp. Got it with {self.model}.")
        if self.many <= self.few:
            raise ConfigError(f"hessian-rank: many must be more than few, {self.few}. Got {self.many}.")
        if self.samples < 2 or not self.lr > 0:
            raise ConfigError(f"hessian-rank: samples must be >= 2 and lr > 0. Got {self.samples} and {self.lr}.")

    @property
    def checkpoints(self) -> list[int]:
        """Epochs after which the Hessian is looked at."""
        return [*range(0, self.epochs, self.every), self.epochs]

    def steps(self, n: int, epochs: int) -> int:
        """Steps of that many epochs over n samples."""
        return epochs * -(-n // min(self.batch, n))


@dataclass(frozen=True)
class Curves:
    """One seed: both readings at every checkpoint."""

    few: list[StableRank]  # trained on few, by epochs
    many: list[StableRank]  # trained on many
    control: list[StableRank]  # trained on few, at as many steps as many
    same: list[StableRank]  # few samples at the weights trained on many


def run(plan: Plan, say: Callable[[str], None] = lambda _: None) -> Outcome:
    """Train and measure for every seed, at every checkpoint."""
    return _outcome(plan, _all(plan, _samples(plan), say))


def by_width(plan: Plan, widths: Sequence[int], say: Callable[[str], None] = lambda _: None) -> Outcome:
    """Train and measure for every width of the hidden layer, at the start and at the end of training.

    Raises:
        ConfigError: if the model has no width.
    """
    if plan.model != "mlp":
        raise ConfigError(f"hessian-rank: widths go with the model mlp. Got them with {plan.model}.")
    source, found = _samples(plan), {}
    for hidden in dict.fromkeys(widths):
        at = replace(plan, hidden=hidden, every=plan.epochs)
        found[hidden] = _all(at, source)
        say(f"{hidden} hidden units: done")
    return _widths_outcome(plan, found)


def _samples(plan: Plan) -> Source:
    source = load(plan.source, plan.root, size=plan.size)
    if len(source) < plan.many:
        raise ConfigError(f"hessian-rank: '{plan.source}' must have at least {plan.many} examples. Got {len(source)}.")
    return source


def _all(plan: Plan, source: Source, say: Callable[[str], None] = lambda _: None) -> list[Curves]:
    found = []
    for seed in range(plan.first_seed, plan.first_seed + plan.seeds):
        found.append(_one(plan, source, seed))
        say(f"seed {seed}: done")
    return found


def _model(plan: Plan, source: Source) -> nn.Module:
    shape = tuple(source.x.shape[1:])
    if plan.activation == "tanh":
        inputs = int(np.prod(shape))
        return nn.Sequential(
            nn.Flatten(), nn.Linear(inputs, plan.hidden), nn.Tanh(), nn.Linear(plan.hidden, source.classes)
        )
    options = {"hidden": (plan.hidden,)} if plan.model == "mlp" else {}
    return build(plan.model, shape, source.classes, **options)


def _one(plan: Plan, source: Source, seed: int) -> Curves:
    task = Task(lambda: _model(plan, source), dtype=torch.float64, seed=seed)
    order = generator(seed, "hessian", "samples").permutation(source.train_rows)
    sets = {n: torch.from_numpy(np.sort(order[:n])) for n in (plan.few, plan.many)}  # the few are among the many
    samples = {n: (source.x[rows].double(), source.y[rows]) for n, rows in sets.items()}

    def rank(params: Params, n: int) -> StableRank:
        return stable_rank(*hessian_products(task, params, *samples[n]), samples=plan.samples, seed=seed)

    def follow(n: int, at: Sequence[int]) -> dict[int, Params]:
        rows = draw(
            np.arange(n), np.empty(0, np.int64), {"train": Steps(max(at))},
            seed=seed, round=0, client=n, batch_size=plan.batch, epochs=1,
        )["train"]  # fmt: skip
        params: Params = task.init()
        done, seen = 0, {}
        for stop in sorted(set(at)):
            stream = Batches(*samples[n], torch.from_numpy(rows[done:stop]), key(seed, "hessian", done))
            params, done = sgd(task.loss, params, stream, plan.lr), stop
            seen[stop] = params
        return seen

    by_epochs = [plan.steps(plan.few, e) for e in plan.checkpoints]
    equal = [plan.steps(plan.many, e) for e in plan.checkpoints]
    few, many = follow(plan.few, [*by_epochs, *equal]), follow(plan.many, equal)
    own = {s: rank(params, plan.few) for s, params in few.items()}
    return Curves(
        few=[own[s] for s in by_epochs],
        many=[rank(many[s], plan.many) for s in equal],
        control=[own[s] for s in equal],
        same=[rank(many[s], plan.few) for s in equal],
    )


def _readings(found: Sequence[Curves]) -> dict[str, Any]:
    """Every reading of every arm, by seed and checkpoint."""
    return {
        arm: {
            reading: [[getattr(s, reading) for s in getattr(c, arm)] for c in found]
            for reading in ("value", "error", "paper", "norm")
        }
        for arm in ("few", "many", "control", "same")
    }


def _plan_of(plan: Plan) -> dict[str, Any]:
    return {k: v for k, v in asdict(plan).items() if k != "root"}


def _larger(found: Sequence[Curves], arm: str, at: Sequence[int], reading: str = "value") -> tuple[int, int]:
    """In how many pairs (seeds and checkpoints) an arm of few samples is above that of many, and of how many."""
    pairs = [(getattr(getattr(c, arm)[k], reading), getattr(c.many[k], reading)) for c in found for k in at]
    return sum(a > b for a, b in pairs), len(pairs)


def _widths_outcome(plan: Plan, found: dict[int, list[Curves]]) -> Outcome:
    def cell(curves: list[Curves], arm: str, k: int) -> str:
        few, many = (float(np.mean([getattr(c, a)[k].value for c in curves])) for a in (arm, "many"))
        return f"{few:.1f} / {many:.1f} ({'{} of {}'.format(*_larger(curves, arm, [k]))})"

    titles = ["hidden units", "same weights, at the start", f"same weights, trained on {plan.many}"]
    titles += ["trained apart, equal steps", "trained apart, equal epochs"]
    rows = [
        [str(h), cell(c, "same", 0), cell(c, "same", -1), cell(c, "control", -1), cell(c, "few", -1)]
        for h, c in found.items()
    ]
    every = {k: [str(h) for h, c in found.items() if _larger(c, "same", [k])[0] == len(c)] for k in (0, -1)}
    says = (
        f"Each cell: the mean stable rank of {plan.few} and of {plan.many} samples, and in how many seeds the former is"
        f" larger ({plan.seeds} seeds from {plan.first_seed}, {plan.epochs} epochs). At the same weights, which is what"
        f" Theorem 3.2 states, few samples have the larger stable rank in every seed with"
        f" {', '.join(every[0]) or 'none of these'} hidden units at the start, and with"
        f" {', '.join(every[-1]) or 'none of these'} after training."
    )
    numbers = {"plan": _plan_of(plan), "widths": {str(h): _readings(c) for h, c in found.items()}}
    return Outcome(titles, rows, says, numbers, partial(_draw_widths, plan, found))


def _draw_widths(plan: Plan, found: dict[int, list[Curves]]) -> Figure:
    parts = [("stable rank, same weights, at the start", "hidden units"), ("the same, trained", "hidden units")]
    figure, axes = panels(8.4, 3.1, parts)
    for a, k in zip(axes, (0, -1)):
        for arm, colour, n in (("same", RED, plan.few), ("many", BLUE, plan.many)):
            y = [[getattr(c, arm)[k].value for c in curves] for curves in found.values()]
            a.plot(range(len(found)), np.mean(y, 1), color=colour, marker="o", markersize=4, label=f"{n} samples")
        a.set_xticks(range(len(found)), [str(h) for h in found])
        a.set_ylim(bottom=0)
    axes[0].legend(frameon=False, fontsize=8)
    return figure


def _outcome(plan: Plan, found: list[Curves]) -> Outcome:
    names = {
        "few": f"{plan.few}", "many": f"{plan.many}", "control": f"{plan.few}, equal steps",
        "same": f"{plan.few}, same weights",
    }  # fmt: skip

    def mean(arm: str, k: int, reading: str) -> float:
        return float(np.mean([getattr(getattr(c, arm)[k], reading) for c in found]))

    titles = ["epochs", *(f"{n}: stable rank" for n in names.values()), *(f"{n}: paper's" for n in names.values())]
    rows = [
        [str(e), *(f"{mean(arm, k, reading):.3g}" for reading in ("value", "paper") for arm in names)]
        for k, e in enumerate(plan.checkpoints)
    ]
    late = [k for k, e in enumerate(plan.checkpoints) if e >= min(SETTLED, plan.epochs)]

    def larger(arm: str, reading: str, at: Sequence[int]) -> str:
        return "{} of {}".format(*_larger(found, arm, at, reading))

    says = (
        f"After {min(SETTLED, plan.epochs)} epochs or more the stable rank of {plan.few} samples is above that of"
        f" {plan.many} in {larger('few', 'value', late)} pairs (seeds and checkpoints), at equal steps in"
        f" {larger('control', 'value', late)}, at the same weights in {larger('same', 'value', late)}, at the start in"
        f" {larger('few', 'value', [0])}. By the paper's estimate: {larger('few', 'paper', late)},"
        f" {larger('control', 'paper', late)}, {larger('same', 'paper', late)}, {larger('few', 'paper', [0])}."
    )
    exact = all(s.exact for c in found for arm in (c.few, c.many, c.control, c.same) for s in arm)
    says += " Hessians are exact." if exact else f" Frobenius norms are estimated from {plan.samples} vectors each."
    numbers = {"plan": _plan_of(plan), "exact": exact, "epochs": plan.checkpoints, **_readings(found)}
    return Outcome(titles, rows, says, numbers, partial(_draw, plan, found, names))


def _draw(plan: Plan, found: list[Curves], names: dict[str, str]) -> Figure:
    parts = [("stable rank", "epochs of training"), ("as the paper estimates it", "epochs of training")]
    figure, axes = panels(8.4, 3.1, parts)
    styles = {"few": (RED, "-"), "many": (BLUE, "-"), "control": (GREY, "--"), "same": (GREEN, "-")}
    for a, reading in zip(axes, ("value", "paper")):
        for arm, (colour, dash) in styles.items():
            y = np.array([[getattr(s, reading) for s in getattr(c, arm)] for c in found])
            a.plot(plan.checkpoints, y.mean(0), color=colour, linestyle=dash, linewidth=1.7, label=names[arm])
            if len(found) > 1:
                low, high = y.min(0), y.max(0)
                a.fill_between(plan.checkpoints, low, high, color=colour, alpha=0.13, linewidth=0)
    axes[1].set_yscale("log")
    for which in (axes[1].yaxis.set_major_formatter, axes[1].yaxis.set_minor_formatter):
        which(lambda v, _: f"{v:g}" if f"{v:e}".startswith("1.0") else "")
    axes[0].set_ylim(bottom=0)
    axes[0].legend(frameon=False, fontsize=8, title="samples (band: all seeds)", title_fontsize=8, loc="lower left")
    return figure
