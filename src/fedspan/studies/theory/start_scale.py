"""How a factorised model starts beside a plain one, how long its first step is, and what that does to training.

Where a norm follows, a layer's output does not change when its weights are multiplied: what counts is how far a step
turns them, ‖ΔW‖/‖W‖. u v + μ starts smaller than the plain W the wider a layer is, and moves by u and v beside μ.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedspan.config import RunConfig, assemble
from fedspan.errors import ConfigError
from fedspan.layers import part, plain_weights, structured
from fedspan.learn.task import Task
from fedspan.method import Converts
from fedspan.simulation.simulator import Simulation

PLAIN, SMALL, FACTORISED = "plain", "plain, started as small", "factorised"
FIRST = 256
"""Examples of the first step."""


def at_start(factorised: RunConfig) -> dict[str, dict[str, float]]:
    """Of every layer of the body: ‖W‖² plain over factorised, and ‖ΔW‖/‖W‖ of a first step, factorised over plain.

    The plain network is the one that is factorised; the step is one of plain SGD on the first examples, for both alike.

    Raises:
        ConfigError: if the experiment's method does not factorise its model.
    """
    method, task, data = assemble(factorised)
    if not isinstance(method, Converts):
        raise ConfigError(f"start-scale: the second row must be of a factorised model. Got {type(method).__name__}.")
    made = method.model(task, None)
    x, y = data.x[:FIRST], data.y[:FIRST]
    lr = float(factorised.method["lr"])
    turned = [first_step(t, x, y, lr) for t in (task, made)]
    ratios = squared_ratios(task, made)
    return {"squares": ratios, "steps": {k: turned[1][k] / turned[0][k] for k in ratios}}


def squared_ratios(plain: Task, factorised: Task) -> dict[str, float]:
    """‖W‖² of a plain layer over that of the u v + μ in its place, both at their start, for every layer of the body.

    Raises:
        ConfigError: if no layer of the body is factorised, or one of them starts at zero.
    """
    large, small = plain.init(), plain_weights(factorised.module, factorised.init())
    body = [name for k in structured(factorised.module) if (name := part(k, "weight")) in plain.body]
    if not body:
        raise ConfigError("start-scale: the method must factorise layers of the body. Got none.")
    sizes = {k: (_square(large[k]), _square(small[k])) for k in body}
    zero = [k for k, (_, s) in sizes.items() if s == 0]
    if zero:
        raise ConfigError(f"start-scale: factorised layers must not start at zero. Got {', '.join(zero)}.")
    return {k: a / b for k, (a, b) in sizes.items()}


def _square(weight: Tensor) -> float:
    return float(weight.double().square().sum())


def first_step(task: Task, x: Tensor, y: Tensor, lr: float) -> dict[str, float]:
    """‖ΔW‖/‖W‖ of every weight after one step of SGD from the start, factors multiplied out."""
    module = copy.deepcopy(task.module).train()
    held = dict(module.named_parameters())
    gradient = torch.autograd.grad(F.cross_entropy(module(x), y), list(held.values()))
    start = {k: p.detach() for k, p in held.items()}
    moved = {k: p - lr * g for (k, p), g in zip(start.items(), gradient)}
    before, after = plain_weights(module, start), plain_weights(module, moved)
    return {k: float((after[k] - w).norm() / w.norm()) for k, w in before.items() if w.ndim > 1}


def shrunk(plain: Task, ratios: Mapping[str, float]) -> Task:
    """The plain network whose weights start as small as those of the factorised one, directions unchanged."""

    def shrink(module: nn.Module) -> nn.Module:
        with torch.no_grad():
            for name, ratio in ratios.items():
                module.get_parameter(name).div_(math.sqrt(ratio))
        return module

    return plain.converted(shrink)


def trained(
    plain: RunConfig, factorised: RunConfig, ratios: Mapping[str, float], lrs: Sequence[float]
) -> dict[str, dict[str, float]]:
    """Accuracy in percent of the three models at each step size, trained alike; the small one by these ratios."""
    return {
        f"{lr:g}": {
            PLAIN: _accuracy(plain, lr),
            SMALL: _accuracy(plain, lr, ratios),
            FACTORISED: _accuracy(factorised, lr),
        }
        for lr in lrs
    }


def _accuracy(config: RunConfig, lr: float, ratios: Mapping[str, float] | None = None) -> float:
    method, task, data = assemble(replace(config, method={**config.method, "lr": lr}))
    task = task if ratios is None else shrunk(task, ratios)
    simulation = Simulation(method, task, data, rounds=config.rounds, seed=config.seed, settings=config.train)
    return 100 * simulation.run().accuracy["mean"]


def summary(values: Iterable[float]) -> dict[str, float]:
    """The least, the geometric mean and the most of positive numbers."""
    held = list(values)
    return {"least": min(held), "mean": math.exp(sum(map(math.log, held)) / len(held)), "most": max(held)}


def compare(plain: RunConfig, factorised: RunConfig, lrs: Sequence[float], width: int) -> dict[str, Any]:
    """Both starts, in the network of the two experiments and in one `width` wide, and training in the former."""
    starts = {"here": at_start(factorised), "wide": at_start(_widened(factorised, width))}
    seen = {where: {k: summary(v.values()) for k, v in start.items()} for where, start in starts.items()}
    return {**seen, "accuracy": trained(plain, factorised, starts["here"]["squares"], lrs)}


def _widened(config: RunConfig, width: int) -> RunConfig:
    return replace(config, model=replace(config.model, options={**config.model.options, "width": width}))
