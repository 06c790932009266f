"""What a method keeps and sends, found by running one round of it on two made-up clients."""

from __future__ import annotations

import inspect
import re
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import fedspan
from fedspan import tree, wire
from fedspan.data.federated import FederatedData
from fedspan.learn.task import Task
from fedspan.method import Abilities, Discloses, Method, Ranked
from fedspan.method.fields import flat
from fedspan.methods import METHODS, make
from fedspan.models import build
from fedspan.randomness import generator
from fedspan.simulation.dry_run import dry_run_round
from fedspan.tree import Outer, Tree


@dataclass(frozen=True)
class Payload:
    """One client's round: what it received, keeps and sent."""

    down: Tree
    kept: Tree
    mean: Tree
    each: Tree


@cache
def toy() -> tuple[Task, FederatedData]:
    """Two clients of different groups with a handful of random examples, and a small perceptron."""
    rng = generator(0, "toy")
    pairs = [(rng.normal(size=(8, 4)).astype("float32"), rng.permutation(8) % 2) for _ in range(2)]
    data = FederatedData.from_arrays(pairs, groups=[0, 1], classes=2, validation_fraction=0.25)
    return Task(lambda: build("mlp", (4,), 2, hidden=[8]), seed=0), data


def probe(method: Method, task: Task, data: FederatedData, client: int = 0, batch: int = 4) -> Payload:
    """Run one round of one client through the engine, as the simulator does."""
    tried = dry_run_round(method, task, data, client, batch)
    sent = tree.take(tried.answer.sent, 0)
    return Payload(tried.down, tree.take(tried.answer.rows, 0), sent._replace(each={}).parts, sent.each)


def facts(name: str) -> dict[str, Any]:
    """Everything `fedspan methods` tells about a method."""
    cls = METHODS[name]
    method = make(name)
    able = Abilities(method)
    payload = probe(method, *toy())
    return {
        "name": name,
        "family": cls.about.family,
        "paper": cls.about.reference,
        "equations": equations(cls),
        "shared": names(payload.down),
        "private": names(payload.kept),
        "sent_mean": names(payload.mean),
        "sent_each": names(payload.each),
        "weight": able.weight,
        "secure_aggregation": "no" if names(payload.each) or able.weight == "own" else able.secure_sum,
        "heterogeneous": "yes" if cls.about.any_model or issubclass(cls, Ranked) else "no",
        "received": {path: list(t.shape) for path, t in tree.items(payload.mean | payload.each)},
        "discloses": _disclosed(cls.about.discloses),
        "file": _file(cls),
        "fields": {k: _default(v) for k, v in flat(method).items()},
    }


@cache
def reference() -> tuple[Task, FederatedData]:
    """Two clients with ten random examples of 64 numbers, and a perceptron of 64-32-10 as for the bundled digits."""
    rng = generator(0, "reference")
    pairs = [(rng.normal(size=(14, 64)).astype("float32"), rng.permutation(14) % 10) for _ in range(2)]
    data = FederatedData.from_arrays(pairs, groups=[0, 1], classes=10, validation_fraction=0.25)
    return Task(lambda: build("mlp", (64,), 10, hidden=[32]), seed=0), data


def traffic(name: str) -> tuple[int, int]:
    """Bytes that one client receives and sends in its first round, with default fields on the reference model."""
    method = make(name)
    payload, codecs = probe(method, *reference()), Abilities(method).coded.codecs(1)
    sizes = []
    for part in (payload.down, payload.mean | payload.each):
        sizes.append(sum(wire.count(part, wire.roundtrip(part, codecs)[1]).values()))
    return sizes[0], sizes[1]


def published(name: str) -> list[str]:
    """The published tables that `fedspan reproduce` runs the method in, without their data sets."""
    from fedspan.studies.papers import available, load_experiment

    found: dict[str, None] = {}
    for e in available():
        if any(row.method == name for row in load_experiment(e).rows):
            paper, _, file = e.partition("/")
            found[f"{paper}/{file if file.startswith('figure') else file.split('-')[0]}"] = None
    return list(found)


def names(payload: Tree) -> list[str]:
    """The top-level names that hold anything; a matrix sent as two vectors says so."""
    return [k + (" (rank one)" if _rank_one(v) else "") for k, v in payload.items() if _numbers(v)]


def equations(cls: type[Method]) -> list[str]:
    """The equations its source refers to, those of the methods it extends included."""
    found: dict[str, None] = {}
    for part in cls.__mro__:
        if part.__module__.startswith("fedspan.methods."):
            found |= dict.fromkeys(re.findall(r"eq\. \([^)\n]{1,20}\)", inspect.getsource(part)))
    return sorted(found, key=lambda e: [int(n) for n in re.findall(r"\d+", e)])


def _disclosed(declared: Discloses | None) -> dict[str, Any] | None:
    """What a server can compute, as values and in words; None where a method does not say."""
    return (
        None if declared is None else {**asdict(declared), "words": declared.sentences, "keywords": declared.keywords}
    )


def _numbers(part: Any) -> int:
    return sum(t.numel() for t in tree.leaves(part))


def _rank_one(part: Any) -> bool:
    return isinstance(part, Outer) or (isinstance(part, dict) and any(_rank_one(v) for v in part.values()))


def _file(cls: type[Method]) -> str:
    path = Path(inspect.getsourcefile(cls) or "").resolve()
    root = Path(fedspan.__file__).resolve().parent.parent
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else path.name


def _default(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
