"""What a method is: the protocol, capabilities that some methods have, bases that most share, fields, the registry."""

from fedspan.method.bases import Averaging, Sharing, Training, named_layers
from fedspan.method.capabilities import (
    Abilities,
    Adapts,
    Announces,
    Coded,
    Converts,
    Lifts,
    Newcomer,
    Observed,
    Onboards,
    Ranked,
    norm_of_state,
)
from fedspan.method.protocol import About, Capacity, ClientInfo, Down, Federation, Method, Round, Sent, Visit

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
    "Lifts",
    "Method",
    "Newcomer",
    "Observed",
    "Onboards",
    "Ranked",
    "Round",
    "Sent",
    "Sharing",
    "Training",
    "Visit",
    "named_layers",
    "norm_of_state",
]
