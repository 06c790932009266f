"""What a method is: a frozen dataclass whose fields are its hyper-parameters, with six pure functions and a plan.

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
>>> MeanLabel().about.family
'baseline'
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

from torch import Tensor

from fedspan.learn.batches import Amount, Batches, Epochs
from fedspan.learn.task import Task
from fedspan.method.disclosure import Discloses
from fedspan.method.fields import check
from fedspan.tree import EMPTY, Tree

Capacity: TypeAlias = Hashable
"""What a device can afford (a rank ratio, a layer set, an architecture). Clients of one capacity share all shapes."""

Weight: TypeAlias = Literal["samples", "one", "own"]
"""How uploads are weighted: by examples, all alike, or by a scalar of the method's own."""


class Down(NamedTuple):
    """What the server sends: one copy for all, and rows of which row k goes to client `ids[k]` alone."""

    shared: Tree = EMPTY
    own: Tree = EMPTY


class Sent(NamedTuple):
    """What a client sends."""

    weight: Tensor
    """n_k, 1, or the method's own scalar, as `About.weight` declares."""
    mean: Tree = EMPTY
    """The server needs only a weighted mean of this."""
    each: Tree = EMPTY
    """The server needs every client's own copy: similarity, clustering. Sent in the clear."""
    weights: Tree = EMPTY
    """Weights >= 0 of their own for parts of `mean`, by name: a scalar, or a tensor over the leading axes of the part.

    For such a part the server gets Σ w x / Σ w, zero where no client has weight, and Σ w as `Round.totals[name]`.
    """

    @property
    def parts(self) -> Tree:
        """All that is sent besides the weight, by the names under which bytes are counted."""
        return {**self.mean, **self.each, **{f"{name} weights": w for name, w in self.weights.items()}}


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
    totals: Tree = field(default_factory=dict)
    """Σ w of the parts of `mean` that have weights of their own (`Sent.weights`)."""


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


@dataclass(frozen=True)
class Yardstick:
    """What a method is to others in a comparison."""

    role: Literal["alone", "common", "told"]
    """`alone`: nothing is shared; `common`: one model for all; `told`: it knows what a method must find out."""
    phrase: str
    """What reports call it inside a sentence."""


@dataclass(frozen=True, kw_only=True)
class About:
    """Constants of a method. What is left out is as the method's base has it; a function is asked with the method."""

    family: str | None = None
    """The paper or the kind of method it belongs to: `baseline`, `pfl-mf`, `factorized-fl`, `fedloru`, `fedara` …"""
    reference: str | None = None
    """Authors, place and year."""
    weight: Weight | Callable[[Any], Weight] | None = None
    """How uploads are weighted."""
    weight_bound: float | None = None
    """The largest weight of the method's own that the server accepts."""
    secure_sum: str | Callable[[Any], str] | None = None
    """Whether what is sent as `mean` could be added up without being seen: "yes", "no", or with which option."""
    needs_groups: bool | None = None
    """Whether the partition must know the true groups of the clients."""
    needs_classes: bool | None = None
    """Whether the model's last layer must have one row per class."""
    any_model: bool | None = None
    """Whether clients may have models of different kinds, with heads of one shape."""
    yardstick: Yardstick | None = None
    """What others are measured by it; never inherited: what extends a yardstick is a method like others."""
    discloses: Discloses | None = None
    """What a server can compute from an upload; never inherited: what extends a method may send more. None: unknown."""

    def over(self, base: About) -> About:
        """This, with what it leaves out from `base`."""
        given = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}
        return About(**{f.name: getattr(base, f.name) for f in fields(base) if f.name not in _OWN} | given)


_OWN = frozenset({"yardstick", "discloses"})  # what a method says of itself alone


@dataclass(frozen=True, kw_only=True)
class Method:
    """Base of all methods: six functions and a plan. What only some methods have is in `method.capabilities`."""

    about: ClassVar[About] = About(
        family="baseline",
        reference="",
        weight="samples",
        weight_bound=1e12,
        secure_sum="yes",
        needs_groups=False,
        needs_classes=False,
        any_model=False,
    )

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        base = next(b.__dict__["about"] for b in cls.__mro__[1:] if "about" in b.__dict__)
        if "about" in cls.__dict__ or any(getattr(base, name) is not None for name in _OWN):
            cls.about = cls.__dict__.get("about", About()).over(base)

    def __post_init__(self) -> None:
        check(self)

    def plan(self) -> Mapping[str, Amount]:
        """The minibatch streams a visit brings."""
        return {"train": Epochs()}

    def init_server(self, task: Task, federation: Federation) -> Tree:
        """The server's state before the first round."""
        raise TypeError(f"{type(self).__name__}: init_server must be defined.")

    def init_client(self, task: Task, who: ClientInfo) -> Tree:
        """One client's private state before its first round; of it nothing is sent but what `client_update` sends."""
        return {}

    def download(self, server: Tree, ids: Tensor, capacity: Capacity, round: int) -> Down:
        """What clients `ids`, all of one capacity, receive."""
        raise TypeError(f"{type(self).__name__}: download must be defined.")

    def client_update(self, task: Task, client: Tree, down: Tree, visit: Visit) -> tuple[Tree, Sent]:
        """One client's round: what it keeps and what it sends."""
        raise TypeError(f"{type(self).__name__}: client_update must be defined.")

    def server_update(self, server: Tree, round: Round) -> Tree:
        """The server's state after a round."""
        raise TypeError(f"{type(self).__name__}: server_update must be defined.")

    def personal(self, task: Task, client: Tree, down: Tree, visit: Visit) -> Tree:
        """The weights a client predicts with; may fit on the streams of `Adapts.personal_plan`."""
        raise TypeError(f"{type(self).__name__}: personal must be defined.")
