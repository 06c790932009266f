"""The policy of a deployment: deadlines, quorum, over-selection, bounds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Le

from fedspan.method.fields import Fraction, check


@dataclass(frozen=True, kw_only=True)
class Policy:
    """How long the server waits and whom it believes."""

    deadline: Annotated[float, Ge(0.1), Le(86_400)] = 600.0
    """Seconds after which a round goes on without those who have not answered."""
    quorum: Fraction = 0.5
    """Share of the asked clients whose uploads a round needs; with fewer it is skipped, and recorded so."""
    over_selection: Annotated[float, Ge(0), Le(10)] = 0.0
    """Share of clients asked beyond those wanted, against stragglers; the first answers count."""
    norm_factor: Annotated[float, Ge(1), Le(math.inf)] = 20.0
    """An upload is refused whose change from what was sent has so many times the median norm of all."""
    wait: Annotated[float, Ge(0), Le(86_400)] = 300.0
    """Seconds to wait for nodes to connect before a round, until a quorum is there."""
    poll: Annotated[float, Ge(0.01), Le(60)] = 0.3
    """Seconds between looks for answers."""
    most_examples: Annotated[int, Ge(1), Le(2**53)] = 10_000_000
    """The most examples that a node may register with."""

    def __post_init__(self) -> None:
        check(self, "Deploy")
