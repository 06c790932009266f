"""Quantity skew and unequal groups: how many examples a client gets, and how many clients a group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedspan.data.federated import Index
from fedspan.data.partitions import assign
from fedspan.errors import ConfigError, nearest

LAWS = {
    "lognormal": "standard deviation of the logarithm",
    "zipf": "exponent a of the size 1/k^a of the k-th largest client",
    "dirichlet": "concentration of the shares; small is uneven",
}
"""Laws of clients' sizes, and what their number means."""


class Law(NamedTuple):
    """A law of sizes and its number."""

    name: str
    value: float

    @property
    def text(self) -> str:
        """As it is written in an experiment file."""
        return f"{self.name}:{self.value:g}"


def parse_law(text: object) -> Law:
    """Read `lognormal:1`, `zipf:1.5` or `dirichlet:0.5`.

    Raises:
        ConfigError: naming what cannot be read.
    """
    name, _, number = str(text).partition(":")
    if not isinstance(text, str) or name not in LAWS:
        raise ConfigError(
            f"Partition: sizes must be a law with its number, e.g. lognormal:1, zipf:1.5 or dirichlet:0.5."
            f" Got {str(text)[:60]!r}.{nearest(name[:60], LAWS) if isinstance(text, str) else ''}"
        )
    try:
        value = float(number)
    except ValueError:
        value = float("nan")
    if not 1e-3 <= value <= 1e3:
        raise ConfigError(
            f"Partition: sizes '{name}' needs a number in 0.001..1000 ({LAWS[name]}), as in {name}:1."
            f" Got {text[:60]!r}."
        )
    return Law(name, value)


def shares(law: Law, clients: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Each client's share of the examples; who gets which is drawn too."""
    if law.name == "dirichlet":
        return assign.proportions(rng, law.value, clients)
    if law.name == "zipf":
        log = -law.value * np.log(rng.permutation(clients) + 1.0)
    else:
        log = law.value * rng.standard_normal(clients)
    weights = np.exp(log - log.max())
    return np.asarray(weights / weights.sum(), np.float64)


def unequal(
    rows: Index, clients: int, rng: np.random.Generator, law: Law, drawn: np.random.Generator, min_samples: int
) -> list[Index]:
    """A shuffle cut into parts whose sizes follow a law (drawn from `drawn`); nobody has less than `min_samples`."""
    assign.enough(rows, clients * min_samples, f"min_samples={min_samples} for each of {clients} clients")
    cuts = np.rint(np.cumsum(shares(law, clients, drawn)) * len(rows)).astype(np.int64)[:-1]
    return assign.top_up(np.split(rng.permutation(rows), np.minimum(cuts, len(rows))), min_samples, drawn)


def parse_group_sizes(value: object, clients: int | None) -> list[int]:
    """Numbers of clients of each group: a list, or a text such as 20:8:4:2:2; they add up to all clients.

    Raises:
        ConfigError: for anything else.
    """
    parts: Sequence[object] = []
    if isinstance(value, str):
        parts = [int(p) if p.strip().isdecimal() and len(p) < 10 else p for p in value.split(":")]
    elif isinstance(value, list | tuple):
        parts = value
    if not parts or not all(isinstance(p, int) and not isinstance(p, bool) and p >= 1 for p in parts):
        raise ConfigError(
            "Partition: group_sizes must be numbers of clients, one for each group, e.g. [20, 8, 4, 2, 2] or"
            f" '20:8:4:2:2'. Got {str(value)[:60]!r}."
        )
    sizes = [p for p in parts if isinstance(p, int)]
    if clients is not None and sum(sizes) != clients:
        raise ConfigError(
            f"Partition: group_sizes must add up to the number of clients, {clients}. Got {sum(sizes)}; set"
            f" partition.clients = {sum(sizes)}."
        )
    return sizes
