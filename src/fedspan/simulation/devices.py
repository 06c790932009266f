"""What devices can afford: the cost of a client's round, the rank that fits a device, and a simulated clock."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple

from annotated_types import MinLen
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from fedspan import tree, wire
from fedspan.data.federated import FederatedData
from fedspan.errors import ConfigError
from fedspan.learn.products import OPERATIONS
from fedspan.learn.task import Task
from fedspan.method import Abilities, Capacity, Method, Ranked
from fedspan.method.fields import Positive, Share, check
from fedspan.simulation.dry_run import dry_run_round
from fedspan.simulation.settings import Settings

__all__ = ["Choice", "Clock", "Cost", "Devices", "assign", "measure"]


STEPS = 32
"""Local steps that are enough to measure a round by."""


@dataclass(frozen=True, kw_only=True)
class Devices:
    """`[devices]`: what clients compute and send with, each list in turn over them; together a table."""

    gflops: tuple[Positive, ...] = ()
    """Speeds of the devices, in 10⁹ floating-point operations per second as they are reached in training."""
    mbps: tuple[Positive, ...] = ()
    """Speeds of their connections, up and down alike, in 10⁶ bits per second."""
    memory_mb: tuple[Positive, ...] = ()
    """Their memory for training, in 10⁶ bytes; without it memory does not matter."""
    round_seconds: Positive | None = None
    """The longest round, in seconds; with it, or with memory, clients of methods with ranks get one that fits."""
    ratios: Annotated[tuple[Share, ...], MinLen(1)] = (1.0, 0.5, 0.375, 0.3, 0.2, 0.1)
    """Rank ratios to choose from: every client gets the largest that fits it."""

    def __post_init__(self) -> None:
        check(self, "Devices")
        if bool(self.gflops) != bool(self.mbps):
            raise ConfigError("Devices: gflops and mbps must be given together. Got one of them.")
        if self.round_seconds is not None and not self.gflops:
            raise ConfigError(
                f"Devices: round_seconds must be a number > 0, with gflops and mbps. Got {self.round_seconds!r}."
            )

    @property
    def timed(self) -> bool:
        """Whether rounds can be timed."""
        return bool(self.gflops)

    @property
    def limited(self) -> bool:
        """Whether a rank must fit anything."""
        return self.round_seconds is not None or bool(self.memory_mb)

    def seconds(self, client: int, flops: float, sent: float) -> float | None:
        """Time of a client's round: computing, then sending `sent` bytes; None if speeds are not known."""
        if not self.timed:
            return None
        speed, rate = self.gflops[client % len(self.gflops)], self.mbps[client % len(self.mbps)]
        return flops / (speed * 1e9) + 8 * sent / (rate * 1e6)

    def memory(self, client: int) -> float | None:
        """Bytes that a client has for training."""
        return self.memory_mb[client % len(self.memory_mb)] * 1e6 if self.memory_mb else None

    def fits(self, client: int, seconds: float | None, memory: float) -> bool:
        """Whether a client can afford a round of this cost."""
        room = self.memory(client)
        slow = self.round_seconds is not None and seconds is not None and seconds > self.round_seconds
        return not slow and (room is None or memory <= room)


class Cost(NamedTuple):
    """A client's round: operations per training example, the most memory at once, bytes up and down."""

    flops: float
    memory: int
    up: int
    down: int


class Choice(NamedTuple):
    """What a client was given, and what a round costs it."""

    client: int
    ratio: float | None
    flops: float
    memory: int
    up: int
    down: int
    seconds: float | None
    fits: bool


def measure(method: Method, task: Task, data: FederatedData, client: int, settings: Settings, level: int = 0) -> Cost:
    """Run a round of one client on a few of its minibatches, at one of its levels, and count what it took.

    Operations are those of products and convolutions, forward and backward, in all epochs and phases, with what the
    safeguard measures after them, spread over the examples. Memory is what tensors held at once: what came and was
    kept, the model, gradients and activations; not a kernel's scratch space.
    """
    rows = data.train[client]
    size = len(rows) if settings.batch_size == "full" else min(len(rows), settings.batch_size)
    # What is not done in every step (a decay, say) needs several steps to be seen; full minibatches only.
    several = size * max(1, min(len(rows) // size, STEPS // max(1, settings.epochs)))
    one = replace(data, train=[r[:several] if i == client else r[:1] for i, r in enumerate(data.train)])
    counter, peak = FlopCounterMode(display=False, custom_mapping=dict(OPERATIONS)), Peak()
    # The second round: what a method leaves out of the first (an alignment, say) is there.
    within = (counter, peak)
    tried = dry_run_round(method, task, one, client, size, epochs=settings.epochs, round=2, level=level, within=within)
    held = tree.nbytes(tried.rows) + tree.nbytes(tried.common) + peak.most
    sent = tree.take(tried.answer.sent, 0)
    up = wire.count(sent.parts) | {k: int(v[0]) for k, v in tried.answer.coded.items()}
    down = wire.count(tried.down)
    return Cost(counter.get_total_flops() / several, held, sum(up.values()), sum(down.values()))


def assign(
    method: Method, task: Task, data: FederatedData, devices: Devices, settings: Settings
) -> tuple[Method, list[Choice]]:
    """The method with the largest ratio every client can afford, and the cost of a round for each.

    A client that no ratio fits gets the smallest one, and `fits` says so. Methods without ranks, and devices without
    limits, stay as they are.
    """
    ratios = sorted(set(devices.ratios), reverse=True)
    known: dict[Any, Cost] = {}
    given: list[float] | None = None
    if devices.limited and isinstance(method, Ranked) and method.with_ratios((1.0,)) is not None:
        given = []
        for i in range(data.clients):
            for r in ratios:
                if r not in known:
                    alike = method.with_ratios((r,))
                    assert alike is not None
                    known[r] = measure(alike, task, data, largest(data), settings)
                if devices.fits(i, _seconds(devices, i, known[r], len(data.train[i])), known[r].memory):
                    break
            given.append(r)
        method = method.with_ratios(tuple(given)) or method
    choices = []
    capacities = [Abilities(method).capacity(task, i) for i in range(data.clients)]
    for i in range(data.clients):
        label: Any = given[i] if given is not None else ("as it is", capacities[i])
        if label not in known:
            known[label] = measure(method, task, data, largest(data, capacities, i), settings)
        cost = known[label]
        seconds = _seconds(devices, i, cost, len(data.train[i]))
        fits = devices.fits(i, seconds, cost.memory)
        ratio = None if given is None else given[i]
        flops = cost.flops * len(data.train[i])
        choices.append(Choice(i, ratio, flops, cost.memory, cost.up, cost.down, seconds, fits))
    return method, choices


def largest(data: FederatedData, capacities: Sequence[Capacity] = (), like: int = 0) -> int:
    """The client with most examples, of those with the capacity of `like` if capacities are given."""
    able = [i for i in range(data.clients) if not capacities or capacities[i] == capacities[like]]
    return max(able, key=lambda i: len(data.train[i]))


def _seconds(devices: Devices, client: int, cost: Cost, examples: int) -> float | None:
    return devices.seconds(client, cost.flops * examples, cost.up + cost.down)


class Timed(NamedTuple):
    """A round on devices: its seconds, who was last, and the operations of all participants together."""

    seconds: float
    slowest: int
    flops: float


class Clock:
    """How long rounds would take on real devices: a round is as long as its slowest participant."""

    def __init__(self, devices: Devices, cost: Callable[[int, Capacity], Cost]) -> None:
        self.devices, self.cost = devices, cost
        self._known: dict[Capacity, Cost] = {}

    def round(self, examples: dict[int, int], capacity: dict[int, Capacity], sent: dict[Capacity, float]) -> Timed:
        """What a round takes.

        Args:
            examples: training examples of every participant.
            capacity: what each trained with.
            sent: bytes up and down of one participant, by capacity.
        """
        times, operations = [], 0.0
        for i, n in examples.items():
            flops = self._cost(i, capacity[i]).flops * n
            times.append((self._seconds(i, flops, sent[capacity[i]]), i))
            operations += flops
        return Timed(*max(times), operations)

    def alone(self, client: int, examples: int, capacity: Capacity) -> tuple[float, float]:
        """Seconds and operations of one client's round, known before it trains: bytes are those that were measured."""
        cost = self._cost(client, capacity)
        flops = cost.flops * examples
        return self._seconds(client, flops, cost.up + cost.down), flops

    def _cost(self, client: int, capacity: Capacity) -> Cost:
        if capacity not in self._known:
            self._known[capacity] = self.cost(client, capacity)
        return self._known[capacity]

    def _seconds(self, client: int, flops: float, sent: float) -> float:
        seconds = self.devices.seconds(client, flops, sent)
        assert seconds is not None
        return seconds


class Peak(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The most bytes that tensors made inside held at one time."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self._live: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {t.untyped_storage().data_ptr() for t in _tensors((args, kwargs or {}))}
        out = func(*args, **(kwargs or {}))
        for t in _tensors(out):
            storage = t.untyped_storage()
            at = storage.data_ptr()
            if at in before or at in self._live:  # a view, or a result written into what was there
                continue
            self._live[at] = storage.nbytes()
            self.now += storage.nbytes()
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._free, at)
        return out

    def _free(self, at: int) -> None:
        self.now -= self._live.pop(at, 0)


def _tensors(x: Any) -> list[Tensor]:
    """All tensors in what an operation takes or gives."""
    if isinstance(x, Tensor):
        return [x]
    if isinstance(x, dict):
        return [t for v in x.values() for t in _tensors(v)]
    return [t for v in x for t in _tensors(v)] if isinstance(x, list | tuple) else []
