"""FedLoRA: one pair of factors for the whole run."""

from __future__ import annotations

from dataclasses import dataclass

from fedspan.method import About, Discloses
from fedspan.method.fields import AtLeast1
from fedspan.methods.fedloru.fedloru import FedLoRU


@dataclass(frozen=True, kw_only=True)
class FedLoRA(FedLoRU):
    """FedLoRA, the baseline of FedLoRU: one pair of factors for the whole run, nothing is accumulated.

    A model that is not pre-trained keeps its random W. Kept: h, if any. Sent: theta and the factors.
    """

    about = About(discloses=Discloses(labels="set", model="whole", examples=True, resembles=True))

    tau: AtLeast1 | None = None
    """The rounds after which A B would be added to W; none: never, which is what makes it FedLoRA."""
