"""FedLoRU's claim that few samples give a loss of higher rank (its Theorem 3.2 and Figure 2a), measured.

Models are trained separately on few and on many samples of one source, and the stable rank of the Hessian of the
training loss on those samples is followed. Epochs of few samples have fewer steps, so that the paper's two curves
differ in how far training got as well: the control follows the model of few samples at equal steps. The theorem itself
is not asserted: its proof ends with the opposite sign.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from fedspan.data import Source, load
from fedspan.errors import ConfigError
from fedspan.learn.batches import Batches, Steps, draw
from fedspan.learn.sgd import sgd
from fedspan.learn.task import Task
from fedspan.models import build
from fedspan.randomness import generator, key
from fedspan.report.canvas import panels
from fedspan.studies.hessian import StableRank, hessian_products, stable_rank
from fedspan.studies.theory.outcome import BLUE, GREY, RED, Outcome
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
    few: int = 50
    many: int = 500
    epochs: int = 40
    every: int = 5
    seeds: int = 5
    batch: int = 32
    lr: float = 0.1
    samples: int = 30

    def __post_init__(self) -> None:
        for name in ("hidden", "few", "epochs", "every", "seeds", "batch"):
            if getattr(self, name) < 1:
                raise ConfigError(f"hessian-rank: {name} must be at least 1. Got {getattr(self, name)}.")
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
    """One seed: both readings at every checkpoint, for few and many samples by epochs, and few at equal steps."""

    few: list[StableRank]
    many: list[StableRank]
    control: list[StableRank]


def run(plan: Plan, say: Callable[[str], None] = lambda _: None) -> Outcome:
    """Train and measure for every seed."""
    source = load(plan.source, plan.root, size=plan.size)
    if len(source) < plan.many:
        raise ConfigError(f"hessian-rank: '{plan.source}' must have at least {plan.many} examples. Got {len(source)}.")
    found = []
    for seed in range(plan.seeds):
        found.append(_one(plan, source, seed))
        say(f"seed {seed}: done")
    return _outcome(plan, found)


def _one(plan: Plan, source: Source, seed: int) -> Curves:
    options = {"hidden": (plan.hidden,)} if plan.model == "mlp" else {}
    shape = tuple(source.x.shape[1:])
    task = Task(lambda: build(plan.model, shape, source.classes, **options), dtype=torch.float64, seed=seed)
    order = generator(seed, "hessian", "samples").permutation(source.train_rows)
    sets = {n: torch.from_numpy(np.sort(order[:n])) for n in (plan.few, plan.many)}

    def follow(n: int, at: Sequence[int]) -> dict[int, StableRank]:
        x, y = source.x[sets[n]].double(), source.y[sets[n]]
        rows = draw(
            np.arange(n), np.empty(0, np.int64), {"train": Steps(max(at))},
            seed=seed, round=0, client=n, batch_size=plan.batch, epochs=1,
        )["train"]  # fmt: skip
        params: Params = task.init()
        done, seen = 0, {}
        for stop in sorted(set(at)):
            stream = Batches(x, y, torch.from_numpy(rows[done:stop]), key(seed, "hessian", done))
            params, done = sgd(task.loss, params, stream, plan.lr), stop
            seen[stop] = stable_rank(*hessian_products(task, params, x, y), samples=plan.samples, seed=seed)
        return seen

    by_epochs = [plan.steps(plan.few, e) for e in plan.checkpoints]
    equal = [plan.steps(plan.many, e) for e in plan.checkpoints]
    few, many = follow(plan.few, [*by_epochs, *equal]), follow(plan.many, equal)
    return Curves([few[s] for s in by_epochs], [many[s] for s in equal], [few[s] for s in equal])


def _outcome(plan: Plan, found: list[Curves]) -> Outcome:
    names = {"few": f"{plan.few}", "many": f"{plan.many}", "control": f"{plan.few}, equal steps"}

    def mean(arm: str, k: int, reading: str) -> float:
        return float(np.mean([getattr(getattr(c, arm)[k], reading) for c in found]))

    titles = ["epochs", *(f"{n}: stable rank" for n in names.values()), *(f"{n}: paper's" for n in names.values())]
    rows = [
        [str(e), *(f"{mean(arm, k, reading):.3g}" for reading in ("value", "paper") for arm in names)]
        for k, e in enumerate(plan.checkpoints)
    ]
    late = [k for k, e in enumerate(plan.checkpoints) if e >= min(SETTLED, plan.epochs)]

    def larger(arm: str, reading: str, at: Sequence[int]) -> str:
        pairs = [(getattr(getattr(c, arm)[k], reading), getattr(c.many[k], reading)) for c in found for k in at]
        return f"{sum(a > b for a, b in pairs)} of {len(pairs)}"

    says = (
        f"After {min(SETTLED, plan.epochs)} epochs or more the stable rank of {plan.few} samples is above that of"
        f" {plan.many} in {larger('few', 'value', late)} pairs (seeds and checkpoints), at equal steps in"
        f" {larger('control', 'value', late)}, at the start in {larger('few', 'value', [0])}. By the paper's estimate:"
        f" {larger('few', 'paper', late)}, {larger('control', 'paper', late)}, {larger('few', 'paper', [0])}."
    )
    exact = all(s.exact for c in found for arm in (c.few, c.many, c.control) for s in arm)
    says += " Hessians are exact." if exact else f" Frobenius norms are estimated from {plan.samples} vectors each."
    numbers = {
        "plan": {k: v for k, v in plan.__dict__.items() if k != "root"},
        "exact": exact,
        "epochs": plan.checkpoints,
        **{
            arm: {
                reading: [[getattr(s, reading) for s in getattr(c, arm)] for c in found]
                for reading in ("value", "error", "paper", "norm")
            }
            for arm in names
        },
    }
    return Outcome(titles, rows, says, numbers, partial(_draw, plan, found, names))


def _draw(plan: Plan, found: list[Curves], names: dict[str, str]) -> Figure:
    parts = [("stable rank", "epochs of training"), ("as the paper estimates it", "epochs of training")]
    figure, axes = panels(8.4, 3.1, parts)
    styles = {"few": (RED, "-"), "many": (BLUE, "-"), "control": (GREY, "--")}
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
