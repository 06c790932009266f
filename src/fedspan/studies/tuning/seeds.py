"""Seeds apart: hyper-parameters are chosen on development seeds, figures are reported from others."""

from __future__ import annotations

from collections.abc import Sequence

from fedspan.errors import ConfigError

DEVELOPMENT = range(10)
"""Seeds on which anything may be chosen."""
REPORTED = range(200, 300)
"""Seeds from which claims are reported; nothing is chosen on them."""


def check_development(seeds: Sequence[int], who: str) -> None:
    """See to it that values are chosen on development seeds alone.

    Raises:
        ConfigError: naming the first that is none.
    """
    for seed in seeds or (-1,):
        if seed not in DEVELOPMENT:
            raise ConfigError(
                f"{who}: values are chosen on development seeds 0 to {DEVELOPMENT[-1]}, never on reported ones"
                f" ({REPORTED[0]} and on). Got {'none' if seed == -1 else f'seed {seed}'}."
            )


def check_reported(seeds: Sequence[int], who: str) -> None:
    """See to it that figures come from seeds on which nothing is chosen.

    Raises:
        ConfigError: naming the first that is not one of them.
    """
    for seed in seeds or (-1,):
        if seed not in REPORTED:
            raise ConfigError(
                f"{who}: figures are reported from seeds {REPORTED[0]} to {REPORTED[-1]}, on which nothing was chosen."
                f" Got {'none' if seed == -1 else f'seed {seed}'}."
            )


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
