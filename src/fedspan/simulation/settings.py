"""How a run is carried out, and who takes part in a round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from fedspan.errors import ConfigError
from fedspan.learn import accelerator
from fedspan.learn.precision import Precision
from fedspan.method.fields import AtLeast1, Count, Fraction, NonNegative, Share, build, check
from fedspan.randomness import generator


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a run is carried out: the `[train]` section of an experiment file.

    Those that cannot change the numbers are named in `simulation.identity`.
    """

    participation: Share = 1.0
    """Share of the clients that is asked in a round."""
    sampling: Literal["fraction", "bernoulli"] = "fraction"
    """Whether that share is drawn exactly, at least one client, or every client with that probability."""
    batch_size: AtLeast1 | Literal["full"] = 32
    """Examples in a minibatch; `full` takes all of a client's at once."""
    epochs: Count = 1
    """Passes over a client's training data in a round, unless the method says otherwise."""
    evaluate_every: AtLeast1 = 10
    """Rounds from one evaluation to the next; the last round is always evaluated."""
    evaluate_clients: AtLeast1 | None = None
    """How many clients, drawn anew, an evaluation before the last one looks at; all if not given."""
    evaluate_part: Literal["test", "validation"] = "test"
    """Which of a client's examples its model is judged by."""
    evaluate_after: bool = False
    """Whether models are also judged after a local round of their own, before the server answers."""
    drop_rate: Fraction = 0.0
    """Probability with which a client that was asked does not answer."""
    drop: Literal["after", "before"] = "after"
    """Whether a client that does not answer has trained, and keeps what it learnt, or was lost before it began."""
    on_divergence: Literal["stop", "halve"] = "stop"
    """What a run that diverges does: stop, or go back and halve the learning rate, three times at most."""
    precision: Precision = "float32"
    """What numbers are computed in; `bf16` computes the products of training passes in 16 bits, all else in float32."""
    device: str = "auto"
    """What a run computes on: `cpu`, `cuda` (every CUDA device), `cuda:1` (that one) or `mps`; `auto` takes CUDA where
    there is any, and otherwise the CPU."""
    mapping: Literal["auto", "vmap", "folded", "loop"] = "auto"
    """Whether clients are computed together (`vmap`, or `folded` into one batch) or one after another (`loop`);
    `auto` chooses by the model alone."""
    chunk: AtLeast1 | None = None
    """Clients in one piece of work; chosen by the sizes of round and model if not given."""
    workers: AtLeast1 | None = None
    """Processes that share the clients of a round; one for each core at hand if not given. On an accelerator one for
    each device, and this many at most."""
    start_method: Literal["auto", "fork", "spawn"] = "auto"
    """How those processes begin: as forks (Linux only) or as new interpreters; `auto` forks where that is safe."""
    checkpoint_every: AtLeast1 = 1
    """Rounds from one checkpoint to the next."""
    checkpoint_seconds: NonNegative = 2.0
    """The least number of seconds between two checkpoints."""
    memory_mb: AtLeast1 = 1024
    """Memory for the clients' states, in units of 2²⁰ bytes; what is beyond it waits on disk."""

    def __post_init__(self) -> None:
        check(self, "Train")
        accelerator.check_name(self.device)

    @property
    def torch_dtype(self) -> torch.dtype:
        """What weights, data and everything sent are kept in."""
        return torch.float64 if self.precision == "float64" else torch.float32


def settings_from(values: Mapping[str, Any], who: str) -> Settings:
    """Settings from the keys of a section; `dtype`, which `precision` has replaced, still says float32 or float64.

    Raises:
        ConfigError: for unknown keys and wrong values, or if `dtype` and `precision` contradict one another.
    """
    given = dict(values)
    if "dtype" in given:
        old = given.pop("dtype")
        if old not in ("float32", "float64"):
            raise ConfigError(f"{who}: dtype must be one of 'float32', 'float64'. Got {old!r}; use precision instead.")
        if (new := given.setdefault("precision", old)) != old:
            raise ConfigError(
                f"{who}: dtype and precision must say the same. Got {old!r} and {new!r}; leave out dtype, which"
                " precision has replaced."
            )
    return build(Settings, given, who)


def sample(clients: int, settings: Settings, seed: int, t: int) -> list[int]:
    """Who is asked in round t, in ascending order."""
    rng = generator(seed, "sample", t)
    if settings.sampling == "bernoulli":
        return np.flatnonzero(rng.random(clients) < settings.participation).tolist()
    return sorted(rng.choice(clients, cohort(clients, settings), replace=False).tolist())


def cohort(clients: int, settings: Settings) -> int:
    """How many clients the share that is asked in a round comes to."""
    return max(1, round(settings.participation * clients))


def dropped(sampled: list[int], settings: Settings, seed: int, t: int) -> set[int]:
    """Who does not answer in round t."""
    if settings.drop_rate == 0.0:
        return set()
    lost = generator(seed, "drop", t).random(len(sampled)) < settings.drop_rate
    return {i for i, gone in zip(sampled, lost) if gone}
