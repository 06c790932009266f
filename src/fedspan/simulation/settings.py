"""How a run is carried out, and who takes part in a round."""

from __future__ import annotations

import math
import typing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from fedspan.errors import ConfigError
from fedspan.randomness import generator

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a run is carried out: the `[train]` section of an experiment file.

    Those that cannot change the numbers are named in `simulation.identity`.
    """

    participation: float = 1.0
    sampling: Literal["fraction", "bernoulli"] = "fraction"
    batch_size: int | Literal["full"] = 32
    epochs: int = 1
    evaluate_every: int = 10
    evaluate_clients: int | None = None
    evaluate_part: Literal["test", "validation"] = "test"
    evaluate_after: bool = False
    drop_rate: float = 0.0
    drop: Literal["after", "before"] = "after"
    on_divergence: Literal["stop", "halve"] = "stop"
    dtype: Literal["float32", "float64"] = "float32"
    mapping: Literal["auto", "vmap", "loop"] = "auto"
    chunk: int | None = None
    workers: int | None = None
    checkpoint_every: int = 1
    checkpoint_seconds: float = 2.0
    memory_mb: int = 1024

    def __post_init__(self) -> None:
        def check(name: str, ok: bool, allowed: str) -> None:
            if not ok:
                raise ConfigError(f"Train: {name} must be {allowed}. Got {getattr(self, name)!r}.")

        def whole(name: str, low: int) -> None:
            value = getattr(self, name)
            check(name, isinstance(value, int) and not isinstance(value, bool) and value >= low, f"an integer >= {low}")

        check("participation", 0.0 < self.participation <= 1.0, "a number in (0, 1]")
        for name, hint in typing.get_type_hints(type(self)).items():
            if typing.get_origin(hint) is Literal:
                allowed = typing.get_args(hint)
                check(name, getattr(self, name) in allowed, "one of " + ", ".join(map(repr, allowed)))
        if self.batch_size != "full":
            whole("batch_size", 1)
        whole("epochs", 0)
        whole("evaluate_every", 1)
        whole("checkpoint_every", 1)
        whole("memory_mb", 1)
        for name in ("evaluate_clients", "chunk", "workers"):
            if getattr(self, name) is not None:
                whole(name, 1)
        check("drop_rate", 0.0 <= self.drop_rate <= 1.0, "a number in [0, 1]")
        check("evaluate_after", isinstance(self.evaluate_after, bool), "true or false")
        check("checkpoint_seconds", 0.0 <= self.checkpoint_seconds < math.inf, "a number >= 0")

    @property
    def torch_dtype(self) -> torch.dtype:
        """What numbers are computed in."""
        import torch  # here, so that who only checks settings need not load it

        return torch.float64 if self.dtype == "float64" else torch.float32


def sample(clients: int, settings: Settings, seed: int, t: int) -> list[int]:
    """Who is asked in round t, in ascending order."""
    rng = generator(seed, "sample", t)
    if settings.sampling == "bernoulli":
        return np.flatnonzero(rng.random(clients) < settings.participation).tolist()
    size = max(1, round(settings.participation * clients))
    return sorted(rng.choice(clients, size, replace=False).tolist())


def dropped(sampled: list[int], settings: Settings, seed: int, t: int) -> set[int]:
    """Who does not answer in round t."""
    if settings.drop_rate == 0.0:
        return set()
    lost = generator(seed, "drop", t).random(len(sampled)) < settings.drop_rate
    return {i for i, gone in zip(sampled, lost) if gone}
