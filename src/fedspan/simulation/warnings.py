"""Warnings: what a person should hear about data and settings that run, and are probably not what was meant.

Each is one function that returns a sentence, or None. They are asked once before the first round, or of an evaluation
that was made anyway, never in a loop over batches or clients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from fedspan import tree
from fedspan.data.federated import FederatedData
from fedspan.learn.batches import Batches, Epochs, draw
from fedspan.learn.sgd import sgd
from fedspan.learn.task import Task
from fedspan.method import Abilities, Method
from fedspan.method.capabilities import OVERSHOOT
from fedspan.randomness import key
from fedspan.tree import Tree

SCALES_APART = 100.0
"""Ratio of feature deviations from which the large features are said to drown the small ones."""

EXPLODED = 1e4
"""A loss so many times that of a model that knows nothing has exploded, although it is finite."""

EVALUATION = "Evaluation"
"""How sentences about an evaluation begin, by which a run knows that it has said one."""

_ROWS = 2000  # examples that stand for all
_RARE = 0.1  # a feature that departs from its usual value less often has a small deviation whatever its scale
_TRIAL_STEPS = 50
_TRIAL_CLIENTS = 3
_MEASURED_ROWS = 64
_BEYOND = "is beyond stability"


def before_run(method: Method, data: FederatedData, rounds: int) -> list[str]:
    """Everything that can be said before the first round."""
    return [*of_data(data), *of_settings(method, data.clients, rounds)]


def of_data(data: FederatedData) -> list[str]:
    """What examples and labels show; a node asks it of its own, and tells nobody else."""
    return [sentence for sentence in (scales_apart(data), label_outside(data)) if sentence is not None]


def of_settings(method: Method, clients: int, rounds: int) -> list[str]:
    """What can be known without data, as by the server of a deployment."""
    found = (too_many_directions(method, clients), not_begun(method, rounds), overshooting(method))
    return [sentence for sentence in found if sentence is not None]


def scales_apart(data: FederatedData) -> str | None:
    """Columns of a table whose deviations are far apart; pictures and tokens have one scale.

    Columns that hardly ever leave one value (constants, rare categories, borders of flattened pictures) do not count.
    """
    if not isinstance(data.x, torch.Tensor) or data.x.ndim != 2 or not data.x.is_floating_point():
        return None
    rows = np.concatenate(data.train)
    x = data.x[torch.from_numpy(rows[:: max(1, len(rows) // _ROWS)])].double()
    moving = (x != x.median(0).values).double().mean(0) > _RARE
    deviation = x.std(0, correction=0)
    known = torch.nonzero(moving & (deviation > 0))[:, 0]
    if len(known) < 2:
        return None
    most, least = (int(known[pick(deviation[known])]) for pick in (torch.argmax, torch.argmin))
    ratio = float(deviation[most] / deviation[least])
    if ratio < SCALES_APART:
        return None
    names = None if data.preprocessing is None else data.preprocessing.names
    called = {k: f"feature {k}" if names is None else f"'{names[k]}'" for k in (most, least)}
    held = ", ".join(f"{called[k]}: {float(deviation[k]):.3g}" for k in (most, least))
    return (
        f"Data: deviations of features differ by a factor of {ratio:,.0f} ({held}), so that few of them decide every"
        f" step; standardise them{'' if names is None else ' (data.standardise)'}."
    )


def label_outside(data: FederatedData) -> str | None:
    """A largest label so far from the next that most outputs of the model stand for no class."""
    if data.classes is None or data.y.ndim != 1 or data.y.is_floating_point():
        return None
    labels = torch.unique(data.y)
    if len(labels) < 2 or int(labels[-1] - labels[-2]) <= 10 * len(labels):
        return None
    return (
        f"Data: label {int(labels[-1])} lies far outside the others, which end at {int(labels[-2])}, and the model has"
        f" an output for each of {data.classes} classes; correct it, or set data.classes to what is meant."
    )


def too_many_directions(method: Method, clients: int) -> str | None:
    """A subspace across clients of more dimensions than there are clients to span it."""
    rank = Abilities(method).cautions.directions()
    if rank is None or rank <= clients:
        return None
    return (
        f"{type(method).__name__}: rank = {rank} is larger than the number of clients, {clients}, whose models span no"
        f" more than {clients} directions; set method.rank to {max(1, clients // 2)} or less."
    )


def not_begun(method: Method, rounds: int) -> str | None:
    """A method whose own part begins after the last round."""
    begins = Abilities(method).cautions.begins()
    if begins is None or not 0 < rounds < begins.round:
        return None
    return (
        f"{type(method).__name__}: {begins.until} before round {begins.round} ({begins.key} = {begins.value}), and the"
        f" run has {rounds}; lower method.{begins.key} or raise rounds."
    )


def overshooting(method: Method) -> str | None:
    """A learning rate at which the proximal term alone makes steps grow."""
    steps = Abilities(method).cautions.proximal_steps()
    worst = max(steps, key=lambda name: steps[name], default=None)
    if worst is None or steps[worst] < OVERSHOOT:
        return None
    return (
        f"{type(method).__name__}: {worst} = {steps[worst]:.3g} {_BEYOND}, which ends at {OVERSHOOT:g}: each"
        " step lands farther from what it is pulled to than it began; lower one of them."
    )


def overshooting_after(
    method: Method,
    data: FederatedData,
    line: Mapping[str, Any],
    rounds: int,
    model: Callable[[int], tuple[Task, Tree]],
    notes: list[str],
) -> list[str]:
    """The same of a term whose curvature has to be measured, by the lr and the weight of the round that comes.

    On examples of the first clients, of a line of the metrics that has an evaluation, unless it is among the run's
    notes, to which it is added.

    Args:
        model: gives the task and the weights of a client.
    """
    cautions, who, t = Abilities(method).cautions, type(method).__name__, line["round"]
    pull = cautions.measured_pull(min(t + 1, rounds)) if "loss" in line else 0.0
    if not pull or any(said.startswith(f"{who}: ") and _BEYOND in said for said in notes):
        return []
    worst, found = OVERSHOOT, list[str]()
    for i in range(min(_TRIAL_CLIENTS, data.clients)):
        task, weights = model(i)
        x = tree.take(data.x, torch.from_numpy(data.train[i][:_MEASURED_ROWS]))
        step = cautions.measured_step(task, weights, x, pull)
        if step is None or not worst < step.value < math.inf:
            continue
        worst = step.value
        found = [
            f"{who}: {step.name} = {worst:.3g} after round {t}, on examples of client '{data.names[i]}', {_BEYOND},"
            f" which ends at {OVERSHOOT:g}: each step of that term alone lands farther from what it is pulled to than"
            f" it began; {step.remedy}."
        ]
    notes += found
    return found


def exploded(task: Task, data: FederatedData, round: int, loss: float) -> str | None:
    """A mean loss of an evaluation that is finite and yet beyond all use."""
    if not loss > EXPLODED * loss_scale(task, data):
        return None
    return (
        f"{EVALUATION} after round {round}: the mean loss is {loss:.3g}, far beyond that of a model that knows nothing;"
        " training explodes: lower method.lr, or standardise features and targets."
    )


def exploded_first(task: Task, data: FederatedData, line: Mapping[str, Any], notes: list[str]) -> list[str]:
    """The same of a line of the metrics, unless it is among the run's notes, to which it is added."""
    if "loss" not in line or any(said.startswith(EVALUATION) for said in notes):
        return []
    sentence = exploded(task, data, line["round"], line["loss"]["mean"])
    found = [] if sentence is None else [sentence]
    notes += found
    return found


def explodes_alone(task: Task, data: FederatedData, lr: float, batch_size: int | None) -> str | None:
    """A trial without a run: some plain steps of a few clients, each from the common start."""
    worst = 0.0
    bound = EXPLODED * loss_scale(task, data)
    for i in range(min(_TRIAL_CLIENTS, data.clients)):
        loss = _loss_after(task, data, i, lr, batch_size)
        worst = max(worst, loss if math.isfinite(loss) else math.inf)
    if worst <= bound:
        return None
    return (
        f"Training: within {_TRIAL_STEPS} plain steps at lr = {lr:g} the loss of a client grows to {worst:.3g}; lower"
        " method.lr, or standardise features and targets."
    )


def _loss_after(task: Task, data: FederatedData, client: int, lr: float, batch_size: int | None) -> float:
    """A client's loss on its own examples after some steps of SGD."""
    each = math.ceil(len(data.train[client]) / (batch_size or len(data.train[client])))
    plan = {"train": Epochs(-(-_TRIAL_STEPS // each))}
    streams = draw(
        data.train[client],
        data.validation[client],
        plan,
        seed=0,
        round=1,
        client=client,
        batch_size=batch_size,
        epochs=1,
        drop_last=bool(task.stats),
    )
    names = None if data.relabel is None else data.relabel[client]
    rows = torch.from_numpy(streams["train"][:_TRIAL_STEPS])
    params = sgd(task.loss, task.init(), Batches(data.x, data.y, rows, key(0, "trial"), names), lr)
    own = torch.from_numpy(data.train[client][:_ROWS])
    with torch.no_grad():
        return float(
            task.example_loss(task.predict(params, tree.take(data.x, own)), data.labels(client)[:_ROWS]).mean()
        )


def loss_scale(task: Task, data: FederatedData) -> float:
    """The loss of a model that knows nothing: equal chances for all classes, or 0 for every target."""
    if task.own_loss:
        return 1e8  # what a loss of somebody's own may reach is not known: only the absurd is told
    if task.kind == "regression":
        return max(1e-12, float(data.y.double().square().mean()))
    if task.kind == "survival":  # nobody is told apart: every event among all that are at risk
        return math.log(max(2, int(data.sizes.max())))
    return math.log(max(2, data.classes or 2))
