"""The sections of an experiment file whose keys depend on a kind: `[data]`, `[partition]`, `[model]`; and `[task]`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from torch import nn

from fedspan.data import PARTITIONS, check_partition
from fedspan.data.federated import FederatedData
from fedspan.data.sources.catalog import KNOWN
from fedspan.data.tables.table_layout import TableLayout
from fedspan.errors import ConfigError, nearest
from fedspan.learn.losses import IGNORED, TaskKind, kind_of_labels
from fedspan.learn.transforms import Transforms
from fedspan.method.fields import build as build_fields
from fedspan.method.fields import check, flat
from fedspan.method.named_code import is_spec, named_function
from fedspan.models import MODELS, build
from fedspan.models.build import is_own


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """`[data]`: where the examples come from; see `fedspan.data.load`."""

    source: str = "digits"
    """A name of `fedspan data`, a path, or a data set of the hub."""
    root: str | None = None
    """Where data lie; without it `$FEDSPAN_DATA`."""
    size: int | None = None
    """Side that pictures are brought to, in pixels; without it they stay as they are."""
    limit: int | None = None
    """The most examples to keep, drawn by the seed; without it all."""
    classes: int | None = None
    """Number of classes, where labels alone do not say it."""
    columns: dict[str, str] = field(default_factory=dict)
    """Names of a table's or a record's columns, by what they hold."""
    max_length: int | None = None
    """The most tokens of a record, for language models; longer ones are cut."""
    whole_records: bool = field(default=False, repr=False)  # outcomes from before it name their data by this repr
    """Whether records of more than max_length tokens are left out, so that none is cut."""
    transforms: dict[str, Any] = field(default_factory=dict)
    """`[data.transforms]`: random changes of training inputs, keys of their own below."""
    table: TableLayout = field(default_factory=TableLayout)

    def __post_init__(self) -> None:
        self.transformation()
        for name in ("size", "limit", "classes", "max_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"Data: {name} must be an integer >= 1. Got {value}.")
        if not self.source or "\0" in self.source + (self.root or ""):
            raise ConfigError(f"Data: source must be a name, a path or a hub id. Got {self.source!r}.")
        if self.is_table:
            others = {"size": self.size, "classes": self.classes, "columns": self.columns or None}
            for name, value in others.items():
                if value is not None:
                    raise ConfigError(f"Data: {name} is not for tables with a target. Got {value!r}; remove it.")

    def transformation(self, load: bool = False) -> Transforms | None:
        """What is done to training inputs; None if nothing is. With `load` functions of one's own are imported.

        Raises:
            ConfigError: for an unknown key, a value that cannot be, or code that is not allowed.
        """
        if "functions" in self.transforms:
            raise ConfigError(
                "Transforms: functions are named by 'own', as 'package.module:function'. Got 'functions'."
            )
        made = build_fields(Transforms, self.transforms, "Transforms")
        if load and made.own:
            found = tuple(named_function(spec, "Transforms: own") for spec in made.own)
            made = replace(made, functions=found)
        return made if made else None

    @property
    def is_table(self) -> bool:
        """Whether the source is a table whose columns are named here."""
        return bool(self.table.targets)

    def to_dict(self) -> dict[str, Any]:
        """Plain values in the layout of the file; what few need is left out where it is as usual."""
        usual = flat(TableLayout())
        values = flat(self)
        usual |= {"columns": {}, "transforms": {}, "whole_records": False}
        return {k: v for k, v in values.items() if k not in usual or v != usual[k]}


@dataclass(frozen=True, kw_only=True)
class PartitionConfig:
    """`[partition]`: who holds what; `options` are the further keys of the section, complete after checking."""

    kind: str = "iid"
    """How examples are divided over the clients."""
    clients: int | None = None
    """Number of clients; kinds that know their clients need none."""
    split: str = "client"
    """Where the test part comes from: `client` each client's own examples, `global` the source's own test file for
    all, `common` a share of all examples for all."""
    validation: float = 0.0
    """Share of each client's examples set aside for choosing hyper-parameters."""
    test: float = 0.25
    """Share of each client's examples it is tested on; with split `common`, of all examples."""
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        known = PARTITIONS[self.kind].options if self.kind in PARTITIONS else self.options
        for name in self.options:
            if name not in known:
                hint = nearest(name[:60], [*known, *(f.name for f in fields(self) if f.name != "options")])
                raise ConfigError(f"Partition: kind '{self.kind}' has no key '{name[:60]}'.{hint}")
        checked = check_partition(self.kind, self.clients, self.split, self.validation, self.test, self.options)
        object.__setattr__(self, "options", {k: v for k, v in checked.items() if v is not None})
        if self.clients == 1:
            raise ConfigError("Partition: clients must be at least 2, as one client has nobody to learn from. Got 1.")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """`[model]`: a name of `fedspan.models.MODELS` or 'package.module:Class', the head's prefix, and its options.

    With `zero_head` the head starts from zero: how a client calls its classes then makes no difference to the body.
    With `kinds` clients take several of these in turn; an option goes for all of them that have it.
    """

    kind: str = "mlp"
    """A name of the models, or `package.module:Class`."""
    kinds: tuple[str, ...] = ()
    """Several kinds that clients take in turn, for methods that allow it."""
    head: str | None = None
    """What the names of the head's parameters begin with; without it the last layer."""
    zero_head: bool = False
    """Whether the head starts from zero."""
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("classes", "input_shape"):
            if name in self.options:
                raise ConfigError(f"Model: {name} comes from the data and cannot be set. Remove it.")
        if self.kinds:
            object.__setattr__(self, "kind", self.kinds[0])
        kinds = self.kinds or (self.kind,)
        named = [kind for kind in kinds if not is_own(kind)]
        known: dict[str, Any] = {}
        for kind in named:
            known |= self._known(kind)
        if len(named) < len(kinds):
            return  # what a class of the user's own takes is not known
        for name in self.options:
            if name not in known:
                hint = nearest(name, [*known, "kind", "kinds", "head", "zero_head"])
                raise ConfigError(f"Model: kind '{', '.join(kinds)}' has no option '{name[:60]}'.{hint}")
        filled = {**known, **self.options}
        options = {k: list(v) if isinstance(v, tuple) else v for k, v in filled.items() if v is not None}
        object.__setattr__(self, "options", options)

    def _known(self, kind: str) -> Mapping[str, Any]:
        """The options of a kind, with their defaults."""
        if kind not in MODELS:
            raise ConfigError(f"Model: unknown kind '{kind[:60]}'.{nearest(kind[:60], MODELS)}")
        return MODELS[kind].options

    def module(
        self, shape: tuple[int, ...], classes: int, kind: str | None = None, positions: tuple[int, ...] = ()
    ) -> nn.Module:
        """Build the model (of several the one of that kind); its weights come from torch's generator."""
        kind, options = kind or self.kind, self.options
        if self.kinds and not is_own(kind):
            options = {k: v for k, v in options.items() if k in self._known(kind)}
        return build(kind, shape, classes, positions, **options)


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """`[task]`: what labels and outputs mean, and what is minimised."""

    kind: Literal["auto", "classification", "multi-label", "regression", "survival", "tagging", "language"] = "auto"
    """What labels mean; `auto` finds it from the data where they say it: `survival` they cannot."""
    loss: str = ""
    """A loss of one's own as `package.module:function` of an allowed package; without it that of the kind."""
    loss_of: Literal["example", "batch"] = "example"
    """Whether the own loss gives a value per example, or one of the whole batch."""
    ties: Literal["efron", "breslow"] = "efron"
    """How Cox's partial likelihood (`survival`) takes events at the same time."""
    ignored: int = IGNORED
    """The label of positions that are not to be predicted (`tagging`)."""

    def __post_init__(self) -> None:
        check(self, "Task")
        if self.loss_of == "batch" and not self.loss:
            raise ConfigError("Task: loss_of = 'batch' needs a loss of one's own. Got none; set loss, or leave it out.")
        if self.loss and not is_spec(self.loss):
            raise ConfigError(f"Task: loss must be given as 'package.module:function'. Got {self.loss[:80]!r}.")

    def kind_for(self, data: FederatedData) -> TaskKind:
        """The kind of task on these data."""
        if self.kind != "auto":
            return self.kind
        return kind_of_labels(data.y, getattr(data, "task", None))

    def options(self) -> dict[str, Any]:
        """What a `Task` is told of its loss.

        Raises:
            ConfigError: if the loss is code that is not allowed or not there.
        """
        own = {"loss": named_function(self.loss, "Task: loss"), "loss_of": self.loss_of} if self.loss else {}
        return {"ties": self.ties, "ignored": self.ignored, **own}


def known_shape(data: DataConfig) -> tuple[tuple[int, ...], int] | None:
    """Shape of an example and number of classes, where they are known before loading."""
    if data.source != "digits" and data.source not in KNOWN:
        return None
    shape = (1, 8, 8) if data.source == "digits" else KNOWN[data.source].shape
    classes = 10 if data.source == "digits" else len(KNOWN[data.source].class_names)
    size = data.size or shape[1]
    return (shape[0], size, size), data.classes or classes
