"""What a method is: a frozen dataclass whose fields are its hyper-parameters, with a few pure functions.

`client_update` is written for one client. The simulator maps it over the clients of a round, a deployed node calls it
for its own client; what it returns is exactly what is kept and what is sent.

A whole method, for example one common mean of all labels:

>>> import torch
>>> from dataclasses import dataclass
>>> from fedspan.method import Down, Method, Sent
>>> @dataclass(frozen=True, kw_only=True)
... class MeanLabel(Method):
...     def init_server(self, task, federation):
...         return {"m": torch.zeros(())}
...     def download(self, server, ids, capacity, round):
...         return Down(shared={"m": server["m"]})
...     def client_update(self, task, client, down, visit):
...         y = visit["train"].whole().y.double().mean()
...         return client, Sent(weight=visit.examples, mean={"m": y})
...     def server_update(self, server, round):
...         return {"m": round.mean["m"]}
...     def personal(self, task, client, down, visit):
...         return {"m": down["m"]}
>>> MeanLabel().weight
'samples'
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from fedspan import tree
from fedspan.errors import ConfigError
from fedspan.learn.batches import All, Amount, Batch, Batches, Epochs
from fedspan.learn.server_optimizer import Rule, moments, step
from fedspan.learn.sgd import NO_PROX, Loss, Prox, adamw, sgd
from fedspan.learn.task import Task
from fedspan.tree import EMPTY, Params, Tree
from fedspan.wire import Codec

Capacity: TypeAlias = Hashable
"""What a device can afford (a rank ratio, a layer set, an architecture). Clients of one capacity share all shapes."""


class Down(NamedTuple):
    """What the server sends: one copy for all, and rows of which row k goes to client `ids[k]` alone."""

    shared: Tree = EMPTY
    own: Tree = EMPTY


class Sent(NamedTuple):
    """What a client sends."""

    weight: Tensor
    """n_k, 1, or the method's own scalar, as `Method.weight` declares."""
    mean: Tree = EMPTY
    """The server needs only a weighted mean of this."""
    each: Tree = EMPTY
    """The server needs every client's own copy: likeness, clustering. Sent in the clear."""


@dataclass(frozen=True)
class Visit:
    """What a client knows in a round besides its state and the download. `visit["train"]` is a stream of batches."""

    round: Tensor
    key: Tensor
    examples: Tensor
    clients: int
    batches: Mapping[str, Batches]
    common: Tree = field(default_factory=dict)
    capacity: Capacity = None

    def __getitem__(self, stream: str) -> Batches:
        return self.batches[stream]


@dataclass(frozen=True)
class Round:
    """What the server holds after a round: who answered, their registered sizes, the mean and the single uploads."""

    round: int
    ids: Tensor
    n: Tensor
    weights: Tensor
    mean: Tree
    each: Tree
    missing: Tensor


@dataclass(frozen=True)
class Federation:
    """What the server knows of the federation before the first round."""

    clients: int
    seed: int
    capacities: tuple[Capacity, ...] = ()
    groups: Tensor | None = None

    @property
    def kinds(self) -> list[Capacity]:
        """The capacities there are, in one order for all; the first one's model starts the server's state."""
        return sorted(set(self.capacities), key=str)


@dataclass(frozen=True)
class ClientInfo:
    """One client: its number, what it can afford, and a key of its own."""

    id: int
    capacity: Capacity
    key: Tensor
    seed: int


@dataclass(frozen=True, kw_only=True)
class Method:
    """Base of all methods: the functions every method has, with the defaults most of them want."""

    family: ClassVar[str] = "baseline"
    reference: ClassVar[str] = ""
    needs_groups: ClassVar[bool] = False
    needs_classes: ClassVar[bool] = False
    any_model: ClassVar[bool] = False
    """Whether clients may have models of different kinds, with heads of one shape."""

    @property
    def weight(self) -> Literal["samples", "one", "own"]:
        """How uploads are weighted: by examples, all alike, or by a scalar of the method's own."""
        return "samples"

    @property
    def secure_sum(self) -> str:
        """Whether what is sent as `mean` could be added up without being seen: "yes", "no", or with which option."""
        return "yes"

    @property
    def weight_bound(self) -> float:
        """The largest weight of the method's own that the server accepts."""
        return 1e12

    def plan(self) -> Mapping[str, Amount]:
        """The minibatch streams a visit brings."""
        return {"train": Epochs()}

    def personal_plan(self, task: Task) -> Mapping[str, Amount]:
        """The streams `personal` wants when the model is used; none for methods that only read."""
        return {}

    def model(self, task: Task, capacity: Capacity) -> Task:
        """The task as this method trains it: here layers are converted to structured ones."""
        return task

    def capacity_of(self, client: int) -> Capacity:
        """What a client can afford; None where all are alike."""
        return None

    def levels(self, client: int) -> Sequence[Capacity]:
        """What a client may train with in some round: what it can afford, then less.

        Shapes of its private state must be the same at all of them.
        """
        return (self.capacity_of(client),)

    def level(self, server: Tree, client: int) -> int:
        """Which of its levels a client has now."""
        return 0

    def with_ratios(self, ratios: tuple[float, ...]) -> Method | None:
        """The same method with these rank ratios for its clients, in turn; None where clients have no ranks."""
        return None

    def init_server(self, task: Task, federation: Federation) -> Tree:
        """The server's state before the first round."""
        raise TypeError(f"{type(self).__name__}: init_server must be defined.")

    def init_client(self, task: Task, who: ClientInfo) -> Tree:
        """One client's private state before its first round; it never leaves the client."""
        return {}

    def download(self, server: Tree, ids: Tensor, capacity: Capacity, round: int) -> Down:
        """What clients `ids`, all of one capacity, receive."""
        raise TypeError(f"{type(self).__name__}: download must be defined.")

    def download_for_use(self, server: Tree, ids: Tensor, capacity: Capacity, round: int) -> Down:
        """What clients receive to predict with: what they would train, unless that is only a part of the model."""
        return self.download(server, ids, capacity, round)

    def client_update(self, task: Task, client: Tree, down: Tree, visit: Visit) -> tuple[Tree, Sent]:
        """One client's round: what it keeps and what it sends."""
        raise TypeError(f"{type(self).__name__}: client_update must be defined.")

    def lift(self, mean: Tree, shared: Tree, capacity: Capacity) -> Tree:
        """Applied on the server to each decoded upload before averaging: to one shape for all capacities.

        `shared` is the download that clients of this capacity received in common.
        """
        return mean

    def server_update(self, server: Tree, round: Round) -> Tree:
        """The server's state after a round."""
        raise TypeError(f"{type(self).__name__}: server_update must be defined.")

    def personal(self, task: Task, client: Tree, down: Tree, visit: Visit) -> Tree:
        """The weights a client predicts with; may fit on the streams of `personal_plan`."""
        raise TypeError(f"{type(self).__name__}: personal must be defined.")

    def trained(self, down: Tree, sent: Sent, capacity: Capacity) -> Tree:
        """What `personal` uses in the place of the download right after local training, before the server answers.

        The download itself, where a client's model is in its own state; methods whose model is in part the download
        put what the client made of it there.
        """
        return down

    def predict(self, task: Task, personal: Tree, x: Tensor) -> Tensor:
        """Outputs for inputs `x` from what `personal` returned."""
        return task.predict(personal, x)

    def size(self, server: Tree) -> float:
        """The norm of the server's state that the divergence monitor watches."""
        return math.sqrt(float(tree.squared_norm(server)))

    def monitor(self, server: Tree) -> dict[str, float]:
        """Numbers about the server's state worth a curve; asked for whenever the run is evaluated."""
        return {}

    def observe(self, client: Tree) -> Mapping[str, Tensor]:
        """Numbers about one client's own state worth a curve. They are not sent: only a simulation can show them."""
        return {}

    def matrices(self, server: Tree) -> dict[str, Tensor]:
        """Matrices over the clients (likeness) worth keeping at every evaluation of runs with up to 100 clients."""
        return {}

    def codecs(self, round: int) -> Mapping[str, Codec]:
        """How named parts of the payload are written on the wire, both ways; what is not named travels as it is."""
        return {}

    # ---- state that every client holds without being sent it each round (a frozen base model, for example)

    def common(self, task: Task, federation: Federation) -> Tree:
        """What every client holds identically from the start."""
        return {}

    def announce(self, server: Tree, round: int) -> Tree | None:
        """News for all clients after a round, sampled or not."""
        return None

    def hear(self, common: Tree, news: Tree) -> Tree:
        """The common state after the news."""
        return common


def capacity_in(method: Method, task: Task, client: int, level: int = 0) -> Capacity:
    """What tells a client's shapes from others': its kind of model, or what the method says it can afford.

    At a `level` beyond the first it makes do with less than that.
    """
    kind = task.kind_of(client)
    return method.levels(client)[level] if kind is None else kind


def model_at(method: Method, task: Task, capacity: Capacity) -> Task:
    """The task as the method trains it on clients of one capacity."""
    return method.model(task.kinds[str(capacity)], None) if task.kinds else method.model(task, capacity)


@dataclass(frozen=True, kw_only=True)
class Training(Method):
    """A method whose clients train by gradient steps: step size, momentum, weight decay, optimiser."""

    lr: float = 0.1
    momentum: float = 0.0
    weight_decay: float = 0.0
    optimizer: Literal["sgd", "adamw"] = "sgd"

    def __post_init__(self) -> None:
        self.require("lr", 0.0, allow_zero=True)
        self.require("momentum", 0.0, 1.0, allow_zero=True)
        self.require("weight_decay", 0.0, allow_zero=True)
        self.one_of("optimizer", "sgd", "adamw")
        if self.optimizer == "adamw" and self.momentum:
            raise ConfigError(f"{type(self).__name__}: momentum must be 0 with optimizer 'adamw'. Got {self.momentum}.")

    def fit(
        self, loss: Loss, params: Tree, batches: Iterable[Batch], lr: float | None = None, prox: Prox = NO_PROX
    ) -> Tree:
        """Train `params` on a stream with the method's optimiser; it starts anew each time.

        `prox` is applied to single parameters after every step.
        """
        lr = self.lr if lr is None else lr
        if self.optimizer == "adamw":
            return adamw(loss, params, batches, lr, weight_decay=self.weight_decay, prox=prox)
        return sgd(loss, params, batches, lr, momentum=self.momentum, weight_decay=self.weight_decay, prox=prox)

    def require(self, name: str, low: float, high: float = float("inf"), *, allow_zero: bool = False) -> None:
        """Check that a field is a finite number above (or at, if zero is allowed) `low` and below `high`."""
        value = getattr(self, name)
        ok = isinstance(value, int | float) and not isinstance(value, bool) and value == value and value < high
        if not ok or (value < low if allow_zero else value <= low):
            limit = f"{'>=' if allow_zero else '>'} {low:g}" + (f" and < {high:g}" if high != float("inf") else "")
            raise ConfigError(f"{type(self).__name__}: {name} must be a finite number {limit}. Got {value!r}.")

    def fraction(self, name: str) -> None:
        """Check that a field is a number in [0, 1]."""
        value = getattr(self, name)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1:
            raise ConfigError(f"{type(self).__name__}: {name} must be a number in [0, 1]. Got {value!r}.")

    def count(self, name: str, low: int = 0) -> None:
        """Check that a field is an integer of at least `low`."""
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise ConfigError(f"{type(self).__name__}: {name} must be an integer >= {low}. Got {value!r}.")

    def one_of(self, name: str, *allowed: str) -> None:
        """Check that a field is one of some words."""
        value = getattr(self, name)
        if value not in allowed:
            words = ", ".join(repr(a) for a in allowed)
            raise ConfigError(f"{type(self).__name__}: {name} must be one of {words}. Got {value!r}.")


@dataclass(frozen=True, kw_only=True)
class Averaging(Training):
    """A method that averages uploads: by examples or all alike, with the head kept private or not.

    With a `server_optimizer` the server takes the mean change of a round as a gradient: "sgd" with `server_momentum`
    is FedAvgM, "adagrad", "adam" and "yogi" are those of FedOpt, with β₁ = `server_momentum`.
    """

    sgd_momentum: ClassVar[float] = 0.9
    """The server's momentum where none is given."""

    weighting: Literal["samples", "uniform"] = "samples"
    private_head: bool = False
    server_optimizer: Rule = "none"
    server_lr: float | None = None
    server_momentum: float | None = None
    server_beta2: float = 0.99
    server_epsilon: float = 1e-3
    server_corrected: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.one_of("weighting", "samples", "uniform")
        self.one_of("server_optimizer", "none", "sgd", "adam", "adagrad", "yogi")
        if self.server_lr is not None:
            self.require("server_lr", 0.0)
        if self.server_momentum is not None:
            self.require("server_momentum", 0.0, 1.0, allow_zero=True)
        self.require("server_beta2", 0.0, 1.0, allow_zero=True)
        self.require("server_epsilon", 0.0)

    def refuse_server_optimizer(self, why: str) -> None:
        """For methods whose server takes other steps: no optimiser, and why not."""
        if self.server_optimizer != "none":
            raise ConfigError(
                f"{type(self).__name__}: server_optimizer must be 'none', as {why}. Got {self.server_optimizer!r}."
            )

    def with_moments(self, parts: Tree, models: int | None = None) -> Tree:
        """What the server averages as it starts, and the state of its optimiser; see `server_step.moments`."""
        if self.server_optimizer == "none":
            return parts
        return {**parts, "optimizer": moments(self.server_optimizer, self._inertia, parts, models)}

    @property
    def _inertia(self) -> float:
        """β of momentum, β₁ of the adaptive rules."""
        if self.server_momentum is not None:
            return self.server_momentum
        return self.sgd_momentum if self.server_optimizer == "sgd" else 0.9

    def stepped(self, server: Tree, mean: Tree, live: Tensor | None = None) -> Tree:
        """What the server averages after a round: the means, or where its optimiser goes from `server` with them.

        `live`: which of stacked models were reported for.
        """
        if self.server_optimizer == "none":
            return mean
        new, state = step(
            self.server_optimizer,
            {k: server[k] for k in mean},
            mean,
            server["optimizer"],
            (1.0 if self.server_optimizer == "sgd" else 0.01) if self.server_lr is None else self.server_lr,
            momentum=self._inertia,
            beta2=self.server_beta2,
            epsilon=self.server_epsilon,
            corrected=self.server_corrected,
            live=live,
        )
        return {**new, "optimizer": state}

    def size(self, server: Tree) -> float:
        """The norm of the server's state, without that of its optimiser."""
        return super().size({k: part for k, part in server.items() if k != "optimizer"})

    @property
    def weight(self) -> Literal["samples", "one", "own"]:
        return "samples" if self.weighting == "samples" else "one"

    def weigh(self, visit: Visit) -> Tensor:
        """This client's weight in the mean."""
        return visit.examples if self.weighting == "samples" else torch.ones_like(visit.examples)


@dataclass(frozen=True, kw_only=True)
class Sharing(Averaging):
    """One tree `theta` is averaged, the rest `h` stays on the client; a method says how they are trained."""

    local_stats: ClassVar[bool] = True
    """Whether running statistics of batch normalisation stay on the client, re-estimated before use."""

    def private(self, task: Task) -> list[str]:
        """Names of the parameters that stay on the client."""
        return task.need_head() if self.private_head else []

    def named(self, task: Task, personal_layers: tuple[str, ...]) -> list[str]:
        """Names of the parameters in layers that are to be personal."""
        names = [k for k in task.names if k.startswith(personal_layers)]
        if not names:
            raise ConfigError(
                f"{type(self).__name__}: personal_layers must begin the name of a parameter. Got"
                f" {list(personal_layers)}; the model has {', '.join(task.names)}."
            )
        return names

    def split(self, task: Task, params: Params) -> tuple[Params, Params]:
        """What is shared and what stays at home."""
        mine = [*self.private(task), *(task.stats if self.local_stats else ())]
        return tree.without(params, mine), tree.select(params, mine)

    def init_server(self, task: Task, federation: Federation) -> Tree:
        """The shared part of the common start."""
        return self.with_moments({"theta": self.split(task, task.init())[0]})

    def init_client(self, task: Task, who: ClientInfo) -> Tree:
        """The private part of the common start."""
        return {"h": self.split(task, task.init())[1]}

    def download(self, server: Tree, ids: Tensor, capacity: Capacity, round: int) -> Down:
        """The shared part."""
        return Down(shared={"theta": server["theta"]})

    def server_update(self, server: Tree, round: Round) -> Tree:
        """The weighted mean, or a step towards it."""
        return self.stepped(server, {"theta": round.mean["theta"]})

    def whole(self, client: Tree, down: Tree) -> Params:
        """All parameters of a client's model."""
        params: Params = down["theta"] | client["h"]
        return params

    def trained(self, down: Tree, sent: Sent, capacity: Capacity) -> Tree:
        """The client's own upload, as far as it is of the download's form, or can be brought into it by `lift`."""
        own = {**sent.mean, **sent.each}
        if not down.keys() <= own.keys():
            own |= self.lift(sent.mean, down, capacity)
        return {k: own.get(k, v) for k, v in down.items()}

    def personal_plan(self, task: Task) -> Mapping[str, Amount]:
        """One pass over the training data where statistics must be re-estimated."""
        return {"all": All()} if task.stats and self.local_stats else {}

    def personal(self, task: Task, client: Tree, down: Tree, visit: Visit) -> Tree:
        """Shared and private part together."""
        params = self.whole(client, down)
        return task.estimate_statistics(params, visit["all"]) if "all" in visit.batches else params


@dataclass(frozen=True, kw_only=True)
class Layered(Sharing):
    """The private part is the head, or the layers that are named."""

    private_head: bool = True
    personal_layers: tuple[str, ...] = ()

    def private(self, task: Task) -> list[str]:
        """The head, or the layers named."""
        return self.named(task, self.personal_layers) if self.personal_layers else super().private(task)
