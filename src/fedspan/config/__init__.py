"""Experiments as TOML: read, check before any data are loaded, write back complete, and assemble."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from fedspan.config.overrides import apply_overrides
from fedspan.config.sections import DataConfig, ModelConfig, PartitionConfig, TaskConfig, known_shape
from fedspan.data import FederatedData, Source, load, partition
from fedspan.data.federated import shape_of
from fedspan.data.partitions.kinds import groups_known_by, knows_groups
from fedspan.data.tables.arrow_files import is_table
from fedspan.data.tables.table_federation import table_data
from fedspan.errors import ConfigError, nearest, safe_name
from fedspan.learn.task import Task
from fedspan.method import Method
from fedspan.method.fields import Key, build, fits, flat, keys_of
from fedspan.method.named_code import is_spec
from fedspan.methods import METHODS, find_method, make
from fedspan.models.build import is_language
from fedspan.randomness import torch_seed
from fedspan.simulation.asynchronous import Asynchronous
from fedspan.simulation.defence import Defence
from fedspan.simulation.devices import Devices, assign
from fedspan.simulation.identity import of_config
from fedspan.simulation.protocols import EvaluationSettings
from fedspan.simulation.settings import Settings, settings_from
from fedspan.storage.toml import checked, parse_toml, plain, read_small, short, write_toml

# The most examples each known source can have.
_EXAMPLES = {"digits": 1_797, "mnist": 70_000, "fashion-mnist": 70_000, "cifar10": 60_000, "cifar100": 60_000}
_EXAMPLES |= {"svhn": 99_289, "tiny-imagenet": 110_000}

# Kinds of tasks whose targets are numbers in a table too, whole ones as well.
_NUMBERS = ("regression", "multi-label", "survival")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A whole experiment. `method` holds `name` and fields; `methods` holds fields for single methods."""

    name: str
    """What the run is called, and its directory; without it the name of the file."""
    seed: int = 0
    """What every random draw of the run is keyed by."""
    rounds: int = 100
    """Rounds of training."""
    data: DataConfig = field(default_factory=DataConfig)
    partition: PartitionConfig = field(default_factory=lambda: PartitionConfig(clients=10))
    model: ModelConfig = field(default_factory=ModelConfig)
    method: dict[str, Any] = field(default_factory=lambda: {"name": "fedavg"})
    methods: dict[str, dict[str, Any]] = field(default_factory=dict)
    task: TaskConfig = field(default_factory=TaskConfig)
    train: Settings = field(default_factory=Settings)
    evaluate: EvaluationSettings = field(default_factory=EvaluationSettings)
    devices: Devices = field(default_factory=Devices)
    defence: Defence | None = None
    """How uploads are judged; if nothing is said a simulation believes them all, and `fedspan deploy` writes it in."""
    asynchronous: Asynchronous | None = None
    """How clients train without waiting for one another; if nothing is said rounds are synchronous."""

    def __post_init__(self) -> None:
        safe_name(self.name, "Config: name")
        for key, low in (("seed", 0), ("rounds", 0)):
            value = getattr(self, key)
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value < 2**31:
                raise ConfigError(f"Config: {key} must be an integer >= {low}. Got {value!r}.")
        self._check_data()
        if self.asynchronous is not None:
            self.asynchronous.check_with(self.train, self.devices, self.defence)
        for name in (self.method["name"], *self.methods):
            self.only(name)
        known = known_shape(self.data)
        if known is not None and is_language(self.model.kind):
            raise ConfigError(
                f"Data: model '{self.model.kind}' needs instruction records (.json or .jsonl). Got source"
                f" '{self.data.source}'."
            )
        if known is not None and self.task.kind in ("auto", "classification"):
            for kind in self.model.kinds or (self.model.kind,):
                with torch_seed(0):
                    self.model.module(*known, kind)

    def _check_data(self) -> None:
        at_most = min(_EXAMPLES.get(self.data.source, 2**31), self.data.limit or 2**31)
        if self.partition.clients is not None and self.partition.clients > at_most:
            raise ConfigError(
                f"Partition: clients must be at most the number of examples, {at_most}. Got {self.partition.clients}."
            )
        if self.data.whole_records and not is_language(self.model.kind):
            raise ConfigError(f"Data: whole_records is for language models. Got model.kind '{self.model.kind}'.")
        marked = self.data.table.split is not None  # the column may mark validation rows
        if self.train.evaluate_part == "validation" and self.partition.validation == 0 and not marked:
            raise ConfigError("Train: evaluate_part 'validation' needs partition.validation above 0. Got 0.")

    def fields_of(self, name: str, compared: Iterable[str] = ()) -> tuple[dict[str, Any], list[str]]:
        """The fields of one method, and the keys of `[method]` that it lacks but another compared method has."""
        own = keys_of(find_method(name))
        others = {*compared, self.method["name"], *self.methods}
        elsewhere = {key for other in others for key in keys_of(find_method(other))}
        shared = {k: v for k, v in self.method.items() if k != "name"}
        dropped = [k for k in shared if k not in own and k in elsewhere]
        given = {k: v for k, v in shared.items() if k not in dropped} | self.methods.get(name, {})
        return {k: _in_rounds(own[k], v, self.rounds) if k in own else v for k, v in given.items()}, dropped

    def only(self, name: str, compared: Iterable[str] = ()) -> Method:
        """The method of that name with its fields from `[method]` and `[methods.NAME]`."""
        method = make(name, **self.fields_of(name, compared)[0])
        if method.about.needs_groups and not knows_groups(self.partition.kind, self.partition.options):
            raise ConfigError(
                f"Method {name}: the partition must know the groups of its clients ({groups_known_by()})."
                f" Got '{self.partition.kind}'."
            )
        if self.model.kinds and not method.about.any_model:
            able = ", ".join(k for k, c in METHODS.items() if c.about.any_model)
            raise ConfigError(f"Method {name}: all clients must have models of one kind. Got model.kinds; use {able}.")
        return method

    def resolve(self, name: str | None = None, compared: Iterable[str] = (), seed: int | None = None) -> RunConfig:
        """The experiment of one method and seed alone, with every field of the method written out."""
        name = name or self.method["name"]
        method = {"name": name} | plain(flat(self.only(name, compared)))
        return replace(self, method=method, methods={}, seed=self.seed if seed is None else seed)

    def to_dict(self) -> dict[str, Any]:
        """Plain values in the layout of the file; what is not set is left out."""
        part, model = dataclasses.asdict(self.partition), dataclasses.asdict(self.model)
        if not self.model.kinds:
            del model["kinds"]
        values = plain(
            {
                **{k: getattr(self, k) for k in ("name", "seed", "rounds")},
                "data": self.data.to_dict(),
                "partition": part | part.pop("options"),
                "model": model | model.pop("options"),
                "method": self.method,
                "methods": self.methods,
                "task": _changed(self.task),
                "train": dataclasses.asdict(self.train),
                "evaluate": _changed(self.evaluate),
                "devices": plain(dataclasses.asdict(self.devices)) if self.devices != Devices() else {},
                "defence": {} if self.defence is None else dataclasses.asdict(self.defence),
                "asynchronous": {} if self.asynchronous is None else dataclasses.asdict(self.asynchronous),
            }
        )
        for key in ("methods", "task", "evaluate", "devices", "defence", "asynchronous"):
            if not values[key]:
                del values[key]
        return values

    def recorded(self) -> dict[str, Any]:
        """The configuration as it is kept with the results: without where the data lie on this machine."""
        values = self.to_dict()
        values["data"].pop("root", None)
        return values

    def identity(self) -> dict[str, Any]:
        """What decides the numbers of a round: more rounds, or other ways to save, continue the same run."""
        return plain(of_config(self.recorded(), self.train))


def _in_rounds(key: Key, value: Any, rounds: int) -> Any:
    """A number of rounds that is given as a share of the run's (`"20%"`), at least one; other values as they are."""
    share = re.fullmatch(r"(\d{1,3}(?:\.\d{1,6})?)%", value) if isinstance(value, str) else None
    whole = fits(key.hint, 1) and not fits(key.hint, 1.5)
    if share is None or not whole or fits(key.hint, value):
        return value
    return max(1, round(float(share[1]) / 100 * rounds))


# ------------------------------------------------------------------------------------------------ reading


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read an experiment file and apply `section.key=value` overrides.

    Raises:
        ConfigError: if the file cannot be read or anything in it does not fit, in one sentence.
    """
    raw, path = read_small(path, "Config"), Path(path)
    return from_dict(parse_toml(raw, str(path)), overrides, name=path.stem)


def from_dict(values: Mapping[str, Any], overrides: Sequence[str] = (), name: str = "run") -> RunConfig:
    """A checked experiment from plain values in the layout of the file."""
    values = {"name": name, **checked(values, "", 1)}
    apply_overrides(values, overrides)
    checked(values, "", 1)
    known = [f.name for f in fields(RunConfig)]
    for key in values:
        if key not in known:
            raise ConfigError(f"Config: unknown key '{key[:60]}'.{nearest(key[:60], known)}")
    sections = ("data", "partition", "model", "method", "methods", "task", "train", "evaluate", "devices")
    for key in (*sections, *(k for k in ("defence", "asynchronous") if k in values)):
        if not isinstance(values.setdefault(key, {}), dict):
            raise ConfigError(f"Config: {key} must be a section ([{key}]). Got {short(values[key])}.")
    if not isinstance(values["name"], str):
        raise ConfigError(f"Config: name must be a string. Got {short(values['name'])}.")
    for key, table in values["methods"].items():
        if not isinstance(table, dict):
            raise ConfigError(f"Config: methods.{key[:60]} must be a section. Got {short(table)}.")
        if key not in METHODS and not is_spec(key):
            raise ConfigError(f"Config: methods.{key[:60]} is no method.{nearest(key[:60], METHODS)}")
    values["method"] = {"name": "fedavg", **values["method"]}
    if not isinstance(values["method"]["name"], str):
        raise ConfigError(f"Method: name must be a string. Got {short(values['method']['name'])}.")
    if _says_clients(values["data"]) and "kind" not in values["partition"]:  # a table mostly says whose its rows are
        values["partition"] = {"kind": "natural", "min_samples": 1, **values["partition"]}
    elif not values["partition"]:
        values["partition"] = {"clients": 10}
    if values["task"].get("kind") in _NUMBERS and "target" in values["data"]:
        values["data"] = {"target_type": "number", **values["data"]}
    return RunConfig(
        **{k: values[k] for k in ("name", "seed", "rounds", "method", "methods") if k in values},
        data=build(DataConfig, values["data"], "Data"),
        partition=_open_ended(PartitionConfig, values["partition"], "Partition"),
        model=_open_ended(ModelConfig, values["model"], "Model"),
        task=build(TaskConfig, values["task"], "Task"),
        train=settings_from(values["train"], "Train"),
        evaluate=build(EvaluationSettings, values["evaluate"], "Evaluate"),
        devices=build(Devices, values["devices"], "Devices"),
        defence=build(Defence, values["defence"], "Defence") if "defence" in values else None,
        asynchronous=build(Asynchronous, values["asynchronous"], "Asynchronous") if "asynchronous" in values else None,
    )


def _says_clients(data: Mapping[str, Any]) -> bool:
    """Whether a table names its clients: by a column, or as a folder with one file for each."""
    source = str(data.get("source", ""))
    return "client" in data or ("target" in data and not is_table(Path(source)))


def _open_ended(cls: type[Any], values: dict[str, Any], who: str) -> Any:
    """A section whose further keys are options of its kind."""
    own = {f.name for f in fields(cls)} - {"options"}
    if "options" in values:
        raise ConfigError(f"{who}: write options as keys of the section itself, not under 'options'.")
    options = {k: v for k, v in values.items() if k not in own}
    return build(cls, {k: v for k, v in values.items() if k in own} | {"options": options}, who)


# ------------------------------------------------------------------------------------------------ writing


def _changed(section: Any) -> dict[str, Any]:
    """The keys of a section that are not as they would be without it."""
    usual = type(section)()
    return {f.name: v for f in fields(section) if (v := getattr(section, f.name)) != getattr(usual, f.name)}


def to_toml(config: RunConfig) -> str:
    """The complete configuration as TOML; reading it gives the same configuration again."""
    return write_toml(config.to_dict())


# ------------------------------------------------------------------------------------------------ assembling


@functools.lru_cache(maxsize=2)  # the methods of a comparison share one copy
def _source(source: str, root: str | None, size: int | None, limit: int | None, classes: int | None,
            columns: tuple[tuple[str, str], ...], seed: int) -> Source:  # fmt: skip
    return load(source, root, size=size, limit=limit, classes=classes, columns=dict(columns), seed=seed)


def assemble_data(config: RunConfig) -> FederatedData:
    """Load and divide the data; a source is read once per process."""
    return replace(_divided(config), transforms=config.data.transformation(load=True))


def _divided(config: RunConfig) -> FederatedData:
    d, p = config.data, config.partition
    if is_language(config.model.kind):
        return _instructions(config)
    if d.is_table:
        return table_data(
            d.source, d.table, root=d.root, kind=p.kind, clients=p.clients, seed=config.seed, split=p.split,
            validation=p.validation, test=p.test, limit=d.limit, **p.options,
        )  # fmt: skip
    seed = config.seed if d.limit is not None else 0  # the seed only chooses which examples are kept
    source = _source(d.source, d.root, d.size, d.limit, d.classes, tuple(sorted(d.columns.items())), seed)
    return partition(source, p.kind, p.clients, config.seed, p.split, p.validation, p.test, **p.options)


def _instructions(config: RunConfig) -> FederatedData:
    """Instruction records, in the tokens of the model."""
    from fedspan.language.instructions import MAX_LENGTH, instruction_data
    from fedspan.language.tokens import load_tokenizer

    d, p = config.data, config.partition
    return instruction_data(
        d.source,
        load_tokenizer(config.model.options["path"]),
        root=d.root,
        kind=p.kind,
        clients=p.clients,
        seed=config.seed,
        split=p.split,
        validation=p.validation,
        test=p.test,
        max_length=d.max_length or MAX_LENGTH,
        whole_records=d.whole_records,
        limit=d.limit,
        columns=d.columns,
        **p.options,
    )


def assemble(config: RunConfig, data: FederatedData | None = None) -> tuple[Method, Task, FederatedData]:
    """The method, the task and the data of an experiment; other data can be given in their place."""
    method = config.only(config.method["name"])
    data = assemble_data(config) if data is None else data
    shape, dtype = shape_of(data.x), config.train.torch_dtype
    kind = "language" if is_language(config.model.kind) else config.task.kind_for(data)
    several = kind in ("multi-label", "regression")
    outputs = data.y[0].numel() if several else 1 if kind == "survival" else data.classes or 1
    positions = tuple(data.y.shape[1:]) if kind == "tagging" else ()
    own = config.task.options()

    def of(name: str) -> Task:
        # Task seeds torch with (seed, "init") around this function, so that the weights depend on nothing else.
        build = lambda: config.model.module(shape, outputs, name, positions)
        where: dict[str, Any] = {"head": config.model.head, "zero_head": config.model.zero_head}
        return Task(build, kind, **where, **own, dtype=dtype, seed=config.seed)

    kinds = config.model.kinds
    task = Task.family({name: of(name) for name in kinds}, kinds) if kinds else of(config.model.kind)
    if config.devices.limited:
        method, _ = assign(method, task, data.to(dtype), config.devices, config.train)
    return method, task, data
