"""What the server and the nodes of a deployment agree on before the first round."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedspan.config import RunConfig, assemble, from_dict
from fedspan.config.sections import known_shape
from fedspan.data.federated import FederatedData, Index
from fedspan.errors import ConfigError, Refused
from fedspan.learn.metrics import check_metrics
from fedspan.learn.task import Task
from fedspan.method import Abilities, Capacity, Federation, Method
from fedspan.models.build import is_language
from fedspan.randomness import key, normal
from fedspan.simulation import identity
from fedspan.simulation.defence import Defence
from fedspan.simulation.engine import Engine
from fedspan.simulation.protocols import EvaluationSettings
from fedspan.simulation.settings import Settings
from fedspan.storage.toml import parse_toml

EXAMPLES = 4
"""Of the server's stand-in data: enough for a batch, a validation part and a test part."""


@dataclass(frozen=True)
class DataKind:
    """What examples look like: all a server has to know of its nodes' data."""

    shape: tuple[int, ...]
    classes: int | None
    dtype: str = "float32"
    label: tuple[int, ...] = ()
    """Shape of one example's labels: empty for a class or a target, else several labels, targets or positions."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))  # JSON has lists
        object.__setattr__(self, "label", tuple(self.label))

    @staticmethod
    def of(data: FederatedData) -> DataKind:
        """What these examples look like; real numbers travel in the precision of the run."""
        dtype = str(data.x.dtype).removeprefix("torch.") if not data.x.is_floating_point() else "float32"
        return DataKind(tuple(data.x.shape[1:]), data.classes, dtype, tuple(data.y.shape[1:]))

    def facts(self) -> dict[str, Any]:
        """As a node tells it."""
        told = {"shape": list(self.shape), "classes": self.classes, "dtype": self.dtype}
        return {**told, "label": list(self.label)} if self.label else told


@dataclass(frozen=True)
class Experiment:
    """A method on a task with its seed and settings; the same on the server and on every node."""

    method: Method
    task: Task
    seed: int
    settings: Settings
    rounds: int
    name: str
    config: dict[str, Any]
    text: str = ""
    defence: Defence = Defence()
    evaluate: EvaluationSettings = field(default_factory=EvaluationSettings)

    @property
    def key(self) -> str:
        """A short hash of everything that decides the numbers; more rounds belong to the same experiment."""
        return identity.of_experiment(self.config, self.settings, seed=self.seed, model=self.task.fingerprint())

    def engine(self, data: FederatedData) -> Engine:
        """Runs one client after another, as a node has only one."""
        s = self.settings
        dtype = s.torch_dtype
        size = None if s.batch_size == "full" else s.batch_size
        check_metrics(self.evaluate.found(), self.task.kind, data.classes)
        args = self.method, self.task, data.to(dtype), self.seed, size, s.epochs
        return Engine(*args, "loop", judging=self.evaluate, precision=s.precision)

    def federation(self, clients: int, groups: Tensor | None = None) -> Federation:
        """What is known of the clients before the first round."""
        return Federation(clients, self.seed, tuple(self.capacity(i) for i in range(clients)), groups)

    def capacity(self, client: int, level: int = 0) -> Capacity:
        """What tells a client's shapes from others'.

        Raises:
            Refused: if the client has no such level: nobody can make it train with more than it can afford.
        """
        able = Abilities(self.method)
        most = len(able.ranked.levels(client)) - 1
        if not 0 <= level <= most:
            raise Refused(f"Node: its level must lie in 0..{most}. Got {level}.")
        return able.capacity(self.task, client, level)


def read_experiment(text: str, data: FederatedData | DataKind) -> Experiment:
    """The experiment of a TOML text, on data like these."""
    config = read_config(text)
    given = data if isinstance(data, FederatedData) else stand_in(data, 1, config.seed)
    method, task, _ = assemble(config, given)
    about: dict[str, Any] = {"config": config.recorded(), "text": text, "evaluate": config.evaluate}
    about["defence"] = config.defence or Defence()
    return Experiment(method, task, config.seed, config.train, config.rounds, config.name, **about)


def read_config(text: str) -> RunConfig:
    """A complete configuration from its text, of what a deployment can do."""
    return deployable(from_dict(parse_toml(text.encode(), "the experiment")).resolve())


def deployable(config: RunConfig) -> RunConfig:
    """The configuration as it is.

    Raises:
        ConfigError: if it asks for what only a simulation has.
    """
    if is_language(config.model.kind):
        raise ConfigError(f"Deploy: language models can be simulated only. Got model.kind '{config.model.kind}'.")
    if config.devices.limited:
        raise ConfigError(
            "Deploy: devices with limits are for simulations, as a server does not know its nodes' data. Take the"
            " ratios that `fedspan capacity` shows into the method's own field."
        )
    if config.asynchronous is not None:
        raise ConfigError("Deploy: asynchronous rounds are for simulations. Got [asynchronous]; leave it out.")
    usual = Settings()
    for name in ("evaluate_clients", "evaluate_after", "drop_rate", "on_divergence"):
        got = getattr(config.train, name)
        if got != getattr(usual, name):
            raise ConfigError(f"Deploy: train.{name} is for simulations. Got {got!r}; leave it out.")
    if config.train.device not in ("auto", "cpu"):
        raise ConfigError(
            "Deploy: train.device must be 'auto' or 'cpu', as servers and nodes compute on the CPU. Got"
            f" {config.train.device!r}."
        )
    judging = EvaluationSettings()
    for name in ("models", "predict_by"):
        if (judged := getattr(config.evaluate, name)) != getattr(judging, name):
            raise ConfigError(f"Deploy: evaluate.{name} is for simulations. Got {list(judged)}; leave it out.")
    return config


def with_defence(config: RunConfig) -> RunConfig:
    """The configuration that is deployed: where a file says nothing of a defence, it is on.

    What is deployed is written out whole, so that simulating the written file gives the same numbers.
    """
    return config if config.defence is not None else replace(config, defence=Defence(rule="clip"))


def kind_of(config: RunConfig) -> DataKind | None:
    """What examples look like, where the source is one that is known."""
    known = known_shape(config.data)
    return None if known is None else DataKind(*known)


def stand_in(kind: DataKind, clients: int, seed: int) -> FederatedData:
    """Data of the right shapes for a server, which has none: it needs them to learn what uploads look like."""
    n = EXAMPLES
    dtype: torch.dtype = getattr(torch, kind.dtype)
    x = normal(key(seed, "stand-in"), (n, *kind.shape)).to(dtype) if dtype.is_floating_point else None
    if x is None:
        x = torch.zeros(n, *kind.shape, dtype=dtype)
    y = torch.zeros(n, *kind.label)
    if kind.classes is not None:
        y = (torch.arange(y.numel()) % kind.classes).reshape(y.shape)
    rows = np.arange(n, dtype=np.int64)
    return FederatedData(
        x=x,
        y=y,
        train=[rows] * clients,
        test=[rows] * clients,
        validation=[rows] * clients,
        classes=kind.classes,
    )


def seat(data: FederatedData, client: int, number: int, clients: int) -> FederatedData:
    """One client's own examples at place `number` of `clients`; the other places hold one row that is never used.

    Batches are drawn by a client's number, so a node must know its own, and nothing of the others.
    """
    if not 0 <= number < clients:
        raise ConfigError(f"Node: its number must lie in 0..{clients - 1}. Got {number}.")
    parts = [getattr(data, name)[client] for name in ("train", "validation", "test")]
    pool = np.unique(np.concatenate(parts))  # in the order of the whole, as some streams sort their rows
    train, validation, test = (np.searchsorted(pool, p).astype(np.int64) for p in parts)
    rows = torch.from_numpy(pool)
    y = data.y[rows] if data.relabel is None else data.relabel[client][data.y[rows]]

    def at(own: Index, others: Index) -> list[Index]:
        return [own if i == number else others for i in range(clients)]

    return replace(
        data,
        x=data.x[rows],
        y=y,
        train=at(train, train[:1]),
        validation=at(validation, train[:0]),
        test=at(test, train[:0]),
        relabel=None,
        groups=None,
        names=[str(i) for i in range(clients)],
    )
