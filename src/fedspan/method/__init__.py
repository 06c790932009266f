"""What a method is: the protocol, capabilities that some methods have, bases that most share, fields, the registry."""

from fedspan.method.bases import Averaging, Sharing, Training, named_layers
from fedspan.method.capabilities import (
    Abilities,
    Adapts,
    Announces,
    Coded,
    Converts,
    Lifts,
    Observed,
    Ranked,
    norm_of_state,
)
from fedspan.method.panels import Findings, Panel, Seen
from fedspan.method.protocol import (
    About,
    Capacity,
    ClientInfo,
    Down,
    Federation,
    Method,
    Round,
    Sent,
    Visit,
    Yardstick,
)

__all__ = [
    "Abilities",
    "About",
    "Adapts",
    "Announces",
    "Averaging",
    "Capacity",
    "ClientInfo",
    "Coded",
    "Converts",
    "Down",
    "Federation",
    "Findings",
    "Lifts",
    "Method",
    "Observed",
    "Panel",
    "Ranked",
    "Round",
    "Seen",
    "Sent",
    "Sharing",
    "Training",
    "Visit",
    "Yardstick",
    "named_layers",
    "norm_of_state",
]
