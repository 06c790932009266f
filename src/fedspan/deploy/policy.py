"""On what terms a deployment runs: deadlines, quorum, over-selection, bounds."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fedspan.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Policy:
    """How long the server waits and whom it believes.

    Args:
        deadline: seconds after which a round goes on without those who have not answered.
        quorum: share of the asked clients whose uploads a round needs; with fewer it is skipped, and recorded so.
        over_selection: share of clients asked beyond those wanted, against stragglers; the first answers count.
        norm_factor: an upload whose norm is so many times the median of all is refused.
        wait: seconds to wait for nodes to connect before a round, until a quorum is there.
        poll: seconds between looks for answers.
        most_examples: the most examples that a node may register with.
    """

    deadline: float = 600.0
    quorum: float = 0.5
    over_selection: float = 0.0
    norm_factor: float = 20.0
    wait: float = 300.0
    poll: float = 0.3
    most_examples: int = 10_000_000

    def __post_init__(self) -> None:
        for name, low, high in (
            ("deadline", 0.1, 86_400.0),
            ("quorum", 0.0, 1.0),
            ("over_selection", 0.0, 10.0),
            ("norm_factor", 1.0, math.inf),
            ("wait", 0.0, 86_400.0),
            ("poll", 0.01, 60.0),
            ("most_examples", 1, 2**53),
        ):
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
                raise ConfigError(f"Deploy: {name} must be a number in [{low:g}, {high:g}]. Got {value!r}.")
