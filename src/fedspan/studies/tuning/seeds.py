"""Seeds apart: hyper-parameters are chosen on development seeds, figures are reported from others."""

from __future__ import annotations

from fedspan.errors import ConfigError

DEVELOPMENT = range(10)
"""Seeds on which anything may be chosen."""


def development_seeds(first: int, count: int) -> list[int]:
    """The seeds of trials, counted from `first`.

    Raises:
        ConfigError: if one of them is no development seed.
    """
    seeds = list(range(first, first + count))
    if seeds[0] not in DEVELOPMENT or seeds[-1] not in DEVELOPMENT:
        got = f"seed {first}" if count == 1 else f"seeds {first} to {seeds[-1]}"
        raise ConfigError(
            f"tune: trials run on development seeds 0 to {DEVELOPMENT[-1]}, never on reported ones. Got {got}; set"
            " seed=0, and take the best configuration to seed=200."
        )
    return seeds


def reported_seeds(first: int, count: int) -> list[int]:
    """The seeds that figures are reported from, counted from `first`.

    Raises:
        ConfigError: if one of them is a development seed, on which the trials run.
    """
    if first in DEVELOPMENT:
        raise ConfigError(
            f"compare: with --tune, reported seeds must be others than development seeds 0 to {DEVELOPMENT[-1]}. Got"
            f" seed {first}; add seed=200."
        )
    return list(range(first, first + count))
