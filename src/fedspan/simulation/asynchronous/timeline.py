"""When clients of an asynchronous run start and finish: a list of events that depends on nothing that is computed.

How long a client trains follows from its examples, the operations of a round and its device, all known before it
begins. So a round's events can be listed before anybody trains, and all who start in a round are computed at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from fedspan.errors import CheckpointError, ConfigError
from fedspan.method.fields import AtLeast1, Count, NonNegative, check
from fedspan.randomness import generator
from fedspan.simulation.defence import Defence
from fedspan.simulation.devices import Devices
from fedspan.simulation.settings import Settings, cohort


@dataclass(frozen=True, kw_only=True)
class Asynchronous:
    """`[asynchronous]`: clients train without waiting for one another, and the server steps whenever enough are in."""

    buffer: AtLeast1 = 10
    """Uploads that make a step of the server, which is a round; K of FedBuff."""
    concurrency: AtLeast1 | None = None
    """Clients that train at any time; as many as a synchronous round asks (`train.participation`) if not given."""
    staleness_exponent: NonNegative = 0.5
    """An upload that s rounds have overtaken weighs (1 + s)^-a times as much as a fresh one; a, 0: just as much."""
    max_staleness: Count | None = None
    """An upload that more rounds than that have overtaken is thrown away; none: all count."""

    def __post_init__(self) -> None:
        check(self, "Asynchronous")

    def factor(self, staleness: int) -> float:
        """What an upload's weight is multiplied by."""
        return float((1 + staleness) ** -self.staleness_exponent)

    def check_with(self, settings: Settings, devices: Devices, defence: Defence | None) -> None:
        """Refuse what does not go together with other sections.

        Raises:
            ConfigError: in one sentence.
        """
        if not devices.timed:
            raise ConfigError(
                "Asynchronous: devices must have gflops and mbps, whose clock says when uploads arrive. Got none; add"
                " the section [devices]."
            )
        if settings.sampling != "fraction":
            raise ConfigError(
                f"Asynchronous: train.sampling must be 'fraction', as a freed place is filled. Got"
                f" {settings.sampling!r}."
            )
        if settings.drop_rate:
            raise ConfigError(
                f"Asynchronous: train.drop_rate must be 0. Got {settings.drop_rate}; max_staleness throws away uploads"
                " of slow clients."
            )
        if defence is not None and defence.on:
            raise ConfigError(
                f"Asynchronous: defence.rule must be 'none', as it judges uploads of one round. Got {defence.rule!r}."
            )

    def places(self, clients: int, settings: Settings) -> int:
        """How many clients train at any time.

        Raises:
            ConfigError: if there are not enough clients for that, or for the buffer.
        """
        for name, value in (("buffer", self.buffer), ("concurrency", self.concurrency or 1)):
            if value > clients:
                raise ConfigError(
                    f"Asynchronous: {name} must be at most the number of clients, {clients}. Got {value}."
                )
        return self.concurrency or cohort(clients, settings)


@dataclass(frozen=True)
class Flight:
    """A client that trains, or whose upload is on its way."""

    client: int
    round: int
    """The round in which it started: one more than the server's steps at that time."""
    number: int
    """How many started before it in the run."""
    arrives: float
    """When its upload is there, in seconds on the simulated clock."""


class Events(NamedTuple):
    """What happens until the server's next step."""

    started: list[Flight]
    arrived: list[Flight]
    """Uploads that make the step, in the order in which they came."""
    late: list[Flight]
    """Uploads that came and are thrown away."""
    after: Timeline


@dataclass(frozen=True)
class Timeline:
    """Who trains now, and what time it is."""

    now: float = 0.0
    started: int = 0
    """How many clients have started since the beginning."""
    flights: tuple[Flight, ...] = ()

    def until_step(
        self, t: int, rule: Asynchronous, places: int, clients: int, seed: int, seconds: Callable[[int], float]
    ) -> Events:
        """Go on until round t has its uploads.

        A place that is free is taken at once by a client that neither trains nor has sent anything since the last step;
        uploads that come at the same moment free their places together. If nobody trains and nobody is left out, the
        next ones are drawn as a synchronous round draws its clients.

        Args:
            places: how many clients train at any time.
            seconds: how long a client's round takes.
        """
        now, number, flying = self.now, self.started, list(self.flights)
        started: list[Flight] = []
        arrived: list[Flight] = []
        late: list[Flight] = []
        while len(arrived) < rule.buffer:
            if all(f.arrives > now for f in flying):
                taken = {f.client for f in (*flying, *arrived, *late)}
                free = [i for i in range(clients) if i not in taken]
                for i in _drawn(free, places - len(flying), clients, seed, t, number):
                    flying.append(Flight(i, t, number, now + seconds(i)))
                    started.append(flying[-1])
                    number += 1
            # There is always one: those who start in this round are in time, and enough did not train when it began.
            first = min(flying, key=lambda f: (f.arrives, f.number))
            flying.remove(first)
            now = first.arrives
            overdue = rule.max_staleness is not None and t - first.round > rule.max_staleness
            (late if overdue else arrived).append(first)
        return Events(started, arrived, late, Timeline(now, number, tuple(flying)))

    def to_json(self) -> dict[str, Any]:
        """As a checkpoint holds it."""
        return {"now": self.now, "started": self.started, "flights": [asdict(f) for f in self.flights]}

    @classmethod
    def from_json(cls, held: Mapping[str, Any], uploads: Mapping[str, Any]) -> Timeline:
        """What a checkpoint holds; the start of a run if it holds nothing.

        Raises:
            CheckpointError: if uploads on their way are not those of the clients that train.
        """
        if not held:
            return cls()
        try:
            flights = tuple(Flight(**f) for f in held["flights"])
            found = cls(float(held["now"]), int(held["started"]), flights)
        except (KeyError, TypeError, ValueError) as e:
            raise CheckpointError("Checkpoint: what it holds of clients in training is damaged. Use --fresh.") from e
        if sorted(str(f.client) for f in flights) != sorted(uploads):
            raise CheckpointError("Checkpoint: uploads on their way are missing in it. Start afresh with --fresh.")
        return found


def _drawn(free: Sequence[int], places: int, clients: int, seed: int, t: int, number: int) -> list[int]:
    """Who starts next, in ascending order."""
    size = min(places, len(free))
    if size <= 0:
        return []
    rng = generator(seed, "sample", t) if len(free) == clients else generator(seed, "start", number)
    return sorted(rng.choice(free, size, replace=False).tolist())
