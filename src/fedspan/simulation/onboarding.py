"""A client that was never trained joins a finished run: it downloads once, fits at home, and sends nothing."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedspan import tree, wire
from fedspan.data.federated import FederatedData, Index, split
from fedspan.errors import ConfigError, DataError, FedspanError
from fedspan.learn.batches import Epochs
from fedspan.learn.metrics import Metric, UndefinedMetric
from fedspan.learn.sgd import sgd
from fedspan.learn.task import Task
from fedspan.method import Adapts, Capacity, ClientInfo
from fedspan.methods import name_of
from fedspan.randomness import key
from fedspan.simulation.engine import Engine
from fedspan.simulation.result import Result
from fedspan.simulation.simulator import Simulation
from fedspan.tree import Tree

Run: TypeAlias = Simulation | Result
Array: TypeAlias = Tensor | NDArray[Any]
Client: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]
"""x, y, x_test, y_test of one client, labels as the client itself names them."""

MOST_VISITS = 100  # a newcomer should not wait longer, and small data are learnt by then
_RATES = (0.03, 0.1, 0.3, 1.0)  # for training alone


@dataclass(frozen=True)
class Onboarded:
    """A newcomer's model, how it does on the newcomer's test part, and what joining took.

    `visits` is how often a private part was trained at home; 0 if it was solved for, or if there is none.
    """

    name: str
    method: str
    round: int
    measures: dict[str, float]
    visits: int
    bytes_down: int
    seconds: float
    v: Tensor | None
    weights: Tree
    task: Task
    data: FederatedData

    bytes_up: ClassVar[int] = 0  # nothing is ever sent

    @property
    def accuracy(self) -> float | None:
        """Accuracy on the test part; None without one, or for regression."""
        return self.measures.get("accuracy")

    @property
    def examples(self) -> Client:
        """What it was trained and tested on, to give to `onboard` of another run."""
        a, b = (torch.from_numpy(rows) for rows in (self.data.train[0], self.data.test[0]))
        return self.data.x[a], self.data.y[a], self.data.x[b], self.data.y[b]

    def model(self) -> nn.Module:
        """The personal model as a module, ready to predict; refused where a method predicts with several models."""
        if not self.task.whole(self.weights):
            raise FedspanError(f"Onboard: {self.method} predicts with more than one model; there is no module of it.")
        return self.task.module_with(self.weights)


class Alone(NamedTuple):
    """Training without any federation: the learning rate its validation part chose, the passes, and the outcome."""

    lr: float
    epochs: int
    measures: dict[str, float]
    seconds: float


def hold_out(data: FederatedData, clients: Sequence[int]) -> tuple[FederatedData, list[Client]]:
    """The federation without some clients, and those clients' own examples, to be onboarded after a run.

    Nothing else changes: pool, order, names, groups, naming of classes. A held-out client's validation part is left
    out, so that it has what a trained client would have trained on.
    """
    gone = set(clients)
    if len(gone) != len(clients) or not gone < set(range(data.clients)):
        allowed = f"different numbers in 0..{data.clients - 1}, but not all of them"
        raise ConfigError(f"hold_out: clients must be {allowed}. Got {list(clients)}.")
    keep = [i for i in range(data.clients) if i not in gone]
    kept: dict[str, Any] = {k: [getattr(data, k)[i] for i in keep] for k in ("train", "test", "validation", "names")}
    kept |= {k: None if (rows := getattr(data, k)) is None else rows[keep] for k in ("relabel", "groups")}

    def part(i: int, name: str) -> tuple[Tensor, Tensor]:
        return data.x[torch.from_numpy(getattr(data, name)[i])], data.labels(i, name)

    return replace(data, **kept), [(*part(i, "train"), *part(i, "test")) for i in clients]


def onboard(
    run: Run, x: Array, y: Array, x_test: Array | None = None, y_test: Array | None = None, *, name: str = "new"
) -> Onboarded:
    """Let a client that was never trained join a run, from its own examples alone; the run is not changed.

    A method that `Onboards` fits it in its own way. Elsewhere a private part is trained by the method's own
    `client_update`, and what would be sent is thrown away; models without one are used as they are.

    Args:
        x: inputs prepared as those of the run (normalised); without a test part they are split 75/25.
        y: labels as this client names them.

    Raises:
        DataError: if shapes or labels do not fit the run.
        ConfigError: if the run's method has nothing for a client the server does not know.
    """
    simulation, data = _newcomer(run, x, y, x_test, y_test)
    start, method, t = time.perf_counter(), simulation.method, simulation.record.progress.round
    capacity, down, received = _download(simulation)
    task = (engine := _engine(simulation, data)).model(capacity)
    n, seed = simulation.data.clients, simulation.seed
    row = method.init_client(task, ClientInfo(n, capacity, key(seed, "client", n), seed))
    visits, v, common = 0, None, simulation.record.common
    if (able := engine.able.onboards) is not None:
        visit = engine.visit(capacity, t, 0, able.onboard_plan(task), common)
        weights, v = tree.detach(able.onboard(task, row, down, visit))
    else:
        visits = _visits(simulation) if tree.leaves(row) else 0
        for k in range(visits):
            answer = engine.update(capacity, t + 1 + k, [0], tree.stack([row]), down, {}, common)
            row = tree.take(answer.rows, 0)  # what it would send is dropped here
        weights = engine.personal(capacity, t, 0, row, down, common)
    seconds = time.perf_counter() - start
    found = _measure(engine.able.adapts, task, weights, data, data.test[0], simulation.engine.gathered)
    return Onboarded(name, name_of(method), t, found, visits, received, seconds, v, weights, task, data)


def is_one_model(simulation: Simulation) -> bool:
    """Whether the run's clients keep nothing of their own: a newcomer takes the shared model as it is."""
    return not tree.leaves(simulation.engine.begin(simulation.capacity[0], 0))


def train_alone(run: Run, new: Onboarded) -> Alone:
    """The yardstick beside `onboard`: the run's model trained on the newcomer's data only.

    It gets as many passes as a client of the run did on average (at most 100 visits), and the best learning rate
    on a quarter of its training data; then it is trained on all of them.
    """
    simulation, data, start = _state(run), new.data, time.perf_counter()
    epochs = _visits(simulation) * max(1, simulation.settings.epochs)
    fit, _, held = split(data.train[0], 0, simulation.seed)

    def measured(lr: float, train: Index, test: Index, metrics: Sequence[Metric] = ()) -> dict[str, float]:
        engine = replace(_engine(simulation, replace(data, train=[train])), epochs=epochs)
        visit, task = engine.visit(None, 1, 0, {"train": Epochs()}, {}), engine.task
        return _measure(Adapts(), task, sgd(task.loss, task.init(), visit["train"], lr), data, test, metrics)

    def badness(lr: float) -> tuple[float, float]:
        found = measured(lr, fit, held)
        return (-found.get("accuracy", 0.0), found["loss"]) if math.isfinite(found["loss"]) else (1.0, math.inf)

    lr = min(_RATES, key=badness) if len(held) else 0.1
    found = measured(lr, data.train[0], data.test[0], simulation.engine.gathered)
    return Alone(lr, epochs, found, time.perf_counter() - start)


def _state(run: Run) -> Simulation:
    simulation = run.simulation if isinstance(run, Result) else run
    if simulation is None:
        raise ConfigError("Onboard: a result without its simulation has no state; use `fedspan onboard RUN`.")
    return simulation


def _newcomer(
    run: Run, x: Array, y: Array, x_test: Array | None, y_test: Array | None
) -> tuple[Simulation, FederatedData]:
    """The run, and its newcomer as a federation of one, checked against the run."""
    simulation = _state(run)
    if (x_test is None) != (y_test is None):
        raise DataError("Onboard: x_test and y_test must come together. Got only one of them.")
    known = simulation.data
    if not isinstance(known.x, Tensor):
        raise DataError("Onboard: the run must have one input per example. Got several; train it with the newcomer.")
    parts = [torch.as_tensor(a) for a in (x, y, x if x_test is None else x_test, y if y_test is None else y_test)]
    for k, what in ((0, "training"), (2, "test")):
        if parts[k].shape[1:] != known.x.shape[1:]:
            want, got = tuple(known.x.shape[1:]), tuple(parts[k].shape[1:])
            raise DataError(f"Onboard: {what} examples must have shape {want} like those of the run. Got {got}.")
        if (known.classes is not None) == parts[k + 1].is_floating_point():
            kind = "integers, one class per example" if known.classes is not None else "real numbers"
            raise DataError(f"Onboard: labels must be {kind}, as in the run. Got {parts[k + 1].dtype}.")
        if parts[k + 1].shape[1:] != known.y.shape[1:]:
            want, got = tuple(known.y.shape[1:]), tuple(parts[k + 1].shape[1:])
            raise DataError(f"Onboard: labels of an example must have shape {want} as in the run. Got {got}.")
        if known.x.is_floating_point():
            parts[k] = parts[k].to(simulation.dtype)
    test = None if x_test is None else [(parts[2], parts[3])]
    made = FederatedData.from_arrays([(parts[0], parts[1])], test=test, classes=known.classes, seed=simulation.seed)
    return simulation, made.to(simulation.dtype)


def _download(simulation: Simulation) -> tuple[Capacity, Tree, int]:
    """What every client of the first capacity gets, and its bytes with the state that all hold in common."""
    method, record, capacity = simulation.method, simulation.record, simulation.capacity[0]
    who, t = name_of(method), record.progress.round
    if method.about.needs_groups:
        raise ConfigError(f"Onboard: {who} must be told a client's group, and a new client's is not known.")
    down = method.download(record.server, torch.tensor([0]), capacity, t)
    if tree.leaves(down.own):
        raise ConfigError(f"Onboard: the server of {who} keeps a part for each client, and has none for a new one.")
    shared, coded = wire.roundtrip(down.shared, simulation.engine.able.coded.codecs(t))
    if not tree.leaves(shared):
        raise ConfigError(f"Onboard: {who} shares nothing that a new client could start from.")
    return capacity, shared, sum(wire.count(shared, coded).values()) + tree.nbytes(record.common)


def _engine(s: Simulation, data: FederatedData) -> Engine:
    args = s.method, s.task, data, s.seed, s.engine.batch_size, s.settings.epochs
    return Engine(*args, "loop", precision=s.settings.precision)


def _visits(s: Simulation) -> int:
    """How often a client of the run took part on average, within what a newcomer can wait for."""
    return min(MOST_VISITS, max(1, round(s.record.progress.round * s.settings.participation)))


def _measure(
    adapts: Adapts, task: Task, weights: Tree, data: FederatedData, rows: Index, metrics: Sequence[Metric] = ()
) -> dict[str, float]:
    """Means over some rows, and the metrics that these define; empty if there are none."""
    if not len(rows):
        return {}
    at = torch.from_numpy(rows)
    with torch.no_grad():
        output = adapts.predict(task, weights, data.x[at])
        found = {k: float(v.mean()) for k, v in task.measures(output, data.y[at]).items()}
    if metrics:
        y, scores = (t.numpy() for t in task.scores(output, data.y[at]))
        for m in metrics:
            with suppress(UndefinedMetric):
                found[m.name] = m(y, scores)
    return found
